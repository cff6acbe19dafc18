"""The thread that waits: it receives for all sockets of a process's end of the wire, and keeps its clock."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

Action = Callable[[], None]


class Loop:
    """Runs actions in one thread: when a file is readable, when somebody posts one, and at a steady tick."""

    def __init__(self, name: str, tick: Action, tick_s: float) -> None:
        self._tick = tick
        self._tick_s = tick_s
        self._posted: deque[Action] = deque()
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._rung = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.watch(self._bell.fileno(), self._answer_bell)
        self._thread.start()

    def watch(self, file: int, action: Action) -> None:
        """Runs the action in the loop whenever the file is readable; called in the loop, or before it starts."""
        self._selector.register(file, selectors.EVENT_READ, action)

    def unwatch(self, file: int) -> None:
        """Ends `watch`; called in the loop, before the file is closed."""
        self._selector.unregister(file)

    def post(self, action: Action) -> None:
        """Runs the action in the loop soon; from any thread."""
        self._posted.append(action)
        if not self._rung:  # two may ring at once, which does no harm
            self._rung = True
            with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyhow; closed: it has ended
                self._rope.send(b"\0")

    def close(self) -> None:
        """Ends the thread, if it was started, after what was posted before."""
        if self._thread.is_alive():
            self.post(self._end)
            self._thread.join()
        self._selector.close()
        self._bell.close()
        self._rope.close()

    def _end(self) -> None:
        self._stopping = True

    def _answer_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        self._rung = False  # after the bell is silent, before the actions are taken: no post is missed in between

    def _run(self) -> None:
        ticks_at = time.monotonic() + self._tick_s
        while not self._stopping:
            for key, _ in self._selector.select(max(0.0, ticks_at - time.monotonic())):
                _guarded(key.data)
            while self._posted:
                _guarded(self._posted.popleft())
            if time.monotonic() >= ticks_at:
                _guarded(self._tick)
                ticks_at = time.monotonic() + self._tick_s


def _guarded(action: Action) -> None:
    try:
        action()
    except BaseException:  # one bad message or socket must not end the wire
        _LOG.exception("an action of the wire failed")
