"""A pause is complete when nobody changes anything, and never dead-locks with threads that wait for each other."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from helpers import pause

from shadowsync.training.gate import Gate

SOON_S = 10.0
SHORT_S = 0.02


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Pauser:
    """Holds a pause in a thread of its own until told to end it."""

    def __init__(self, gate: Gate, threads: ThreadPoolExecutor) -> None:
        self.complete, self.end = threading.Event(), threading.Event()
        self._gate = gate
        self._done: Future[None] = threads.submit(self._run)

    def _run(self) -> None:
        with pause(self._gate):
            self.complete.set()
            self.end.wait(SOON_S)

    def finish(self) -> None:
        self.end.set()
        self._done.result(SOON_S)


def paused(gate: Gate) -> bool:
    """Somebody has asked for a pause."""
    return gate._paused


def until(true: Callable[[], bool]) -> None:
    """Looks again and again, for a while."""
    nothing = threading.Event()
    for _ in range(int(SOON_S / 0.001)):
        if true():
            return
        nothing.wait(0.001)
    raise AssertionError("it did not happen")


def step_on(gate: Gate, over: threading.Event) -> None:
    """What a worker does: one step after the other."""
    while not over.is_set():
        gate.step()


def test_a_gate_without_members_is_still() -> None:
    with pause(Gate()):
        pass


def test_a_pause_waits_for_every_member_at_its_step(threads: ThreadPoolExecutor) -> None:
    gate, steps = Gate(), [threading.Event(), threading.Event()]
    for _ in steps:
        gate.join()

    def member(step: threading.Event) -> None:
        step.wait(SOON_S)
        gate.step()

    members = [threads.submit(member, step) for step in steps]
    pauser = Pauser(gate, threads)
    until(lambda: paused(gate))
    steps[0].set()
    assert not pauser.complete.wait(SHORT_S)
    steps[1].set()
    assert pauser.complete.wait(SOON_S)
    assert not any(one.done() for one in members)
    pauser.finish()
    for one in members:
        one.result(SOON_S)


def test_steps_without_a_pause_do_not_wait() -> None:
    gate = Gate()
    gate.join()
    for _ in range(3):
        gate.step()


def test_a_member_that_leaves_is_not_waited_for(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    gate.join()
    pauser = Pauser(gate, threads)
    assert not pauser.complete.wait(SHORT_S)
    gate.leave()
    assert pauser.complete.wait(SOON_S)
    pauser.finish()


def test_nobody_joins_during_a_pause(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    pauser = Pauser(gate, threads)
    assert pauser.complete.wait(SOON_S)
    joining = threads.submit(gate.join)
    with pytest.raises(TimeoutError):
        joining.result(SHORT_S)
    pauser.finish()
    joining.result(SOON_S)


@pytest.mark.parametrize("way", ["resting", "rest"])
def test_a_member_at_rest_is_still_and_comes_back_after_the_pause(threads: ThreadPoolExecutor, way: str) -> None:
    gate, inside, wake = Gate(), threading.Event(), threading.Event()
    gate.join()

    def rest_in_a_block() -> None:
        with gate.resting():
            inside.set()
            wake.wait(SOON_S)

    def rest_at_once() -> None:
        inside.set()
        gate.rest(SOON_S, wake.is_set)

    member = threads.submit({"resting": rest_in_a_block, "rest": rest_at_once}[way])
    assert inside.wait(SOON_S)
    pauser = Pauser(gate, threads)
    assert pauser.complete.wait(SOON_S)
    wake.set()
    gate.wake()
    with pytest.raises(TimeoutError):
        member.result(SHORT_S)
    pauser.finish()
    member.result(SOON_S)


def test_a_sleeper_wakes_for_a_member_that_waits_for_it(threads: ThreadPoolExecutor) -> None:
    """One waits for the other, who sleeps; a pause must not wait for the end of that sleep."""
    gate, met, waits, over = Gate(), threading.Event(), threading.Event(), threading.Event()
    for _ in range(2):
        gate.join()

    def waiter() -> None:
        with gate.waiting():
            waits.set()
            assert met.wait(SOON_S)
        step_on(gate, over)

    def sleeper() -> None:
        gate.rest(1000.0, lambda: False)
        met.set()
        step_on(gate, over)

    members = [threads.submit(waiter), threads.submit(sleeper)]
    assert waits.wait(SOON_S)
    pauser = Pauser(gate, threads)
    assert pauser.complete.wait(SOON_S)
    assert met.is_set()
    over.set()
    pauser.finish()
    for one in members:
        one.result(SOON_S)


def test_those_at_their_step_go_on_for_a_member_that_waits_for_them(threads: ThreadPoolExecutor) -> None:
    """As in an all-reduce: one has arrived, the other stands at the boundary before it."""
    gate, arrived, stands, over = Gate(), threading.Event(), threading.Event(), threading.Event()
    for _ in range(2):
        gate.join()

    def early() -> None:
        until(lambda: paused(gate) and gate._still == 1)
        with gate.waiting():
            assert arrived.wait(SOON_S)
        step_on(gate, over)

    def late() -> None:
        stands.wait(SOON_S)
        gate.step()
        arrived.set()
        step_on(gate, over)

    members = [threads.submit(early), threads.submit(late)]
    pauser = Pauser(gate, threads)
    until(lambda: paused(gate))
    stands.set()
    assert pauser.complete.wait(SOON_S)
    assert arrived.is_set()
    over.set()
    pauser.finish()
    for one in members:
        one.result(SOON_S)
