"""What an embedding table is, which rows of it a server holds, the numbers that they have there, and which tables a
job has.

`K` rows asked for, `D_w` floats in a row of width w.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, get_args

import torch
from pydantic import Field
from torch import Tensor

from shadowsync.config import DIM, OTHERS
from shadowsync.data.source import Dynamic, Feature, Pooling, Schema
from shadowsync.errors import ConfigError
from shadowsync.models.model import SequenceInput
from shadowsync.registry import nearest


@dataclass(frozen=True)
class Table:
    """An embedding table of `rows × dim` float32 and the features that look rows up in it.

    Attributes:
        rows: ids lie in `[0, rows)`; of a dynamic table, whose ids are any int64, how many of them can have a row at a
            time, a multiple of 16.
        ids: of a dynamic table, how they get their rows; None: an id is the number of its row.
        features: that share the table; pooled vectors come in the order of the tables and, within a table, in this one.
        pooling: how the rows of one sample become one vector, for all features or for each in their order. A sample
            without ids gives zeros, and with `none`, which keeps the rows apart, an empty sequence.
    """

    name: str
    rows: Annotated[int, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    features: tuple[str, ...]
    pooling: Pooling | tuple[Pooling, ...] = "sum"
    ids: Dynamic | None = None

    @property
    def poolings(self) -> dict[str, Pooling]:
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


WAYS = 16
"""Rows of a dynamic table among which a key has its own (`keys`)."""


def whole_sets(rows: int) -> int:
    """So many rows at least that a dynamic table can have them."""
    return -(-rows // WAYS) * WAYS


@dataclass(frozen=True)
class Shard:
    """Rows `start … stop − 1` of a table, held by one server."""

    table: Table
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> str:
        """A name for the shard that is unique in a job and fit for a file name's end."""
        return f"{self.table.name}[{self.start}:{self.stop}]"


RowSource = Callable[[int, int, str], Iterator[Tensor]]
"""Gives rows that are not in memory: the tensor `name` of those at positions `first … last − 1`, in parts and in order.

One of the table as a whole is a single part; whoever wants several tensors asks for those last.
"""


@dataclass(frozen=True)
class Rows:
    """Rows of one table from `start` on, with everything the optimizer keeps for them.

    Attributes:
        tensors: as in `Storage.state()`: `weight` and the optimizer's; a tensor of first dimension 1 beside more
            rows (Adam's `step`) belongs to the table as a whole.
        source: of tensors that tell only their form (torch's meta device); None where all are in memory.
    """

    table: Table
    start: int
    tensors: Mapping[str, Tensor]
    source: RowSource | None = field(default=None, compare=False)

    @property
    def stop(self) -> int:
        return self.start + len(self.tensors["weight"])


@dataclass(frozen=True)
class RowSet:
    """Some of a table's rows `start … stop − 1`, what changed of them, say: those of these numbers, distinct and
    ascending, int64 `[K]`; tensors and source as in `Rows`."""

    table: Table
    start: int
    stop: int
    numbers: Tensor
    tensors: Mapping[str, Tensor]
    source: RowSource | None = field(default=None, compare=False)


def cut_rows(rows: Rows, run: range) -> dict[str, Tensor]:
    """Views of a run of the rows; a tensor that belongs to the table as a whole is there in each."""
    count, part = rows.stop - rows.start, slice(run.start - rows.start, run.stop - rows.start)
    return {name: tensor[part] if len(tensor) == count else tensor for name, tensor in rows.tensors.items()}


