"""Every way to choose rows keeps one contract; each finds the rows it is made for."""

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.checkpoint.values import row_values
from shadowsync.embedding.watching import RowPriority
from shadowsync.memory.pages import zeros
from shadowsync.recovery.priority import PERIOD, Scar, largest
from shadowsync.registry import members

MEMBERS = members("shadowsync.recovery", RowPriority)
EACH = pytest.mark.parametrize("name", MEMBERS)
ROWS, DIM, SHARE = 40, 3, 0.25
COUNT = 10


def made(name: str, rows: int = ROWS, share: float = SHARE, seed: int = 0) -> tuple[RowPriority, Tensor]:
    """A tracker and the weights of its shard."""
    weights = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))
    return MEMBERS[name](weights, share, seed), weights


def push(tracker: RowPriority, weights: Tensor, rows: list[int], by: float = 1.0) -> None:
    """Changes rows as training would: first the weights, then the word to the tracker."""
    ids = torch.tensor(rows, dtype=torch.int64)
    weights.index_add_(0, ids, torch.full((len(rows), DIM), by))
    tracker.seen(ids)


def held_bytes(tracker: RowPriority) -> int:
    """Memory of the tensors and arrays that a tracker holds on to."""
    return sum(held.nbytes for held in vars(tracker).values() if isinstance(held, Tensor | np.ndarray))


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
        assert len(picked) <= count or name == "all"
        assert picked.tolist() == sorted(set(picked.tolist()))
        assert all(0 <= row < ROWS for row in picked.tolist())
        tracker.saved(picked, weights[picked])


@EACH
def test_memory_is_as_announced(name: str) -> None:
    tracker, weights = made(name)
    announced = MEMBERS[name].memory_bytes(ROWS, DIM, SHARE)
    assert held_bytes(tracker) == announced
    for _ in range(5):
        push(tracker, weights, list(range(ROWS)))
    assert held_bytes(tracker) == announced


def test_memory_is_what_the_documentation_says() -> None:
    figures = {"all": 40, "mfu": 160, "scar": 480, "ssu": 40}
    assert {name: MEMBERS[name].memory_bytes(ROWS, DIM, SHARE) for name in figures} == figures
    assert MEMBERS["ssu"].memory_bytes(2**31 + 8, 1, 0.125) == 8 * (2**28 + 1)


@EACH
def test_rows_outside_the_shard_are_refused_and_leave_no_trace(name: str) -> None:
    tracker, weights = made(name)
    assert tracker.sees == (name != "scar")
    if not tracker.sees:
        tracker.seen(torch.tensor([ROWS, -1]))
    else:
        for wrong in (ROWS, -1, -(2**63), 2**62):
            with pytest.raises(IndexError, match=f"row {wrong} is not a row of a shard of 40 rows"):
                tracker.seen(torch.tensor([3, wrong, 4]))
        assert tracker.pick(COUNT, weights).tolist() == []


@EACH
def test_the_rows_used_most_are_picked(name: str) -> None:
    tracker, weights = made(name)
    hot = [7, 21, 33]
    for step in range(12):
        push(tracker, weights, [*hot, *hot, step])
    picked = tracker.pick(COUNT, weights).tolist()
    assert set(hot) <= set(picked)


@EACH
def test_a_save_that_failed_brings_its_rows_up_again(name: str) -> None:
    tracker, weights = made(name)
    push(tracker, weights, [2, 3, 5, 7, 11, 13])
    first = tracker.pick(COUNT, weights)
    assert torch.equal(tracker.pick(COUNT, weights), first)
    tracker.saved(first, weights[first])
    assert not set(first.tolist()) & set(tracker.pick(COUNT, weights).tolist())


@pytest.mark.parametrize("name", ["all", "mfu", "ssu"])
def test_rows_are_picked_while_other_processes_see_some(name: str) -> None:
    """Whoever writes holds no lock that this process has; numpy counts what is not 0, looks again, and refuses."""
    rows, given = 400_000, list[Tensor]()

    def allocate(count: int, dtype: torch.dtype) -> Tensor:
        given.append(zeros(count, dtype))
        return given[-1]

    weights = torch.zeros(rows, 1)
    tracker, done = MEMBERS[name](weights, 0.9, 0, allocate), threading.Event()

    def write() -> None:
        while not done.is_set():
            given[0].random_(0, 2)  # without the interpreter's lock

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(30):
            picked = tracker.pick(rows - 1, weights)
            tracker.saved(picked, weights[picked])
    finally:
        done.set()
        writing.join()


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
        assert len(torch.unique(picked)) == len(picked)
        assert len(picked) <= 125 or name == "all"
        tracker.saved(picked, weights[picked])
    for thread in threads:
        thread.join()
    assert set(tracker.pick(1000, weights).tolist()) <= set(range(1000))


