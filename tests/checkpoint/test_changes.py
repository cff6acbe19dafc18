"""What a serving system is given: the rows that changed since it was last given some."""

import itertools
import json
import zlib
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import (
    BASE,
    EDGES,
    FIRST,
    ITEMS,
    SECOND,
    USERS,
    Counting,
    Model,
    ScriptedLocal,
    Steps,
    chain,
    disk_full,
    flip,
    forget_memory,
    memory_root,
    tight_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from shadowsync.checkpoint.deltas import changed_rows, write_delta
from shadowsync.checkpoint.files import open_files
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.optimizers import SGD
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import RowSet, Shard
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import CheckpointError, SaveError


def by_table(found: list[RowSet]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for one in found:
        rows.setdefault(one.table.name, []).extend(one.numbers.tolist())
    return rows


def test_between_deltas_only_their_rows_are_read(tmp_path: Path) -> None:
    store, states = chain(tmp_path)
    files = Counting(tmp_path)
    found = list(changed_rows(tight_store(tmp_path, files=files), BASE, SECOND))
    assert by_table(found) == {"user": [0, 3, 8, 9, *range(10, 16), 22], ITEMS.name: [1]}
    users = found[0]
    assert users.tensors.keys() == {"weight"}
    assert torch.equal(users.tensors["weight"], states[SECOND]["user"]["weight"][users.numbers])
    base = {path.partition("/")[2] for path in files.paths if path.startswith(BASE)} - {"manifest.json"}
    items = {piece.file for piece in store.open(BASE).layers[0].pieces[ITEMS.name]}
    assert base <= {*items, "dense.safetensors", "random.safetensors"}
    assert by_table(list(changed_rows(store, FIRST))) == {"user": [3, *range(10, 16)], ITEMS.name: [1]}
    assert list(changed_rows(store, SECOND, SECOND)) == []


def test_whole_ones_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.checkpoint.loading.CHUNK_BYTES", 100)
    store, model = tight_store(tmp_path, 9), Model()
    model.train(range(USERS.rows))
    model.state["user"]["weight"][4] = float("nan")
    first = store.save(model.whole())
    model.train([2, 21])
    model.state["user"]["momentum"][7] = 99.0
    store.save(model.whole())
    found = list(changed_rows(store, first))
    assert by_table(found) == {"user": [2, 21], ITEMS.name: [1]}
    assert all(one.stop - one.start <= 8 for one in found)
    assert [one.start for one in found] == [0, 20, 0]
    complete = list(changed_rows(store, first, names={"weight", "momentum", "step"}))
    assert by_table(complete)["user"] == [2, 7, 21]
    assert {one.tensors["step"].item() for one in complete} == {2.0}


def test_a_compaction_changes_nothing(tmp_path: Path) -> None:
    store, _ = chain(tmp_path, keep=9)
    before = by_table(list(changed_rows(store, FIRST, SECOND)))
    store.compact(FIRST)
    assert by_table(list(changed_rows(store, FIRST, SECOND))) == before
    store.compact(SECOND)
    assert by_table(list(changed_rows(store, f"{FIRST}-whole"))) == before
    assert list(changed_rows(store, SECOND)) == []


def test_what_is_gone_or_of_another_size_is_said(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    with pytest.raises(CheckpointError, match="samples-000000000009 is not a checkpoint"):
        list(changed_rows(store, "samples-000000000009"))
    first, second = Model(), Model(samples=1)
    other = tight_store(tmp_path / "other")
    name = other.save(first.whole())
    items = second.whole().tables[-1]
    grown = type(ITEMS)(ITEMS.name, 7, 3, ITEMS.features)
    tensors = {"weight": torch.zeros(7, 3), "momentum": torch.zeros(7), "step": torch.zeros(1)}
    other.save(second.snapshot((*second.whole().tables[:-1], type(items)(grown, 0, tensors))))  # type: ignore[call-arg]
    with pytest.raises(CheckpointError, match=f"has 7 rows of 2 in {name} and 7 of 3 in samples-000000000001: export"):
        list(changed_rows(other, name))


@given(
    courses=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 22), max_size=5)), min_size=2, max_size=5),
    since=st.integers(0, 4),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_laid_over_the_former_it_is_the_latter(courses: list[tuple[bool, list[int]]], since: int) -> None:
    forget_memory()
    store, model = tight_store(memory_root(), 9), Model()
    names = [store.save(model.whole())]
    for whole, rows in courses:
        model.changed.clear()
        model.train(rows)
        names.append(store.save(model.whole() if whole else model.delta(names[-1])))
    former = names[since % len(names)]
    optimizer = SGD()
    shards = [Shard(USERS, 0, EDGES[1]), Shard(USERS, EDGES[1], 23), Shard(ITEMS, 0, 7)]
    server = EmbeddingServer(shards, TorchStorage, optimizer, 0)
    server.load(store.open(former).rows_of(shards, {"weight"}))
    server.load(changed_rows(store, former), partial=True)
    for own in server.state():
        wanted = model.state[own.table.name]["weight"][own.start : own.start + len(own.tensors["weight"])]
        assert torch.equal(own.tensors["weight"], wanted)


