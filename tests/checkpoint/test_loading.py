"""Opened checkpoints: rows are compared in the pass that loads them, and others are given up or removed meanwhile.

Each byte is read once, and damage leads to an older one.
"""

import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import (
    BASE,
    EDGES,
    FIRST,
    SECOND,
    USERS,
    Counting,
    Model,
    assert_state,
    chain,
    flip,
    full_table,
    make_snapshot,
    small_store,
    tight_store,
)

from shadowsync.checkpoint.files import LocalFiles
from shadowsync.checkpoint.format import MANIFEST
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import CheckpointStore, ParentLost
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.errors import CheckpointError, SaveError

BLOCK = 1024
BIG, OTHER = Table("big", 3000, 4, ("a",)), Table("other", 700, 4, ("b",))
SHARDS = [Shard(USERS, 0, EDGES[1])]


def rows_read(files: Counting) -> dict[tuple[str, int, int], int]:
    return {part: times for part, times in files.ranges.items() if "rows-" in part[0]}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pieces nor chunks of rows end where blocks do."""
    monkeypatch.setattr(sys.modules["shadowsync.checkpoint.snapshot"], "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(sys.modules["shadowsync.checkpoint.loading"], "CHUNK_BYTES", 3000)


def snapshot(samples: int, tables: tuple[Rows, ...]) -> Snapshot:
    dense = {"center": torch.zeros(1)}
    return Snapshot({}, samples, tables, dense, {}, {"torch": torch.zeros(1, dtype=torch.uint8)}, {})


@pytest.mark.usefixtures("small_blocks")
def test_each_block_is_read_once(tmp_path: Path) -> None:
    """But for those in which a tensor ends and the next one begins."""
    tables = {table: full_table(table, 3) for table in (BIG, OTHER)}
    writer = CheckpointStore(str(tmp_path), piece_bytes=25_000)
    name = writer.save(snapshot(1, tuple(Rows(table, 0, tensors) for table, tensors in tables.items())))
    files = Counting(tmp_path)
    store = CheckpointStore(str(tmp_path), files=files)
    found: list[Rows] = []
    shards = [Shard(BIG, 100, 2900), Shard(OTHER, 0, 700)]
    with store.opened(None, shards, lambda saved: found.extend(saved.rows_of(shards))) as loaded:
        assert loaded.name == name
        assert loaded.skipped == ()
    for shard in shards:
        parts = [rows.tensors for rows in found if rows.table == shard.table]
        assert len(parts) > 3
        for tensor in ("weight", "momentum"):
            wanted = tables[shard.table][tensor][shard.start : shard.stop]
            assert torch.equal(torch.cat([part[tensor] for part in parts]), wanted)
    bytes_read = sum((stop - start) * times for (_, start, stop), times in rows_read(files).items())
    sizes = [path.stat().st_size for path in tmp_path.glob("*/rows-*")]
    assert sum(sizes) > 60 * BLOCK
    assert 0.9 * sum(sizes) < bytes_read <= sum(sizes) + 2 * len(sizes) * BLOCK
    assert max(rows_read(files).values()) <= 2


def test_each_file_of_a_chain_is_read_once(tmp_path: Path) -> None:
    chain(tmp_path)
    files = Counting(tmp_path)
    with tight_store(tmp_path, files=files).opened(None, SHARDS, lambda saved: list(saved.rows_of(SHARDS))) as loaded:
        assert loaded.name == SECOND
    assert len({path.partition("/")[0] for path, _, _ in rows_read(files)}) == 3
    assert set(rows_read(files).values()) == {1}


def test_damage_that_shows_while_rows_are_loaded_leads_to_the_one_before(tmp_path: Path) -> None:
    _, states = chain(tmp_path)
    harmed = min((tmp_path / SECOND).glob("rows-*"))
    flip(harmed)
    tried: list[str] = []
    rows = torch.zeros(EDGES[1], USERS.dim)

    def load(saved: LoadedCheckpoint) -> None:
        tried.append(saved.name)
        for part in saved.rows_of(SHARDS):
            rows[part.start : part.start + len(part.tensors["weight"])] = part.tensors["weight"]

    with tight_store(tmp_path).opened(None, SHARDS, load) as loaded:
        assert (loaded.name, tried) == (FIRST, [SECOND, FIRST])
        assert torch.equal(rows, states[FIRST]["user"]["weight"][: EDGES[1]])
        (sentence,) = loaded.skipped
    assert sentence.startswith(
        f"{SECOND} cannot be loaded, so the 1 samples trained after {FIRST} are lost: {harmed} is not what was written"
    )


def test_damage_in_rows_of_others_does_not_matter(tmp_path: Path) -> None:
    chain(tmp_path)
    for path in (tmp_path / SECOND).glob("rows-*"):
        path.write_bytes(bytes(len(path.read_bytes())))
    (tmp_path / SECOND / "dense.safetensors").unlink()
    with tight_store(tmp_path).opened(None, [], lambda saved: None) as loaded:
        assert loaded.name == SECOND


@pytest.mark.parametrize("error", [CheckpointError("of another model"), OSError("mine")])
def test_what_else_goes_wrong_while_rows_are_loaded_is_not_taken_for_damage(tmp_path: Path, error: Exception) -> None:
    chain(tmp_path)
    tried: list[str] = []

    def load(saved: LoadedCheckpoint) -> None:
        tried.append(saved.name)
        raise error

    with pytest.raises(type(error), match=str(error)), tight_store(tmp_path).opened(None, SHARDS, load):
        raise AssertionError
    assert tried == [SECOND]


def test_rows_do_not_come_from_what_was_given_up(tmp_path: Path) -> None:
    """The newest has lost its dense part, so that the job went on from the one before; a server dies at once."""
    store, states = chain(tmp_path)
    (tmp_path / SECOND / "dense.safetensors").unlink()
    assert store.load().name == FIRST
    with store.opened(None, SHARDS) as loaded:
        assert loaded.name == FIRST
        assert loaded.skipped == ()
        assert loaded.rows("user", 3, 4)["weight"].tolist() == states[FIRST]["user"]["weight"][3:4].tolist()
    assert store.load().name == FIRST
    assert store.open().name == FIRST
    assert tight_store(tmp_path).open(None, SHARDS).name == SECOND, "who gave nothing up takes the newest"


def test_what_is_chosen_by_name_is_not_given_up_any_more(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    store.load(BASE)
    assert store.open().name == BASE
    store.load(SECOND)
    assert store.open().name == SECOND
    model = Model(samples=3)
    model.train([1])
    name = store.save(model.delta(SECOND))
    assert store.names() == [BASE, FIRST, SECOND, name]


def test_a_name_that_was_given_up_may_be_that_of_a_new_one(tmp_path: Path) -> None:
    store = small_store(tmp_path, keep=2)
    for samples in (10, 20, 30):
        store.save(make_snapshot(samples))
    store.load("samples-000000000020")
    for samples in (25, 30):
        store.save(make_snapshot(samples))
    assert store.names() == ["samples-000000000025", "samples-000000000030"]
    assert store.open().name == "samples-000000000030"


def test_what_is_rewritten_stays_given_up(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    store.load(FIRST)
    with store.opened(SECOND):
        store.compact(SECOND)
        assert store.open().name == FIRST


def test_a_delta_on_what_was_given_up_is_refused(tmp_path: Path) -> None:
    store, states = chain(tmp_path)
    store.load(FIRST)
    model = Model(samples=6, state=states[FIRST])
    before = store.names()
    with pytest.raises(
        ParentLost,
        match=f"{SECOND}, on which the new checkpoint builds, belongs to a course that was given up: save a whole",
    ):
        store.save(model.delta(SECOND))
    assert store.names() == before
    assert not list(tmp_path.glob(".*"))
    assert store.save(model.whole()) == "samples-000000000006"
    with pytest.raises(ParentLost, match="cannot be loaded any more: save a whole"):
        store.save(model.delta(SECOND))
    assert_state(store.load(), model.state)


def test_a_delta_on_another_runs_is_refused(tmp_path: Path) -> None:
    chain(tmp_path)
    store, model = tight_store(tmp_path), Model(samples=2)
    with pytest.raises(SaveError, match="another run's") as caught:
        store.save(model.delta(SECOND))
    assert not isinstance(caught.value, ParentLost), "a whole one could not be saved either"


class Prunes(LocalFiles):
    """Between choosing a checkpoint and reading it, another thread of this process saves, and removes old ones."""

    writer: CheckpointStore | None = None

    def read(self, path: str, start: int, stop: int) -> bytes:
        writer, self.writer = self.writer, None
        if writer is not None and not path.endswith(MANIFEST):
            saver = threading.Thread(target=writer.save, args=(Model(samples=9).whole(),))
            saver.start()
            saver.join()
        elif writer is not None:
            self.writer = writer
        return super().read(path, start, stop)


@pytest.mark.parametrize("name", [None, SECOND])
def test_nothing_is_removed_between_choosing_and_reading(tmp_path: Path, name: str | None) -> None:
    _, states = chain(tmp_path)
    files = Prunes(str(tmp_path), tmp_path)
    store = tight_store(tmp_path, keep=1, files=files)
    files.writer = store
    with store.opened(name) as loaded:
        assert loaded.name == SECOND
        assert_state(loaded, states[SECOND])
        assert store.names() == [BASE, FIRST, SECOND, "samples-000000000009"]
    store.save(Model(samples=10).whole())
    assert store.names() == ["samples-000000000010"], "what nobody reads any more may go"


def test_what_is_open_may_be_rewritten_meanwhile(tmp_path: Path) -> None:
    store, states = chain(tmp_path, keep=1)
    with store.opened(None, SHARDS) as loaded:
        store.compact(SECOND)
        store.save(Model(samples=7).whole())
        for rows in loaded.rows_of(SHARDS):
            wanted = states[SECOND]["user"]["weight"][: EDGES[1]]
            assert rows.tensors["weight"].tolist() == wanted.tolist()


def test_an_error_within_the_block_is_not_taken_for_damage(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    with pytest.raises(CheckpointError, match="mine"), store.opened():
        raise CheckpointError("mine")
    store.save(Model(samples=9).whole())
    with (
        pytest.raises(CheckpointError, match="samples-000000000099 is not a checkpoint"),
        store.opened("samples-000000000099"),
    ):
        raise AssertionError
