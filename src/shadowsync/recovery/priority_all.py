"""Rows in turn: the plain partial checkpoint, spread over time."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.recovery.priority import RowPriority, Tracker


@dataclass(frozen=True)
class EveryRow(RowPriority):
    """Every row has its turn: after 1/r saves all of them were written. Costs nothing, observes nothing."""

    name: ClassVar[str] = "all"

    def tracker(self, weights: Tensor, share: float, seed: int) -> Tracker:
        return RoundRobin(len(weights))

    def memory_bytes(self, rows: int, dim: int, share: float) -> int:
        return 0


class RoundRobin(Tracker):
    """Remembers where the next save begins."""

    bytes = 0

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._next = 0
        self._after = 0

    def seen(self, rows: Tensor) -> None:
        """Which rows change is of no matter."""

    def pick(self, count: int, weights: Tensor) -> Tensor:
        count = min(count, self.rows)
        self._after = (self._next + count) % self.rows
        return ((self._next + torch.arange(count)) % self.rows).sort().values

    def saved(self, rows: Tensor, weights: Tensor) -> None:
        self._next = self._after
