"""`shadowsync plan recovery`."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, assert_sentence, train, trained_once

from shadowsync.embedding.watching import RowPriority
from shadowsync.planning import plan_recovery
from shadowsync.recovery.scheduler import Priors, time_between_failures
from shadowsync.registry import members

PAPER = (
    *("plan", "recovery", "--save-s", "318", "--load-s", "200", "--restart-s", "208", "--fail-s", "100800"),
    *("--servers", "8"),
)
MEASURED = {"failures": 4, "pls": 0.1, "saves": 5, "interval_s": 3.0, "mode": "partial"}
SECONDS = {"save": 10.0, "load": 12.0, "lost": 1.0, "wait": 20.0}


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of all tables by the first of their row."""
    lines = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in text.splitlines() if "│" in line]
    return {first: rest for first, *rest in lines}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its three tables of 50 rows of width 4 are saved by priority."""
    settings = ("recovery.mode=partial", "recovery.priority=mfu", "recovery.min_rows=50")
    return trained_once(tmp_path_factory.mktemp("run"), *settings)


def set_measured(folder: Path, recovery: dict[str, Any] | None) -> float:
    """Writes a measured section into a run's result; returns the run's seconds."""
    content = json.loads((folder / "result.json").read_text())
    content["recovery"] = recovery
    if recovery is None:
        del content["recovery"]
    (folder / "result.json").write_text(json.dumps(content))
    return float(content["throughput"]["seconds"])


def test_the_papers_numbers(shadowsync: CommandLine) -> None:
    said = shadowsync(*PAPER, "--rows", "33762577", "--dim", "16")
    assert (said.status, said.err) == (0, "")
    cells = rows_of(said.out)
    assert cells["time between saves"] == ["2.22 h", "44.8 h"]
    assert cells["expected overhead"] == ["8.35 %", "0.60 %"]
    assert cells["expected PLS"] == ["0", "0.1"]
    assert set(members("shadowsync.recovery", RowPriority)) <= set(cells)
    assert cells["scar"] == ["2.16 GB", "100.00 %"]
    assert cells["mfu"] == ["135 MB", "6.25 %"]
    assert cells["ssu"] == ["16.9 MB", "0.78 %"]
    assert cells["between failures"] == ["28 h", "--fail-s", "given"]
    assert cells["target PLS"] == ["0.1", "--target-pls", "assumed"]
    assert "Recommended is partial recovery: 0.60 %" in said.out


def test_numbers_alone_say_what_else_could_be_given(shadowsync: CommandLine) -> None:
    said = shadowsync("plan", "recovery", "--save-s", "60", "--servers", "4", "--target-pls", "0.0001")
    assert said.status == 0
    assert "Give --rows and --dim" in said.out
    assert "Recommended is full recovery" in said.out
    cells = rows_of(said.out)
    assert cells["a load"] == ["60 s", "--load-s", "as long as a save"]
    assert cells["the job"] == ["—", "--hours", "not known"]


def test_the_length_of_the_job_bounds_the_intervals(shadowsync: CommandLine) -> None:
    cells = rows_of(shadowsync(*PAPER, "--hours", "10").out)
    assert cells["time between saves"] == ["2.22 h", "10 h"]
    assert cells["expected PLS"][1] == "0.0223"


def test_servers_that_fail_together_are_saved_more_often(shadowsync: CommandLine) -> None:
    cells = rows_of(shadowsync(*PAPER, "--lost-servers", "4").out)
    assert cells["lost at once"] == ["4", "--lost-servers", "given"]
    assert cells["time between saves"] == ["2.22 h", "11.2 h"]
    assert cells["expected PLS"] == ["0", "0.1"]


def test_a_run_without_failures(trained: CommandLine) -> None:
    cells = rows_of(trained("plan", "recovery", "out").out)
    assert cells["a save"][1] == "--save-s"
    assert cells["a save"][2].startswith("measured: 1 ")
    assert cells["embedding servers"] == ["1", "--servers", "the run's configuration"]
    assert cells["between failures"] == ["28 h", "--fail-s", "the run's configuration"]
    assert cells["lost at once"] == ["1", "--lost-servers", "the run's configuration"]
    assert cells["mfu"] == ["600 bytes", "25.00 %"], "3 tables of 50 rows of 16 bytes"


def test_what_a_run_measured(trained: CommandLine) -> None:
    seconds = set_measured(trained.folder / "out", MEASURED | {"seconds": SECONDS})
    plan = plan_recovery(Path("out"), servers=6)
    values = {name: figure.value for name, figure in plan.figures.items()}
    assert (values["save_s"], values["load_s"], values["restart_s"], values["servers"]) == (2, 3, 5, 6)
    assert values["fail_s"] == time_between_failures(Priors(), 4, seconds)
    assert plan_recovery(Path("out"), save_s=9.0).figures["save_s"].source == "given"


def test_rounds_and_embedding_servers_count(trained: CommandLine) -> None:
    """Of 16 saves by priority 8 came to a round, and of 4 dead roles 2 were embedding servers."""
    measured = MEASURED | {"seconds": SECONDS, "saves": 16, "rounds": 2, "server_failures": 2}
    seconds = set_measured(trained.folder / "out", measured)
    figures = plan_recovery(Path("out")).figures
    assert (figures["save_s"].value, figures["load_s"].value, figures["restart_s"].value) == (5, 6, 10)
    assert figures["fail_s"].value == time_between_failures(Priors(), 2, seconds)
    assert figures["lost_servers"] == (1, "the run's configuration")
    set_measured(trained.folder / "out", measured | {"lost_servers": 2.5})
    assert plan_recovery(Path("out")).figures["lost_servers"] == (2.5, "measured: 2 failures")
    assert figures["save_s"].source == "measured: 2 rounds of saves"
    set_measured(trained.folder / "out", measured | {"server_failures": 0, "rounds": 0})
    figures = plan_recovery(Path("out"), save_s=9.0).figures
    assert figures["load_s"].source == "as long as a save", "those that died had nothing to load"


@pytest.mark.parametrize("place", ["out/checkpoints", "out/checkpoints/samples-000000000060"])
def test_a_folder_of_checkpoints(trained: CommandLine, place: str) -> None:
    assert_sentence(trained("plan", "recovery", place), 2, ["--save-s must be given"])
    cells = rows_of(trained("plan", "recovery", place, "--save-s", "3", "--rows", "1000", "--dim", "8").out)
    assert cells["embedding servers"][2] == "the run's configuration"
    assert cells["mfu"][0] == "4 kB", "rows given take the place of the run's"


def test_tables_too_small_for_priority(shadowsync: CommandLine) -> None:
    assert shadowsync(*train()).status == 0
    said = shadowsync("plan", "recovery", "out")
    assert "No table of the run is large enough" in said.out


def test_a_run_that_measured_nothing(trained: CommandLine) -> None:
    set_measured(trained.folder / "out", None)
    assert_sentence(trained("plan", "recovery", "out"), 2, ["--save-s must be given"])


def test_a_run_whose_result_is_broken(trained: CommandLine) -> None:
    (trained.folder / "out" / "result.json").write_text("{")
    assert_sentence(trained("plan", "recovery", "out"), 2, ["out/result.json"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--save-s", "1"), ["--servers must be given", "shadowsync plan recovery --save-s 318"]),
        (("--save-s", "-1", "--servers", "2"), ["--save-s -1", "0 or above"]),
        (("--save-s", "nan", "--servers", "2"), ["--save-s nan"]),
        (("--save-s", "inf", "--servers", "2"), ["--save-s inf"]),
        (("--save-s", "1", "--servers", "2", "--fail-s", "0"), ["--fail-s 0", "above 0"]),
        (("--save-s", "1", "--servers", "2", "--target-pls", "2"), ["--target-pls 2", "at most 1"]),
        (("--save-s", "1", "--servers", "2", "--share", "0"), ["--share 0", "above 0"]),
        (("--save-s", "1", "--servers", "2", "--hours", "0"), ["--hours 0"]),
        (("--save-s", "1", "--servers", "0"), ["--servers"]),
        (("--save-s", "1", "--servers", "2", "--lost-servers", "0.5"), ["--lost-servers 0.5", "1 or above"]),
        (("--save-s", "soon", "--servers", "2"), ["--save-s", "number"]),
        (("--save-s", "1", "--servers", "2", "--rows", "9"), ["--rows and --dim"]),
        (("nowhere",), ["nowhere", "no such folder"]),
        (("run.yaml",), ["run.yaml", "no such folder"]),
        ((".",), ["no checkpoint"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_numbers_that_cannot_be(shadowsync: CommandLine, arguments: tuple[str, ...], named: list[str]) -> None:
    assert_sentence(shadowsync("plan", "recovery", *arguments), 2, named)


def test_never_to_fail_is_a_number(shadowsync: CommandLine) -> None:
    said = shadowsync("plan", "recovery", "--save-s", "1", "--servers", "2", "--fail-s", "inf")
    assert (said.status, rows_of(said.out)["time between saves"]) == (0, ["never", "never"])
