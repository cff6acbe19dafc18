"""Every row is trained exactly once per epoch, whoever trains it and whoever dies; every job ends."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import (
    METHODS,
    Ledger,
    Witness,
    beside_own_model,
    checkpoints,
    error_of,
    fails,
    name_of,
    set_cells,
    settings,
    train_counted,
    write_rows,
)
from torch import Tensor

from shadowsync import Job, TrainerLost
from shadowsync.errors import DataError, NonFiniteLoss, RunError

DEADLINE_S = 120.0
MEETINGS = METHODS[3:7]
"""Methods that meet in every step and in the background."""
SHAPES = [(23, 2, 2), (23, 8, 1), (1, 8, 1)]
"""Rows, trainers and workers; fewer slices than trainers, too."""
MORE_SHAPES = [(23, 1, 1), (23, 1, 2), (23, 8, 2)]


@pytest.mark.parametrize(
    ("sync", "shape"),
    [(sync, shape) for sync in METHODS for shape in SHAPES + (MORE_SHAPES if sync in MEETINGS else [])],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_every_row_is_trained_once_per_epoch(tmp_path: Path, sync: dict[str, Any], shape: tuple[int, int, int]) -> None:
    rows, trainers, workers = shape
    config = settings(
        write_rows(tmp_path / "rows.parquet", rows),
        sync=sync,
        data={"epochs": 2},
        train={"trainers": trainers, "workers": workers},
    )
    result, counts = train_counted(config, tmp_path / "out")
    assert result.data.trained_samples == 2 * rows
    assert counts == dict.fromkeys(range(rows), 2)


@pytest.mark.parametrize(("prefetch", "batch_size"), [(1, 1), (3, 3), (3, 64)])
def test_prefetched_pulls_are_trained_once(tmp_path: Path, prefetch: int, batch_size: int) -> None:
    data = write_rows(tmp_path / "rows.parquet", 23)
    train = {"trainers": 2, "workers": 2, "prefetch": prefetch, "batch_size": batch_size}
    _, counts = train_counted(settings(data, train=train, sync={"method": "ma"}), tmp_path / "out")
    assert counts == dict.fromkeys(range(23), 1)


class Death:
    """Kills one trainer before the given iteration of one of its workers; the others cannot finish before that."""

    def __init__(self, rank: int, iteration: int) -> None:
        self.rank, self.iteration = rank, iteration
        self.died = threading.Event()

    def __call__(self, rank: int, iteration: int) -> None:
        if rank != self.rank and iteration > self.iteration:
            assert self.died.wait(DEADLINE_S), "the trainer that should die did not get so far"
        if rank == self.rank and iteration == self.iteration:
            self.died.set()
            raise TrainerLost(f"trainer {rank} dies before iteration {iteration}")


@pytest.mark.parametrize(
    ("sync", "workers", "iteration"),
    [(sync, 2, 3) for sync in METHODS] + [(sync, 1, iteration) for sync in MEETINGS for iteration in (1, 3)],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_the_others_train_what_a_dead_trainer_held(
    tmp_path: Path, sync: dict[str, Any], workers: int, iteration: int
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 61)
    config = settings(data, sync=sync, train={"trainers": 3, "workers": workers}, data={"epochs": 2})
    death = Death(1, iteration)
    result, counts = train_counted(config, tmp_path / "out", failures=death)
    assert death.died.is_set()
    assert result.data.trained_samples == 122
    assert counts == dict.fromkeys(range(61), 2)


class LastBatch:
    """Trainer 1 dies with rows in hand, once everybody else, its own other worker too, has nothing else to train."""

    def __init__(self, ledger: Ledger, rows_trained_by_then: int) -> None:
        self.ledger, self.rows_trained_by_then = ledger, rows_trained_by_then
        self.holds = threading.Event()
        self.died = False
        self._lock = threading.Lock()

    def __call__(self, rank: int, iteration: int) -> None:
        if rank != 1:
            assert self.holds.wait(DEADLINE_S), "trainer 1 got nothing to train"
            return
        with self._lock:
            first, self.died = not self.died, True
        if first:
            self.holds.set()
            assert self.ledger.wait_for(self.rows_trained_by_then), "the others did not train the rest"
            raise TrainerLost("trainer 1 dies last")


@pytest.mark.parametrize("sync", METHODS, ids=name_of)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trainer_that_dies_with_the_last_rows(tmp_path: Path, sync: dict[str, Any], workers: int) -> None:
    """All others are idle by then; they must come back for its rows."""
    rows, batch = 24, 2
    data, ledger = write_rows(tmp_path / "rows.parquet", rows), Ledger()
    if sync["schedule"] == "every_k" and sync["method"] != "none":
        sync = sync | {"k": 100}  # a trainer that stands still for good holds up the averaging of the others
    ahead = batch if workers == 1 else 0  # what waits behind the rows in hand; another worker takes it
    script = LastBatch(ledger, rows - batch - ahead)
    train = {"trainers": 2, "workers": workers, "batch_size": batch}
    config = settings(data, sync=sync, train=train, data={"slice_rows": batch, "prefetch": 1})
    result = Job(beside_own_model(config), model=Witness(ledger), out=tmp_path / "out", failures=script).run()
    assert script.died
    assert result.data.trained_samples == rows
    assert ledger.rows == dict.fromkeys(range(rows), 1)


def test_when_all_trainers_die_the_run_fails_and_can_be_resumed(tmp_path: Path) -> None:
    def everybody_dies(rank: int, iteration: int) -> None:
        if iteration == 3:
            raise TrainerLost(f"trainer {rank} dies")

    out = tmp_path / "out"
    config = settings(write_rows(tmp_path / "rows.parquet", 40), train={"trainers": 2, "workers": 2})
    error = fails(
        lambda: train_counted(config, out, failures=everybody_dies), RunError, "every trainer died", f"--resume {out}"
    )
    assert error.exit_status == 1
    assert not (out / "result.json").exists()
    result, _ = train_counted(config, out, resume=out)
    assert result.data.trained_samples == 40


def broken(config: dict[str, Any], out: Path, fault: Callable[[Tensor], Tensor]) -> Job:
    """A job whose model fails in the given way after some rows."""

    class Broken(Witness):
        def forward(self, dense: Tensor, embeddings: Any) -> Tensor:
            logits = super().forward(dense, embeddings)
            return fault(logits) if self.ledger.rows.total() > 12 else logits

    return Job(beside_own_model(config), model=Broken(Ledger()), out=out)


@pytest.mark.parametrize("sync", MEETINGS, ids=name_of)
def test_an_exception_in_a_worker_ends_the_job_with_it(tmp_path: Path, sync: dict[str, Any]) -> None:
    def mistake(logits: Tensor) -> Tensor:
        raise ZeroDivisionError("the user's own mistake")

    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    with pytest.raises(RunError, match="Broken failed on a batch: ZeroDivisionError: the user's own mistake"):
        broken(settings(data, sync=sync, train={"trainers": 3, "workers": 2}), out, mistake).run()
    assert not (out / "result.json").exists()
    assert checkpoints(out) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_place(tmp_path: Path, value: float) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    job = broken(settings(data, train={"trainers": 2, "workers": 2}), out, lambda logits: logits * value)
    assert fails(job.run, NonFiniteLoss, f"{data}, row ", "train.lr").exit_status == 1
    assert not (out / "result.json").exists()


def test_a_row_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    data, out = set_cells(write_rows(tmp_path / "rows.parquet", 60), "label", 2, [46]), tmp_path / "out"
    config = settings(data, train={"trainers": 2, "workers": 2}, sync={"method": "ma", "schedule": "every_k", "k": 1})
    fails(lambda: train_counted(config, out), DataError, f"{data}, row 47")
    assert not (out / "result.json").exists()


def test_skipped_rows_are_counted_and_the_others_trained_once(tmp_path: Path) -> None:
    bad = [0, 17, 18, 59]
    data = set_cells(write_rows(tmp_path / "rows.parquet", 60), "label", 7, bad)
    config = settings(data, data={"on_bad_row": "skip"}, train={"trainers": 3})
    result, counts = train_counted(config, tmp_path / "out")
    assert counts == dict.fromkeys(set(range(60)) - set(bad), 1)
    assert (result.data.trained_samples, result.data.skipped_rows) == (56, 4)


def test_the_job_leaves_torchs_threads_as_they_were(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    train_counted(settings(write_rows(tmp_path / "rows.parquet", 8)), tmp_path / "out")
    assert torch.get_num_threads() == 2


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    config = settings(write_rows(tmp_path / "rows.parquet", 30), sync={"method": "ma"}, train={"trainers": 3})
    train_counted(config, tmp_path / "one")
    error_of(broken(config, tmp_path / "two", lambda logits: logits * float("nan")).run)
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()] == []
