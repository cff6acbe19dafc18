"""Rows of a cluster's embedding servers that are saved while trainers train, and servers that die meanwhile."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_sessions import (
    Pause,
    assert_same,
    by_table,
    in_memory,
    loaded_rows,
    material,
    never_asked,
    save,
    save_delta,
    save_while_training,
    save_whole,
    snapshot,
)
from wired_roles import Wired

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.cluster.session import Session
from shadowsync.embedding import memory
from shadowsync.embedding.table import Rows, RowSet, Shard
from shadowsync.recovery_controller import take_snapshot
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import PeerLost

pytest.importorskip("zmq", reason="needs ZeroMQ: pip install 'shadowsync[ray]'")


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def newest_of(
    store: CheckpointStore, shards: Sequence[Shard] | None, load: Callable[[LoadedCheckpoint], None] | None = None
) -> AbstractContextManager[LoadedCheckpoint | None]:
    """As `Newest`, of a store."""
    if store.newest() is None:
        return nullcontext()
    return store.opened(None, shards, load or LoadedCheckpoint.verify)


class Started:
    """A session with the runtime that started its processes."""

    def __init__(self, folder: Path, store: CheckpointStore, **given: Any) -> None:
        self.runtime: Wired

        def start() -> Wired:
            self.runtime = Wired(JobKeys.make(), 1)
            return self.runtime

        given = {"cluster": {"runtime": "ray"}} | given
        self.session = Session(*material(folder, **given), start, partial(newest_of, store))

    def kill(self, role: str) -> None:
        next(process for process in self.runtime.processes if process.request.role == role).kill()


@contextmanager
def clustered(folder: Path, store: CheckpointStore, **given: Any) -> Iterator[Started]:
    started = Started(folder, store, **given)
    with closing(started.session), started.session.recorder:
        yield started


def store_in(folder: Path) -> CheckpointStore:
    return CheckpointStore(str(folder / "checkpoints"), keep=1000)


def trained(session: Session) -> None:
    session.start()
    while session.alive():
        session.reap()
        session.ended.wait(0.1)
        session.ended.clear()
    session.finish()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_a_whole_one_and_deltas_taken_beside_training_are_its_last_state(tmp_path: Path, optimizer: str) -> None:
    store = store_in(tmp_path)
    with clustered(tmp_path, store, embedding={"optimizer": optimizer}) as started:
        session = started.session
        session.start()
        name, count = save_while_training(session, store)
        assert count > 0
        last = by_table(session.rows())
        assert_same(loaded_rows(store.open(name)), last)
        assert_same(loaded_rows(store.open(store.compact(name))), last)


@pytest.mark.parametrize("priority", ["scar", "mfu", "ssu"])
def test_by_priority_shares_cross_and_small_tables_at_the_end_of_a_round(tmp_path: Path, priority: str) -> None:
    store = store_in(tmp_path)
    with clustered(tmp_path, store, recovery={"priority": priority, "min_rows": 50, "share": 0.3}) as started:
        session = started.session
        name = save_whole(session, store)
        trained(session)
        rows = session.changed_rows(end_of_round=False)
        assert {(r.table.name, type(r)) for r in rows} == {("c0", RowSet), ("c1", RowSet), ("many", RowSet)}
        sizes = {(r.table.name, r.start): len(r.tensors["weight"]) for r in rows}
        big = [size for (table, _), size in sizes.items() if table == "many"]
        assert 0 < sum(big) == sum(sizes.values())
        assert all(size <= 8 for size in big)
        name = save(session, store, rows, name, False)
        first = {(r.table.name, n) for r in rows if isinstance(r, RowSet) for n in r.numbers.tolist()}
        again = session.changed_rows(end_of_round=True)
        assert {r.table.name for r in again if isinstance(r, Rows)} == {"c0", "c1"}
        second = {(r.table.name, n) for r in again if isinstance(r, RowSet) for n in r.numbers.tolist()}
        assert not first & second
        assert sum(session.row_shares()) == pytest.approx(1)
        name = save_delta(session, store, name)
        assert not store.open(name).exact


def test_a_server_that_dies_is_reported_and_nothing_counts_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowsync.checkpoint.remote_save.EARLY_BYTES", 0)
    store, pause = store_in(tmp_path), Pause(iteration=20)
    with clustered(tmp_path, store, failures=pause, rows=600) as started:
        session = started.session
        session.start()
        name = save_whole(session, store)
        pause.reached()
        rows = session.changed_rows(end_of_round=True)
        started.kill("embedding-1")
        for call in (
            lambda: session.changed_rows(end_of_round=True),
            session.rows_beside,
            lambda: session.rows_saved(rows, never_asked),
            lambda: store.save(snapshot(session, rows, name)),
        ):
            with pytest.raises(PeerLost):
                call()
        assert store.names() == [name]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [name], "nothing is left of it"
        session.settle()
        pause.go()
        trained_on = save_delta(session, store, name)
        while session.alive():
            session.reap()
            session.ended.wait(0.05)
            session.ended.clear()
        session.finish()
        name = save_delta(session, store, trained_on)
        assert_same(loaded_rows(store.open(name)), by_table(session.rows()))


def test_after_rows_are_loaded_nothing_has_changed(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with clustered(tmp_path, store) as started:
        trained(started.session)
        name = save_whole(started.session, store)
    with clustered(tmp_path, store) as started:
        started.session.load_rows(store.load(name))
        changed = started.session.changed_rows(end_of_round=True)
        assert all(isinstance(r, RowSet) and not len(r.numbers) for r in changed)
        assert torch.equal(in_memory(changed[0])["weight"], torch.zeros(0, 4))


def harm_last(folder: Path, store: CheckpointStore, name: str, shards: Sequence[Shard]) -> None:
    """Flips a bit in the last file that these shards are read from."""
    (layer,) = store.open(name, shards[-1:]).layers
    path = folder / "checkpoints" / name / layer.pieces[shards[-1].table.name][-1].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other(rows: Rows) -> Rows:
    """Every number of it is another one."""
    return Rows(rows.table, rows.start, {name: tensor + 1 for name, tensor in rows.tensors.items()})


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_checkpoint_that_is_damaged_shows_while_it_is_loaded(tmp_path: Path, goes_back: bool) -> None:
    """The one before is loaded over what was there already, and is what the account hears of."""
    store = CheckpointStore(str(tmp_path / "checkpoints"), piece_bytes=300)
    with clustered(tmp_path, store) as started:
        session = started.session
        session.goes_back = goes_back
        image = take_snapshot(session, {})
        older = store.save(image)
        newer = store.save(replace(image, samples=4, tables=tuple(map(other, image.tables))))
        harm_last(tmp_path, store, newer, session._manager.spec.shards[1])
        read: list[str] = []
        rows_of = LoadedCheckpoint.rows_of

        def noted(self: LoadedCheckpoint, shards: Sequence[Shard], *names: Any) -> Iterator[Rows]:
            for rows in rows_of(self, shards, *names):
                read.append(self.name)
                yield rows

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LoadedCheckpoint, "rows_of", noted)
            started.kill("embedding-1")
            while not (losses := session.losses()):
                session.reap()
                session.ended.wait(0.05)
                session.ended.clear()
        (loss,) = losses
        assert (loss.servers, loss.loaded, loss.loaded_samples) == ((1,), older, 0)
        assert read[0] == newer
        assert set(read) == {newer, older}
        session.settle()
        assert_same(by_table(session.rows()), loaded_rows(store.open(older)))
        trained(session)
        assert session.reader.finished


@pytest.mark.parametrize("saved", [True, False])
def test_initial_rows_are_drawn_for_a_replacement_only_where_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    store = store_in(tmp_path)
    with clustered(tmp_path, store) as started:
        session = started.session
        image = take_snapshot(session, {})
        if saved:
            image = replace(image, tables=tuple(map(other, image.tables)))
            store.save(image)
            session.load_rows(store.open())
        drawn: list[int] = []
        draw = memory.fill
        monkeypatch.setattr(memory, "fill", lambda shards, seed: drawn.append(seed) or draw(shards, seed))
        started.kill("embedding-1")
        while not session.losses():
            session.reap()
            session.ended.wait(0.05)
            session.ended.clear()
        session.settle()
        assert len(drawn) == (0 if saved else 1)
        assert_same(by_table(session.rows()), by_table(image.tables))
