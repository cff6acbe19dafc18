"""Saves in the background, so that training goes on meanwhile."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Self

NICENESS = 10
"""Of the saver's thread, so that it takes from training only what training leaves."""


class AsyncSaver:
    """Does one save at a time in a thread of its own, which lives only while there is something to save.

    Whoever submits only when it is not `busy` never waits for a disk: a disk slower than the interval between
    checkpoints costs checkpoints, not training.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, save: Callable[[], object]) -> None:
        """Has `save` called in the thread, when the one before has ended.

        If that one failed its `SaveError`, or whatever else it was, is raised here, and `save` is called none the less.
        """
        self.settle()
        earlier, self._error = self._error, None
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint-saver", daemon=True)
        self._thread.start()
        if earlier is not None:
            raise earlier

    def _run(self, save: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            save()
        except BaseException as error:  # it is raised again where somebody can act on it
            self._error = error

    def settle(self) -> None:
        """Returns when what was submitted has ended or failed, of which somebody else will hear."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """As `settle`, but raises what the save raised, once."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits; where the block has already failed, an error of a save becomes a note on that failure."""
        try:
            self.wait()
        except Exception as save_error:
            if error is None:
                raise
            error.add_note(str(save_error))
