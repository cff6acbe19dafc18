"""The page on gradient methods: every method and option, stragglers that parse, and commands that are accepted."""

import re
import shlex
from pathlib import Path

import pytest

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.aggregation.stragglers import parse_stragglers
from shadowsync.choices import choose_all
from shadowsync.config import AggregationConfig, load
from shadowsync.registry import members, option_names
from shadowsync.report.measures import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "aggregation.md").read_text("utf-8")
COMMANDS = re.findall(r"^    (shadowsync (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
STRAGGLERS = re.findall(r"^\| `((?:share|index)=[^`]+)`", PAGE, re.MULTILINE)
MEMBERS = members("shadowsync.aggregation", Aggregation)


def test_the_page_names_every_key_of_the_section_and_every_option_of_a_method() -> None:
    options = {option for member in MEMBERS.values() for option in option_names(member)}
    assert set(re.findall(r"`aggregation\.([a-z_]+)[`=]", PAGE)) == {*AggregationConfig.model_fields, *options}


def test_page_and_report_know_every_method() -> None:
    table = PAGE.partition("## The methods")[2].partition("**Which to take.**")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)) == set(MEMBERS)
    assert set(METHODS) == set(MEMBERS)


@pytest.mark.parametrize("stragglers", STRAGGLERS)
def test_the_stragglers_shown_are_in_the_language(stragglers: str) -> None:
    found = parse_stragglers(stragglers)
    assert max(found.factor(worker, second) for worker in range(20) for second in (0.0, 400.0)) > 1


def test_there_are_stragglers_and_commands_to_check() -> None:
    assert len(STRAGGLERS) == 4
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--resume" not in command])
def test_the_commands_shown_are_accepted(command: str) -> None:
    _, _, *settings = shlex.split(command.replace("\\\n", ""))
    assert choose_all(load(None, settings), own_model=False).aggregation is not None
