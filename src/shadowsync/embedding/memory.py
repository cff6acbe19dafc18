"""The memory behind a storage: all shards in one flat tensor, grouped by width, with the optimizer's state alike.

FBGEMM wants one flat tensor for all tables; the torch storage wants all tables of one width as one matrix. Putting
shards of equal width side by side serves both without a copy.

`R` rows of all shards of one width `D`, `S` shards.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shadowsync.embedding.initial import fill
from shadowsync.embedding.numbering import RowNumbers, starts_of
from shadowsync.embedding.optimizers import Extent, RowRule
from shadowsync.embedding.table import Shard
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate


def parts_of(shards: Sequence[Shard], rule: type[RowRule]) -> list[tuple[int, torch.dtype]]:
    """Elements and type of each tensor that is kept of these shards: of the weights, and of the state."""
    sizes = {
        Extent.ROW: (sum(shard.rows for shard in shards), torch.float32),
        Extent.ELEMENT: (sum(shard.rows * shard.table.dim for shard in shards), torch.float32),
        Extent.SHARD: (len(shards), torch.int64),
    }
    return [sizes[extent] for extent in (Extent.ELEMENT, *rule.state.values())]


class ShardMemory:
    """Weights and optimizer state of a storage's shards.

    Attributes:
        shards: as given.
        numbers: of all rows.
        row_start: where each shard's rows start among all rows (in the order of their numbers), `S` numbers.
        weight_start: where each shard's weights start in the flat tensor, `S` numbers.
        flat: by name, tensors of one dimension: `weight`, and the state.
    """

    def __init__(
        self, shards: Sequence[Shard], rule: type[RowRule], seed: int | None, allocate: Allocate = zeros
    ) -> None:
        self.shards = tuple(shards)
        self.numbers = RowNumbers(shards)
        self.row_start = self.numbers.starts
        self.weight_start = starts_of({s: self._elements(s) for s in self.numbers.by_width})
        self._extents = {"weight": Extent.ELEMENT, **rule.state}
        self.flat = dict(zip(self._extents, (allocate(*part) for part in parts_of(shards, rule)), strict=True))
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
        """As `Storage.state`."""
        return {
            shard.key: {name: self.view(index, name) for name in self.flat} for index, shard in enumerate(self.shards)
        }

    @cached_property
    def blocks(self) -> dict[int, dict[str, Tensor]]:
        """For each width, the tensors of all its shards together: `[R, D]` per element, `[R]` per row."""
        return {dim: self._block(dim) for dim in {shard.table.dim for shard in self.shards}}

    def _block(self, dim: int) -> dict[str, Tensor]:
        width = self.numbers.width(dim)
        first, rows = self.numbers.members(dim)[0], width.stop - width.start
        spans = {
            Extent.ELEMENT: (self.weight_start[first], rows * dim, (rows, dim)),
            Extent.ROW: (width.start, rows, (rows,)),
        }
        block = {}
        for name, extent in self._extents.items():
            if extent in spans:
                start, count, shape = spans[extent]
                block[name] = self.flat[name][start : start + count].view(shape)
        return block

    def start_in_block(self, index: int) -> int:
        """The position of shard `index`'s first row in the block of its width."""
        return self.row_start[index] - self.numbers.width(self.shards[index].table.dim).start
