"""Writes snapshots in the background, so that training goes on meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from shadowsync.checkpoint.snapshot import Snapshot

_Task: TypeAlias = "tuple[Snapshot | Callable[[], Snapshot], Callable[[str], None], Callable[[BaseException], bool]]"


def _nothing(_: str) -> None:
    """Nobody wants to know."""


def _unheard(_: BaseException) -> bool:
    return False


NICENESS = 10
"""Of the saver's thread, so that it takes from training only what training leaves."""


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
        self._waiting: _Task | None = None
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def submit(
        self,
        snapshot: Snapshot | Callable[[], Snapshot],
        saved: Callable[[str], None] = _nothing,
        failed: Callable[[BaseException], bool] = _unheard,
    ) -> None:
        """Has a snapshot saved; its tensors must not change until it is.

        Args:
            snapshot: or what makes it, in the saver's thread.
            saved: told the checkpoint's name in the saver's thread, when it is complete.
            failed: told there what went wrong; true if that need not be raised any more.

        Raises:
            SaveError: (or whatever else was raised) an earlier save failed; this snapshot is saved none the less.
        """
        with self._lock:
            earlier = self._next_error()
            self.replaced += self._waiting is not None
            self._waiting = (snapshot, saved, failed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
                self._thread.start()
        if earlier is not None:
            raise earlier

    def settle(self) -> None:
        """Returns when everything submitted has been saved or has failed, which somebody else will hear of."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Returns when everything submitted has been saved.

        Raises:
            SaveError: (or whatever else was raised) a save failed. Of several errors each call raises one, in order.
        """
        self.settle()
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
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (task := self._next()) is not None:
            self._save(*task)

    def _next(self) -> "_Task | None":
        with self._lock:
            task, self._waiting = self._waiting, None
            if task is None:
                self._thread = None
            return task

    def _save(
        self,
        snapshot: Snapshot | Callable[[], Snapshot],
        saved: Callable[[str], None],
        failed: Callable[[BaseException], bool],
    ) -> None:
        began = self._clock()
        error = None
        try:
            saved(self._store.save(snapshot() if callable(snapshot) else snapshot))
        except BaseException as caught:  # it is raised again where somebody can act on it
            error = caught
        heard = error is not None and failed(error)
        with self._lock:
            self.seconds += self._clock() - began
            if error is None:
                self.saves += 1
            elif not heard:
                self._errors.append(error)

    def _next_error(self) -> BaseException | None:
        return self._errors.pop(0) if self._errors else None
