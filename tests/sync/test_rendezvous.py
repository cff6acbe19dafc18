"""The barrier whose members may leave, alone and together with a pause for a checkpoint."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import pytest
from helpers import pause
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_threads import TIMEOUT_S, join_all, run_all, start

from shadowsync.sync.rendezvous import Left, Rendezvous
from shadowsync.training.gate import Gate


def total(values: Mapping[int, int]) -> int:
    return sum(values.values())


@given(rounds=st.lists(st.integers(0, 12), min_size=1, max_size=6))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_members_with_uneven_rounds_never_hang(rounds: list[int]) -> None:
    meeting: Rendezvous[int, int] = Rendezvous(range(len(rounds)), total)
    results: list[list[int]] = [[] for _ in rounds]

    def member(index: int) -> None:
        results[index].extend(meeting.arrive(index, 1) for _ in range(rounds[index]))
        meeting.leave(index)

    run_all(member, range(len(rounds)))
    for index, count in enumerate(rounds):
        others = [sum(other > turn for other in rounds) for turn in range(count)]
        assert results[index] == others


def test_an_error_in_combine_reaches_every_member() -> None:
    def fail(_: Mapping[int, int]) -> int:
        raise ValueError("no")

    meeting: Rendezvous[int, int] = Rendezvous([0, 1], fail)
    raised: list[str] = []

    def member(index: int) -> None:
        with pytest.raises(ValueError, match="no"):
            meeting.arrive(index, 1)
        raised.append("no")

    run_all(member, range(2))
    assert raised == ["no", "no"]


def test_who_leaves_while_waiting_is_released_and_its_value_withdrawn() -> None:
    gate, arrived = Gate(), threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        with gate.waiting():
            arrived.set()
            yield

    meeting: Rendezvous[int, int] = Rendezvous([0, 1, 2], total, waiting)

    def waits(index: int) -> None:
        with pytest.raises(Left):
            meeting.arrive(0, 5)
        with pytest.raises(Left):
            meeting.arrive(0, 6)

    thread = start(waits, [0])
    assert arrived.wait(TIMEOUT_S)
    meeting.leave(0)
    join_all(thread)
    with pause(gate):  # the one that was released depends on nobody any more
        pass
    results: list[int] = []
    run_all(lambda index: results.append(meeting.arrive(index, 10 * index)), [1, 2])
    assert results == [30, 30]


def test_who_left_may_join_again() -> None:
    meeting: Rendezvous[int, int] = Rendezvous([0, 1], total)
    meeting.leave(1)
    assert meeting.arrive(0, 5) == 5
    meeting.join(1)
    meeting.leave(0)
    assert meeting.arrive(1, 7) == 7


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("steps", [[40, 40], [40, 13], [7, 0, 25], [30] * 8])
def test_a_pause_never_deadlocks_with_a_barrier(steps: list[int], rests: bool) -> None:
    """Members meet every third step, while another thread pauses them again and again."""
    gate = Gate()
    resting = gate.resting if rests else nullcontext
    meeting: Rendezvous[int, int] = Rendezvous(range(len(steps)), total, gate.waiting, resting)
    trained = [0] * len(steps)

    def member(index: int) -> None:
        for step in range(1, steps[index] + 1):
            trained[index] += 1
            if step % 3 == 0:
                meeting.arrive(index, 1)
            gate.step()
        meeting.leave(index)
        gate.leave()

    for _ in steps:
        gate.join()
    threads = start(member, range(len(steps)))
    alive = True
    while alive:
        with pause(gate):
            image = list(trained)
            assert trained == image
        alive = any(thread.is_alive() for thread in threads)
    join_all(threads)
    assert trained == steps


def test_a_pause_waits_for_one_meeting_and_not_for_many() -> None:
    """Shadows that meet back to back: those that wake up first must not meet again before the last one woke up."""
    gate, stop, met = Gate(), threading.Event(), [0]

    def count(values: Mapping[int, int]) -> int:
        met[0] += 1
        return total(values)

    meeting: Rendezvous[int, int] = Rendezvous(range(8), count, gate.waiting)

    def shadow(index: int) -> None:
        while not stop.is_set():
            gate.step()
            meeting.arrive(index, 1)
            gate.rest(0.01, stop.is_set)
        meeting.leave(index)
        gate.leave()

    for _ in range(8):
        gate.join()
    threads = start(shadow, range(8))
    meetings = []
    for _ in range(20):
        before = met[0]
        with pause(gate):
            meetings.append(met[0] - before)
    stop.set()
    join_all(threads)
    assert max(meetings) <= 5


class Meeting:
    """A meeting that takes as long as a test wants."""

    def __init__(self, members: int, gate: Gate) -> None:
        self.begun, self.may_end, self.values = threading.Semaphore(0), threading.Semaphore(0), []
        self.under_way = self.most_under_way = 0
        self.rendezvous: Rendezvous[int, int] = Rendezvous(range(members), self._combine, gate.waiting, gate.resting)

    def _combine(self, values: Mapping[int, int]) -> int:
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        self.values.append(dict(values))
        self.begun.release()
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        self.under_way -= 1
        return total(values)

    def arrive(self, results: dict[int, int], *members: int) -> list[threading.Thread]:
        """Threads that put into `results` what their members meet for."""

        def arrives(member: int) -> None:
            results[member] = self.rendezvous.arrive(member, member)

        return start(arrives, members)


def test_members_come_and_go_while_a_meeting_is_under_way() -> None:
    """Who leaves has its value used, and who comes meanwhile meets after it; two meetings never overlap."""
    meeting, results = Meeting(2, Gate()), dict[int, int]()
    threads = meeting.arrive(results, 0, 1)
    assert meeting.begun.acquire(timeout=TIMEOUT_S)
    meeting.rendezvous.join(5)
    for member in (0, 1):
        meeting.rendezvous.leave(member)
    threads += meeting.arrive(results, 5)
    assert not meeting.begun.acquire(timeout=0.02), "all that are present have come, but there is a meeting"
    meeting.may_end.release()
    assert meeting.begun.acquire(timeout=TIMEOUT_S)
    meeting.may_end.release()
    join_all(threads)
    assert results == {0: 1, 1: 1, 5: 5}
    assert meeting.values == [{0: 0, 1: 1}, {5: 5}]
    assert meeting.most_under_way == 1


def test_who_waits_for_a_meeting_stands_still_and_who_holds_it_does_not() -> None:
    """0 and 1 meet, and 2 comes meanwhile: a pause waits for the one that combines, and for nobody else."""
    gate, results = Gate(), dict[int, int]()
    meeting = Meeting(2, gate)
    for _ in range(3):
        gate.join()
    threads = meeting.arrive(results, 0, 1)
    assert meeting.begun.acquire(timeout=TIMEOUT_S)
    meeting.rendezvous.join(2)
    threads += meeting.arrive(results, 2)
    while gate._still < 2:
        assert not gate.hold(0.01), "the one that combines is not still"
    assert gate._waiting == 0
    gate.release()
    meeting.may_end.release(2)
    for member in (0, 1):
        meeting.rendezvous.leave(member)
    join_all(threads)
    assert results == {0: 1, 1: 1, 2: 2}


def test_nothing_moves_during_a_pause() -> None:
    gate, counts, stop = Gate(), [0, 0, 0], threading.Event()

    def works(index: int) -> None:
        while not stop.is_set():
            counts[index] += 1
            gate.step()
        gate.leave()

    def rests(index: int) -> None:
        while not stop.is_set():
            gate.rest(10.0, stop.is_set)
            counts[index] += 1
        gate.leave()

    for _ in counts:
        gate.join()
    threads = start(works, [0, 1]) + start(rests, [2])
    for _ in range(50):
        with pause(gate):
            before = list(counts)
            for _ in range(1000):
                assert counts == before
    stop.set()
    gate.wake()
    join_all(threads)
    assert counts[0] > 0
    assert counts[1] > 0
