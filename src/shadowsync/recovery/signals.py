"""Ctrl-C and SIGTERM: the first asks the job to save and stop, the second stops it at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the job to stop, and with which signal.

    A plain flag without a lock: a signal's handler runs between two instructions of the main thread, which may hold
    the lock of a `threading.Event` at that moment and would then wait for itself. So there is nothing to wait on; the
    main thread looks at it between its other waits.

    `requested` may be set to stop the job without a signal. `interrupt` handles the signals that come after the first.
    """

    def __init__(self, interrupt: Callable[[int, FrameType | None], Any] = signal.default_int_handler) -> None:
        self._interrupt = interrupt
        self.requested = False
        self.signal: signal.Signals | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.signal.name if self.signal is not None else "the program"

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handler of the signals: takes the first as a request, and hands others to `interrupt`."""
        if self.signal is not None:
            self._interrupt(number, frame)
        else:
            self.signal = signal.Signals(number)
            self.requested = True


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block SIGINT and SIGTERM set the request handed out; afterwards the handlers are as before.

    A second signal goes to the handler that SIGINT had before, which as a rule raises `KeyboardInterrupt`. Only the
    main thread may change handlers, so elsewhere the request is never set by a signal.
    """
    usual = signal.getsignal(signal.SIGINT)
    request = StopRequest(usual) if callable(usual) else StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            # None is a handler that was not installed from Python and that Python cannot put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
