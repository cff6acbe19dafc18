"""Saving, listing, keeping and loading, the same on every file system, and any range of rows out of any cut."""

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_helpers import (
    LONE,
    USERS,
    assert_equal,
    assert_holds,
    cut,
    forget_memory,
    full_table,
    make_snapshot,
    memory_root,
    small_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.checkpoint import snapshot as snapshots
from shadowsync.checkpoint.files import open_files
from shadowsync.checkpoint.format import place
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import TABLE_WIDE, Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.optimizers import Extent, RowOptimizer
from shadowsync.embedding.table import Rows, Table
from shadowsync.errors import CheckpointError, SaveError
from shadowsync.registry import members


def test_what_is_saved_is_loaded(root: str) -> None:
    name = small_store(root).save(make_snapshot(1024))
    assert name == "samples-000000001024"
    loaded = small_store(root).load()
    assert loaded.name == name
    assert loaded.skipped == ()
    assert_holds(loaded, 1024)
    assert loaded.tensor_names("user") == ("weight", "momentum")
    assert set(loaded.tensor_names("lone")) == {"weight", "exp_avg", "exp_avg_sq", "step"}


def test_the_newest_are_kept(root: str) -> None:
    store = small_store(root, keep=2)
    assert store.newest() is None
    for samples in (10, 20, 30, 40):
        store.save(make_snapshot(samples))
    assert store.names() == ["samples-000000000030", "samples-000000000040"]
    assert store.newest() == "samples-000000000040"
    assert_holds(store.load("samples-000000000030"), 30)


def test_a_second_checkpoint_of_the_same_samples_replaces_nothing(root: str) -> None:
    store = small_store(root, keep=2)
    names = [store.save(make_snapshot(10)) for _ in range(3)]
    assert names == ["samples-000000000010", "samples-000000000010-1", "samples-000000000010-2"]
    assert store.names() == names[1:]
    assert store.load().name == names[2]


def test_names_sort_by_samples_however_many(root: str) -> None:
    store = small_store(root, keep=3)
    for samples in (0, 10**12 - 1, 10**12):
        store.save(make_snapshot(samples))
    assert [store.load(name).samples for name in store.names()] == [0, 10**12 - 1, 10**12]


def test_remains_of_an_unfinished_save_are_no_checkpoint_and_go_with_the_next_save(root: str) -> None:
    files = open_files(root)
    store = small_store(root)
    store.save(make_snapshot(10))
    files.write(f"{files.staging('samples-000000000020')}/rows-00000.safetensors", [b"half"])
    files.write("samples-000000000030/rows-00000.safetensors", [b"half"])
    files.write("notes/of-mine.txt", [b"keep me"])
    assert store.names() == ["samples-000000000010"]
    with pytest.raises(CheckpointError, match="samples-000000000030 is not a checkpoint"):
        store.load("samples-000000000030")
    store.save(make_snapshot(40))
    assert sorted(files.names()) == ["notes", "samples-000000000010", "samples-000000000040"]


def test_a_folder_without_checkpoints_says_so(root: str) -> None:
    store = small_store(root)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.load()
    with pytest.raises(CheckpointError, match="has none"):
        store.load("samples-000000000010")


@pytest.mark.parametrize(
    "name", ["../elsewhere", "samples-1", ".samples-000000000010.part", "samples-000000000010/..", ""]
)
def test_a_name_cannot_leave_the_folder(root: str, name: str) -> None:
    store = small_store(root)
    store.save(make_snapshot(10))
    with pytest.raises(CheckpointError, match=r"is not a checkpoint; .* has samples-000000000010"):
        store.load(name)


def test_what_came_after_the_resumed_checkpoint_goes_with_the_next_save(root: str) -> None:
    store = small_store(root, keep=3)
    for samples in (10, 20, 30):
        store.save(make_snapshot(samples))
    store.load("samples-000000000010")
    store.save(make_snapshot(15))
    assert store.names() == ["samples-000000000010", "samples-000000000015"]


def test_checkpoints_of_another_run_are_neither_replaced_nor_mixed_in(root: str) -> None:
    small_store(root).save(make_snapshot(100))
    with pytest.raises(SaveError, match=r"samples-000000000100, which is newer than the 50 samples"):
        small_store(root).save(make_snapshot(50))
    assert small_store(root).names() == ["samples-000000000100"]
    assert_holds(small_store(root).load(), 100)


def test_our_files_are_safetensors_files(tmp_path: Path) -> None:
    name = small_store(tmp_path).save(make_snapshot(7))
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / name).glob("rows-*.safetensors")):
        found |= safetensors.torch.load_file(path)
    parts = {int(key[5:].partition(":")[0]): tensor for key, tensor in found.items() if re.match("user.*weight", key)}
    assert torch.equal(torch.cat([parts[start] for start in sorted(parts)]), full_table(USERS, 7)["weight"])
    dense = safetensors.torch.load_file(tmp_path / name / "dense.safetensors")
    assert torch.equal(dense["center"], torch.full((5,), 7.0))


