"""The memory behind a storage: all shards in one flat tensor, grouped by width, with the optimizer's state alike.

FBGEMM wants one flat tensor for all tables; the torch storage wants all tables of one width as one matrix. Putting
shards of equal width side by side serves both without a copy.

`R` rows of all shards of one width `D`, `S` shards, `L` ids, `K` distinct rows.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shadowsync.embedding.initial import initial_rows
from shadowsync.embedding.optimizers import Extent, RowOptimizer
from shadowsync.embedding.table import RowNumbers, Shard, starts_of
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate

ROWS_PER_BLOCK = 4096


def fill(shards: list[tuple[Shard, Tensor]], seed: int) -> None:
    """Writes the `initial` rows into each shard's weight `[rows, D]`, several threads at blocks of it.

    Rows of dynamic tables stay as they are: each is made for its key.
    """
    blocks = [
        (shard, weight, start)
        for shard, weight in shards
        if shard.table.ids is None
        for start in range(0, shard.rows, ROWS_PER_BLOCK)
    ]

    def draw(block: tuple[Shard, Tensor, int]) -> None:
        shard, weight, start = block
        stop = min(start + ROWS_PER_BLOCK, shard.rows)
        numbers = np.arange(shard.start + start, shard.start + stop)
        weight.numpy()[start:stop] = initial_rows(shard.table, numbers, seed)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        for _ in threads.map(draw, blocks):
            pass


def parts_of(shards: Sequence[Shard], optimizer: RowOptimizer) -> list[tuple[int, torch.dtype]]:
    """Elements and type of each tensor that is kept of these shards: of the weights, and of the state."""
    sizes = {
        Extent.ROW: (sum(shard.rows for shard in shards), torch.float32),
        Extent.ELEMENT: (sum(shard.rows * shard.table.dim for shard in shards), torch.float32),
        Extent.SHARD: (len(shards), torch.int64),
    }
    return [sizes[extent] for extent in (Extent.ELEMENT, *optimizer.state.values())]


class ShardMemory:
    """Weights and optimizer state of a storage's shards: `flat` by name, tensors of one dimension, `weight` and the
    state, in which each shard's weights start at `weight_start`, and what is kept for its rows at `row_start`."""

    def __init__(
        self, shards: Sequence[Shard], optimizer: RowOptimizer, seed: int | None, allocate: Allocate = zeros
    ) -> None:
        self.shards = tuple(shards)
        self.numbers = RowNumbers(shards)
        self.row_start = self.numbers.starts
        self.weight_start = starts_of({s: self._elements(s) for s in self.numbers.by_width})
        self._extents = {"weight": Extent.ELEMENT, **optimizer.state}
        self.flat = dict(zip(self._extents, (allocate(*part) for part in parts_of(shards, optimizer)), strict=True))
        self._fill(seed)

    def reset(self, seed: int | None) -> None:
        """All as at the start, with the initial rows of this seed; None: zero."""
        for tensor in self.flat.values():
            tensor.zero_()
        self._fill(seed)

    def _fill(self, seed: int | None) -> None:
        if seed is not None:
            fill([(shard, self.view(index, "weight")) for index, shard in enumerate(self.shards)], seed)

    def _elements(self, index: int) -> int:
        return self.shards[index].rows * self.shards[index].table.dim

    def view(self, index: int, name: str) -> Tensor:
        """The live tensor `name` of shard `index`: `[rows, D]`, `[rows]` or `[1]`."""
        shard, extent, flat = self.shards[index], self._extents[name], self.flat[name]
        if extent is Extent.SHARD:
            return flat[index : index + 1]
        if extent is Extent.ROW:
            return flat[self.row_start[index] : self.row_start[index] + shard.rows]
        start = self.weight_start[index]
        return flat[start : start + self._elements(index)].view(shard.rows, shard.table.dim)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            shard.key: {name: self.view(index, name) for name in self.flat} for index, shard in enumerate(self.shards)
        }

    @cached_property
    def blocks(self) -> dict[int, dict[str, Tensor]]:
        """For each width, the tensors of all its shards together: `[R, D]` per element, `[R]` per row."""
        found: dict[int, dict[str, Tensor]] = {}
        for width in self.numbers.widths:
            dim, rows = width.dim, width.stop - width.start
            start, block = self.weight_start[self.numbers.members(dim)[0]], found.setdefault(dim, {})
            for name, extent in self._extents.items():
                if extent is Extent.ELEMENT:
                    block[name] = self.flat[name][start : start + rows * dim].view(rows, dim)
                elif extent is Extent.ROW:
                    block[name] = self.flat[name][width.start : width.stop]
        return found

    def start_in_block(self, index: int) -> int:
        """The position of the shard's first row in the block of its width."""
        return self.row_start[index] - self.numbers.width(self.shards[index].table.dim).start
