"""Initial rows depend on the seed, the table and the row only."""

import itertools
import math

import pytest
import torch
from embedding_cases import EACH, SGD, table
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.embedding import memory
from shadowsync.embedding.memory import ROWS_PER_BLOCK, fill
from shadowsync.embedding.table import Shard
from shadowsync.memory import pages


def rows_of(found, start, stop, seed=0):
    weight = torch.full((stop - start, found.dim), float("nan"))
    fill([(Shard(found, start, stop), weight)], seed)
    return weight


@settings(deadline=None, max_examples=30, derandomize=True)
@given(edges=st.sets(st.integers(1, 2 * ROWS_PER_BLOCK + 99), max_size=4), dim=st.sampled_from([1, 3, 16]))
def test_any_cut_gives_the_same_rows(edges, dim):
    found = table("t", 2 * ROWS_PER_BLOCK + 100, dim)
    cuts = [0, *sorted(edges), found.rows]
    parts = [rows_of(found, start, stop) for start, stop in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), rows_of(found, 0, found.rows))


def test_threads_do_not_change_rows(monkeypatch):
    found = table("t", 3 * ROWS_PER_BLOCK, 4)
    many = rows_of(found, 0, found.rows)
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 1)
    assert torch.equal(rows_of(found, 0, found.rows), many)


def test_rows_are_uniform_in_the_bound_of_the_whole_table():
    weight = rows_of(table("t", 3 * ROWS_PER_BLOCK, 16), 0, 3 * ROWS_PER_BLOCK)
    bound = 1 / math.sqrt(3 * ROWS_PER_BLOCK)
    assert float(weight.abs().max()) <= bound * (1 + 1e-6)
    assert float(weight.abs().max()) > 0.999 * bound
    assert float(weight.mean()) == pytest.approx(0, abs=4 * bound / math.sqrt(3 * weight.numel()))
    assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_seeds_tables_and_blocks_differ():
    drawn = [rows_of(table(name, 2 * ROWS_PER_BLOCK), 0, 2 * ROWS_PER_BLOCK, seed) for name in "ab" for seed in (0, 1)]
    firsts = [weight[row] for weight in drawn for row in (0, ROWS_PER_BLOCK)]
    assert len({tuple(first.tolist()) for first in firsts}) == len(firsts)


@EACH
def test_storages_start_from_these_rows(storage):
    found = table("t", 50, 8)
    made = storage([Shard(table("other", 3, 16), 0, 3), Shard(found, 20, 50)], [0, 1], SGD, 7)
    assert torch.equal(made.state()["t[20:50]"]["weight"], rows_of(found, 20, 50, 7))


@pytest.mark.parametrize("count", [0, 5, pages.HUGE_PAGE_BYTES // 4, pages.HUGE_PAGE_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_pages_hold_zeros_that_can_be_written(count, dtype):
    found = pages.zeros(count, dtype)
    assert (found.shape, found.dtype) == ((count,), dtype)
    assert not bool(found.any())
    found += 1
    assert int(found.sum()) == count


def test_large_memory_starts_at_a_huge_page_and_outlives_its_parts(monkeypatch):
    view = pages.zeros(pages.HUGE_PAGE_BYTES, torch.float32)[: pages.HUGE_PAGE_BYTES // 2]
    view.fill_(3)
    assert float(view.sum()) == 3 * len(view)
    if hasattr(pages.mmap, "MADV_HUGEPAGE"):
        assert view.data_ptr() % pages.HUGE_PAGE_BYTES == 0
    monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert not bool(pages.zeros(pages.HUGE_PAGE_BYTES, torch.float32).any())


def test_freed_memory_is_kept_where_the_c_library_can(monkeypatch):
    assert pages.keep_freed_memory() in (True, False)

    def no_library(name):
        raise OSError

    monkeypatch.setattr(pages.ctypes, "CDLL", no_library)
    assert pages.keep_freed_memory() is False
