"""`benchmarks/leaderboard.py`: one replica is plain PyTorch within rounding, each method is compared, runs are kept."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.registry import members
from shadowsync.sync.method import SyncMethod

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "leaderboard.py"
SOME = ("--ways", "plain", "one replica", "ma", "gba")
Run = Callable[..., tuple[str, str]]
"""Runs the script with these words; returns what it printed and what it said about its runs."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setattr(sys, "path", [*sys.path])

    def script(*words: str) -> tuple[str, str]:
        given = ["--out", str(tmp_path), "--small", "--models", "deepfm", "--seeds", "1", *words]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        told = capsys.readouterr()
        return told.out, told.err

    return script


def test_every_method_is_one_of_its_ways() -> None:
    methods = {*members("shadowsync.sync", SyncMethod), *members("shadowsync.aggregation", Aggregation)}
    assert set(runpy.run_path(str(SCRIPT))["WAYS"]) == {"plain", "one replica", *methods}


def test_ways_are_compared_with_plain_pytorch_and_none_is_run_twice(tmp_path: Path, run: Run) -> None:
    first, _ = run(*SOME)
    assert set(re.findall(r"^(\w+(?: replica)?) +1/1 +0\.\d{5}", first, re.M)) == set(SOME[1:])
    assert run("--report", *SOME)[0] == first
    assert_as_plain(tmp_path, "adagrad")
    kept = tmp_path / "runs.jsonl"
    lines = kept.read_text("utf-8").splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if "small-deepfm-ma-adagrad-rows-all-seed0" not in line), "utf-8")
    assert re.findall(r"^small-\S+", run(*SOME)[1], re.M) == ["small-deepfm-ma-adagrad-rows-all-seed0"]


def test_one_replica_decides_as_plain_pytorch_does_with_adam(tmp_path: Path, run: Run) -> None:
    run("--ways", "plain", "one replica", "--recipe", "adam")
    assert_as_plain(tmp_path, "adam")


def assert_as_plain(folder: Path, recipe: str) -> None:
    lines = map(json.loads, (folder / "runs.jsonl").read_text("utf-8").splitlines())
    found = {line["cell"]: line["result"] for line in lines}
    plain, ours = (found[f"small-deepfm-{way}-{recipe}-rows-all-seed0"] for way in ("plain", "one_replica"))
    assert abs(plain["auc"] - ours["auc"]) < 1e-4
    assert all(plain[figure] == ours[figure] for figure in ("validations", "best_samples", "samples"))
    assert ours["samples"] > ours["best_samples"], "the task is one that a model overfits on"
