"""Lets pushes run side by side, and one copier alone, so that a row is copied between two pushes, never within one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PushGate:
    """A push goes through with `with gate:`, any number at once; `alone` waits until none is inside.

    Turns alternate: pushes that came while somebody was alone all go before the next one is. So a push waits for the
    pushes that were under way and for one turn, however often turns are asked for, and a turn for the pushes that came
    before it. A push that meets nobody pays 0.7 µs (one core). Pulls do not come here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._turn = threading.Lock()
        self._one = threading.Lock()
        self._moving = threading.Lock()
        self._closed = False
        self._inside = 0
        self._waiting = 0
        self._turns = 0

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                self._wait()
            else:
                self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._closed and not self._inside:
                self._changed.notify_all()

    def _wait(self) -> None:
        self._waiting += 1
        turns = self._turns
        self._changed.wait_for(lambda: self._turns != turns)  # whoever ended the turn has counted it as inside

    @contextmanager
    def singly(self) -> Iterator[None]:
        """As a push goes through, but one of those who do so at a time."""
        with self, self.one():
            yield

    @contextmanager
    def one(self) -> Iterator[None]:
        """For who is inside: one at a time."""
        with self._one:
            yield

    @contextmanager
    def moving(self) -> Iterator[None]:
        """One at a time of those who move rows: pushes go on meanwhile, and who is inside may be `alone` for a part of
        it."""
        with self._moving:
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no push is under way; one thread at a time."""
        with self._turn:
            try:
                with self._changed:
                    self._closed = True
                    self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                with self._changed:
                    self._closed = False
                    self._inside += self._waiting
                    self._waiting = 0
                    self._turns += 1
                    self._changed.notify_all()
