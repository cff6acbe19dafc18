"""Where roles run if nobody says so, and that it is said."""

import threading
from pathlib import Path
from typing import Any

import pytest
from job_helpers import settings, write_rows
from rich.console import Console
from torch import nn

from shadowsync import Job
from shadowsync.cluster.context import Own
from shadowsync.config import parse
from shadowsync.job import where_roles_run, with_runtime


class Locked(nn.Module):
    """A model that holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def chosen(own: Own | None = None, **sections: Any) -> tuple[str, str]:
    return where_roles_run(parse(sections), own or Own())


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.job.cores", lambda: 16)


def test_on_few_cores_roles_are_threads_unless_the_user_says_otherwise() -> None:
    assert chosen(train={"trainers": 8}) == ("inprocess", "2 cores")
    assert chosen(cluster={"runtime": "processes"}) == ("processes", "")
    assert chosen(cluster={"address": "auto"}) == ("ray", "cluster.address is given")


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"trainers": 4}}, ("processes", "4 trainers on 16 cores")),
        ({"train": {"trainers": 1}}, ("inprocess", "one trainer")),
        ({"train": {"device": "cuda"}}, ("inprocess", "trainers share cuda")),
        ({"aggregation": {"method": "gba"}}, ("inprocess", "gradients are gathered in one place")),
        ({"recovery": {"inject": "at:1"}}, ("inprocess", "failures are emulated")),
        ({"recovery": {"emulate_job_s": 60.0}}, ("inprocess", "failures are emulated")),
    ],
    ids=str,
)
def test_on_many_cores_trainers_are_processes_if_nothing_speaks_against_it(
    sections: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert chosen(**sections) == expected


@pytest.mark.usefixtures("many_cores")
def test_a_model_that_cannot_be_sent_stays_in_this_process() -> None:
    assert chosen(Own(Locked()))[0] == "inprocess"
    assert chosen(Own(nn.Linear(2, 1)))[0] == "processes"


@pytest.mark.usefixtures("many_cores")
def test_without_shared_memory_roles_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.job.can_share", lambda: False)
    assert chosen()[0] == "inprocess"


def test_what_was_chosen_stands_in_the_result(tmp_path: Path) -> None:
    config = settings(write_rows(tmp_path / "rows.parquet", 40))
    job = Job(config, out=tmp_path / "out")
    assert job.config.cluster.runtime == "inprocess"
    assert job.run(Console(quiet=True)).config["cluster"]["runtime"] == "inprocess"
    assert "runtime" not in (tmp_path / "out/config.yaml").read_text(), "another machine may choose otherwise"


def test_a_choice_changes_nothing_else() -> None:
    config = parse({"train": {"trainers": 3}})
    assert with_runtime(config, "inprocess").train == config.train
