"""Which key of a full set loses its row to a new one.

`K` new keys, `W` rows of the set of each.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
KEPT = np.iinfo(np.int64).max
"""The rank of a row that stays."""


@dataclass(frozen=True)
class Eviction(ABC):
    """Ranks rows; ties go to the first."""

    name: ClassVar[str]

    @abstractmethod
    def rank(self, counts: Counts, seen: Counts) -> Counts:
        """The lower, the earlier a row goes, `[K, W]`, given how often its key was looked up and at which sample last;
        at least 0."""

    def yields(self, counts: Counts, times: Counts) -> NDArray[np.bool_]:
        """Whose row goes to the new key, given how often theirs and the new one were looked up, `[K]`."""
        return np.ones(len(counts), dtype=np.bool_)


class LFU(Eviction):
    """The key that was looked up least often, once the new one was twice as often: what a row has learnt is lost with
    its owner, so that keys which are looked up about as often must not take turns."""

    name = "lfu"

    def rank(self, counts: Counts, seen: Counts) -> Counts:
        return counts

    def yields(self, counts: Counts, times: Counts) -> NDArray[np.bool_]:
        return times > 2 * counts


class LRU(Eviction):
    """The key that was not looked up for the longest time."""

    name = "lru"

    def rank(self, counts: Counts, seen: Counts) -> Counts:
        return seen


class Never(Eviction):
    """None: new keys of a full set get no row, unless one there is older than its time to live."""

    name = "never"

    def rank(self, counts: Counts, seen: Counts) -> Counts:
        return np.full_like(counts, KEPT)
