"""The server's book about one client's requests: each runs once, however often it comes."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

Frames: TypeAlias = list[Any]
"""A message ready to be sent: its header and the memory of its tensors."""


class Verdict(Enum):
    """What to do with a request that came."""

    RUN = auto()
    REPEAT = auto()
    """Send the kept reply again."""
    DROP = auto()
    """It is running, or its sender no longer waits for it."""
    LOST = auto()
    """It has run and its reply is no longer kept."""
    FLOOD = auto()
    """Too many of this client's requests are open."""


class _State(Enum):
    RUNNING = auto()
    EVICTED = auto()


@dataclass
class Ledger:
    """The open numbers of one client; the caller's lock guards it.

    Attributes:
        window: most numbers from the client's lowest open one to its newest.
        open_calls: most requests that run or wait to run.
        keep_bytes: most bytes of kept replies; beyond them the oldest is let go, and its request then cannot be
            answered again.
    """

    window: int
    open_calls: int
    keep_bytes: int
    low: int = 0
    running: int = 0
    kept_bytes: int = 0
    _entries: dict[int, _State | Frames] = field(default_factory=dict)
    _order: deque[int] = field(default_factory=deque)
    """Numbers in the order in which their replies were kept; some may have been settled since."""

    def admit(self, number: int, low: int) -> Verdict:
        """Enters a request that came; after `RUN` the caller owes a `finish`."""
        self.settle(low)
        if number < self.low:
            return Verdict.DROP
        entry = self._entries.get(number)
        if entry is None:
            return self._begin(number)
        if entry is _State.RUNNING:
            return Verdict.DROP
        return Verdict.LOST if entry is _State.EVICTED else Verdict.REPEAT

    def _begin(self, number: int) -> Verdict:
        if number - self.low >= self.window or self.running >= self.open_calls:
            return Verdict.FLOOD
        self._entries[number] = _State.RUNNING
        self.running += 1
        return Verdict.RUN

    def reply(self, number: int) -> Frames:
        """The kept reply of a number whose verdict was `REPEAT`."""
        kept = self._entries[number]
        assert isinstance(kept, list)
        return kept

    def finish(self, number: int, reply: Frames | None) -> None:
        """Ends a request that ran; `reply` is kept, without one the request may run again."""
        self.running -= 1
        if self._entries.get(number) is not _State.RUNNING:  # its sender gave it up meanwhile
            return
        if reply is None:
            del self._entries[number]
            return
        self._entries[number] = reply
        self._order.append(number)
        self.kept_bytes += _byte_count(reply)
        while self.kept_bytes > self.keep_bytes:
            self._evict(self._order.popleft())

    def settle(self, low: int) -> None:
        """The client no longer waits for numbers below `low`."""
        if low <= self.low:
            return
        self.low = low
        while self._order and self._order[0] < low:
            self._order.popleft()
        for number in [number for number in self._entries if number < low]:
            self._release(self._entries.pop(number))

    def _evict(self, number: int) -> None:
        entry = self._entries.get(number)
        if entry is not None:
            self._release(entry)
            self._entries[number] = _State.EVICTED

    def _release(self, entry: _State | Frames) -> None:
        if isinstance(entry, list):
            self.kept_bytes -= _byte_count(entry)


def _byte_count(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)
