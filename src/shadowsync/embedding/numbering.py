"""Numbers for the rows of one server, so that a row is asked for by one integer.

`K` rows asked for, `D_w` floats in a row of width w.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shadowsync.embedding.table import Shard


@dataclass(frozen=True)
class Width:
    """The rows of one width have the numbers `start … stop − 1`."""

    dim: int
    start: int
    stop: int


class RowNumbers:
    """All rows of a sequence of shards, numbered by width and, among shards of equal width, as they stand.

    Rows of one width are adjacent, so that numbers in ascending order are also sorted by width. Both ends of a wire
    derive the same numbers from the shards.

    Attributes:
        by_width: positions of the shards in the order of their numbers.
        starts: the number of each shard's first row, in the order of the shards.
        widths: the widths there are, ascending.
        total: how many rows there are.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.by_width = tuple(sorted(range(len(shards)), key=lambda index: shards[index].table.dim))
        self.starts = starts_of({index: shards[index].rows for index in self.by_width})
        self.total = sum(shard.rows for shard in shards)
        self._members: dict[int, tuple[int, ...]] = {}
        for index in self.by_width:
            dim = shards[index].table.dim
            self._members[dim] = (*self._members.get(dim, ()), index)
        self.widths = tuple(self._width(dim, shards[members[-1]]) for dim, members in self._members.items())
        self._edges = torch.tensor([width.stop for width in self.widths], dtype=torch.int64)

    def _width(self, dim: int, last: Shard) -> Width:
        members = self._members[dim]
        return Width(dim, self.starts[members[0]], self.starts[members[-1]] + last.rows)

    def members(self, dim: int) -> tuple[int, ...]:
        """Positions of the shards of that width, in the order of their numbers."""
        return self._members[dim]

    def width(self, dim: int) -> Width:
        """The numbers of the rows of that width."""
        return next(width for width in self.widths if width.dim == dim)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Ascending numbers, int64 `[K]`, cut by width and counted from each width's start."""
        cut = [0, *torch.searchsorted(rows, self._edges).tolist()]
        return [rows[cut[w] : cut[w + 1]] - width.start for w, width in enumerate(self.widths)]

    def shapes(self, rows: Tensor) -> tuple[tuple[int, int], ...]:
        """Of the rows with these ascending numbers, int64 `[K]`: how many there are of each width, and the width."""
        return tuple((len(own), width.dim) for own, width in zip(self.split(rows), self.widths, strict=True))


def starts_of(sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Where each of things of these sizes starts when they lie side by side in the order given; by key `0 … n − 1`."""
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    return tuple(starts[index] for index in range(len(sizes)))
