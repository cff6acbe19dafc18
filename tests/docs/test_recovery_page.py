"""The page on recovery: every key, schedules that parse, and the plan as the command prints it."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shadowsync.choices import choose_all
from shadowsync.cli import app
from shadowsync.config import RecoveryConfig, load
from shadowsync.recovery.failures import FailureScript, parse_schedules

PAGE = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text("utf-8")
COMMANDS = re.findall(r"^    (shadowsync (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
SCHEDULES = re.findall(r"^\| `((?:gamma|at):[^`]+)`", PAGE, re.MULTILINE)


def words(start: str) -> list[str]:
    """The words of the only command on the page that begins so."""
    (found,) = (command for command in COMMANDS if command.startswith(start))
    return shlex.split(found.replace("\\\n", ""))[1:]


def test_the_page_names_every_key_of_the_section() -> None:
    assert set(re.findall(r"`recovery\.([a-z_]+)", PAGE)) == set(RecoveryConfig.model_fields)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedules_shown_are_in_the_language(schedule: str) -> None:
    roles = {"embedding": 4, "trainer": 2}
    assert FailureScript(parse_schedules(schedule), roles).due(seconds=1e4, epochs=10.0)


def test_there_are_schedules_to_check() -> None:
    assert len(SCHEDULES) >= 4


def test_the_plan_shown_is_what_the_command_prints() -> None:
    done = CliRunner().invoke(app, words("shadowsync plan"), env={"COLUMNS": "100"}, catch_exceptions=False)
    assert done.exit_code == 0
    printed = "\n".join(line.rstrip() for line in done.output.splitlines())
    assert f"```text\n{printed}\n```" in PAGE


def test_the_training_command_shown_is_accepted() -> None:
    _, *settings = words("shadowsync train")
    assert choose_all(load(None, settings), own_model=False).recovery.job_s == 201_600