def test_files_stay_within_their_bound(tmp_path: Path) -> None:
    name = CheckpointStore(str(tmp_path), piece_bytes=100).save(make_snapshot(7))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / name).glob("rows-*")}
    assert len(sizes) >= 6
    header_bytes = 700
    assert max(sizes.values()) <= 100 + header_bytes
    assert len(list((tmp_path / CheckpointStore(str(tmp_path)).save(make_snapshot(8))).glob("rows-*"))) == 1


def test_tensors_may_be_views_of_any_dtype(tmp_path: Path) -> None:
    wide = torch.arange(48.0).reshape(6, 8)
    dense = {
        "transposed": wide.t(),
        "strided": wide[::2, 1::3],
        "half": wide.half(),
        "bfloat": wide.bfloat16(),
        "double": wide.double(),
        "long": wide.long(),
        "flags": wide > 3,
        "bytes": wide.to(torch.uint8)[:3, :5],
        "learned": torch.nn.Parameter(wide.clone()),
    }
    small_store(tmp_path).save(Snapshot({}, 1, (), dense, {}, {}, {}))
    assert_equal(small_store(tmp_path).load().dense, dense)


def test_every_tensor_stands_at_a_multiple_of_its_width() -> None:
    dtypes = [torch.uint8, torch.float64, torch.bfloat16, torch.float32, torch.bool, torch.int64, torch.int16]
    for lengths in ((1, 1, 1, 1, 1, 1, 1), (3, 2, 5, 1, 7, 2, 9)):
        tensors = [(str(i), torch.zeros(n, dtype=d)) for i, (n, d) in enumerate(zip(lengths, dtypes, strict=True))]
        head, offsets = place(tensors)
        assert len(head) % 8 == 0
        assert offsets.keys() == dict(tensors).keys()
        assert all(offsets[name] % tensor.element_size() == 0 for name, tensor in tensors)


def test_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="names of tensors are not unique: a, a"):
        place([("a", torch.ones(1)), ("a", torch.ones(2))])


