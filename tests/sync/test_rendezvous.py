"""The barrier whose members may leave, alone and together with a pause for a checkpoint."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.sync.rendezvous import Left, Rendezvous
from shadowsync.training.gate import Gate

TIMEOUT_S = 20


def total(values: Mapping[int, int]) -> int:
    return sum(values.values())


def join_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a thread hangs"


@given(rounds=st.lists(st.integers(0, 12), min_size=1, max_size=6))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_members_with_uneven_rounds_never_hang(rounds: list[int]) -> None:
    meeting: Rendezvous[int, int] = Rendezvous(range(len(rounds)), total)
    results: list[list[int]] = [[] for _ in rounds]

    def member(index: int) -> None:
        results[index].extend(meeting.arrive(index, 1) for _ in range(rounds[index]))
        meeting.leave(index)

    threads = [threading.Thread(target=member, args=(i,), daemon=True) for i in range(len(rounds))]
    for thread in threads:
        thread.start()
    join_all(threads)
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

    threads = [threading.Thread(target=member, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert raised == ["no", "no"]


def test_who_leaves_while_waiting_is_released_and_its_value_withdrawn() -> None:
    gate, arrived = Gate(), threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        with gate.waiting():
            arrived.set()
            yield

    meeting: Rendezvous[int, int] = Rendezvous([0, 1, 2], total, waiting)

    def waits() -> None:
        with pytest.raises(Left):
            meeting.arrive(0, 5)
        with pytest.raises(Left):
            meeting.arrive(0, 6)

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    assert arrived.wait(TIMEOUT_S)
    meeting.leave(0)
    join_all([thread])
    with gate.pause():  # the one that was released depends on nobody any more
        pass
    results: list[int] = []
    last = threading.Thread(target=lambda: results.append(meeting.arrive(1, 10)), daemon=True)
    last.start()
    results.append(meeting.arrive(2, 20))
    join_all([last])
    assert results == [30, 30]


def test_who_left_may_join_again() -> None:
    meeting: Rendezvous[int, int] = Rendezvous([0, 1], total)
    meeting.leave(1)
    assert meeting.arrive(0, 5) == 5
    meeting.join(1)
    meeting.leave(0)
    assert meeting.arrive(1, 7) == 7


@pytest.mark.parametrize("steps", [[40, 40], [40, 13], [7, 0, 25], [30] * 8])
def test_a_pause_never_deadlocks_with_a_barrier(steps: list[int]) -> None:
    """Members meet every third step, while another thread pauses them again and again."""
    gate = Gate()
    meeting: Rendezvous[int, int] = Rendezvous(range(len(steps)), total, gate.waiting)
    trained = [0] * len(steps)

    def member(index: int) -> None:
        for step in range(1, steps[index] + 1):
            trained[index] += 1
            if step % 3 == 0:
                meeting.arrive(index, 1)
            gate.step()
        meeting.leave(index)
        gate.leave()

    threads = [threading.Thread(target=member, args=(i,), daemon=True) for i in range(len(steps))]
    for thread in threads:
        gate.join()
        thread.start()
    alive = True
    while alive:
        with gate.pause():
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

    threads = [threading.Thread(target=shadow, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        gate.join()
        thread.start()
    meetings = []
    for _ in range(20):
        before = met[0]
        with gate.pause():
            meetings.append(met[0] - before)
    stop.set()
    join_all(threads)
    assert max(meetings) <= 5


def test_nothing_moves_during_a_pause() -> None:
    gate, counts, stop = Gate(), [0, 0, 0], threading.Event()

    def works(index: int) -> None:
        while not stop.is_set():
            counts[index] += 1
            gate.step()
        gate.leave()

    def rests() -> None:
        while not stop.is_set():
            gate.rest(10.0, stop.is_set)
            counts[2] += 1
        gate.leave()

    threads = [threading.Thread(target=works, args=(i,), daemon=True) for i in range(2)]
    threads.append(threading.Thread(target=rests, daemon=True))
    for thread in threads:
        gate.join()
        thread.start()
    for _ in range(50):
        with gate.pause():
            before = list(counts)
            for _ in range(1000):
                assert counts == before
    stop.set()
    gate.wake()
    join_all(threads)
    assert counts[0] > 0
    assert counts[1] > 0
