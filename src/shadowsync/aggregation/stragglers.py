"""The language of scripted stragglers: which workers are slow when, alike in every run, for emulated studies.

    share=0.25,slow=3-10,for_s=60,seed=1      a quarter of the workers is 3 to 10 times slower, for a minute on average
    share=0.25,from_s=300,until_s=900         even at first, busy for ten minutes, even again
    index=0+3,slow=5                          the first and the fourth are 5 times slower throughout
    index=0,slow=2; share=0.1                 several side by side: the slowest counts

Pure: the time is handed in, in seconds since training began.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, Field

from shadowsync.config import LONGEST_S
from shadowsync.errors import ConfigError
from shadowsync.registry import Listed, build_described

KEY = "train.stragglers"
_CALM_S = 1e12
MOST_SLOW = 100.0
"""A worker that takes longer looks as if the job hung."""


def _range(given: object) -> object:
    """`3-10` as its ends, `5` as both."""
    if not isinstance(given, str):
        return given
    low, dash, high = given.partition("-")
    return (low, high) if dash else (low, low)


Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Workers that are slow: some at a time, or always the same ones.

    Each worker changes by itself between slow and fast spells of exponential length, in the mean `for_s` and
    `for_s (1 − share) / share`. So at any time, from the first second on, each is slow with probability `share`. A slow
    spell has one factor, drawn evenly from `slow`.

    Attributes:
        share: of the workers that is slow at a time, or
        index: exactly these, throughout.
        slow: times that a batch takes longer, from 1 to 100: a number, or from-to.
        for_s: mean length of a slow spell, from 0.1 s on.
        from_s, until_s: before and from then on, nobody is slow.
    """

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    index: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Listed] | None = None
    slow: Annotated[tuple[Factor, Factor], BeforeValidator(_range)] = (3.0, 10.0)
    for_s: Annotated[float, Field(ge=0.1, le=LONGEST_S, allow_inf_nan=False)] | None = None
    from_s: Seconds = 0.0
    until_s: Annotated[float, Field(gt=0)] = math.inf
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if (self.share is None) == (self.index is None):
            raise ValueError("give share or index, for instance share=0.25,slow=3-10 or index=0,slow=5")
        if self.index is not None and self.for_s is not None:
            raise ValueError("workers given by index are slow throughout: for_s goes with share")
        if self.slow[0] > self.slow[1]:
            raise ValueError(f"slow={self.slow[0]:g}-{self.slow[1]:g}: give the smaller factor first")
        if self.slow[1] > MOST_SLOW:
            raise ValueError(
                f"slow={self.slow[1]:g} is more than {MOST_SLOW:g} times, which looks like a job that hangs: give less"
            )
        if self.from_s >= self.until_s:
            raise ValueError(f"from_s={self.from_s:g} has to be before until_s={self.until_s:g}")

    def spells(self, worker_index: int) -> Iterator[tuple[float, float]]:
        """Of a worker: when the next spell ends, and how many times longer a batch takes in it."""
        dice = np.random.default_rng((self.seed, worker_index))
        if self.share is None:
            yield math.inf, self._slow_factor(dice) if worker_index in (self.index or ()) else 1.0
            return
        slow_s = 60.0 if self.for_s is None else self.for_s
        fast_s = min(_CALM_S, slow_s * (1 - self.share) / self.share)
        end, slow = 0.0, bool(dice.random() < self.share)
        while True:
            end += float(dice.exponential(slow_s if slow else fast_s))
            yield end, self._slow_factor(dice) if slow else 1.0
            slow = not slow

    def _slow_factor(self, dice: np.random.Generator) -> float:
        return float(dice.uniform(*self.slow))


@dataclass
class Stragglers:
    """How slow each worker is at a time. A worker is asked about by one thread at a time.

    Spells are drawn as far as somebody has asked; so the order of the questions does not matter.
    """

    parts: tuple[Slowness, ...]
    _drawn: dict[tuple[int, int], tuple[Iterator[tuple[float, float]], list[float], list[float]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def factor(self, worker_index: int, seconds: float) -> float:
        """How many times longer a batch takes that this worker begins now; 1 is not at all."""
        slowest = 1.0
        for position, part in enumerate(self.parts):
            if part.from_s <= seconds < part.until_s:
                if (key := (position, worker_index)) not in self._drawn:
                    self._drawn[key] = part.spells(worker_index), [], []
                spells, ends, factors = self._drawn[key]
                while not ends or ends[-1] <= seconds:
                    end, factor = next(spells)
                    ends.append(end)
                    factors.append(factor)
                slowest = max(slowest, factors[bisect_right(ends, seconds)])
        return slowest


def parse_stragglers(text: str) -> Stragglers:
    """What a text in the language above describes; `ConfigError` if it is not in the language."""
    given = [part.strip() for part in text.split(";")]
    if not all(given):
        raise ConfigError(f"{KEY}={text}: nothing is given, or nothing before or after a semicolon")
    return Stragglers(tuple(build_described(KEY, part, part, {KEY: Slowness}) for part in given))
