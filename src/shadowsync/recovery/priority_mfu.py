"""MFU: the rows most frequently used since they were saved."""

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate
from shadowsync.recovery.priority import RowPriority, checked, largest


class MostFrequentlyUsed(RowPriority):
    """An access counter per row, less what a saved row was picked for (CPR-MFU, arXiv 2011.02999).

    In the paper the counter is set to 0, which forgets the accesses while the save was being written. Here only a save
    of every row does so.

    Costs 4 bytes a row, at a push 16 µs for 13,000 accesses (one core), at a save three passes over
    the counters, and between the pick and the word that its rows are saved 12 bytes for each of them. Among rows of as
    many accesses as the last one taken, those taken change from save to save.
    """

    name: ClassVar[str] = "mfu"

    def __init__(self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros) -> None:
        self._counts = allocate(*self.seen_parts(len(weights), share)[0])  # accesses of each row, int32 `[R]`
        self._turn = 0
        self._forget()

    @classmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        return [(rows, torch.int32)]

    def seen(self, rows: Tensor) -> None:
        checked(rows, len(self._counts))
        ones = _ones()
        for start in range(0, len(rows), len(ones)):
            part = rows[start : start + len(ones)]
            self._counts.scatter_add_(0, part, ones[: len(part)])

    def begin(self) -> None:
        self._forget()

    def pick(self, count: int, weights: Tensor) -> Tensor:
        self._turn = (self._turn + count) % len(self._counts)
        rows = torch.from_numpy(largest(self._counts.numpy(), count, self._turn))
        self._picked, self._as_picked, self._told = rows, self._counts[rows], 0
        return rows

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        here, there = _places(rows, self._picked)
        left = torch.zeros(len(rows), dtype=torch.int32)
        left[here] = (self._counts[rows[here]] - self._as_picked[there]).clamp_(min=0)  # threads may lose an access
        self._counts[rows] = left
        self._as_picked[there] = 0
        self._told += len(there)
        if self._told >= len(self._picked):
            self._forget()

    def loaded(self, rows: Tensor, weights: Tensor) -> None:
        """What was picked of them is not what they are now."""
        self._as_picked[_places(rows, self._picked)[1]] = 0
        self._counts[rows] = 0

    def _forget(self) -> None:
        """Nothing is picked."""
        self._picked, self._as_picked = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
        self._told = 0


def _places(rows: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Where rows that were picked stand among `rows`, and where among those picked, which ascend."""
    if not len(picked):
        return picked, picked
    at = torch.searchsorted(picked, rows).clamp_(max=len(picked) - 1)
    here = (picked[at] == rows).nonzero().flatten()
    return here, at[here]


@functools.cache
def _ones() -> Tensor:
    """What is added, 64 KB for all trackers: a single one, expanded, would take four times as long."""
    return torch.ones(1 << 14, dtype=torch.int32)
