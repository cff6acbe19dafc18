"""The weakest codec that keeps the network off the critical path, found while a job runs.

Pure: what was measured and the time are handed in, decisions come out.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.int4 import Int4
from shadowsync.compression.int8 import NEAREST, ROUNDING, Block, Int8, Rounding, Seed
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
    """Each trainer measures its link and its steps, and sends in the weakest codec of those (`plain`, `bf16`,
    `int8`, `int4`, and where `strongest` says so `threshold`) with which the network is busy for less than `share` of
    the time that it computes. Where nothing can be measured it is `weakest`: in one process nothing is sent.

    Messages say which of these they are in, so that both ends need not agree on anything else; the codec of
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

    @functools.cached_property
    def levels(self) -> tuple[Codec, ...]:
        rounding, seed, block = self.rounding, self.seed, self.block
        every: tuple[Codec, ...] = (
            Plain(),
            Bf16(),
            Int8(rounding, seed, block),
            Int4(rounding, seed, block),
            Threshold(self.keep or _KEEP, values="int8", feedback=False, rounding=rounding, seed=seed, block=block),
        )
        return every[_ORDER.index(self.weakest) : _ORDER.index(self.strongest) + 1]

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.strongest == "bf16":
            yield from ((option, "with strongest=bf16: set strongest=int8 or int4") for option in ROUNDING)
        if self.rounding == "nearest":
            yield "seed", NEAREST
        if self.strongest != "threshold":
            yield "keep", f"with strongest={self.strongest}: set strongest=threshold"

    @property
    def by_feature(self) -> bool:
        return self.levels[0].by_feature

    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        return self.levels[0].encode(tensor, state, groups)

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return self.levels[0].decode(frames, shape)

    def restored(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.levels[0].restored(tensors)

    def resolved(self, key: str) -> Self:
        if not key.startswith("compression."):
            raise ConfigError(f"{key}=auto has nothing to measure there; allowed: {', '.join(_ORDER)}")
        if key == "compression.dense" and self.strongest == "threshold":
            raise ConfigError(
                f"{key}.strongest=threshold cannot be chosen by auto: what a threshold holds back would come late, or "
                f"not at all, when the codec changes; allowed: bf16, int8, int4, or {key}=threshold by itself"
            )
        return self


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
        names: of the codecs, weakest first.
        sizes: bytes of one float in each.
        share: as the option, resolved.
        stay_s: as the option.
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
        """The name of the codec in use."""
        return self._names[self._at]

    def judge(self, seen: Measured, now: float) -> str | None:
        """Takes a stretch of time that ended `now`, all of it with the codec in use.

        Returns:
            Why the codec is another one from now on, a sentence without its end; None if it is not.
        """
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
        if towards > 0 and now >= self._futile_until:
            if self._went_down:
                self._rest_s = min(2 * self._rest_s, MOST_STAYS * self._stay_s)
            before, self._futile_until = (self._at, seen.load), -math.inf
            self._begin(target, now)
            self._before = before
            return f"{seen.words}, above share={self._share:g}, and workers wait"
        if towards < 0 and stayed_s >= self._rest_s:
            expected = self._expected(target, seen)
            self._begin(target, now)
            self._went_down = True
            return f"{seen.words}, so that it is expected at {expected:.2g} of share={self._share:g}"
        return None

    def _target(self, seen: Measured) -> int:
        """The position of the codec that the stretch calls for."""
        at, last = self._at, len(self._names) - 1
        if seen.load > self._share:
            if not seen.waits:
                return at
            last = min(at + 1, last) if self._elastic else last
            return next((place for place in range(at + 1, last) if self._expected(place, seen) <= self._share), last)
        weaker = range(max(0, at - 1) if self._elastic else 0, at)
        return next((place for place in weaker if self._expected(place, seen) <= EVEN * self._share), at)

    def _expected(self, place: int, seen: Measured) -> float:
        """The load with another codec, at the speed that was measured."""
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
