"""Which checkpoints of a store somebody is writing or reading at the moment, so that nobody clears them away."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from shadowsync.errors import CheckpointError


class Pins:
    """Held for the threads of one process.

    Attributes:
        lock: held by whoever removes checkpoints or chooses the name of a new one.
        written: names of those that are being written.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.written: set[str] = set()
        self._read: Counter[str] = Counter()

    def read(self) -> list[str]:
        """Names of those that are being read."""
        return [name for name, readers in self._read.items() if readers]

    @contextlib.contextmanager
    def writing(self, choose: Callable[[], str]) -> Iterator[str]:
        """Within the block the name that `choose` gives, asked under the lock, is the caller's.

        Raises:
            CheckpointError: somebody writes it already.
        """
        with self.lock:
            name = choose()
            if name in self.written:
                raise CheckpointError(f"{name} is being written already")
            self.written.add(name)
        try:
            yield name
        finally:
            with self.lock:
                self.written.discard(name)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Within the block the checkpoint and all that it builds on stay."""
        with self.lock:
            self._read[name] += 1
        try:
            yield
        finally:
            with self.lock:
                self._read[name] -= 1
