"""The weakest codec that keeps the network off the critical path, found while a job runs.

Pure: what was measured and the time are handed in, decisions come out.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.int4 import Int4
from shadowsync.compression.int8 import Int8
from shadowsync.compression.low_bit import Block, Rounding, Seed
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.config import LONGEST_S
from shadowsync.errors import ConfigError

OVERLAPPED, IN_LINE = 0.8, 0.1
"""`share` where pulls are prefetched, and where a step waits for its pull."""
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

_KEEP = 0.05
_ORDER = ("plain", "bf16", "int8", "int4", "threshold")
_Weakest = Literal["plain", "bf16", "int8", "int4"]
_Strongest = Literal["bf16", "int8", "int4", "threshold"]


@dataclass(frozen=True)
class Auto(Codec):
    """Each trainer measures its link and its steps, and sends in the weakest codec of a ladder (`plain`, `bf16`,
    `int8`, `int4`, and where `strongest` says so `threshold`) with which the network is busy for less than `share` of
    the time that it computes. Where nothing can be measured it is `weakest`: in one process nothing is sent.

    Messages say which codec of the ladder they are in, so that both ends need not agree on anything else; the codec of
    a pull's answer is the one that was asked for.
    """

    name: ClassVar[str] = "auto"

    weakest: Annotated[_Weakest, Field(description="what it starts with; a stronger one always rounds")] = "plain"
    strongest: Annotated[
        _Strongest, Field(description="the last resort; threshold drops what is small, for pull and push")
    ] = "int4"
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=10,
            description="seconds that the network may be busy in each second of computing; more compresses less. null: "
            f"{OVERLAPPED} where pulls are prefetched, {IN_LINE} where each step waits for its pull",
        ),
    ] = None
    stay_s: Annotated[
        float,
        Field(
            ge=0,
            le=LONGEST_S,
            allow_inf_nan=False,
            description="least seconds between two changes; more follows later and flaps less",
        ),
    ] = 5.0
    keep: Annotated[
        float | None, Field(gt=0, le=1, description=f"of threshold, with values in int8; null is {_KEEP}")
    ] = None
    rounding: Rounding = "nearest"
    seed: Seed = 0
    block: Block = None

    def __post_init__(self) -> None:
        if _ORDER.index(self.weakest) >= _ORDER.index(self.strongest):
            raise ValueError(
                f"weakest={self.weakest} has to come before strongest={self.strongest} among {', '.join(_ORDER)}"
            )

    @property
    def ladder(self) -> tuple[Codec, ...]:
        return _ladder(self)

    @property
    def by_feature(self) -> bool:
        return self.ladder[0].by_feature

    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        return self.ladder[0].encode(tensor, state, groups)

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return self.ladder[0].decode(frames, shape)

    def restored(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.ladder[0].restored(tensors)

    def resolved(self, key: str) -> Self:
        if not key.startswith("compression."):
            raise ConfigError(f"{key}=auto has nothing to measure there; allowed: {', '.join(_ORDER)}")
        if key == "compression.dense" and self.strongest == "threshold":
            raise ConfigError(
                f"{key}.strongest=threshold cannot be chosen by auto: what a threshold holds back would come late, or "
                f"not at all, when the codec changes; allowed: bf16, int8, int4, or {key}=threshold by itself"
            )
        return self


@functools.cache
def _ladder(auto: Auto) -> tuple[Codec, ...]:
    rounding, seed, block = auto.rounding, auto.seed, auto.block
    rungs: tuple[Codec, ...] = (
        Plain(),
        Bf16(),
        Int8(rounding, seed, block),
        Int4(rounding, seed, block),
        Threshold(auto.keep or _KEEP, values="int8", feedback=False, rounding=rounding, seed=seed, block=block),
    )
    return rungs[_ORDER.index(auto.weakest) : _ORDER.index(auto.strongest) + 1]


@dataclass(frozen=True)
class Measured:
    """What a trainer saw of one kind of traffic over a stretch of time.

    Attributes:
        steps: that its workers made.
        computed_s: that a worker computed, the mean over the workers.
        waited_s: that a worker waited for vectors, for parameters, or until gradients were taken; the same mean.
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
    def waits(self) -> bool:
        """Something holds the workers up."""
        return self.waited_s > WAITING * (self.waited_s + self.computed_s)

    @property
    def says_something(self) -> bool:
        """Enough was done and sent."""
        return self.steps >= LEAST_STEPS and self.computed_s > 0 and self.busy_s > 0 and self.float_bytes > 0

    @property
    def words(self) -> str:
        """For a person."""
        speed = (self.fixed_bytes + self.float_bytes) / self.busy_s / 1e6
        return (
            f"the link carries {speed:.3g} MB/s and is busy for {1e3 * self.busy_s / self.steps:.3g} ms in each step "
            f"that computes for {1e3 * self.computed_s / self.steps:.3g} ms"
        )


@dataclass(frozen=True)
class Change:
    """Another codec from now on.

    Attributes:
        codec: its name.
        why: a sentence without its end.
    """

    codec: str
    why: str


@dataclass(frozen=True)
class Rules:
    """What a `Chooser` goes by.

    Attributes:
        names: of the codecs, weakest first.
        sizes: bytes of one float in each.
        share: as the option, resolved.
        stay_s: as the option.
        elastic: this traffic takes whatever the link has left, and no step waits for it (replicas merged in the
            background). Its own load says nothing then: what is measured is the traffic that it gets in the way of,
            and codecs change by one at a time.
    """

    names: tuple[str, ...]
    sizes: tuple[float, ...]
    share: float
    stay_s: float
    elastic: bool = False


