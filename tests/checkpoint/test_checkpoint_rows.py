"""Any cut in, any range of rows out."""

from itertools import pairwise

import pytest
import torch
from checkpoint_helpers import USERS, assert_equal, cut, full_table, make_snapshot, memory_root, small_store
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.checkpoint import snapshot as snapshots
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, Table
from shadowsync.errors import CheckpointError

ROWS = st.integers(0, USERS.rows)


def saved_and_loaded(tables: tuple[Rows, ...], piece_bytes: int = 200) -> LoadedCheckpoint:
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


def test_servers_of_any_number_take_their_parts() -> None:
    whole = full_table(USERS, 0)
    loaded = saved_and_loaded(cut(USERS, whole, [3, 10, 11]))
    for servers in range(1, 9):
        edges = [round(USERS.rows * i / servers) for i in range(servers + 1)]
        parts = [loaded.rows("user", a, b)["weight"] for a, b in pairwise(edges)]
        assert torch.equal(torch.cat(parts), whole["weight"])


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


def test_a_dense_tensor_must_be_there_and_fit(tmp_path: object) -> None:
    store = small_store(str(tmp_path))
    store.save(make_snapshot(3))
    loaded = store.load()
    assert torch.equal(loaded.dense_tensor("center", 5), torch.full((5,), 3.0))
    with pytest.raises(CheckpointError, match=r"no dense tensor centre \(it has center, scalar, empty\)"):
        loaded.dense_tensor("centre", 5)
    with pytest.raises(CheckpointError, match="center has 5 elements where this model has 6"):
        loaded.dense_tensor("center", 6)
