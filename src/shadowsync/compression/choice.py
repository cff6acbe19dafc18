"""How `auto` chooses codecs: a trainer measures its link and its steps, and a rule for each kind of traffic decides.

The rule is pure: what was measured and the time are handed in, decisions come out.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowsync.compression.auto import IN_LINE, OVERLAPPED, Auto
from shadowsync.compression.channel import Channel, float_bytes
from shadowsync.compression.codec import Codec
from shadowsync.compression.wire import WireCounter
from shadowsync.rpc.connection import EMPTY, Connection, Payload
from shadowsync.rpc.pending import Pending

EVEN = 0.7
"""A weaker codec has to be expected below this part of `share`."""
WAITING = 0.1
"""Workers that wait for less of their time are not held up by any network."""
STEADY = 3
"""Stretches in a row that have to call for the same."""
LEAST_STEPS = 4
"""A stretch of fewer steps says nothing."""
WORTH = 0.25
"""A stronger codec has to bring this part of what its bytes promised, or it was not bytes that took the time."""
FUTILE_STAYS = 20
"""Minimum stays for which nothing stronger is tried after it brought nothing."""
MOST_STAYS = 32
"""Minimum stays between two tries of a weaker codec, at most."""


@dataclass(frozen=True)
class Measured:
    """What a trainer saw of one kind of traffic over a stretch of time.

    Attributes:
        computed_s: that a worker computed, the mean over the workers.
        waited_s: that one waited for vectors, for parameters, or until gradients were taken; the same mean.
        busy_s: in which at least one message was on its way, there or back; what the servers took is not in it.
        fixed_bytes: of ids, which no codec changes.
        float_bytes: of floats as they crossed.
    """

    steps: int
    computed_s: float
    waited_s: float
    busy_s: float
    fixed_bytes: int
    float_bytes: int

    @property
    def load(self) -> float:
        """Seconds of the network for each second of computing."""
        return self.busy_s / self.computed_s

    @property
    def says_something(self) -> bool:
        return self.steps >= LEAST_STEPS and self.computed_s > 0 and self.busy_s > 0 and self.float_bytes > 0


class Chooser:
    """The rule for one kind of traffic of one trainer.

    The network is off the critical path as long as it is busy for less than `share` of the time that is computed; if it
    is on it, workers wait, and both have to be seen. What other codecs would take is their bytes at the speed that was
    measured: so it goes at once to the weakest that suffices, else to the strongest. It goes back to a weaker one that
    is expected well below `share`. Either way `STEADY` stretches in a row have to call for it, and `stay_s` to have
    passed. Whoever had to come back from a weaker codec waits twice as long before the next try. And where a stronger
    codec does not bring what its bytes promised (delay or processors take the time), it goes back and lets that be for
    a while.

    Args:
        names, sizes: of the codecs, weakest first; and bytes of one float in each.
        share, stay_s: as the options, resolved.
        elastic: this traffic takes whatever the link has left, and no step waits for it (replicas merged in the
            background). Its own load says nothing then: what is measured is the traffic that it gets in the way of,
            and codecs change by one at a time.
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[float], share: float, stay_s: float, elastic: bool = False
    ) -> None:
        self._names, self._sizes, self._share, self._stay_s, self._elastic = names, sizes, share, stay_s, elastic
        self._rest_s = stay_s  # least seconds until a weaker codec is tried
        self._futile_until = -math.inf  # nothing stronger is tried before
        self._begin(0, None)

    def _begin(self, at: int, now: float | None) -> None:
        """The codec at that position is in use from now on."""
        self._at, self._since = at, now
        self._stretches = 0  # seen of it, of those that say something
        self._towards = self._streak = 0  # which way the last of them called, and how many in a row did
        self._before: tuple[int, float] | None = None  # position and load before, till it is clear what that brought
        self._went_down = False

    @property
    def codec(self) -> str:
        return self._names[self._at]

    def judge(self, seen: Measured, now: float) -> str | None:
        """Takes a stretch of time that ended `now`, all of it with the codec in use. Why another one is in use from now
        on, a sentence without its end; None if it is not."""
        if self._since is None:
            self._since = now
        if not seen.says_something:
            return None
        target = self._target(seen)
        towards = (target > self._at) - (target < self._at)
        self._streak = self._streak + 1 if towards == self._towards else 1
        self._towards = towards
        self._stretches += 1
        stayed_s = now - self._since
        if self._stretches < STEADY or stayed_s < self._stay_s:
            return None
        if (why := self._regret(seen, now)) is not None or self._streak < STEADY:
            return why
        measured = (
            f"the link carries {(seen.fixed_bytes + seen.float_bytes) / seen.busy_s / 1e6:.3g} MB/s and is busy for "
            f"{1e3 * seen.busy_s / seen.steps:.3g} ms in each step that computes for "
            f"{1e3 * seen.computed_s / seen.steps:.3g} ms"
        )
        if towards > 0 and now >= self._futile_until:
            if self._went_down:
                self._rest_s = min(2 * self._rest_s, MOST_STAYS * self._stay_s)
            before, self._futile_until = (self._at, seen.load), -math.inf
            self._begin(target, now)
            self._before = before
            return f"{measured}, above share={self._share:g}, and workers wait"
        if towards < 0 and stayed_s >= self._rest_s:
            expected = self._expected(target, seen)
            self._begin(target, now)
            self._went_down = True
            return f"{measured}, so that it is expected at {expected:.2g} of share={self._share:g}"
        return None

    def _target(self, seen: Measured) -> int:
        """The position of the codec that the stretch calls for."""
        at, last = self._at, len(self._names) - 1
        if seen.load > self._share:
            if seen.waited_s <= WAITING * (seen.waited_s + seen.computed_s):
                return at
            last = min(at + 1, last) if self._elastic else last
            return next((place for place in range(at + 1, last) if self._expected(place, seen) <= self._share), last)
        weaker = range(max(0, at - 1) if self._elastic else 0, at)
        return next((place for place in weaker if self._expected(place, seen) <= EVEN * self._share), at)

    def _expected(self, place: int, seen: Measured) -> float:
        if self._elastic:
            return seen.load
        return seen.load * self._bytes(place, seen) / self._bytes(self._at, seen)

    def _bytes(self, place: int, seen: Measured) -> float:
        return seen.fixed_bytes + seen.float_bytes * self._sizes[place] / self._sizes[self._at]

    def _regret(self, seen: Measured, now: float) -> str | None:
        """Judges the last change to a stronger codec, once."""
        if self._before is None or self._elastic:
            return None
        (place, load), self._before = self._before, None
        promised = 1 - self._bytes(self._at, seen) / self._bytes(place, seen)
        brought = 1 - seen.load / load
        if seen.load <= self._share or brought >= WORTH * promised:
            return None
        stronger, self._futile_until = self.codec, now + FUTILE_STAYS * self._stay_s
        self._begin(place, now)
        return (
            f"{stronger} sends {promised:.0%} fewer bytes and took {max(0.0, brought):.0%} off the time of the "
            "network, so it is not bytes that take it"
        )


