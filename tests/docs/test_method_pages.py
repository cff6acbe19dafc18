"""The pages on recovery and on gradient methods: every key and option, languages that parse, commands that work."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.aggregation.stragglers import parse_stragglers
from shadowsync.choices import choose_all
from shadowsync.cli import app
from shadowsync.config import AggregationConfig, RecoveryConfig, load
from shadowsync.recovery.failures import FailureScript, parse_schedules
from shadowsync.registry import members, option_names
from shadowsync.report.measures import METHODS

DOCS = Path(__file__).parents[2] / "docs"
RECOVERY, AGGREGATION = ((DOCS / f"{name}.md").read_text("utf-8") for name in ("recovery", "aggregation"))
SCHEDULES = re.findall(r"^\| `((?:gamma|at):[^`]+)`", RECOVERY, re.MULTILINE)
STRAGGLERS = re.findall(r"^\| `((?:share|index)=[^`]+)`", AGGREGATION, re.MULTILINE)
MEMBERS = members("shadowsync.aggregation", Aggregation)


def commands(page: str) -> list[list[str]]:
    """The words of every command on a page, without the program."""
    found = re.findall(r"^    (shadowsync (?:.*\\\n)*.*)$", page, re.MULTILINE)
    return [shlex.split(command.replace("\\\n", ""))[1:] for command in found]


def test_the_pages_name_every_key_of_their_sections_and_every_option_of_a_method() -> None:
    assert set(re.findall(r"`recovery\.([a-z_]+)", RECOVERY)) == set(RecoveryConfig.model_fields)
    options = {option for member in MEMBERS.values() for option in option_names(member)}
    assert set(re.findall(r"`aggregation\.([a-z_]+)[`=]", AGGREGATION)) == {*AggregationConfig.model_fields, *options}


def test_page_and_report_know_every_method() -> None:
    table = AGGREGATION.partition("## The methods")[2].partition("**Which to take.**")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)) == set(MEMBERS)
    assert set(METHODS) == set(MEMBERS)


def test_the_schedules_and_stragglers_shown_are_in_their_languages() -> None:
    assert len(SCHEDULES) >= 4
    for schedule in SCHEDULES:
        script = FailureScript(parse_schedules(schedule), {"embedding": 4, "trainer": 2})
        assert script.due(seconds=1e4, epochs=10.0), schedule
    assert len(STRAGGLERS) == 4
    for stragglers in STRAGGLERS:
        found = parse_stragglers(stragglers)
        assert max(found.factor(worker, second) for worker in range(20) for second in (0.0, 400.0)) > 1, stragglers


def test_the_plan_shown_is_what_the_command_prints() -> None:
    (words,) = (words for words in commands(RECOVERY) if words[0] == "plan")
    done = CliRunner().invoke(app, words, env={"COLUMNS": "100"}, catch_exceptions=False)
    assert done.exit_code == 0
    printed = "\n".join(line.rstrip() for line in done.output.splitlines())
    assert f"```text\n{printed}\n```" in RECOVERY


def test_the_training_commands_shown_are_accepted() -> None:
    (settings,) = (settings for command, *settings in commands(RECOVERY) if command == "train")
    assert choose_all(load(None, settings), own_model=False).recovery.job_s == 201_600
    assert len(commands(AGGREGATION)) == 3
    for _, *settings in commands(AGGREGATION):
        if "--resume" not in settings:
            assert choose_all(load(None, settings), own_model=False).aggregation is not None
