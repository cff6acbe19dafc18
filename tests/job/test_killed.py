"""Real processes that are stopped, killed and resumed."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_helpers import SMALL_DLRM, checkpoints, result_of, settings, write_rows
from omegaconf import OmegaConf

from shadowsync.job import train_from_command_line
from shadowsync.runs import load_checkpoint

ROWS = 500
DEADLINE_S = 120.0


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """Arguments of a run that nobody waits for to end; results go to `out` below the test's folder."""
    data = write_rows(tmp_path / "rows.parquet", ROWS)
    config = settings(
        data,
        data,
        data={"epochs": 1000, "slice_rows": 64},
        model=SMALL_DLRM | {"embedding_dim": 64},
        train={"trainers": 2, "workers": 1, "batch_size": 4, "save_every_s": 0.05},
        sync={"method": "ma"},
    )
    OmegaConf.save(OmegaConf.create(config), tmp_path / "run.yaml")
    return ["train", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")]


@contextlib.contextmanager
def process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The command line in a process of its own, which is gone afterwards."""
    command = [sys.executable, "-c", "from shadowsync.cli import main; main()", *arguments]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def watch(started: subprocess.Popen[str], seen: Callable[[], bool]) -> None:
    """Returns at the moment when something is seen; fails if the process ends before, or after a minute."""
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < deadline, "it did not get so far"
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(0.001)
            raise AssertionError(f"it ended: {started.communicate()[1]}")


def finish(out: Path) -> None:
    """Resumes to the end of the epoch after the one reached, and checks that everything was trained once."""
    epochs = load_checkpoint(out).samples // ROWS + 2
    train_from_command_line(None, [f"data.epochs={epochs}"], None, out)
    result = result_of(out)
    assert result["data"]["trained_samples"] == ROWS * epochs
    assert 0 < result["test"]["logloss"] < 5
    samples = [json.loads(line)["samples"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert samples == sorted(samples)
    assert samples[-1] == ROWS * epochs


def test_a_signal_saves_and_stops(run: list[str], tmp_path: Path) -> None:
    """One signal while a run is under way, and the other one while the same run goes on."""
    out = tmp_path / "out"
    history, arguments, before = out / "metrics.jsonl", [*run, "train.save_every_s=null"], 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with process(arguments) as started:
            watch(started, lambda before=before: history.exists() and history.read_bytes().count(b"\n") > before)
            started.send_signal(number)
            _, said = started.communicate(timeout=DEADLINE_S)
        assert started.returncode == 130
        samples = int(checkpoints(out)[-1].name.removeprefix("samples-"))
        expected = f"shadowsync: stopped by {number.name} after {samples} samples; a checkpoint is written: go on with "
        assert said == f"{expected}shadowsync train --resume {out}\n"
        assert not (out / "result.json").exists()
        arguments, before = ["train", "--resume", str(out)], history.read_bytes().count(b"\n")
    assert len(checkpoints(out)) == 2
    finish(out)


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
"""Two kinds, since a signal that is sent again before it was seen is sent once."""


@pytest.mark.parametrize(("saved", "count"), [(False, 3), (True, 2)])
def test_signals_in_a_row_end_it_with_one_sentence(run: list[str], saved: bool, count: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    history = out / "metrics.jsonl"
    settings = ["train.emulate_step_ms=20000"] if not saved else []
    with process([*run, *settings]) as started:
        watch(started, lambda: bool(checkpoints(out)) if saved else history.exists())
        for number in STOPS[:count]:
            started.send_signal(number)
        _, said = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 130, said
    assert said.count("\n") == 1
    kept = [found.name for found in checkpoints(out)]
    assert said.startswith("shadowsync: interrupted; ")
    assert (f"{max(kept)}: go on with shadowsync train --resume {out}" if kept else "nothing was saved") in said


def test_sigterm_before_and_after_training_ends_the_command_as_ctrl_c_does(tmp_path: Path) -> None:
    program = (
        "import signal\n"
        "from shadowsync import cli\n"
        "cli.app = lambda standalone_mode: signal.raise_signal(signal.SIGTERM)\n"
        "cli.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "shadowsync: interrupted\n")


def test_kill_at_any_moment_leaves_a_run_that_goes_on(run: list[str], tmp_path: Path) -> None:
    """When the first checkpoint appears; in the middle of a save; after several saves."""
    out = tmp_path / "out"
    arguments, start, left = run, 0, set[Path]()

    def staged() -> set[Path]:
        return set((out / "checkpoints").glob(".*.part"))

    def newest() -> int:
        return max((int(found.name.removeprefix("samples-")) for found in checkpoints(out)), default=0)

    moments: list[Callable[[], bool]] = [
        lambda: newest() > 0,
        lambda: bool(staged() - left),
        lambda: newest() >= start + 1000,
    ]
    for moment in moments:
        with process(arguments) as started:
            watch(started, moment)
            started.kill()
            started.wait(DEADLINE_S)
        loaded = load_checkpoint(out)
        assert loaded.skipped == ()
        assert loaded.samples >= start
        assert not (out / "result.json").exists()
        arguments, start, left = ["train", "--resume", str(out)], loaded.samples, staged()
    finish(out)
    assert staged() == set()
