"""A pause is complete when nobody changes anything, and never dead-locks with threads that wait for each other."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from helpers import pause

from shadowsync.training.gate import Gate

SOON_S = 10.0
SHORT_S = 0.02


class Threads:
    """Runs members and pauses of one gate, each in a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.gate, self._pool = Gate(), pool
        self.over = threading.Event()
        """When members that step on and on go away."""

    def members(self, *runs: Callable[[], object]) -> list[Future[object]]:
        """Members that have all joined before the first one runs."""
        for _ in runs:
            self.gate.join()
        return [self.start(run) for run in runs]

    def start(self, run: Callable[[], object]) -> Future[object]:
        return self._pool.submit(run)

    def step_on(self) -> None:
        """What a worker does: one step after the other."""
        while not self.over.is_set():
            self.gate.step()

    @contextmanager
    def pausing(self) -> Iterator[threading.Event]:
        """Inside, somebody asks for a pause, and holds it from when the event is set; at the end all go away."""
        complete, end = threading.Event(), threading.Event()

        def hold() -> None:
            with pause(self.gate):
                complete.set()
                end.wait(SOON_S)

        held = self.start(hold)
        until(lambda: self.gate._paused)
        yield complete
        self.over.set()
        end.set()
        held.result(SOON_S)


@pytest.fixture
def threads() -> Iterator[Threads]:
    with ThreadPoolExecutor(8) as pool:
        yield Threads(pool)


def until(true: Callable[[], bool]) -> None:
    """Looks again and again, for a while."""
    nothing = threading.Event()
    for _ in range(int(SOON_S / 0.001)):
        if true():
            return
        nothing.wait(0.001)
    raise AssertionError("it did not happen")


def waits(future: Future[object]) -> bool:
    """It does not end for a moment."""
    with pytest.raises(TimeoutError):
        future.result(SHORT_S)
    return True


def test_without_members_everything_is_still_and_without_a_pause_steps_do_not_wait() -> None:
    gate = Gate()
    with pause(gate):
        pass
    gate.join()
    for _ in range(3):
        gate.step()


def test_a_pause_waits_for_every_member_at_its_step(threads: Threads) -> None:
    first, second = threading.Event(), threading.Event()
    members = threads.members(
        lambda: first.wait(SOON_S) and threads.gate.step(), lambda: second.wait(SOON_S) and threads.gate.step()
    )
    with threads.pausing() as complete:
        first.set()
        assert not complete.wait(SHORT_S)
        second.set()
        assert complete.wait(SOON_S)
        assert not any(member.done() for member in members)
    for member in members:
        member.result(SOON_S)


def test_a_member_that_leaves_is_not_waited_for(threads: Threads) -> None:
    threads.gate.join()
    with threads.pausing() as complete:
        assert not complete.wait(SHORT_S)
        threads.gate.leave()
        assert complete.wait(SOON_S)


def test_nobody_joins_during_a_pause(threads: Threads) -> None:
    with threads.pausing() as complete:
        assert complete.wait(SOON_S)
        joining = threads.start(threads.gate.join)
        assert waits(joining)
    joining.result(SOON_S)


@pytest.mark.parametrize("way", ["resting", "rest"])
def test_a_member_at_rest_is_still_and_comes_back_after_the_pause(threads: Threads, way: str) -> None:
    inside, wake = threading.Event(), threading.Event()

    def member() -> None:
        if way == "rest":
            inside.set()
            threads.gate.rest(SOON_S, wake.is_set)
            return
        with threads.gate.resting():
            inside.set()
            wake.wait(SOON_S)

    (resting,) = threads.members(member)
    assert inside.wait(SOON_S)
    with threads.pausing() as complete:
        assert complete.wait(SOON_S)
        wake.set()
        threads.gate.wake()
        assert waits(resting)
    resting.result(SOON_S)


def test_a_sleeper_wakes_for_a_member_that_waits_for_it(threads: Threads) -> None:
    """One waits for the other, who sleeps; a pause must not wait for the end of that sleep."""
    met, waiting = threading.Event(), threading.Event()

    def waiter() -> None:
        with threads.gate.waiting():
            waiting.set()
            assert met.wait(SOON_S)
        threads.step_on()

    def sleeper() -> None:
        threads.gate.rest(1000.0, lambda: False)
        met.set()
        threads.step_on()

    members = threads.members(waiter, sleeper)
    assert waiting.wait(SOON_S)
    with threads.pausing() as complete:
        assert complete.wait(SOON_S)
        assert met.is_set()
    for member in members:
        member.result(SOON_S)


def test_those_at_their_step_go_on_for_a_member_that_waits_for_them(threads: Threads) -> None:
    """As in an all-reduce: one has arrived, the other stands at the boundary before it."""
    arrived, stands = threading.Event(), threading.Event()

    def early() -> None:
        until(lambda: threads.gate._paused and threads.gate._still == 1)
        with threads.gate.waiting():
            assert arrived.wait(SOON_S)
        threads.step_on()

    def late() -> None:
        stands.wait(SOON_S)
        threads.gate.step()
        arrived.set()
        threads.step_on()

    members = threads.members(early, late)
    with threads.pausing() as complete:
        stands.set()
        assert complete.wait(SOON_S)
        assert arrived.is_set()
    for member in members:
        member.result(SOON_S)
