"""What an embedding table is, and which rows of it a server holds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

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
