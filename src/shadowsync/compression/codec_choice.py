"""The codecs of one trainer, of which it may choose some itself while it runs."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from shadowsync.compression.auto import IN_LINE, LEAST_STEPS, OVERLAPPED, Auto, Change, Chooser, Measured, Rules
from shadowsync.compression.channel import Counter, Line, float_bytes
from shadowsync.compression.codec import Codec
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.link import Clock, Link, MeasuredConnection, Traffic

STRETCH_S = 1.0
"""What is measured is looked at so often."""


@dataclass(frozen=True)
class Situation:
    """What the rule has to know of the job.

    Attributes:
        workers: of the trainer, which share its link.
        overlapped: pulls are prefetched.
        elastic: the dense part is merged in the background, in whatever time the network has left.
        collective: all trainers send the dense part in one codec, so that none of them can choose it.
    """

    workers: int = 1
    overlapped: bool = True
    elastic: bool = False
    collective: bool = False


@dataclass(frozen=True)
class ChangingLine(Line):
    """A line whose codec is chosen while the job runs: it has one line for each codec, whose streams are their own."""

    chooser: Chooser = field(kw_only=True, repr=False, compare=False)
    _rungs: dict[str, Line] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def now(self) -> Line:
        name = self.chooser.codec
        found = self._rungs.get(name)
        # setdefault is atomic, as in `stream`
        return found or self._rungs.setdefault(name, Line(self.kind, self.codec.rung(name), self.counter))


class CodecChoice:
    """Measures a trainer's link and steps, and has `auto` choose codecs by that, each kind of traffic for itself.

    Where nothing is to be chosen, it is not in anybody's way: lines and connections are the ordinary ones.

    Args:
        codecs: of the job by kind.
        situation: of the job.
        clock: seconds.
    """

    def __init__(
        self, codecs: Mapping[str, Codec], situation: Situation = Situation(), clock: Clock = time.monotonic
    ) -> None:
        self._codecs, self._situation, self._clock = codecs, situation, clock
        self._link = Link(clock)
        self._lock = threading.Lock()
        self._choosers = {
            kind: Chooser(_rules(kind, codec, situation))
            for kind, codec in codecs.items()
            if isinstance(codec, Auto) and not (kind == "dense" and situation.collective)
        }
        self._since = clock()
        self._steps, self._computed_s, self._waited_s = 0, 0.0, 0.0
        self._told: list[str] = []

    def line(self, kind: str, counter: Counter) -> Line:
        """A line of that kind; those of one kind change together."""
        codec, chooser = self._codecs[kind], self._choosers.get(kind)
        return Line(kind, codec.ladder[0], counter) if chooser is None else _changing(kind, codec, counter, chooser)

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

    @property
    def decisions(self) -> tuple[str, ...]:
        """All that was decided so far, in sentences, in order."""
        return tuple(self._told)

    def _look(self, now: float) -> None:
        traffic = {kind: self._link.take(kind) for kind in ("pull", "push", "dense")}
        for kind, chooser in self._choosers.items():
            before = chooser.codec
            change = chooser.judge(self._measured(kind, traffic), now)
            if change is not None:
                self._told.append(sentence(kind, before, change))
                self._link.forget(kind)
        self._since, self._steps, self._computed_s, self._waited_s = now, 0, 0.0, 0.0

    def _measured(self, kind: str, traffic: Mapping[str, Traffic]) -> Measured:
        seen, workers = traffic[kind], self._situation.workers
        if self._situation.elastic and kind == "dense":
            seen = max(traffic["pull"], traffic["push"])
        return Measured(self._steps, self._computed_s / workers, self._waited_s / workers, *seen)


def sentence(kind: str, before: str, change: Change) -> str:
    """What is told of a change."""
    return f"compression.{kind}: {change.codec} instead of {before}, because {change.why}"


def unmeasured(kind: str, codec: Codec, why: str) -> str:
    """What is told of a choice that is none."""
    return f"compression.{kind}=auto is {codec.ladder[0].name}, because {why}"


def _changing(kind: str, codec: Codec, counter: Counter, chooser: Chooser) -> Line:
    return ChangingLine(kind, codec, counter, chooser=chooser)


def _rules(kind: str, auto: Auto, situation: Situation) -> Rules:
    ladder = auto.ladder
    default = OVERLAPPED if situation.overlapped else IN_LINE
    return Rules(
        names=tuple(codec.name for codec in ladder),
        sizes=tuple(map(float_bytes, ladder)),
        share=default if auto.share is None else auto.share,
        stay_s=auto.stay_s,
        elastic=situation.elastic and kind == "dense",
    )
