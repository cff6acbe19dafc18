"""The time in which workers may work."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WorkClock:
    """Seconds that stand still while everybody does, so that a checkpoint makes nobody a straggler.

    Args:
        clock: seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped_at: float | None = None
        self._stopped_s = 0.0

    def __call__(self) -> float:
        """The time now."""
        with self._lock:
            return (self._clock() if self._stopped_at is None else self._stopped_at) - self._stopped_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, no time passes; one thread at a time."""
        with self._lock:
            self._stopped_at = began = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._stopped_at = None
                self._stopped_s += self._clock() - began
