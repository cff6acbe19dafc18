"""What `RecoveryController` does with rows that are copied while they are written, and with what comes of it."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from saving_sessions import Pause, assert_same, by_table, loaded_rows, local, lose
from torch import Tensor

from shadowsync.checkpoint.saver import AsyncSaver
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.cluster.session import Session
from shadowsync.embedding.table import Rows
from shadowsync.errors import CheckpointError
from shadowsync.recovery.scheduler import Due
from shadowsync.recovery_controller import RecoveryController
from shadowsync.rpc.errors import PeerLost

MOST_SHARE = "shadowsync.recovery_controller.MOST_SHARE"


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Kept:
    """A session in process with its recovery controller."""

    def __init__(self, folder: Path, session: Session) -> None:
        self.session = session
        self.store = CheckpointStore(str(folder / "checkpoints"), keep=1000)
        self.saver = AsyncSaver()
        self.controller = RecoveryController(session, self.store, self.saver, {})

    def save(self) -> str:
        """What is due at the end of a round, until it is on the disk."""
        assert self.controller.save(Due.ROUND)
        self.saver.wait()
        self.controller.take_stock()
        newest = self.store.newest()
        assert newest is not None
        return newest

    def assert_holds_all(self) -> None:
        """The newest checkpoint is what the servers hold."""
        assert_same(loaded_rows(self.store.open()), by_table(self.session.rows()))


@contextmanager
def kept(folder: Path, **given: Any) -> Iterator[Kept]:
    with local(folder, **given) as session:
        yield Kept(folder, session)


class Failing:
    """Rows whose server is gone when the second part of its weights is asked for."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __call__(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        yield next(self._rows.source(first, (first + last) // 2, name))
        raise PeerLost("an embedding server is gone")


def test_at_the_end_rows_are_copied_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(tmp_path, recovery={"mode": "full"}) as job:
        monkeypatch.setattr(job.session, "rows", lambda: pytest.fail("all rows are copied at once"))
        job.session.start()
        job.session.finish()
        assert job.controller.save_last()
        assert not job.saver.busy
        assert job.controller.save_last(), "there is no news"
        monkeypatch.undo()
        assert len(job.store.names()) == 1
        job.assert_holds_all()


def test_while_somebody_trains_a_last_image_is_of_one_moment(tmp_path: Path) -> None:
    pause = Pause(iteration=20)
    with kept(tmp_path, recovery={"mode": "full"}, failures=pause) as job:
        job.session.start()
        pause.reached()
        copied: list[int] = []
        rows = job.session.rows

        def copying() -> tuple[Rows, ...]:
            copied.append(1)
            return rows()

        job.session.rows = copying  # type: ignore[method-assign]
        pause.go()
        assert job.controller.save_last()
        assert copied
        job.session.finish()


def test_a_server_that_is_lost_in_the_middle_of_the_last_save_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(tmp_path) as job:
        job.session.start()
        job.session.finish()
        beside = job.session.rows_beside
        monkeypatch.setattr(
            job.session, "rows_beside", lambda: tuple(replace(rows, source=Failing(rows)) for rows in beside())
        )
        assert not job.controller.save_last()
        assert job.store.names() == []
        monkeypatch.undo()
        assert job.controller.save_last()
        job.saver.wait()
        job.assert_holds_all()


def test_a_server_that_is_lost_in_the_middle_of_a_delta_costs_that_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(tmp_path) as job, mock.patch(MOST_SHARE, 100.0):  # nearly all rows have changed
        first = job.save()
        job.session.start()
        job.session.finish()
        changed = job.session.changed_rows
        monkeypatch.setattr(
            job.session, "changed_rows", lambda end: tuple(replace(r, source=Failing(r)) for r in changed(end))
        )
        assert job.controller.save(Due.ROUND)
        job.saver.wait()
        job.controller.take_stock()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [first]
        monkeypatch.undo()
        job.save()
        assert [layer.name for layer in job.store.open().layers] == [first, job.store.newest()]
        job.assert_holds_all()


def test_nothing_is_due_while_a_save_is_under_way(tmp_path: Path) -> None:
    """A disk slower than the interval costs checkpoints, not training."""
    with kept(tmp_path, recovery={"mode": "full", "interval_s": 1e-6}) as job:
        go_on = threading.Event()
        assert job.controller.due() is Due.ROUND
        job.saver.submit(lambda: go_on.wait(120))
        assert job.controller.due() is Due.NOTHING
        assert math.isinf(job.controller.seconds_left())
        go_on.set()
        job.saver.wait()
        assert job.controller.due() is Due.ROUND


def test_a_checkpoint_that_cannot_be_read_back_is_built_upon_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(tmp_path, recovery={"priority": "scar", "min_rows": 1}) as job:

        def unreadable(name: str, shards: Any) -> Any:
            raise CheckpointError(f"{name} cannot be read")

        monkeypatch.setattr(job.store, "opened", unreadable)
        first = job.save()
        monkeypatch.undo()
        assert f"{first} cannot be read" in job.controller.look()
        job.session.start()
        job.session.finish()
        second = job.save()
        assert len(job.store.open(second).layers) == 1
        job.assert_holds_all()


@pytest.mark.parametrize(("share", "expected"), [(1.0, [1, 1, 1]), (3.0, [2, 3, 1]), (100.0, [2, 3, 4])])
def test_deltas_that_outgrow_what_they_lie_on_are_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: list[int]
) -> None:
    """Every save but the first holds all rows, and with their numbers is a little larger than the whole one."""
    monkeypatch.setattr(MOST_SHARE, share)
    pauses = [Pause(iteration) for iteration in (5, 10, 15)]

    def failures(rank: int, iteration: int) -> None:
        for pause in pauses:
            pause(rank, iteration)

    with kept(tmp_path, failures=failures, train={"trainers": 1, "workers": 1}) as job:
        monkeypatch.setattr(job.session, "standing_still", nullcontext)  # the worker is held where it stands still
        job.save()
        job.session.start()
        layers = []
        for pause in pauses:
            pause.reached()
            lose(job.session, [0, 1], None)
            job.save()
            layers.append(len(job.store.open().layers))
            pause.go()
        job.session.finish()
        assert layers == expected


def test_a_failure_beyond_the_last_epoch_never_comes(tmp_path: Path) -> None:
    with kept(tmp_path, recovery={"inject": "at:5+1e308,unit=epoch"}) as job:
        job.controller.begin()
        job.controller.look()
        job.session.start()
        job.session.finish()
        job.controller.look()
        assert job.session.failures == 0
