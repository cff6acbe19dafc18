"""SCAR: the rows that moved furthest since they were saved."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate
from shadowsync.recovery.priority import RowPriority, largest

CHUNK_ROWS = 1 << 16


class Scar(RowPriority):
    """The largest L2 change since saved (Qiao et al. 2019, as CPR-SCAR in arXiv 2011.02999).

    Costs a copy of the weights (+100 %), nothing at a push, and at each save one pass over weights and copy, during
    which 4 bytes a row are taken for the changes.
    """

    name: ClassVar[str] = "scar"
    sees: ClassVar[bool] = False
    compares: ClassVar[bool] = True

    def __init__(self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros) -> None:
        self._saved = weights.detach().clone(memory_format=torch.contiguous_format)

    @classmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        return []

    @classmethod
    def memory_bytes(cls, rows: int, dim: int, share: float) -> int:
        return 4 * rows * dim

    def inherit(self) -> None:
        """How rows were saved last, only the one before knew: all of them count as moved furthest."""
        self._saved.fill_(torch.nan)

    def seen(self, rows: Tensor) -> None:
        """The weights themselves tell."""

    def pick(self, count: int, weights: Tensor) -> Tensor:
        changes = torch.empty(len(weights))
        for start in range(0, len(weights), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            torch.linalg.vector_norm(weights[part] - self._saved[part], dim=1, out=changes[part])
        changes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return torch.from_numpy(largest(changes.numpy(), count))

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        assert weights is not None, "a tracker that compares is given what was written"
        self._saved.index_copy_(0, rows, weights)
