"""How busy a trainer's connections are, by kind of traffic, as seen from its end."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.service import Meta

Clock = Callable[[], float]

KINDS: Mapping[str, str] = {
    "pull": "pull",
    "read": "pull",
    "push": "push",
    "step": "push",
    "elastic": "dense",
    "sequential": "dense",
    "hold": "dense",
    "newer": "dense",
}
"""The kind of traffic of the methods of embedding and dense servers; others are not measured."""
MOST_KEPT = 1 << 14
"""Messages that are kept between two looks; beyond, the oldest is forgotten."""


class Crossing(NamedTuple):
    """A request and its answer on their way, without what the server took; seconds on the caller's clock."""

    since: float
    until: float
    fixed_bytes: int
    float_bytes: int


class Traffic(NamedTuple):
    """What crossed in a stretch of time, as in `compression.auto.Measured`."""

    busy_s: float = 0.0
    fixed_bytes: int = 0
    float_bytes: int = 0


def busy_s(crossings: Iterable[Crossing], covered: float = -math.inf) -> tuple[float, float]:
    """The time after `covered` in which at least one was on its way, and when the last of them ended."""
    total = 0.0
    for since, until, *_ in sorted(crossings):
        total += max(0.0, until - max(since, covered))
        covered = max(covered, until)
    return total, covered


@dataclass
class Link:
    """All measured connections of a trainer.

    Messages share the network, so that their times must not be added up: under prefetching several are on their way at
    once. What counts is the time in which any is, from the request until the answer is here; how long a server says
    that it had the request is taken off the end of each. Ids are what a pull sends there, floats everything else.

    Attributes:
        clock: seconds.
    """

    clock: Clock = time.monotonic
    _crossed: dict[str, deque[Crossing]] = field(default_factory=dict, init=False, repr=False)
    _covered: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _fresh_since: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def crossed(self, kind: str, crossing: Crossing) -> None:
        """Notes a message; one that began before the kind was forgotten does not count."""
        with self._lock:
            if crossing.since >= self._fresh_since.get(kind, -math.inf):
                self._crossed.setdefault(kind, deque(maxlen=MOST_KEPT)).append(crossing)

    def take(self, kind: str) -> Traffic:
        """What has crossed since the last call."""
        with self._lock:
            found = self._crossed.pop(kind, ())
            busy, self._covered[kind] = busy_s(found, self._covered.get(kind, -math.inf))
        fixed = sum(crossing.fixed_bytes for crossing in found)
        return Traffic(busy, fixed, sum(crossing.float_bytes for crossing in found))

    def forget(self, kind: str) -> None:
        """What is on its way now is of another codec than what follows."""
        with self._lock:
            self._fresh_since[kind] = self.clock()
            self._crossed.pop(kind, None)


@dataclass(frozen=True)
class MeasuredConnection(Connection):
    """A connection to an embedding or dense server whose messages a `Link` sees.

    Attributes:
        inner: the connection.
        link: takes note.
    """

    inner: Connection
    link: Link

    def call(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """As `Connection.call`."""
        kind = KINDS.get(method)
        if kind is None:
            return self.inner.call(method, meta, tensors, timeout_s)
        sent, since = sum(tensor.nbytes for tensor in tensors), self.link.clock()
        answer = self.inner.call(method, meta, tensors, timeout_s)
        answer.add_done_callback(lambda done: self._answered(kind, sent, since, done))
        return answer

    def _answered(self, kind: str, sent: int, since: float, done: Future[Answer]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        answer, now = done.result(), self.link.clock()
        came = sum(tensor.nbytes for tensor in answer.tensors)
        fixed, floats = (sent, came) if kind == "pull" else (0, sent + came)
        served_s = min(max(0.0, answer.served_s), now - since)
        self.link.crossed(kind, Crossing(since, now - served_s, fixed, floats))

    def close(self) -> None:
        """As `Connection.close`."""
        self.inner.close()