def test_files_hold_what_changed(tmp_path: Path) -> None:
    store, states = chain(tmp_path / "from")
    out = tmp_path / "deep" / "delta"
    made = write_delta(str(out), BASE, SECOND, changed_rows(store, BASE, SECOND), file_bytes=100)
    assert [path.name for path in out.parent.iterdir()] == ["delta"]
    listed = json.loads((out / "delta.json").read_text())
    assert (listed["format"], listed["since"], listed["until"]) == (1, BASE, SECOND)
    assert listed["tables"] == [
        {"name": "user", "rows": 23, "dim": 4, "changed": 11},
        {"name": ITEMS.name, "rows": 7, "dim": 2, "changed": 1},
    ]
    assert len(made["files"]) == 2
    found = {}
    for file in listed["files"]:
        content = (out / file["name"]).read_bytes()
        assert (file["bytes"], file["crc32"]) == (len(content), zlib.crc32(content))
        found |= load_file(out / file["name"])
    numbers, weight = found["user[0:23].numbers"], found["user[0:23].weight"]
    assert torch.equal(weight, states[SECOND]["user"]["weight"][numbers])


def test_no_changes_are_a_delta_too_wherever_it_goes() -> None:
    store, _ = chain(memory_root())
    root = memory_root()
    write_delta(f"{root}/none", SECOND, SECOND, changed_rows(store, SECOND))
    write_delta(f"{root}/some", FIRST, SECOND, changed_rows(store, FIRST))
    files = open_files(root)
    assert sorted(files.names()) == ["none", "some"]
    assert files.names("none") == ["delta.json"]
    size = files.size("some/rows-00000.safetensors")
    assert size is not None
    tensors = load(files.read("some/rows-00000.safetensors", 0, size))
    assert tensors["user[0:23].numbers"].tolist() == [3, *range(10, 16)]


def test_a_delta_appears_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = chain(tmp_path / "from")
    out = tmp_path / "out" / "delta"
    for at in itertools.count(1):
        steps = Steps(at, disk_full)
        monkeypatch.setattr(
            "shadowsync.checkpoint.deltas.open_files", lambda root, steps=steps: ScriptedLocal(Path(root), steps)
        )
        try:
            write_delta(str(out), BASE, SECOND, changed_rows(store, BASE, SECOND), file_bytes=100)
            break
        except SaveError as error:
            assert "delta could not be written (No space left on device): make room" in str(error)  # noqa: PT017
            assert not list((tmp_path / "out").glob("*"))
    assert at > 10
    with pytest.raises(SaveError, match="is there already: give another folder"):
        write_delta(str(out), BASE, SECOND, [])
    assert len(list(out.iterdir())) == 3


def test_a_damaged_checkpoint_leaves_no_delta(tmp_path: Path) -> None:
    chain(tmp_path / "from")
    for path in (tmp_path / "from" / SECOND).glob("rows-*"):
        flip(path)
    store = CheckpointStore(str(tmp_path / "from"))
    with pytest.raises(CheckpointError, match="is not what was written"):
        write_delta(str(tmp_path / "delta"), BASE, SECOND, changed_rows(store, BASE, SECOND))
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
