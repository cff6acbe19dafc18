"""Rows that are compared in the pass that loads them: each byte is read once, and damage leads to an older one."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import USERS, full_table
from delta_helpers import EDGES, chain, tight_store

from shadowsync.checkpoint.files import LocalFiles
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import DeltaOf, Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.errors import CheckpointError

BLOCK = 1024
BIG, OTHER = Table("big", 3000, 4, ("a",)), Table("other", 700, 4, ("b",))
BASE, FIRST, SECOND = "samples-000000000001", "samples-000000000002", "samples-000000000003"
SHARDS = [Shard(USERS, 0, EDGES[1])]


class Counting(LocalFiles):
    """Counts how often each byte range of a file of rows is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), root)
        self.ranges: Counter[tuple[str, int, int]] = Counter()

    def read(self, path: str, start: int, stop: int) -> bytes:
        if "rows-" in path:
            self.ranges[path, start, stop] += 1
        return super().read(path, start, stop)

    def bytes_read(self) -> int:
        return sum((stop - start) * times for (_, start, stop), times in self.ranges.items())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pieces nor chunks of rows end where blocks do."""
    monkeypatch.setattr(sys.modules["shadowsync.checkpoint.snapshot"], "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(sys.modules["shadowsync.checkpoint.loading"], "CHUNK_BYTES", 3000)


def snapshot(samples: int, tables: tuple[Rows, ...], delta: DeltaOf | None = None) -> Snapshot:
    dense = {"center": torch.zeros(1)}
    return Snapshot({}, samples, tables, dense, {}, {"torch": torch.zeros(1, dtype=torch.uint8)}, {}, delta)


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
    sizes = [path.stat().st_size for path in tmp_path.glob("*/rows-*")]
    assert sum(sizes) > 60 * BLOCK
    assert 0.9 * sum(sizes) < files.bytes_read() <= sum(sizes) + 2 * len(sizes) * BLOCK
    assert max(files.ranges.values()) <= 2


def test_each_file_of_a_chain_is_read_once(tmp_path: Path) -> None:
    chain(tmp_path)
    files = Counting(tmp_path)
    with tight_store(tmp_path, files=files).opened(None, SHARDS, lambda saved: list(saved.rows_of(SHARDS))) as loaded:
        assert loaded.name == SECOND
    assert len({path.partition("/")[0] for path, _, _ in files.ranges}) == 3
    assert set(files.ranges.values()) == {1}


def test_damage_that_shows_while_rows_are_loaded_leads_to_the_one_before(tmp_path: Path) -> None:
    _, states = chain(tmp_path)
    harmed = next(path for path in sorted((tmp_path / SECOND).glob("rows-*")))
    content = bytearray(harmed.read_bytes())
    content[-1] ^= 1
    harmed.write_bytes(content)
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


def test_of_a_state_that_is_there_twice_the_other_one_is_loaded(tmp_path: Path) -> None:
    store, states = chain(tmp_path)
    with store.opened(SECOND):
        whole = store.compact(SECOND)
    for path in (tmp_path / whole).glob("rows-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    found: list[Rows] = []

    def load(saved: LoadedCheckpoint) -> None:
        found[:] = []
        found.extend(saved.rows_of(SHARDS))

    with store.opened(None, SHARDS, load) as loaded:
        assert loaded.samples == 3
    weights = torch.cat([part.tensors["weight"] for part in found])
    assert torch.equal(weights, states[SECOND]["user"]["weight"][: EDGES[1]])
    assert BASE in store.names()
