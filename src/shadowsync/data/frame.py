"""Turns named columns of a data frame into a batch, and says which rows cannot be turned.

`B` samples, `F` categorical features, `N` dense columns, `L` ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.files import Problem
from shadowsync.data.hashing import hash_strings, mix, to_rows
from shadowsync.data.source import Feature, Pooling, Schema
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest

Mask = NDArray[np.bool_]
Rows = Annotated[int, Field(ge=1, le=1 << 32)]

_MOST = 1e38  # of a dense value; sums and products of larger ones are beyond float32


@dataclass(frozen=True)
class Column:
    """A categorical column, whose ids lie in `[0, rows)`.

    Attributes:
        hashed: values, `text` or integers, are hashed to `[1, rows)`; else they are the ids.
        listed: a cell is a list of values.
        weights: the column of the ids' weights, lists as long as this column's.
    """

    name: str
    rows: int
    hashed: bool
    text: bool
    listed: bool
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which named columns a batch is made of, and how: options of any source of tables."""

    not_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("weight", "sample_weight", "sample_weights", "weight_column"),
        "all rows count alike, a row has no weight of its own yet; data.weights={COLUMN: WEIGHTS} is for the ids of a "
        "list column",
    )

    categorical: Annotated[tuple[str, ...], Field(description="categorical columns, in the model's order")]
    label: Annotated[
        str | None, Field(description="the column that holds 0 or 1; null: rows without labels, for predictions only")
    ] = "label"
    dense: Annotated[tuple[str, ...], Field(description="dense columns, in the model's order")] = ()
    log_dense: Annotated[bool, Field(description="take log(1 + max(x, 0)) of the dense columns, for counts")] = False
    rows: Annotated[
        Rows | dict[str, Rows] | None,
        Field(description="integers used as they are lie in [0, rows): one number, or by column"),
    ] = None
    hash_size: Annotated[
        Rows | dict[str, Rows] | None,
        Field(description="rows that values are hashed to: one number, or by column; more collides less"),
    ] = None
    weights: Annotated[dict[str, str], Field(description="for a list column, the list column of its ids' weights")] = (
        field(default_factory=dict)
    )
    tables: Annotated[dict[str, str], Field(description="by column, the name of a table it shares with others")] = (
        field(default_factory=dict)
    )
    pooling: Annotated[
        dict[str, Pooling],
        Field(description="how a list column's rows are pooled, sum by default; none keeps them apart, as a sequence"),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("weights", "tables", "pooling", "rows", "hash_size"):
            named = getattr(self, key)
            for name in named if isinstance(named, dict) else ():
                if name not in self.categorical:
                    hint = nearest(name, self.categorical)
                    raise ConfigError(f"data.{key} names {name!r}, which is not in data.categorical{hint}")
        if not self.categorical:
            raise ConfigError("data.categorical is empty: name at least one column of ids, as data.categorical=[user]")
        weights = tuple(dict.fromkeys(self.weights.values()))
        for key, names in (("dense", self.dense), ("categorical", self.categorical), ("weights", weights)):
            if repeated := {name for name in names if names.count(name) > 1}:
                raise ConfigError(f"data.{key} names {min(repeated)!r} twice: leave one out")
            if self.label in names:
                raise ConfigError(
                    f"data.{key} names {self.label!r}, which is the label (data.label): leave it out, as a model "
                    "cannot be given the answer"
                )

    def size(self, name: str) -> tuple[int, bool]:
        """Rows of the feature's table, and whether its values are hashed to them."""
        for hashed, sizes in ((True, self.hash_size), (False, self.rows)):
            found = sizes.get(name) if isinstance(sizes, dict) else sizes
            if found is not None:
                if hashed and found == 1:
                    raise ConfigError(
                        f"data.hash_size of {name} is 1; it must be at least 2, as row 0 is for missing values"
                    )
                return found, hashed
        raise ConfigError(
            f"column {name!r} has no size: give data.hash_size=100000, or data.rows if it holds ids from 0 to rows − 1"
        )

    def names(self) -> list[str]:
        """All columns that are read."""
        label = () if self.label is None else (self.label,)
        return list(dict.fromkeys((*label, *self.dense, *self.categorical, *self.weights.values())))

    def columns(self, types: Mapping[str, pl.DataType], place: str) -> tuple[Column, ...]:
        """The categorical columns of the table at `place` whose columns have these types.

        Raises:
            ConfigError: a column has no size.
            DataError: any column is missing, or of another type than it must be.
        """

        def need(condition: bool, key: str, name: str, allowed: str) -> None:
            if not condition:
                held = f"column {name!r} (data.{key}) holds {types[name]}"
                raise DataError(f"{place}: {held}, it must hold {allowed}")

        def number(kind: object) -> bool:
            return isinstance(kind, pl.DataType) and (kind.is_numeric() or kind == pl.Boolean)

        for key, names in (("label", () if self.label is None else (self.label,)), ("dense", self.dense)):
            for name in names:
                need(number(type_of(name, types, place, f"data.{key}")), key, name, "one number per row")
        columns = []
        for name in self.categorical:
            kind, (rows, hashed) = type_of(name, types, place, "data.categorical"), self.size(name)
            listed = isinstance(kind, pl.List)
            value = kind.inner if isinstance(kind, pl.List) else kind
            text = value in (pl.String, pl.Categorical, pl.Enum)
            need(text or value.is_integer(), "categorical", name, "integers or strings, or lists of them")
            need(hashed or not text, "categorical", name, "integers, unless data.hash_size is given")
            weights = self.weights.get(name)
            if weights is not None:
                need(listed, "categorical", name, "lists, as data.weights gives their ids weights")
                kind = type_of(weights, types, place, "data.weights")
                need(isinstance(kind, pl.List) and number(kind.inner), "weights", weights, "lists of numbers")
            columns.append(Column(name, rows, hashed, text, listed, weights))
        return tuple(columns)

    def schema(self, columns: Sequence[Column]) -> Schema:
        """What a source of tables with these columns yields."""
        features = (
            Feature(c.name, c.rows, self.tables.get(c.name), c.listed, self.pooling.get(c.name, "sum")) for c in columns
        )
        return Schema(self.dense, tuple(features))


def type_of(name: str, types: Mapping[str, pl.DataType], place: str, key: str) -> pl.DataType:
    """Of a column that `key` names; raises `DataError` if the table at `place` has none such."""
    if name not in types:
        has = ", ".join(list(types)[:50])
        hint = nearest(name, types)
        if f"/{name}=" in place:
            hint = f": it is in the name of a folder, so give as the path the folder above, or a pattern ({name}=*)"
        raise DataError(f"{place}: there is no column {name!r} ({key}){hint}; the file has {has}")
    return types[name]


def batch_of(frame: pl.DataFrame, options: TableOptions, columns: Sequence[Column]) -> tuple[Batch, list[Problem]]:
    """All rows as a batch, and the first problem of each bad row in their order; with any, the batch is of no use."""
    first: dict[int, Problem] = {}

    def note(bad: Mask, before: str, values: pl.Series | Mapping[int, int] | None, after: str, **more: str) -> None:
        for row in np.flatnonzero(bad).tolist():
            if row not in first:
                shown = "" if values is None else "missing" if values[row] is None else repr(values[row])
                first[row] = Problem(row, f"{before}{shown}{after}", **more)

    labels = np.zeros(len(frame), dtype=np.float32)
    if options.label is not None:
        given = frame[options.label]
        labels = _numpy(given.cast(pl.Float32), -1).copy()
        note((labels != 0) & (labels != 1), f"the label ({options.label}) is ", given, ", it must be 0 or 1")

    dense = np.empty((len(frame), len(options.dense)), dtype=np.float32)
    for position, name in enumerate(options.dense):
        dense[:, position] = _numpy(frame[name].cast(pl.Float32), 0)
    if not (dense.max(initial=0) <= _MOST and dense.min(initial=0) >= -_MOST):  # not so either where one is no number
        allowed = f", it must be a finite number of at most {_MOST:.0e}"
        for name, numbers in zip(options.dense, dense.T, strict=True):
            note(~(np.abs(numbers) <= _MOST), f"{name} is ", frame[name], allowed)
    if options.log_dense:
        dense = np.log1p(np.maximum(dense, 0))

    listed, weighted = any(column.listed for column in columns), any(column.weights for column in columns)
    values, lengths, weights = [], [], []
    for column in columns:
        name, (flat, counts) = column.name, _flatten(frame[column.name], column.listed)
        ids = _hashed(flat, column) if column.hashed else _as_they_are(flat, counts, column, note)
        values.append(ids)
        lengths.append(counts)
        if column.weights is not None:
            given, given_counts = _flatten(frame[column.weights], listed=True)
            weights.append(_numpy(given.cast(pl.Float32), np.nan))
            note(given_counts != counts, f"{column.weights} and {name} are of different length", None, "")
            if not np.isfinite(weights[-1]).all():
                wrong = _rows_with(~np.isfinite(weights[-1]), given_counts)
                note(wrong, f"{column.weights} has a weight that is not a finite number", None, "")
        elif weighted:
            weights.append(np.ones(len(ids), dtype=np.float32))
    jagged = Jagged(
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(np.append(0, np.cumsum(np.concatenate(lengths)))) if listed else None,
        torch.from_numpy(np.concatenate(weights)) if weighted else None,
        len(columns),
        len(frame),
    )
    return Batch(torch.from_numpy(labels), torch.from_numpy(dense), jagged), [first[row] for row in sorted(first)]


def _numpy(values: pl.Series, missing: float) -> NDArray[Any]:
    """With `missing` for those that are; filling takes polars a tenth of a millisecond, also where there are none."""
    return (values.fill_null(missing) if values.null_count() else values).to_numpy()


def _flatten(series: pl.Series, listed: bool) -> tuple[pl.Series, NDArray[np.int64]]:
    """All values, and how many each row has; a missing list is an empty one."""
    if not listed:
        return series, np.ones(len(series), dtype=np.int64)
    counts = series.list.len().fill_null(0).to_numpy().astype(np.int64)
    return series.filter(pl.Series(counts > 0)).explode(), counts


def _hashed(values: pl.Series, column: Column) -> NDArray[np.int64]:
    if column.text:
        hashes = hash_strings(values.cast(pl.String))
    else:
        hashes = mix(_numpy(values, 0).astype(np.int64).view(np.uint64))
    rows = to_rows(hashes, np.uint64(column.rows))
    if values.null_count():
        rows[values.is_null().to_numpy()] = 0
    return rows


def _as_they_are(
    values: pl.Series, counts: NDArray[np.int64], column: Column, note: Callable[..., None]
) -> NDArray[np.int64]:
    ids = _numpy(values, 0).astype(np.int64)
    outside = ids.view(np.uint64) >= column.rows
    hashed = f"hash the column with data.hash_size={{{column.name}: 100000}}"
    if values.null_count():
        missing, remedy = values.is_null().to_numpy(), f"{hashed}, which takes missing ones to row 0"
        note(_rows_with(missing, counts), f"{column.name} has no id", None, "", remedy=remedy)
    if outside.any():
        rows = np.repeat(np.arange(len(counts)), counts)[outside]
        found = dict(zip(rows[::-1].tolist(), values.filter(pl.Series(outside))[::-1], strict=True))
        allowed = f", outside of 0 … {column.rows - 1} (data.rows)"
        remedy = f"{hashed}, or raise data.rows above its highest id"
        note(_rows_with(outside, counts), f"{column.name} has id ", found, allowed, remedy=remedy)
    return ids


def _rows_with(flags: Mask, counts: NDArray[np.int64]) -> Mask:
    """Which rows have a flag among their values, of which there are so many."""
    found = np.zeros(len(counts), dtype=np.bool_)
    found[np.repeat(np.arange(len(counts)), counts)[flags]] = True
    return found