BROKEN = {
    "gap": (cut(USERS, full_table(USERS, 0), [5, 9])[::2], "row 5 of table user exactly once"),
    "end": (cut(USERS, full_table(USERS, 0), [5])[:1], "holds 5 of the 23 rows of table user"),
    "twice": (cut(USERS, full_table(USERS, 0), []) * 2, "row 23 of table user exactly once"),
    "dtype": ((Rows(LONE, 0, {"weight": torch.ones(1, 3, dtype=torch.complex64)}),), "complex64"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_snapshot_that_cannot_be_loaded_again_is_not_saved(tmp_path: Path, case: str) -> None:
    tables, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        small_store(tmp_path).save(Snapshot({}, 1, tables, {}, {}, {}, {}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, torch.ones(1), b"x"])
def test_values_that_json_would_change_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="extra of a checkpoint must be plain JSON"):
        small_store(tmp_path).save(Snapshot({}, 1, (), {}, {}, {}, {"x": [value]}))
    assert list(tmp_path.iterdir()) == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(str(tmp_path), 0)


def test_the_root_can_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_store("here").save(make_snapshot(3))
    assert [path.name for path in Path("here").iterdir()] == ["samples-000000000003"]
    assert_holds(small_store("here").load(), 3)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd"])
def test_tensors_of_a_whole_shard_are_known_by_name(optimizer: str) -> None:
    state = members("shadowsync.embedding", RowOptimizer)[optimizer].state
    assert {name for name, extent in state.items() if extent is Extent.SHARD} == TABLE_WIDE & state.keys()


# --- any cut in, any range of rows out -----------------------------------------------------------------------------

ROWS = st.integers(0, USERS.rows)


def saved_and_loaded(tables: tuple[Rows, ...], piece_bytes: int = 200) -> LoadedCheckpoint:
    forget_memory()
    store = CheckpointStore(memory_root(), piece_bytes=piece_bytes)
    store.save(Snapshot({}, 1, tables, {}, {}, {}, {}))
    return store.load()


@given(
    edges=st.lists(ROWS, max_size=6),
    piece_bytes=st.integers(1, 700),
    ranges=st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_cut_in_any_range_out(edges: list[int], piece_bytes: int, ranges: list[tuple[int, int]]) -> None:
    whole = full_table(USERS, 0)
    loaded = saved_and_loaded(cut(USERS, whole, edges), piece_bytes)
    for one, other in ranges:
        start, stop = min(one, other), max(one, other)
        if start < stop:
            assert_equal(loaded.rows("user", start, stop), {name: t[start:stop] for name, t in whole.items()})


@given(block_bytes=st.integers(1024, 1100), start=st.integers(0, 2999), count=st.integers(1, 3000))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_rows_that_straddle_blocks_are_put_together(block_bytes: int, start: int, count: int) -> None:
    table = Table("t", 3000, 3, ("f",))
    whole = full_table(table, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "BLOCK_BYTES", block_bytes)
        loaded = saved_and_loaded((Rows(table, 0, whole),), 1 << 20)
    stop = min(start + count, table.rows)
    assert_equal(loaded.rows("t", start, stop), {name: tensor[start:stop] for name, tensor in whole.items()})


def test_a_state_of_the_whole_table_is_the_furthest_of_the_parts_that_hold_the_rows() -> None:
    parts = [
        Rows(USERS, start, {"weight": torch.ones(stop - start, 4), "step": torch.tensor([step])})
        for start, stop, step in ((0, 10, 5.0), (10, 22, 9.0), (22, 23, 7.0))
    ]
    loaded = saved_and_loaded(tuple(parts))
    assert loaded.rows("user", 0, 10)["step"].tolist() == [5.0]
    assert loaded.rows("user", 5, 23)["step"].tolist() == [9.0]
    assert loaded.rows("user", 22, 23)["step"].tolist() == [7.0]


def test_only_the_asked_tensors_are_read() -> None:
    loaded = saved_and_loaded(make_snapshot(1).tables)
    assert loaded.rows("user", 0, 2, {"weight"}).keys() == {"weight"}
    assert loaded.rows("lone", 0, 1, {"step"}).keys() == {"step"}


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 5), (6, 5), (0, 24), (23, 24)])
def test_rows_beyond_the_table_are_refused(start: int, stop: int) -> None:
    loaded = saved_and_loaded(cut(USERS, full_table(USERS, 0), []))
    with pytest.raises(CheckpointError, match=f"no rows {start} to {stop} of table user: it has 23 rows"):
        loaded.rows("user", start, stop)


def test_an_unknown_table_is_named() -> None:
    loaded = saved_and_loaded(cut(USERS, full_table(USERS, 0), []))
    with pytest.raises(CheckpointError, match="no table usr; it has user"):
        loaded.rows("usr", 0, 1)
    with pytest.raises(CheckpointError, match="no table usr"):
        loaded.tensor_names("usr")


def test_a_dense_tensor_must_be_there_and_fit(tmp_path: Path) -> None:
    small_store(tmp_path).save(make_snapshot(3))
    loaded = small_store(tmp_path).load()
    assert torch.equal(loaded.dense_tensor("center", 5), torch.full((5,), 3.0))
    with pytest.raises(CheckpointError, match=r"no dense tensor centre \(it has center, scalar, empty\)"):
        loaded.dense_tensor("centre", 5)
    with pytest.raises(CheckpointError, match="center has 5 elements where this model has 6"):
        loaded.dense_tensor("center", 6)
