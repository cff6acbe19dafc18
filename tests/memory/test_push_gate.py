"""Pushes go together, a turn goes alone, and neither keeps the other out for long."""

import threading
from collections.abc import Callable

import pytest

from shadowsync.memory.push_gate import PushGate

DEADLINE_S = 120.0


class Actor:
    """A thread that goes in, says so, and stays until it is let go."""

    def __init__(self, enter: Callable[[], object]) -> None:
        self.inside, self._leave = threading.Event(), threading.Event()
        self._enter = enter
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._enter():  # type: ignore[attr-defined]
            self.inside.set()
            assert self._leave.wait(DEADLINE_S)

    def came_in(self) -> bool:
        return self.inside.wait(DEADLINE_S)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def until(condition: Callable[[], bool], changed: threading.Condition) -> None:
    """Waits for a state of the gate, which tells of each change."""
    with changed:
        while not condition():
            changed.wait(0.01)


def test_pushes_go_together() -> None:
    gate = PushGate()
    actors = [Actor(lambda: gate) for _ in range(3)]
    assert all(actor.came_in() for actor in actors)
    for actor in actors:
        actor.leave()


def test_a_turn_waits_for_the_pushes_inside_and_keeps_the_others_out() -> None:
    gate = PushGate()
    push = Actor(lambda: gate)
    assert push.came_in()
    turn = Actor(gate.alone)
    until(lambda: gate._closed, gate._changed)
    late = Actor(lambda: gate)
    until(lambda: gate._waiting == 1, gate._changed)
    assert not turn.inside.is_set()
    push.leave()
    assert turn.came_in()
    assert not late.inside.is_set()
    turn.leave()
    assert late.came_in()
    late.leave()


def test_a_push_that_waited_goes_before_the_next_turn() -> None:
    gate = PushGate()
    first = Actor(gate.alone)
    assert first.came_in()
    push, second = Actor(lambda: gate), Actor(gate.alone)
    until(lambda: gate._waiting == 1, gate._changed)
    first.leave()
    assert push.came_in()
    assert not second.inside.is_set()
    push.leave()
    assert second.came_in()
    second.leave()


def test_whoever_fails_inside_leaves_the_gate_open() -> None:
    gate = PushGate()
    for enter in (gate.alone, lambda: gate):
        with pytest.raises(ZeroDivisionError), enter():  # type: ignore[attr-defined]
            raise ZeroDivisionError
    with gate.alone(), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    with gate:
        pass