def parts_of(rows: Rows | RowSet, most: int) -> Iterator[Tensor | range]:
    """The numbers of the rows that a copy holds, so many at a time; of none, once too."""
    numbers = rows.numbers if isinstance(rows, RowSet) else range(rows.start, rows.stop)
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
        """Positions of the shards, in the order of their numbers."""
        return self._members[dim]

    def width(self, dim: int) -> Width:
        """The numbers of the rows of that width; none if there are none."""
        return next((width for width in self.widths if width.dim == dim), Width(dim, 0, 0))

    def split(self, rows: Tensor) -> list[Tensor]:
        """Ascending numbers, int64 `[K]`, cut by width and counted from each width's start."""
        cut = [0, *torch.searchsorted(rows, self._edges).tolist()]
        return [rows[cut[w] : cut[w + 1]] - width.start for w, width in enumerate(self.widths)]

    def shapes(self, rows: Tensor) -> tuple[tuple[int, int], ...]:
        """Of the rows with these ascending numbers: how many there are of each width, and the width."""
        return tuple((len(own), width.dim) for own, width in zip(self.split(rows), self.widths, strict=True))


def starts_of(sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Where each of things of these sizes starts when they lie side by side in the order given; by key `0 … n − 1`."""
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    return tuple(starts[index] for index in range(len(sizes)))


Subject = tuple[int, ...] | int
"""What a tensor holds: pooled rows of these slots side by side, or rows of this width."""
_MOST = 3


def described(shards: Sequence[Shard], subject: Subject) -> str:
    """`features a, b, c, …` or `rows of tables a, b, c, …`; slots that are none are passed over."""
    if isinstance(subject, int):
        return "rows of " + _listed("table", [shard.table.name for shard in shards if shard.table.dim == subject])
    known = slots_of(shards)
    return _listed("feature", [known[slot].feature for slot in subject if 0 <= slot < len(known)])


def _listed(kind: str, names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = ", …" if len(distinct) > _MOST else ""
    return f"{kind}{'s' if len(distinct) != 1 else ''} {', '.join(distinct[:_MOST])}{more}"


# --- the tables of a job ---------------------------------------------------------------------------------------------


def default_tables(schema: Schema, dim: int | Mapping[str, int], extra_columns: int = 0) -> tuple[Table, ...]:
    """One table for each feature of the source, or for each group of features that name the same table.

    `dim` is the width of their vectors, one for all or by feature, with `OTHERS` for those that are not named; a row
    has so many `extra_columns` in front of its vector.

    Raises:
        ConfigError: `dim` names a feature that is not there, or two widths for one table.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in schema.features:
        groups.setdefault(feature.table or feature.name, []).append(feature)
    by_feature: Mapping[str, int] = {OTHERS: dim} if isinstance(dim, int) else dim
    known = [feature.name for feature in schema.features]
    for name in by_feature:
        if name not in (*known, OTHERS):
            raise ConfigError(
                f"model.embedding_dim: there is no feature {name}{nearest(name, known)}; there are {', '.join(known)}, "
                f"and {OTHERS} for those that are not named"
            )
    tables = []
    for name, features in groups.items():
        named = {feature.name: by_feature[feature.name] for feature in features if feature.name in by_feature}
        if len(set(named.values())) > 1:
            given = " and ".join(f"{width} of {feature}" for feature, width in named.items())
            raise ConfigError(f"model.embedding_dim: rows of table {name} cannot have the widths {given}: give one")
        rows = max(feature.rows for feature in features)
        width = next(iter(named.values()), by_feature.get(OTHERS, DIM))
        if len({feature.ids for feature in features}) > 1:
            together = " and ".join(feature.name for feature in features)
            raise ConfigError(
                f"data.tables puts {together} into one table, and they are declared otherwise: an id has one row only "
                "if data.columns says the same of all"
            )
        names = tuple(feature.name for feature in features)
        table = Table(name, whole_sets(rows) if features[0].ids else rows, width + extra_columns, names)
        table = replace(table, ids=features[0].ids)
        tables.append(pool(table, {feature.name: feature.pooling for feature in features}))
    return tuple(tables)


def with_pooling(tables: Sequence[Table], poolings: Mapping[str, Pooling], key: str) -> tuple[Table, ...]:
    """The tables with other poolings of some features, by name; raises `ConfigError`, which names the key of the
    configuration, if there is no such feature."""
    known = [feature for table in tables for feature in table.features]
    for feature in poolings:
        if feature not in known:
            raise ConfigError(
                f"{key}: there is no feature {feature}{nearest(feature, known)}; there are {', '.join(known)}"
            )
    return tuple(pool(t, {f: p for f, p in poolings.items() if f in t.features}) for t in tables)


def widths(tables: Sequence[Table]) -> dict[str, int]:
    """Width of each pooled feature's vector, in the order of the columns of pooled vectors."""
    return {feature: table.dim for table in tables for feature in table.features if feature not in table.sequences}


def histories(tables: Sequence[Table], schema: Schema) -> dict[str, tuple[str, ...]]:
    """The features with several ids per sample that share a table with others of one id, each with those others."""
    partners = _partners(tables, schema)
    several = {feature.name for feature in schema.features if feature.multi_hot}
    pairs = ((feature, partners[table.name]) for table in tables for feature in table.features)
    return {feature: others for feature, others in pairs if feature in several and others}


def sequence_inputs(tables: Sequence[Table], schema: Schema) -> dict[str, SequenceInput]:
    """What a model has to know of the features that are not pooled, in the order of the tables."""
    partners = _partners(tables, schema)
    return {f: SequenceInput(table.dim, partners[table.name]) for table in tables for f in table.sequences}


def _partners(tables: Sequence[Table], schema: Schema) -> dict[str, tuple[str, ...]]:
    """Of each table the pooled features with one id per sample."""
    single = {feature.name for feature in schema.features if not feature.multi_hot}
    return {t.name: tuple(f for f in t.features if f in single and f not in t.sequences) for t in tables}


def check_tables(tables: Sequence[Table], features: Sequence[str]) -> None:
    """Raises `ConfigError`, naming the first that does not fit and the nearest that would, unless every feature of the
    source has exactly one table, and every table only such features."""
    _check_distinct([table.name for table in tables], "embedding.tables: two tables are called")
    for table in tables:
        given = table.pooling if isinstance(table.pooling, tuple) else (table.pooling,)
        for pooling in given:
            if pooling not in get_args(Pooling):
                raise ConfigError(
                    f"table {table.name}: pooling {pooling!r} is not known{nearest(str(pooling), get_args(Pooling))}; "
                    f"allowed: {', '.join(get_args(Pooling))}"
                )
        if isinstance(table.pooling, tuple) and len(given) != len(table.features):
            raise ConfigError(
                f"table {table.name} has {len(given)} poolings for {len(table.features)} features: give one for all, "
                f"or one for each of {', '.join(table.features)}"
            )
    looked_up = [feature for table in tables for feature in table.features]
    for table in tables:
        for feature in table.features:
            if feature not in features:
                raise ConfigError(
                    f"table {table.name}: the source has no feature {feature}{nearest(feature, features)}; it has "
                    f"{', '.join(features)}"
                )
    _check_distinct(looked_up, "embedding.tables: two tables look up feature")
    for feature in features:
        if feature not in looked_up:
            raise ConfigError(
                f"feature {feature} of the source has no table{nearest(feature, looked_up)}; add it to the features of "
                "one of embedding.tables"
            )


def check_rows(tables: Sequence[Table], schema: Schema) -> None:
    """Raises `ConfigError` for a table with fewer rows than the source has ids for one of its features."""
    rows: Mapping[str, int] = {feature.name: feature.rows for feature in schema.features}
    keyed = {feature.name for feature in schema.features if feature.ids is not None}
    for table in tables:
        for feature in table.features:
            if table.ids is not None:
                continue
            if feature in keyed:
                raise ConfigError(
                    f"table {table.name} has a row for each id from 0 on, and feature {feature} any ids: write "
                    f"ids: dynamic and capacity in place of rows"
                )
            if table.rows < rows[feature]:
                raise ConfigError(
                    f"table {table.name} has rows={table.rows} and the ids of feature {feature} go up to "
                    f"{rows[feature] - 1}: set rows={rows[feature]}"
                )


def _check_distinct(names: Sequence[str], what: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{what} {name}")
