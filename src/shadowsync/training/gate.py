"""Where the threads of a job stand still between two steps, so that a consistent image can be taken."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Gate:
    """Counts the threads that change parameters (members) and those of them that stand still.

    A pause is complete when every member stands at a step boundary or rests. A thread that waits for others
    (`waiting`, for instance in an all-reduce) does not stand still; as long as there is one, those that stand at the
    boundary go on, until it has what it waits for. So a pause never dead-locks with a synchronisation.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._paused = False
        self._members = 0
        self._still = 0
        self._waiting = 0
        self._changing = 0

    def join(self) -> None:
        """One more thread that a pause has to wait for; not before the end of a pause."""
        with self._condition:
            self._condition.wait_for(lambda: not self._paused)
            self._members += 1

    def leave(self) -> None:
        with self._condition:
            self._members -= 1
            self._condition.notify_all()

    @property
    def pausing(self) -> bool:
        return self._paused

    def step(self) -> None:
        """A step boundary of a member: stands still here while the job is paused."""
        if self._paused:
            with self._condition:
                self._stand_still()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While inside, the member changes nothing: it waits for data, say. Leaving waits for the end of a pause."""
        with self._condition:
            self._still += 1
            if self._paused:
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._still -= 1
                self._stand_still()

    def rest(self, seconds: float, until: Callable[[], bool]) -> None:
        """Sleeps until `until()` or for `seconds`, less if a pause is held up by a thread that waits for others.

        `until` is asked at the start and after `wake`.
        """
        deadline = time.monotonic() + seconds
        with self._condition:
            self._still += 1
            if self._paused:
                self._condition.notify_all()
            while not until() and not (self._paused and self._waiting) and (left := deadline - time.monotonic()) > 0:
                self._condition.wait(left)
            self._still -= 1
            self._stand_still()

    def wake(self) -> None:
        """Lets every thread in `rest` ask its `until` again."""
        with self._condition:
            self._condition.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While inside, the member depends on others, so that a pause lets them go on."""
        with self._condition:
            self._waiting += 1
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._waiting -= 1
                self._condition.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While inside, a thread that is no member changes something for one that may rest: a pause is complete when it
        has left, and it does not enter during a pause."""
        with self._condition:
            self._condition.wait_for(lambda: not self._paused or self._waiting > 0)
            self._changing += 1
        try:
            yield
        finally:
            with self._condition:
                self._changing -= 1
                self._condition.notify_all()

    def hold(self, timeout_s: float | None = None) -> bool:
        """Asks every member to stand still and waits until they do; `release` lets them go on.

        False if somebody does not stand still yet after `timeout_s`; they stay asked, and it may be called again.
        """
        with self._condition:
            self._paused = True
            self._condition.notify_all()
            return self._condition.wait_for(self._complete, timeout_s)

    def release(self) -> None:
        """Ends a pause, complete or not."""
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    def _complete(self) -> bool:
        return self._still == self._members and not self._waiting and not self._changing

    def _stand_still(self) -> None:
        if not self._paused:
            return
        self._still += 1
        self._condition.notify_all()
        self._condition.wait_for(lambda: not self._paused or self._waiting > 0)
        self._still -= 1
