"""Writes snapshots in the background, so that training goes on meanwhile."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from shadowsync.recovery.snapshot import Snapshot


class Store(Protocol):
    """Where snapshots go; `CheckpointStore` is one."""

    def save(self, snapshot: Snapshot) -> str:
        """Writes a snapshot and returns the checkpoint's name."""


class AsyncSaver:
    """Saves one snapshot at a time; at most one more waits, and a newer one takes its place.

    `submit` never waits for a disk: a disk slower than the interval between checkpoints costs checkpoints, not
    training. The newest snapshot is always written. The thread lives only while there is something to save.

    Args:
        store: what saves.
        clock: seconds from any start.

    Attributes:
        saves: checkpoints written.
        replaced: snapshots that gave way to a newer one before their turn.
        seconds: spent on writing, failed attempts included.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.perf_counter) -> None:
        self.saves = 0
        self.replaced = 0
        self.seconds = 0.0
        self._store = store
        self._clock = clock
        self._waiting: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def submit(self, snapshot: Snapshot) -> None:
        """Has a snapshot saved; its tensors must not change until it is.

        Raises:
            SaveError: (or whatever else was raised) an earlier save failed; this snapshot is saved none the less.
        """
        with self._lock:
            earlier = self._next_error()
            self.replaced += self._waiting is not None
            self._waiting = snapshot
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
                self._thread.start()
        if earlier is not None:
            raise earlier

    def wait(self) -> None:
        """Returns when everything submitted has been saved.

        Raises:
            SaveError: (or whatever else was raised) a save failed. Of several errors each call raises one, in order.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            error = self._next_error()
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        with self._lock:
            return self._thread is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits; where the block has already failed, an error of a save becomes a note on that failure."""
        try:
            self.wait()
        except Exception as save_error:
            if error is None:
                raise
            error.add_note(str(save_error))

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            self._save(snapshot)

    def _next(self) -> Snapshot | None:
        with self._lock:
            snapshot, self._waiting = self._waiting, None
            if snapshot is None:
                self._thread = None
            return snapshot

    def _save(self, snapshot: Snapshot) -> None:
        began = self._clock()
        error = None
        try:
            self._store.save(snapshot)
        except BaseException as caught:  # it is raised again where somebody can act on it
            error = caught
        with self._lock:
            self.seconds += self._clock() - began
            if error is None:
                self.saves += 1
            else:
                self._errors.append(error)

    def _next_error(self) -> BaseException | None:
        return self._errors.pop(0) if self._errors else None