@EACH
def test_rows_that_were_loaded_are_known_as_saved(name: str) -> None:
    tracker, weights = made(name)
    push(tracker, weights, [2, 3, 5])
    every = torch.arange(ROWS)
    tracker.loaded(every, weights)
    assert tracker.pick(ROWS, weights).tolist() == []
    push(tracker, weights, [7, 8, 8])
    assert set(tracker.pick(ROWS, weights).tolist()) <= {7, 8}


COURSES = {
    "every row that changed, until a save is reported": (
        "all: push 3 9 9 39, pick 3 9 39, push 4, pick 3 4 9 39, push 5 9, saved 3 4 9 39, pick 5 9"
    ),
    "of a whole save what came after it began": "all: push 1 2, begin, push 2 3, saved every, pick 2 3",
    "the save holds what loaded rows were before, so that the next one has to hold what they are": (
        "all: push 1 2, begin, loaded 1, saved 1 2, pick 1"
    ),
    "a whole save may hold what a row was loaded as meanwhile": (
        "all: begin, loaded 4, saved every, pick 4, saved 4, loaded 4, pick"
    ),
    "what is used while a save is written is not forgotten": (
        "mfu ssu all: push 7 7 7 7 7 7 30 30, begin, pick 7 30, push 7 7 7 7 8 8 8 8, saved 7, saved 30, pick 7 8"
    ),
    "of a save that was never reported everything comes again": (
        "mfu ssu all: push 7 7 7 7, begin, pick 7, push 8 8 8 8, begin, pick 7 8, push 9 9 9 9, begin, pick 7 8 9, "
        "saved 7 8 9, pick"
    ),
    "rows loaded while a save is written start anew": (
        "mfu ssu: push 7 7 7 7 7 7 8 8 8 8 8 8, begin, pick 7 8, push 7 7 7 7 8 8 8 8, loaded 7, push 7 7, saved 7 8, "
        "pick 7 8, loaded 8 7, pick"
    ),
    "a whole save leaves nothing of an earlier pick": (
        "mfu: push 7 7 7 8 8 8 8, pick 7 8, push 8 8 8, begin, saved every, pick"
    ),
}
MEMBERS_OF_COURSES = [(says, name) for says, course in COURSES.items() for name in course.partition(":")[0].split()]


@pytest.mark.parametrize(("says", "name"), MEMBERS_OF_COURSES)
def test_courses_of_saves(says: str, name: str) -> None:
    tracker, weights = made(name)
    for event in COURSES[says].partition(": ")[2].split(", "):
        what, *words = event.split()
        rows = list(range(ROWS)) if words == ["every"] else [int(word) for word in words]
        ids = torch.tensor(rows, dtype=torch.int64)
        match what:
            case "push":
                push(tracker, weights, rows)
            case "begin":
                tracker.begin()
            case "pick":
                assert tracker.pick(COUNT, weights).tolist() == rows
            case _:
                getattr(tracker, what)(ids, weights[ids])


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


