"""Counts of what happened before a given week, by key: the one place that keeps the future out of the features.

`E` events, `Q` questions. A moment is `key * 64 + week`, weeks lie in 1 … 63.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

WEEK_BITS = 6


def moment(key: Integers, week: Integers | int) -> Integers:
    """A number that orders by key and then by week."""
    return (key << WEEK_BITS) | week


@dataclass(frozen=True)
class History:
    """Events in the order of their moments, `[E]`."""

    moments: Integers

    @staticmethod
    def of(key: Integers, week: Integers) -> "History":
        """Events with their keys and weeks, `[E]` each, in any order."""
        return History(np.sort(moment(key, week)))

    def before(self, key: Integers, week: Integers, weeks: int = 1 << WEEK_BITS) -> Integers:
        """Events with the same key in the `weeks` weeks before `week`, that week itself left out, `[Q]`."""
        first = np.maximum(week - weeks, 0)
        return self._position(key, week) - self._position(key, first)

    def weeks_since(self, key: Integers, week: Integers) -> Integers:
        """Weeks from the last event with the same key before `week`, at least 1; 64 if there is none, `[Q]`."""
        last = np.maximum(self._position(key, week) - 1, 0)
        if len(self.moments) == 0:
            return np.full(len(key), 1 << WEEK_BITS)
        found = self.moments[last]
        same = (found >> WEEK_BITS == key) & (found < moment(key, week))
        return np.where(same, week - (found & ((1 << WEEK_BITS) - 1)), 1 << WEEK_BITS)

    def _position(self, key: Integers, week: Integers) -> Integers:
        return np.searchsorted(self.moments, moment(key, week))


@dataclass(frozen=True)
class Sums:
    """Running sums of values by key and week, for keys `0 … K − 1`: `[K, 64]`, week w at position w."""

    running: Floats

    @staticmethod
    def of(key: Integers, week: Integers, value: Floats, keys: int) -> "Sums":
        """Values of events, `[E]` each."""
        sums = np.bincount(moment(key, week), weights=value, minlength=keys << WEEK_BITS)
        return Sums(np.cumsum(sums.reshape(keys, 1 << WEEK_BITS), axis=1))

    def before(self, key: Integers, week: Integers) -> Floats:
        """The sum over the weeks before `week`, `[Q]`."""
        return self.running[key, week - 1]
