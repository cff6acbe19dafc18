"""The search with Ray Tune runs as it is, on data made by the source."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shadowsync.report.files import read_frames

pytest.importorskip("ray.tune", reason="examples/tune.py needs Ray: pip install 'shadowsync[ray]'")

TUNE = Path(__file__).parents[2] / "examples" / "tune.py"
SMALL = ("data.name=synthetic", "data.test_rows=500", "data.features=3", "data.table_rows=100", "data.dense=4")
MODEL = ("model.bottom=[8]", "model.top=[8]", "train.batch_size=50", "report.tensorboard=false", "report.html=false")
TO_THE_END = ("report.every_s=1000",)
"""Trials report once, so that none can be stopped early: how far both have come at a moment is the machine's affair."""


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TUNE), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=500)


def test_two_trials_are_jobs_that_report_and_are_compared_on_the_test_rows(tmp_path: Path) -> None:
    done = run(tmp_path, "--trials", "2", "--concurrent", "2", "--rows", "3000", *SMALL, *MODEL, *TO_THE_END)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("test AUC  test NE") :].splitlines()
    found = [re.match(r" +(0\.\d{4}) +(\d\.\d{4}) +\d\.\d{4} +3,000  sync\.alpha=", line) for line in table[1:3]]
    aucs = [float(match[1]) for match in found if match is not None]
    assert len(aucs) == 2, done.stdout
    assert aucs == sorted(aucs, reverse=True)
    assert table[3].startswith("best: shadowsync train sync.method=easgd sync.schedule=every_k sync.alpha=")
    jobs = sorted((tmp_path / "runs" / "tune").glob("*/run"))
    assert len(jobs) == 2
    assert all(read_frames(job)[-1].samples == 3000 for job in jobs)


def test_an_override_that_is_wrong_ends_the_search_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TUNE), "--trials", "1", "train.lrr=3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TUNE), run_name="__main__")
    assert ended.value.code == 2
    assert "tune.py: error: train.lrr: there is no such key, did you mean lr?" in capsys.readouterr().err
