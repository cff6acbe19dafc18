"""The language of scripted failures, `recovery.inject`: who is made to fail when, alike in every run.

    gamma:mean_s=5,seed=3                         one embedding server every 5 s on average
    gamma:mean_epochs=0.25,shape=4,share=0.5      half of them at once, in more even steps
    at:0.45+0.9,unit=epoch,index=0                the first one after 45 % and after 90 % of an epoch
    at:30,unit=s,kind=trainer;gamma:mean_s=20     several schedules side by side

A schedule is a kind of times and its options. A new kind is one class here or in a module of this folder.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from shadowsync.errors import ConfigError
from shadowsync.registry import Listed, build_described, choose

AT_ONCE = 100
KEY = "recovery.inject"
Kind = Literal["embedding", "trainer", "dense", "reader"]
Unit = Literal["s", "epoch"]


@dataclass(frozen=True)
class Failure:
    """Roles of a kind that fail at the same moment; `indices` are in ascending order.

    `at` is in `unit`: seconds since training began, or passes over the data (0.5 is the middle of the first epoch,
    counted in samples trained, and 1.5 that of the second).
    """

    at: float
    unit: Unit
    kind: Kind
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FailureTimes(ABC):
    """One schedule: when somebody fails, and who. The attributes are in the reference of the configuration.

    Attributes:
        kind: of the roles that fail.
        share: of them fails at once, rounded, at least one; without `share` and `index` it is one.
        index: exactly these fail each time, counted from 0. Otherwise they are drawn anew each time.
        seed: of all that is drawn.
    """

    name: ClassVar[str]
    leading: ClassVar[str | None] = None
    """The option that may stand first without its name."""

    kind: Kind = "embedding"
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    index: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Listed] | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.share is not None and self.index is not None:
            raise ValueError("give share or index, not both")

    @property
    @abstractmethod
    def counted_in(self) -> Unit: ...

    @abstractmethod
    def times(self) -> Iterator[float]:
        """When somebody fails, in ascending order, in the unit `counted_in`."""

    def check_roles(self, numbers: Mapping[str, int]) -> None:
        """Raises `ConfigError` if there are no such roles among so many of each kind."""
        number = numbers.get(self.kind, 0)
        if number <= max(self.index or (0,)):
            has = f"it has {number}, counted from 0" if number else "it has none"
            raise ConfigError(f"{KEY}: this job has no {self.kind} {max(self.index or (0,))} that could fail; {has}")

    def failures(self, number: int) -> Iterator[Failure]:
        """The failures among so many roles of its kind."""
        dice = np.random.default_rng((self.seed, 1))
        together = 1 if self.share is None else struck_at_once(self.share, number)
        for at in self.times():
            who = self.index or dice.choice(number, together, replace=False).tolist()
            yield Failure(at, self.counted_in, self.kind, tuple(sorted(set(who))))


def struck_at_once(share: float, number: int) -> int:
    """How many of so many roles a failure takes that takes this share of them."""
    return max(1, math.floor(share * number + 0.5))


@dataclass(frozen=True, kw_only=True)
class Gamma(FailureTimes):
    """Times between failures drawn from a gamma distribution, as in CPR's emulation (arXiv 2011.02999).

    Attributes:
        mean_s: mean time between failures in seconds, from 0.001 on, or
        mean_epochs: in passes over the data, from 0.0001 on, which does not depend on the machine.
        shape: of the distribution, from 0.01 on: 1 for failures without memory, more for even steps, less for bursts.
        count: how many failures there are; None: until the job ends.
    """

    name: ClassVar[str] = "gamma"

    mean_s: Annotated[float, Field(ge=1e-3, allow_inf_nan=False)] | None = None
    mean_epochs: Annotated[float, Field(ge=1e-4, allow_inf_nan=False)] | None = None
    shape: Annotated[float, Field(ge=0.01, le=1e6)] = 1.0
    count: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mean_s is None) == (self.mean_epochs is None):
            raise ValueError("give mean_s or mean_epochs, for instance gamma:mean_s=5")

    @property
    def counted_in(self) -> Unit:
        return "epoch" if self.mean_s is None else "s"

    def times(self) -> Iterator[float]:
        dice = np.random.default_rng(self.seed)
        mean, at = self.mean_s or self.mean_epochs or 0.0, 0.0
        for _ in itertools.count() if self.count is None else range(self.count):
            at += float(dice.gamma(self.shape, mean / self.shape))
            yield at


@dataclass(frozen=True, kw_only=True)
class At(FailureTimes):
    """Fixed times.

    Attributes:
        unit: `s` for seconds since training began, `epoch` for passes over the data.
        at: the times, joined by `+`.
    """

    name: ClassVar[str] = "at"
    leading: ClassVar[str | None] = "at"

    at: Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Listed]
    unit: Unit = "s"

    @property
    def counted_in(self) -> Unit:
        return self.unit

    def times(self) -> Iterator[float]:
        return iter(sorted(self.at))


class FailureScript:
    """Hands out the failures of a job as their time comes, each once: of several schedules side by side.

    The job has so many roles of each kind (`numbers`); `ConfigError` if a schedule names others.
    """

    def __init__(self, schedules: Sequence[FailureTimes], numbers: Mapping[str, int]) -> None:
        for schedule in schedules:
            schedule.check_roles(numbers)
        self._streams = [schedule.failures(numbers[schedule.kind]) for schedule in schedules]
        self._next = [next(stream, None) for stream in self._streams]

    @property
    def next_epochs(self) -> float | None:
        """When the next failure is that is counted in passes over the data; None if there is none."""
        return min((one.at for one in self._next if one is not None and one.unit == "epoch"), default=None)

    def due(self, seconds: float, epochs: float) -> list[Failure]:
        """What fails now, after so many seconds of training and so many passes over the data, schedule by schedule.

        Of each schedule at most `AT_ONCE`, so that one that runs far ahead holds nobody up; the rest comes next time.
        """
        found: list[Failure] = []
        for i, stream in enumerate(self._streams):
            for _ in range(AT_ONCE):
                failure = self._next[i]
                if failure is None or failure.at > (seconds if failure.unit == "s" else epochs):
                    break
                found.append(failure)
                self._next[i] = next(stream, None)
        return found


def parse_schedules(text: str) -> tuple[FailureTimes, ...]:
    """The schedules that a text in the language above describes; `ConfigError` if it is not in the language."""
    parts = [part.strip() for part in text.split(";")]
    if not all(parts):
        raise ConfigError(f"{KEY}={text}: there is no schedule before or after a semicolon")
    found: list[FailureTimes] = []
    for part in parts:
        name, _, words = (piece.strip() for piece in part.partition(":"))
        member = choose(KEY, name, "shadowsync.recovery", FailureTimes)
        found.append(build_described(KEY, part, words, {name: member}))
    return tuple(found)
