"""Counts of what happened before a given week, by key: the one place that keeps the future out of the features.

`E` events, `Q` questions, `K` keys. A moment is `key · 64 + week`; weeks lie in 1 … 63.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

WEEKS = 64


def moment(key: Integers, week: Integers | int) -> Integers:
    """A number that orders by key and then by week."""
    return key * WEEKS + week


def distinct(values: Integers) -> Integers:
    """The different values, ascending; by sorting, which for many values is several times faster than `np.unique`."""
    ordered = np.sort(values)
    first: Integers = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return first


@dataclass(frozen=True)
class History:
    """Events in the order of their moments, `[E]`: for many keys with few events each."""

    moments: Integers

    @staticmethod
    def of(key: Integers, week: Integers) -> "History":
        """Events with their keys and weeks, `[E]` each, in any order."""
        return History(np.sort(moment(key, week)))

    def before(self, key: Integers, week: Integers) -> Integers:
        """Events with the same key in the weeks before `week`, `[Q]`."""
        return self.position(key, week) - self.position(key, np.zeros_like(week))

    def weeks_since(self, key: Integers, week: Integers) -> Integers:
        """Weeks from the last event with the same key before `week`, at least 1; 64 if there is none, `[Q]`."""
        position = self.position(key, week)
        last = np.append(self.moments, -WEEKS)[position - 1]  # position 0 takes the appended one, which fits no key
        return np.where(last // WEEKS == key, week - last % WEEKS, WEEKS)

    def position(self, key: Integers, week: Integers) -> Integers:
        """How many events come before the start of `week` of `key`, `[Q]`."""
        return np.searchsorted(self.moments, moment(key, week))


@dataclass(frozen=True)
class Sums:
    """Running sums of values over the weeks, `[K, 64]`: for few keys with many events each."""

    running: Floats

    @staticmethod
    def of(moments: Integers, keys: int, values: Floats | None = None) -> "Sums":
        """Sums of `values` (None: counts) of events, `[E]` each, by their moments with keys `0 … keys − 1`."""
        sums = np.bincount(moments, weights=values, minlength=keys * WEEKS).astype(np.float64)
        return Sums(np.cumsum(sums.reshape(keys, WEEKS), axis=1))

    def before(self, key: Integers, week: Integers, weeks: int = WEEKS) -> Floats:
        """The sum over the `weeks` weeks before `week`, that week itself left out, `[Q]`."""
        sums: Floats = self.running[key, week - 1] - self.running[key, np.maximum(week - 1 - weeks, 0)]
        return sums