KINDS: Mapping[str, str] = {
    "pull": "pull",
    "push": "push",
    "hold_gradients": "push",
    "elastic": "dense",
    "sequential": "dense",
    "receive": "dense",
    "newer": "dense",
}
"""The kind of traffic of the methods of embedding and dense servers; others are not measured."""
MOST_KEPT = 1 << 14
"""Messages that are kept between two looks; beyond, the oldest is forgotten."""
Clock = Callable[[], float]


class Crossing(NamedTuple):
    """A request and its answer on their way, without what the server took; seconds on the caller's clock."""

    since: float
    until: float
    fixed_bytes: int
    float_bytes: int


def busy_s(crossings: Iterable[Crossing], covered: float = -math.inf) -> tuple[float, float]:
    """The time after `covered` in which at least one was on its way, and when the last of them ended."""
    total = 0.0
    for since, until, *_ in sorted(crossings):
        total += max(0.0, until - max(since, covered))
        covered = max(covered, until)
    return total, covered


class Link:
    """How busy all measured connections of a trainer are, by kind of traffic, as seen from its end.

    Messages share the network, so that their times must not be added up: under prefetching several are on their way at
    once. What counts is the time in which any is, from the request until the answer is here; how long a server says
    that it had the request is taken off the end of each. Ids are what a pull sends there, floats everything else.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._crossed: dict[str, deque[Crossing]] = {}
        self._covered: dict[str, float] = {}
        self._fresh_since: dict[str, float] = {}
        self._lock = threading.Lock()

    def crossed(self, kind: str, crossing: Crossing) -> None:
        """Notes a message; one that began before the kind was forgotten does not count."""
        with self._lock:
            if crossing.since >= self._fresh_since.get(kind, -math.inf):
                self._crossed.setdefault(kind, deque(maxlen=MOST_KEPT)).append(crossing)

    def take(self, kind: str) -> tuple[float, int, int]:
        """What has crossed since the last call, as the last three of `Measured`."""
        with self._lock:
            found = self._crossed.pop(kind, ())
            busy, self._covered[kind] = busy_s(found, self._covered.get(kind, -math.inf))
        return busy, sum(crossing.fixed_bytes for crossing in found), sum(crossing.float_bytes for crossing in found)

    def forget(self, kind: str) -> None:
        """What is on its way now is of another codec than what follows."""
        with self._lock:
            self._fresh_since[kind] = self.clock()
            self._crossed.pop(kind, None)


@dataclass(frozen=True)
class MeasuredConnection(Connection):
    """A connection to an embedding or dense server whose messages a `Link` sees."""

    inner: Connection
    link: Link

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        kind = KINDS.get(method)
        if kind is None:
            return self.inner.call(method, payload, timeout_s)
        sent, since = sum(tensor.nbytes for tensor in payload.tensors), self.link.clock()
        answer = self.inner.call(method, payload, timeout_s)

        def answered(error: BaseException | None) -> None:
            if error is None:
                found, now = answer.result(), self.link.clock()
                came = sum(tensor.nbytes for tensor in found.tensors)
                fixed, floats = (sent, came) if kind == "pull" else (0, sent + came)
                served_s = min(max(0.0, found.served_s), now - since)
                self.link.crossed(kind, Crossing(since, now - served_s, fixed, floats))

        answer.then(answered)
        return answer

    def close(self) -> None:
        self.inner.close()


STRETCH_S = 1.0
"""A trainer looks so often at what it measured."""


class CodecChoice:
    """Measures a trainer's link and steps, and has `auto` choose codecs by that, each kind of traffic for itself.

    Where nothing is to be chosen, it is not in anybody's way: channels and connections are the ordinary ones.
    `decisions` are all that was decided so far, in sentences, in order.

    Args:
        codecs: by kind of traffic.
        workers: of the trainer.
        overlapped: pulls are prefetched.
        elastic: the dense part is merged in the background, in whatever time the network has left.
    """

    def __init__(
        self,
        codecs: Mapping[str, Codec],
        workers: int = 1,
        overlapped: bool = True,
        elastic: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._codecs, self._workers, self._elastic, self._clock = codecs, workers, elastic, clock
        self._link = Link(clock)
        self._lock = threading.Lock()
        self._choosers = {}
        for kind, codec in codecs.items():
            if isinstance(codec, Auto):
                default = OVERLAPPED if overlapped else IN_LINE
                self._choosers[kind] = Chooser(
                    [level.name for level in codec.levels],
                    [float_bytes(level) for level in codec.levels],
                    default if codec.share is None else codec.share,
                    codec.stay_s,
                    elastic=elastic and kind == "dense",
                )
        self._since = clock()
        self._steps, self._computed_s, self._waited_s = 0, 0.0, 0.0
        self.decisions: tuple[str, ...] = ()

    def channel(self, kind: str, counter: WireCounter) -> Channel:
        """A channel of that kind; those of one kind change together."""
        codec, chooser = self._codecs[kind], self._choosers.get(kind)
        if chooser is None:
            return Channel(kind, codec.levels[0], counter)
        return Channel(kind, codec, counter, lambda: chooser.codec)

    def measured(self, connection: Connection) -> Connection:
        """A connection to a server, measured if anything is to be chosen."""
        return MeasuredConnection(connection, self._link) if self._choosers else connection

    def stepped(self, computed_s: float, waited_s: float) -> None:
        """A worker has made a step: what it computed, and what it waited for before and after. In any thread."""
        if not self._choosers:
            return
        with self._lock:
            self._steps += 1
            self._computed_s += computed_s
            self._waited_s += waited_s
            if (now := self._clock()) - self._since >= STRETCH_S and self._steps >= LEAST_STEPS:
                self._look(now)

    @property
    def names(self) -> dict[str, str]:
        """The codec in use by kind, where it is chosen here."""
        return {kind: chooser.codec for kind, chooser in self._choosers.items()}

    def _look(self, now: float) -> None:
        traffic = {kind: self._link.take(kind) for kind in ("pull", "push", "dense")}
        workers = self._workers
        for kind, chooser in self._choosers.items():
            seen, before = traffic[kind], chooser.codec
            if self._elastic and kind == "dense":
                seen = max(traffic["pull"], traffic["push"])
            why = chooser.judge(Measured(self._steps, self._computed_s / workers, self._waited_s / workers, *seen), now)
            if why is not None:
                told = f"compression.{kind}: {chooser.codec} instead of {before}, because {why}"
                self.decisions = (*self.decisions, told)
                self._link.forget(kind)
        self._since, self._steps, self._computed_s, self._waited_s = now, 0, 0.0, 0.0
