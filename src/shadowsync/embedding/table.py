"""What an embedding table is, which rows of it a server holds, and the numbers that they have there.

`K` rows asked for, `D_w` floats in a row of width w.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from shadowsync.data.source import Pooling


@dataclass(frozen=True)
class Table:
    """An embedding table of `rows × dim` float32 and the features that look rows up in it.

    Attributes:
        name: unique among the tables of a job.
        rows: number of rows; ids lie in `[0, rows)`.
        dim: width of a row.
        features: names of the features that share the table; pooled vectors come in the order of the tables and, within
            a table, in this one.
        pooling: how the rows of one sample become one vector, for all features or for each in their order. A sample
            without ids gives zeros, and with `none`, which keeps the rows apart, an empty sequence.
    """

    name: str
    rows: Annotated[int, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    features: tuple[str, ...]
    pooling: Pooling | tuple[Pooling, ...] = "sum"

    @property
    def poolings(self) -> dict[str, Pooling]:
        """Of each feature, by name and in the order of the features."""
        each = self.pooling if isinstance(self.pooling, tuple) else (self.pooling,) * len(self.features)
        return dict(zip(self.features, each, strict=True))

    @property
    def sequences(self) -> tuple[str, ...]:
        """The features whose rows are kept apart."""
        return tuple(feature for feature, pooling in self.poolings.items() if pooling == "none")


def pool(table: Table, poolings: Mapping[str, Pooling]) -> Table:
    """The table with these poolings of some of its features, and its own of the others."""
    each = tuple({**table.poolings, **poolings}[feature] for feature in table.features)
    return replace(table, pooling=each[0] if len(set(each)) == 1 else each)


@dataclass(frozen=True)
class Shard:
    """Rows `start … stop − 1` of a table, held by one server."""

    table: Table
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows in the shard."""
        return self.stop - self.start

    @property
    def key(self) -> str:
        """A name for the shard that is unique in a job and fit for a file name's end."""
        return f"{self.table.name}[{self.start}:{self.stop}]"


class RowSource(Protocol):
    """Gives rows that are not in memory, when somebody wants them."""

    def read(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        """A tensor of the rows at positions `first … last − 1` of those held, in parts and in order.

        Whoever wants several tensors asks for those of the table as a whole last.

        Args:
            first: position of the first row.
            last: one beyond the last.
            name: of the tensor; one of the table as a whole is a single part.
        """


@dataclass(frozen=True)
class Rows:
    """A run of rows of one table with everything the optimizer keeps for them.

    Attributes:
        table: the table's specification.
        start: first row; the tensors hold rows `start … start + len(weight) − 1`.
        tensors: as in `Storage.state()`: `weight` and the optimizer's; a tensor of first dimension 1 beside more
            rows (Adam's `step`) belongs to the table as a whole.
        source: of tensors that tell only their form (torch's meta device); None where all are in memory.
    """

    table: Table
    start: int
    tensors: Mapping[str, Tensor]
    source: RowSource | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RowSet:
    """Some rows of one table with everything the optimizer keeps for them: what changed, say.

    Attributes:
        table: the table's specification.
        start: first row of the run that is spoken of.
        stop: one beyond its last row.
        numbers: the rows that are held, distinct and ascending in `[start, stop)`, int64 `[K]`.
        tensors: as in `Rows`, of the rows `numbers`: first dimension K, or those of the table as a whole.
        source: as in `Rows`.
    """

    table: Table
    start: int
    stop: int
    numbers: Tensor
    tensors: Mapping[str, Tensor]
    source: RowSource | None = field(default=None, compare=False)


def span_of(rows: Rows | RowSet) -> tuple[int, int]:
    """The run of rows of its table that a copy is of: the first, and one beyond the last."""
    return rows.start, rows.stop if isinstance(rows, RowSet) else rows.start + len(rows.tensors["weight"])


def numbers_of(rows: Rows | RowSet) -> Tensor | range:
    """The rows that a copy holds, as numbers in their table."""
    return rows.numbers if isinstance(rows, RowSet) else range(*span_of(rows))


def parts_of(rows: Rows | RowSet, most: int) -> Iterator[Tensor | range]:
    """The numbers of the rows that a copy holds, so many at a time; of none, once too."""
    numbers = numbers_of(rows)
    for first in range(0, max(1, len(numbers)), most):
        yield numbers[first : first + most]


@dataclass(frozen=True)
class Slot:
    """One feature's look-ups in one shard; a server is asked for it by its position among the server's slots."""

    shard: Shard
    feature: str


def slots_of(shards: Sequence[Shard]) -> tuple[Slot, ...]:
    """What a server that holds `shards` can be asked for: every feature of every shard, in their order."""
    return tuple(Slot(shard, feature) for shard in shards for feature in shard.table.features)


def group_by_table(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """The shards of each table, by the table's name, in the order of their rows."""
    found: dict[str, list[Shard]] = {}
    for shard in sorted(shards, key=lambda shard: shard.start):
        found.setdefault(shard.table.name, []).append(shard)
    return found


def shares_of(servers: Sequence[Sequence[Shard]]) -> tuple[float, ...]:
    """The share of all rows that each server holds; they add up to 1."""
    rows = [sum(shard.rows for shard in shards) for shards in servers]
    return tuple(count / sum(rows) for count in rows)


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
        self.widths = tuple(
            Width(dim, self.starts[members[0]], self.starts[members[-1]] + shards[members[-1]].rows)
            for dim, members in self._members.items()
        )
        self._edges = torch.tensor([width.stop for width in self.widths], dtype=torch.int64)

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


_MOST = 3


def listed(kind: str, names: Sequence[str]) -> str:
    """`features a, b, c, …`."""
    distinct = list(dict.fromkeys(names))
    more = ", …" if len(distinct) > _MOST else ""
    return f"{kind}{'s' if len(distinct) != 1 else ''} {', '.join(distinct[:_MOST])}{more}"


def of_features(shards: Sequence[Shard], slots: Sequence[int]) -> str:
    """The features at these slots; those that are none are passed over."""
    known = slots_of(shards)
    return listed("feature", [known[slot].feature for slot in slots if 0 <= slot < len(known)])


def of_rows(shards: Sequence[Shard], dim: int) -> str:
    """The rows of tables of that width."""
    return "rows of " + listed("table", [shard.table.name for shard in shards if shard.table.dim == dim])