@dataclass(frozen=True)
class _State:
    """Of a `Chooser`.

    Attributes:
        at: position of the codec in use.
        since: when it began; None before anything was seen.
        stretches: seen of it, of those that say something.
        towards: 1 if the last of them called for a stronger codec, -1 for a weaker one, 0 for neither.
        streak: how many of them in a row did.
        before: the position and the load before a change to a stronger codec, until it is clear what that brought.
        rest_s: least seconds until a weaker codec is tried.
        futile_until: nothing stronger is tried before.
        went_down: the last change was to a weaker codec.
    """

    at: int = 0
    since: float | None = None
    stretches: int = 0
    towards: int = 0
    streak: int = 0
    before: tuple[int, float] | None = None
    rest_s: float = 0.0
    futile_until: float = -math.inf
    went_down: bool = False


class Chooser:
    """The rule for one kind of traffic of one trainer.

    The network is off the critical path as long as it is busy for less than `share` of the time that is computed; if it
    is on it, workers wait, and both have to be seen. What other codecs would take is their bytes at the speed that was
    measured: so it goes at once to the weakest that suffices, else to the strongest. It goes back to a weaker one that
    is expected well below `share`. Either way `STEADY` stretches in a row have to call for it, and `stay_s` to have
    passed. Whoever had to come back from a weaker codec waits twice as long before the next try. And where a stronger
    codec does not bring what its bytes promised (delay or processors take the time), it goes back and lets that be for
    a while.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._state = _State(rest_s=rules.stay_s)

    @property
    def codec(self) -> str:
        """The name of the codec in use."""
        return self._rules.names[self._state.at]

    def judge(self, seen: Measured, now: float) -> Change | None:
        """Takes a stretch of time that ended `now`, all of it with the codec in use; what is to change, if anything."""
        if self._state.since is None:
            self._state = replace(self._state, since=now)
        if not seen.says_something:
            return None
        target = self._target(seen)
        state = self._state = _counted(self._state, (target > self._state.at) - (target < self._state.at))
        stayed_s = now - (state.since or 0.0)
        if state.stretches < STEADY or stayed_s < self._rules.stay_s:
            return None
        if (change := self._regret(seen, now)) is not None or state.streak < STEADY:
            return change
        if state.towards > 0 and now >= state.futile_until:
            return self._stronger(target, seen, now)
        return self._weaker(target, seen, now) if state.towards < 0 and stayed_s >= state.rest_s else None

    def _target(self, seen: Measured) -> int:
        """The position of the codec that the stretch calls for."""
        rules, at = self._rules, self._state.at
        last = len(rules.names) - 1
        if seen.load > rules.share:
            if not seen.waits:
                return at
            last = min(at + 1, last) if rules.elastic else last
            return next((place for place in range(at + 1, last) if self._expected(place, seen) <= rules.share), last)
        weaker = range(max(0, at - 1) if rules.elastic else 0, at)
        return next((place for place in weaker if self._expected(place, seen) <= EVEN * rules.share), at)

    def _expected(self, place: int, seen: Measured) -> float:
        """The load with another codec, at the speed that was measured."""
        if self._rules.elastic:
            return seen.load
        return seen.load * self._bytes(place, seen) / self._bytes(self._state.at, seen)

    def _bytes(self, place: int, seen: Measured) -> float:
        sizes = self._rules.sizes
        return seen.fixed_bytes + seen.float_bytes * sizes[place] / sizes[self._state.at]

    def _stronger(self, target: int, seen: Measured, now: float) -> Change:
        state, rules = self._state, self._rules
        rest_s = min(2 * state.rest_s, MOST_STAYS * rules.stay_s) if state.went_down else state.rest_s
        self._state = _State(target, now, before=(state.at, seen.load), rest_s=rest_s)
        return Change(self.codec, f"{seen.words}, above share={rules.share:g}, and workers wait")

    def _weaker(self, target: int, seen: Measured, now: float) -> Change:
        expected, rules = self._expected(target, seen), self._rules
        before = self._state
        self._state = _State(target, now, rest_s=before.rest_s, went_down=True, futile_until=before.futile_until)
        return Change(self.codec, f"{seen.words}, so that it is expected at {expected:.2g} of share={rules.share:g}")

    def _regret(self, seen: Measured, now: float) -> Change | None:
        """Judges the last change to a stronger codec, once."""
        state, rules = self._state, self._rules
        if state.before is None or rules.elastic:
            return None
        place, load = state.before
        self._state = replace(state, before=None)
        promised = 1 - self._bytes(state.at, seen) / self._bytes(place, seen)
        brought = 1 - seen.load / load
        if seen.load <= rules.share or brought >= WORTH * promised:
            return None
        self._state = _State(place, now, rest_s=state.rest_s, futile_until=now + FUTILE_STAYS * rules.stay_s)
        stronger = rules.names[state.at]
        return Change(
            self.codec,
            f"{stronger} sends {promised:.0%} fewer bytes and took {max(0.0, brought):.0%} off the time of the "
            "network, so it is not bytes that take it",
        )


def _counted(state: _State, towards: int) -> _State:
    streak = state.streak + 1 if towards == state.towards else 1
    return replace(state, stretches=state.stretches + 1, towards=towards, streak=streak)
