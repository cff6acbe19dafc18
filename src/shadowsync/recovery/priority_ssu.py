"""SSU: a sample of the rows used since the last save."""

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.recovery.priority import RowPriority, Tracker, checked

PERIOD = 2
_INT32_ROWS = 1 << 31


@dataclass(frozen=True)
class SubSampledUsed(RowPriority):
    """A list of r · R entries from every second access, emptied at each save (CPR-SSU, arXiv 2011.02999).

    Costs 4 bytes for each of the r · R entries (8 in a shard beyond 2³¹ rows) and at a push 7 µs for 13,000 accesses
    (one core). When the list is full, the entries of a push take the place of a run that begins at
    a random entry: each entry is as likely to go as in the paper, but neighbours go together, which is one copy
    instead of a random number for each. A row may be in the list several times, is written once, and is the harder
    to drive out for it.
    """

    name: ClassVar[str] = "ssu"

    def tracker(self, weights: Tensor, share: float, seed: int) -> Tracker:
        return Sample(len(weights), _capacity(len(weights), share), seed)

    def memory_bytes(self, rows: int, dim: int, share: float) -> int:
        return _capacity(rows, share) * np.dtype(_entry(rows)).itemsize


class Sample(Tracker):
    """The list: `[capacity]`, of which the first `_filled` count."""

    def __init__(self, rows: int, capacity: int, seed: int) -> None:
        self.rows = rows
        self._list: NDArray[Any] = np.zeros(capacity, _entry(rows))
        self.bytes = self._list.nbytes
        self._filled = 0
        self._seen = 0
        self._random = random.Random(seed)  # noqa: S311 (nothing is kept secret with it)

    def seen(self, rows: Tensor) -> None:
        found = checked(rows, self.rows)
        capacity = len(self._list)
        sample = found[self._seen % PERIOD :: PERIOD][-capacity:]
        self._seen += len(found)
        filled = self._filled
        room = min(len(sample), capacity - filled)
        self._list[filled : filled + room] = sample[:room]
        self._filled = filled + room
        if room < len(sample):
            self._replace(sample[room:])

    def _replace(self, sample: NDArray[np.int64]) -> None:
        start = int(self._random.random() * len(self._list))
        room = min(len(sample), len(self._list) - start)
        self._list[start : start + room] = sample[:room]
        self._list[: len(sample) - room] = sample[room:]

    def pick(self, count: int, weights: Tensor) -> Tensor:
        rows = np.unique(self._list[: self._filled]).astype(np.int64)
        if len(rows) > count:
            rows = rows[sorted(self._random.sample(range(len(rows)), count))]
        return torch.from_numpy(rows)

    def saved(self, rows: Tensor, weights: Tensor) -> None:
        self._filled = 0


def _capacity(rows: int, share: float) -> int:
    return max(1, math.ceil(share * rows))


def _entry(rows: int) -> type[np.signedinteger[Any]]:
    return np.int32 if rows <= _INT32_ROWS else np.int64
