"""Every way to choose rows keeps one contract; each finds the rows it is made for."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.recovery import largest as largest_module
from shadowsync.recovery.dirty import DirtyRows
from shadowsync.recovery.largest import largest
from shadowsync.recovery.priority import RowPriority, Tracker
from shadowsync.recovery.priority_ssu import PERIOD
from shadowsync.registry import members

MEMBERS = members("shadowsync.recovery", RowPriority)
EACH = pytest.mark.parametrize("name", MEMBERS)
ROWS, DIM, SHARE = 40, 3, 0.25
COUNT = 10


def made(name: str, rows: int = ROWS, share: float = SHARE, seed: int = 0) -> tuple[Tracker, Tensor]:
    """A tracker and the weights of its shard."""
    weights = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))
    return MEMBERS[name]().tracker(weights, share, seed), weights


def push(tracker: Tracker, weights: Tensor, rows: list[int], by: float = 1.0) -> None:
    """Changes rows as training would: first the weights, then the word to the tracker."""
    ids = torch.tensor(rows, dtype=torch.int64)
    weights.index_add_(0, ids, torch.full((len(rows), DIM), by))
    tracker.seen(ids)


def test_the_seam_has_these_members() -> None:
    assert list(MEMBERS) == ["all", "mfu", "scar", "ssu"]


@EACH
@given(
    pushes=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=30), max_size=6),
    counts=st.lists(st.integers(0, ROWS + 5), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_what_is_picked_is_rows_ascending_distinct_and_not_too_many(
    name: str, pushes: list[list[int]], counts: list[int]
) -> None:
    tracker, weights = made(name)
    for rows in pushes:
        push(tracker, weights, rows)
    for count in counts:
        picked = tracker.pick(count, weights)
        assert picked.dtype == torch.int64
        assert len(picked) <= count
        assert picked.tolist() == sorted(set(picked.tolist()))
        assert all(0 <= row < ROWS for row in picked.tolist())
        tracker.saved(picked, weights[picked])


@EACH
def test_memory_is_as_announced(name: str) -> None:
    tracker, weights = made(name)
    announced = MEMBERS[name]().memory_bytes(ROWS, DIM, SHARE)
    assert tracker.bytes == announced == {"all": 0, "mfu": 160, "scar": 480, "ssu": 40}[name]
    for _ in range(5):
        push(tracker, weights, list(range(ROWS)))
    assert tracker.bytes == announced
    assert MEMBERS["ssu"]().memory_bytes(2**31 + 8, 1, 0.125) == 8 * (2**28 + 1)


@EACH
def test_rows_outside_the_shard_are_refused_and_leave_no_trace(name: str) -> None:
    tracker, weights = made(name)
    if name in ("all", "scar"):  # they do not look at what is seen
        tracker.seen(torch.tensor([ROWS, -1]))
    else:
        for wrong in (ROWS, -1, -(2**63), 2**62):
            with pytest.raises(IndexError, match=f"row {wrong} is not a row of a shard of 40 rows"):
                tracker.seen(torch.tensor([3, wrong, 4]))
        assert tracker.pick(COUNT, weights).tolist() == []
    assert tracker.rows == ROWS


@EACH
def test_the_rows_used_most_are_picked(name: str) -> None:
    tracker, weights = made(name)
    hot = [7, 21, 33]
    for step in range(12):
        push(tracker, weights, [*hot, *hot, step])
    picked = tracker.pick(COUNT, weights).tolist()
    assert set(hot) <= set(picked) or name == "all"


@EACH
def test_a_save_that_failed_brings_its_rows_up_again(name: str) -> None:
    tracker, weights = made(name)
    push(tracker, weights, [2, 3, 5, 7, 11, 13])
    first = tracker.pick(COUNT, weights)
    assert torch.equal(tracker.pick(COUNT, weights), first)
    tracker.saved(first, weights[first])
    assert not set(first.tolist()) & set(tracker.pick(COUNT, weights).tolist())


@EACH
def test_many_threads_harm_nothing(name: str) -> None:
    tracker, weights = made(name, rows=1000)
    ids = [torch.randint(0, 1000, (300,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def run(rows: Tensor) -> None:
        for _ in range(40):
            tracker.seen(rows)

    threads = [threading.Thread(target=run, args=(rows,)) for rows in ids]
    for thread in threads:
        thread.start()
    for _ in range(20):
        picked = tracker.pick(125, weights)
        assert len(torch.unique(picked)) == len(picked) <= 125
        tracker.saved(picked, weights[picked])
    for thread in threads:
        thread.join()
    assert set(tracker.pick(1000, weights).tolist()) <= set(range(1000))


def test_in_turn_every_row_is_saved_once_in_a_round() -> None:
    tracker, weights = made("all")
    rounds = []
    for _ in range(8):
        picked = tracker.pick(COUNT, weights)
        tracker.saved(picked, weights[picked])
        rounds += picked.tolist()
    assert rounds == [*range(ROWS), *range(ROWS)]
    tracker, weights = made("all", rows=7)
    picks = []
    for _ in range(7):
        picked = tracker.pick(3, weights)
        tracker.saved(picked, weights[picked])
        picks += picked.tolist()
    assert sorted(picks) == sorted([*range(7)] * 3)


def test_scar_goes_by_the_distance_from_what_was_saved() -> None:
    tracker, weights = made("scar")
    for row, by in ((4, 0.1), (9, -3.0), (17, 2.0), (30, 0.5)):
        push(tracker, weights, [row], by)
    assert tracker.pick(2, weights).tolist() == [9, 17]
    tracker.saved(torch.tensor([9, 17]), weights[[9, 17]])
    assert tracker.pick(10, weights).tolist() == [4, 30]
    push(tracker, weights, [9], 0.2)
    assert tracker.pick(2, weights).tolist() == [9, 30]
    weights[39] = float("nan")
    assert tracker.pick(1, weights).tolist() == [39]


def test_scar_gives_the_rows_of_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.recovery.priority_scar.CHUNK_ROWS", 7)
    tracker, weights = made("scar")
    moved = weights + torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9))
    wanted = (moved - weights).norm(dim=1).topk(13).indices.sort().values
    assert torch.equal(tracker.pick(13, moved), wanted)


def test_mfu_counts_every_access_and_starts_anew_where_saved() -> None:
    tracker, weights = made("mfu", rows=20_000)
    push(tracker, weights, [5] * 17_000 + [9] * 16_000 + [11] * 15_000)
    assert tracker.pick(2, weights).tolist() == [5, 9]
    tracker.saved(torch.tensor([5]), weights[[5]])
    assert tracker.pick(2, weights).tolist() == [9, 11]


def test_mfu_does_not_always_take_the_first_of_equals() -> None:
    tracker, weights = made("mfu")
    taken: set[int] = set()
    for _ in range(8):
        push(tracker, weights, list(range(ROWS)))
        taken |= set(tracker.pick(5, weights).tolist())
    assert len(taken) == ROWS


def test_ssu_takes_every_second_access_over_pushes_of_any_length() -> None:
    tracker, weights = made("ssu", rows=1000, share=1.0)
    stream = list(range(900))
    for start in range(0, 900, 7):
        push(tracker, weights, stream[start : start + 7])
    assert tracker.pick(1000, weights).tolist() == stream[::PERIOD]


def test_ssu_never_holds_more_than_its_list_and_every_entry_may_go() -> None:
    tracker, weights = made("ssu", rows=4000, share=0.01)
    first = list(range(80))
    survivors: set[int] = set()
    for seed in range(60):
        tracker, weights = made("ssu", rows=4000, share=0.01, seed=seed)
        push(tracker, weights, first)
        push(tracker, weights, list(range(1000, 1040)))
        picked = tracker.pick(40, weights).tolist()
        old = [row for row in picked if row < 80]
        assert (len(picked), len(old)) == (40, 20)
        survivors |= set(old)
    assert survivors == set(first[::PERIOD])
    push(tracker, weights, list(range(4000)))
    assert len(tracker.pick(4000, weights)) == 40


def test_ssu_gives_the_same_with_the_same_seed() -> None:
    picks = []
    for seed in (3, 3, 4):
        tracker, weights = made("ssu", rows=4000, share=0.01, seed=seed)
        for start in range(0, 4000, 50):
            push(tracker, weights, list(range(start, start + 50)))
        picks.append(tracker.pick(10, weights).tolist())
    assert picks[0] == picks[1] != picks[2]


@given(
    values=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1)), min_size=6, max_size=60),
    count=st.integers(0, 9),
    first=st.integers(0, 59),
    chunk=st.integers(2, 20),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_the_largest_are_those_of_a_sort(values: list[int], count: int, first: int, chunk: int) -> None:
    array = np.array(values, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest_module, "CHUNK", chunk)
        found = [largest(kind, count, first % len(values)) for kind in (array, array.astype(np.float32))]
    for positions, kind in zip(found, (array, array.astype(np.float32)), strict=True):
        assert positions.tolist() == sorted(set(positions.tolist()))
        wanted = sorted((value for value in kind.tolist() if value > 0), reverse=True)[:count]
        assert sorted(kind[positions].tolist(), reverse=True) == wanted
    last = array[found[0]].min(initial=2**31 - 1)
    equal = [position for position in found[0].tolist() if array[position] == last]
    offered = [(p - first) % len(values) for p in np.flatnonzero(array == last)]
    assert sorted((p - first) % len(values) for p in equal) == sorted(offered)[: len(equal)]


def test_every_change_is_in_the_next_checkpoint() -> None:
    dirty = DirtyRows(ROWS)
    assert dirty.bytes == ROWS
    dirty.seen(torch.tensor([5, 5, 3]))
    assert dirty.take(10).tolist() == [3, 5]
    dirty.seen(torch.tensor([5, 9]))
    assert dirty.take(20).tolist() == [3, 5, 9], "the save of 10 is not confirmed"
    dirty.confirm(10)
    assert dirty.take(30).tolist() == [5, 9], "what changed since 10"
    dirty.confirm(30)
    assert dirty.take(40).tolist() == []
    assert dirty.bytes == ROWS
    with pytest.raises(ValueError, match="version 40 is taken after version 40"):
        dirty.take(40)
    for wrong in (ROWS, -1):
        with pytest.raises(IndexError, match=f"row {wrong} is not"):
            dirty.seen(torch.tensor([1, wrong]))
    assert dirty.take(50).tolist() == []


@given(st.lists(st.one_of(st.lists(st.integers(0, 9), min_size=1), st.just("take"), st.just("confirm")), max_size=25))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_marks_equal_a_plain_history(events: list[list[int] | str]) -> None:
    """Each take holds exactly the rows changed after the newest confirmed take."""
    dirty, changed, taken, confirmed = DirtyRows(10), [set[int]()], 0, 0
    for event in events:
        if isinstance(event, list):
            dirty.seen(torch.tensor(event))
            changed[-1] |= set(event)
        elif event == "take":
            assert dirty.take(taken + 1).tolist() == sorted(set().union(*changed[confirmed:]))
            taken += 1
            changed.append(set())
        else:
            confirmed = taken
            dirty.confirm(confirmed)
