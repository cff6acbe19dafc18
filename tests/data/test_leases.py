"""The lease book trains every row of every epoch exactly once, whatever happens in between."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data.leases import BookState, Lease, LeaseBook, LeaseService
from shadowsync.errors import CheckpointError, DataError

TRAINERS = 3


class World:
    """Trainers that lease, train in pieces, die and are resumed, driven by drawn numbers."""

    def __init__(self, slices: list[int], epochs: int, bad: list[int], seed: int) -> None:
        self.slices, self.bad = slices, bad
        self.epochs, self.seed = epochs, seed
        self.book = self.new_book()
        self.held: dict[int, tuple[Lease, list[tuple[int, int]]]] = {}
        self.unsettled: set[int] = set()
        self.trained: Counter[tuple[int, int, int]] = Counter()

    def new_book(self) -> LeaseBook:
        return LeaseBook(self.slices, self.epochs, shuffle=True, seed=self.seed)

    def good(self, part: int) -> int:
        return max(self.slices[part] - self.bad[part], 0)

    def lease(self, trainer: int) -> bool:
        lease = self.book.lease(trainer)
        if lease is None:
            return False
        rows = self.good(lease.slice)
        spans = [(a, min(b, rows)) for a, b in lease.spans if a < rows]
        assert self.book.opened(lease, rows) == bool(spans)
        if spans:
            self.held[lease.number] = (lease, spans)
        return True

    def train(self, choice: int, size: int) -> None:
        if not self.held:
            return
        number = sorted(self.held)[choice % len(self.held)]
        lease, spans = self.held[number]
        start, stop = spans.pop(0)
        cut = min(start + size, stop)
        assert self.book.claim(lease, start, cut) == cut
        self.unsettled.discard(number)
        assert self.book.done(lease, start, cut)
        self.trained.update((lease.epoch, lease.slice, row) for row in range(start, cut))
        if cut < stop:
            spans.insert(0, (cut, stop))
        if not spans:
            del self.held[number]

    def take_over(self, trainer: int, grain: int) -> None:
        moved = self.book.take_over(trainer, grain)
        others = {number: held for number, held in self.held.items() if held[0].trainer != trainer}
        if moved is None:
            assert not set(others) - self.unsettled
            return
        self.unsettled.add(moved.number)
        (number,) = [n for n, (lease, spans) in others.items() if _common(lease, spans, moved)]
        lease, spans = others[number]
        start = moved.spans[0][0]
        assert self.book.claim(lease, start, start + 1) == start, "these rows are another's now"
        kept = [(a, min(b, start)) for a, b in spans if a < start]
        self.held[moved.number] = (moved, [(max(a, start), b) for a, b in spans if b > start])
        there, here = sum(b - a for a, b in moved.spans), sum(b - a for a, b in kept)
        assert -(-there // grain) * grain >= here, "half of the batches, of which the last one may be short"
        if kept:
            self.held[number] = (lease, kept)
        else:
            del self.held[number]

    def abandon(self, trainer: int) -> None:
        self.book.abandon(trainer)
        dead = [lease for lease, _ in self.held.values() if lease.trainer == trainer]
        for lease in dead:
            _, spans = self.held.pop(lease.number)
            assert not self.book.done(lease, *spans[0]), "a lease that was given up must not count"

    def restore(self) -> None:
        state = msgspec.json.decode(msgspec.json.encode(self.book.state()), type=BookState)
        self.book = self.new_book()
        self.book.restore(state)
        self.held = {}

    def finish(self) -> None:
        while not self.book.finished:
            assert self.lease(0) or self.held
            while self.held:
                self.train(0, 5)

    def check(self) -> None:
        expected = {
            (epoch, part, row): 1
            for epoch in range(self.epochs)
            for part in range(len(self.slices))
            for row in range(self.good(part))
        }
        assert self.trained == expected
        assert self.book.trained == len(expected)
        per_epoch = sum(self.slices) - sum(self.good(part) for part in range(len(self.slices)))
        assert self.book.skipped_in == [per_epoch] * self.epochs
        assert self.book.lease(0) is None


def _common(lease: Lease, spans: list[tuple[int, int]], moved: Lease) -> bool:
    """Whether rows of `moved` are among the spans of `lease`."""
    same = (lease.epoch, lease.slice) == (moved.epoch, moved.slice)
    return same and any(a <= moved.spans[0][0] < b for a, b in spans)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "lease", "train", "train", "take_over", "abandon", "restore"]), st.integers(0, 20)
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    slices=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    epochs=st.integers(1, 3),
    bad=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    seed=st.integers(0, 5),
    events=EVENTS,
)
def test_any_interleaving_trains_every_row_of_every_epoch_once(slices, epochs, bad, seed, events):
    world = World(slices, epochs, bad, seed)
    for event, number in events:
        match event:
            case "lease":
                world.lease(number % TRAINERS)
            case "train":
                world.train(number, 1 + number % 4)
            case "take_over":
                world.take_over(number % TRAINERS, 1 + number % 4)
            case "abandon":
                world.abandon(number % TRAINERS)
            case "restore":
                world.restore()
    world.finish()
    world.check()


def test_the_next_epoch_follows_at_once():
    book = LeaseBook([4, 4], epochs=2)
    assert [book.lease(trainer).epoch for trainer in range(4)] == [0, 0, 1, 1]


def test_order_is_drawn_anew_for_each_epoch_and_again_for_the_same_seed():
    def order(seed, epochs=2, shuffle=True):
        book = LeaseBook([1] * 50, epochs, shuffle, seed)
        return [book.lease(0).slice for _ in range(50 * epochs)]

    assert sorted(order(7)) == sorted([*range(50)] * 2)
    assert order(7)[:50] != order(7)[50:]
    assert order(7)[:50] == order(7, epochs=1)
    assert order(7)[:50] != order(8)[:50]
    assert order(7, shuffle=False) == [*range(50)] * 2


def test_only_what_was_not_done_is_trained_again():
    book = LeaseBook([10])
    lease = book.lease(0)
    book.opened(lease, 10)
    book.done(lease, 2, 4)
    book.abandon(0)
    assert book.lease(1).spans == ((0, 2), (4, 10))


def test_rows_that_are_not_leased_cannot_be_done():
    book = LeaseBook([10])
    lease = book.lease(0)
    book.done(lease, 0, 4)
    with pytest.raises(DataError, match="not among those to train"):
        book.done(lease, 2, 6)


def test_a_restored_book_may_have_more_epochs():
    book = LeaseBook([3])
    book.done(book.lease(0), 0, 3)
    longer = LeaseBook([3], epochs=2)
    longer.restore(book.state())
    assert not longer.finished
    longer.done(longer.lease(0), 0, 3)
    assert longer.finished
    assert longer.trained_in == [3, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"position": 2},
        {"trained": []},
        {"parts": [(0, 0, [(0, 4)], True)]},
        {"parts": [(0, 0, [(2, 1)], True)]},
        {"parts": [(0, 1, [(0, 1)], True)]},
        {"parts": [(0, 0, [(0, 10**12)], True)]},
    ],
)
def test_a_state_that_no_book_gives_is_refused(change):
    with pytest.raises(CheckpointError, match="position in the data"):
        LeaseBook([3]).restore(msgspec.structs.replace(LeaseBook([3]).state(), **change))


def test_a_state_of_other_data_is_refused():
    with pytest.raises(CheckpointError, match="data of 3 rows, this data has 4"):
        LeaseBook([4]).restore(LeaseBook([3]).state())


def test_what_was_claimed_is_not_taken_over_and_the_rest_goes_in_whole_batches():
    book = LeaseBook([20])
    lease = book.lease(0)
    assert book.opened(lease, 20)
    assert book.claim(lease, 0, 4) == 4
    moved = book.take_over(1, grain=4)
    assert moved.spans == ((12, 20),)
    assert book.claim(lease, 8, 16) == 12, "a batch that straddles the cut is cut"
    assert book.take_over(1, grain=4) is None
    assert book.claim(lease, 12, 16) == 12
    assert book.done(lease, 0, 4)
    assert book.done(lease, 4, 12)
    assert book.opened(moved, 20)
    assert book.done(moved, 12, 20)
    assert book.finished


def test_a_slice_that_nobody_has_parsed_yet_is_taken_over_whole():
    book = LeaseBook([20])
    lease = book.lease(0)
    moved = book.take_over(1, grain=4)
    assert moved.spans == lease.spans
    assert not book.opened(lease, 20)
    assert book.claim(lease, 0, 4) == 0
    assert book.opened(moved, 20)
    assert book.claim(moved, 0, 20) == 20


def test_epochs_cost_nothing_before_they_begin():
    book = LeaseBook([2], epochs=10**6)
    for _ in range(2):
        lease = book.lease(0)
        book.opened(lease, 2)
        book.done(lease, 0, 2)
    assert (book.trained, len(book.trained_in), len(book.state().trained)) == (4, 2, 2)
    other = LeaseBook([2], epochs=10**6)
    other.restore(book.state())
    assert other.lease(0).epoch == 2
    assert len(other.trained_in) == 3


def train(leases: LeaseService, rows: int) -> None:
    """Two rows at a time."""
    for _ in range(rows // 2):
        _, lease = leases.lease(0, idle=False)
        assert lease is not None
        assert leases.opened(lease, 2)[1]
        _, claim = leases.claim(lease, 0, 2)
        assert claim is not None
        assert leases.done(lease, 0, 2)


def test_the_last_alarm_rings_once_when_so_many_rows_are_trained_and_not_when_it_is_late() -> None:
    leases, rung = LeaseService(LeaseBook([2] * 8), 2), list[object]()
    leases.alarm(2, lambda: rung.append("replaced"))
    leases.alarm(5, lambda: rung.append(leases.trained))
    train(leases, 4)
    assert rung == []
    train(leases, 8)
    assert rung == [6]
    leases.alarm(12, lambda: rung.append("late"))
    train(leases, 4)
    assert rung == [6]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    slices=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    epochs=st.integers(1, 3),
    bad=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    every=st.integers(1, 30),
    events=EVENTS,
)
def test_nobody_trains_a_row_behind_the_barrier_before_all_in_front_of_it(slices, epochs, bad, every, events):
    """The barrier is set anew after a resume, and lifted once all trainers have arrived."""
    world, barrier, arrived = World(slices, epochs, bad, 3), every, 0
    for event, number in [*events, *[("lease", 0), ("train", 0)] * 300]:
        world.book.barrier = barrier
        match event:
            case "lease":
                world.lease(number % TRAINERS)
            case "train":
                world.train(number, 1 + number % 4)
            case "take_over":
                world.take_over(number % TRAINERS, 1 + number % 4)
            case "abandon":
                world.abandon(number % TRAINERS)
            case "restore":
                world.restore()
                world.book.barrier = barrier
        assert world.book.passed <= barrier
        assert world.book.remaining == min(barrier, epochs * sum(slices)) - world.book.passed
        if world.book.at_barrier:
            assert world.book.passed == barrier
            barrier, arrived = barrier + every, arrived + 1
    world.book.barrier = None
    world.finish()
    world.check()
    assert world.book.remaining == 0
    assert arrived == epochs * sum(slices) // every


def test_whoever_waits_at_the_barrier_is_told_when_it_is_lifted() -> None:
    leases, arrived = LeaseService(LeaseBook([2] * 8), 2), list[int]()
    leases.go_on_to(4, 1.0, lambda: arrived.append(leases.trained))
    train(leases, 2)
    assert arrived == []
    train(leases, 2)
    assert arrived == [4]
    status, lease = leases.lease(1, idle=True)
    assert (lease, status.finished, status.scale, leases.at_barrier) == (None, False, 1.0, True)
    leases.go_on_to(None, 0.25, lambda: None)
    leases.wait(status.version)
    status, lease = leases.lease(1, idle=True)
    assert (lease.slice, status.scale, leases.at_barrier) == (2, 0.25, False)
