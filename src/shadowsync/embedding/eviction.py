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

    def first_count(self, counts: Counts) -> Counts:
        """Of new keys, given those of the keys that go, `[K]`."""
        return np.ones_like(counts)


class LFU(Eviction):
    """The key that was looked up least often, counted from the count of the key before it in its row, so that what was
    looked up often long ago goes at last (dynamic aging, as in Arlitt et al., "Evaluating content management techniques
    for Web proxy caches", 2000)."""

    name = "lfu"

    def rank(self, counts: Counts, seen: Counts) -> Counts:
        return counts

    def first_count(self, counts: Counts) -> Counts:
        return counts + 1


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
