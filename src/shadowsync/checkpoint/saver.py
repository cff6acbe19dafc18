"""Writes snapshots in the background, so that training goes on meanwhile."""

import contextlib
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from shadowsync.checkpoint.snapshot import Snapshot

NICENESS = 10
"""Of the saver's thread, so that it takes from training only what training leaves."""


class AsyncSaver:
    """Saves one snapshot at a time; at most one more waits, and a newer one takes its place.

    `submit` never waits for a disk: a disk slower than the interval between checkpoints costs checkpoints, not
    training. The newest snapshot is always written. The thread lives only while there is something to save.

    `write` writes a snapshot and returns the checkpoint's name (`CheckpointStore.save`); `saves` have been written.
    """

    def __init__(self, write: Callable[[Snapshot], str]) -> None:
        self.saves = 0
        self._write = write
        self._waiting: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def submit(
        self,
        snapshot: Snapshot | Callable[[], Snapshot],
        saved: Callable[[str], object] = lambda _: None,
        failed: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        """Has a snapshot saved, or what makes it in the saver's thread; its tensors must not change until it is.

        In that thread `saved` is told the checkpoint's name when it is complete, and `failed` what went wrong, which
        answers whether that need not be raised any more. If an earlier save failed its `SaveError`, or whatever else it
        was, is raised here, and this snapshot is saved none the less.
        """

        def save() -> None:
            try:
                saved(self._write(snapshot() if callable(snapshot) else snapshot))
                self.saves += 1
            except BaseException as error:  # it is raised again where somebody can act on it
                if not failed(error):
                    self._errors.append(error)

        with self._lock:
            earlier = self._errors.pop(0) if self._errors else None
            self._waiting = save
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
                self._thread.start()
        if earlier is not None:
            raise earlier

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._lock:
                save, self._waiting = self._waiting, None
                if save is None:
                    self._thread = None
                    return
            save()

    def settle(self) -> None:
        """Returns when everything submitted has been saved or has failed, of which somebody else will hear."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """As `settle`, but raises what a save raised: of several errors each call one, in order."""
        self.settle()
        if self._errors:
            raise self._errors.pop(0)

    @property
    def busy(self) -> bool:
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