@pytest.mark.parametrize("values", ["bf16", "int8", "int4"])
def test_scar_knows_what_no_save_brings_back(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are as saved, but for what checkpoints round off them, are left out; the largest are off most."""
    monkeypatch.setattr("shadowsync.recovery.priority.CHUNK_ROWS", 7)
    kind = row_values(values)
    assert kind is not None
    weights = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    weights[21] *= 1000
    tracker = Scar(weights, SHARE, 0, restored=kind.restored)
    assert tracker.pick(ROWS, weights).tolist() == []
    push(tracker, weights, [4, 9], 5.0)
    assert tracker.pick(1, weights).tolist() in ([4], [9])
    assert tracker.pick(ROWS, weights).tolist() == [4, 9]
    tracker.saved(torch.tensor([4, 9]), kind.restored(weights[[4, 9]]))
    assert tracker.pick(ROWS, weights).tolist() == []
    tracker.loaded(torch.arange(ROWS), weights)
    assert tracker.pick(ROWS, weights).tolist() == []
    weights[9] = float("nan")
    assert tracker.pick(ROWS, weights).tolist() == [9]


def test_scar_gives_the_rows_of_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.recovery.priority.CHUNK_ROWS", 7)
    tracker, weights = made("scar")
    moved = weights + torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9))
    wanted = (moved - weights).norm(dim=1).topk(13).indices.sort().values
    assert torch.equal(tracker.pick(13, moved), wanted)


def test_mfu_takes_off_what_a_row_was_picked_for() -> None:
    tracker, weights = made("mfu")
    push(tracker, weights, [7] * 60 + [8] * 5)
    picked = tracker.pick(1, weights)
    push(tracker, weights, [7] * 6)
    tracker.saved(picked, None)
    assert tracker.pick(1, weights).tolist() == [7]
    push(tracker, weights, [8] * 2)
    assert tracker.pick(1, weights).tolist() == [8]


def test_ssu_merges_what_it_set_aside_into_one_list() -> None:
    tracker, weights = made("ssu", rows=4000, share=0.01)
    for start in range(0, 400, 20):
        push(tracker, weights, list(range(start, start + 20)))
        assert len(tracker.pick(40, weights)) <= 40
    assert len(tracker.pick(4000, weights)) == 40
    assert held_bytes(tracker) == 2 * 160, "the list, and that of the save under way"


def test_mfu_counts_what_it_is_told_and_starts_anew_where_saved() -> None:
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


def test_ssu_takes_every_second_access_of_a_push() -> None:
    taken = set()
    for seed in range(20):
        tracker, weights = made("ssu", rows=1000, share=1.0, seed=seed)
        push(tracker, weights, list(range(900)))
        taken.add(tuple(tracker.pick(1000, weights).tolist()))
    assert taken == {tuple(range(0, 900, PERIOD)), tuple(range(1, 900, PERIOD))}


def test_ssu_takes_either_id_of_bags_of_two() -> None:
    tracker, weights = made("ssu", rows=1000, share=1.0)
    for _ in range(20):
        push(tracker, weights, [3, 900] * 8)
    assert tracker.pick(1000, weights).tolist() == [3, 900]


def test_ssu_holds_a_row_once_however_often_it_is_used() -> None:
    tracker, weights = made("ssu", rows=4000, share=0.01)
    for start in range(40):
        push(tracker, weights, [7] * 500 + [start] * 2)
    assert tracker.pick(40, weights).tolist() == list(range(40))


def test_ssu_never_holds_more_than_its_list_and_the_row_used_more_stays_the_likelier() -> None:
    kept = 0
    for seed in range(60):
        tracker, weights = made("ssu", rows=4000, share=0.01, seed=seed)
        dice = random.Random(seed)
        push(tracker, weights, dice.sample([9] * 30 + [49] * 10 + [10] * 40, 80))
        (held,) = set(tracker.pick(40, weights).tolist()) - {10}
        kept += held == 9
    assert 35 < kept < 55, "three of four"
    for _ in range(20):
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
        patch.setattr("shadowsync.recovery.priority.CHUNK", chunk)
        found = [largest(kind, count, first % len(values)) for kind in (array, array.astype(np.float32))]
    for positions, kind in zip(found, (array, array.astype(np.float32)), strict=True):
        assert positions.tolist() == sorted(set(positions.tolist()))
        wanted = sorted((value for value in kind.tolist() if value > 0), reverse=True)[:count]
        assert sorted(kind[positions].tolist(), reverse=True) == wanted
    last = array[found[0]].min(initial=2**31 - 1)
    equal = [position for position in found[0].tolist() if array[position] == last]
    offered = [(p - first) % len(values) for p in np.flatnonzero(array == last)]
    assert sorted((p - first) % len(values) for p in equal) == sorted(offered)[: len(equal)]


@given(st.lists(st.one_of(st.lists(st.integers(0, 9), min_size=1), st.just("pick"), st.just("saved")), max_size=25))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_marks_equal_a_plain_history(events: list[list[int] | str]) -> None:
    """Each pick holds exactly the rows changed after the newest pick that was reported as saved."""
    tracker, weights = made("all", rows=10)
    changed, picked, confirmed = [set[int]()], 0, 0
    for event in events:
        if isinstance(event, list):
            tracker.seen(torch.tensor(event))
            changed[-1] |= set(event)
        elif event == "pick":
            assert tracker.pick(1, weights).tolist() == sorted(set().union(*changed[confirmed:]))
            picked += 1
            changed.append(set())
        else:
            confirmed = picked
            tracker.saved(torch.tensor([0]), None)
