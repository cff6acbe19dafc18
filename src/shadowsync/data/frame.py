"""Turns named columns of a data frame into a batch, and says which rows cannot be turned.

`B` samples, `F` categorical features, `N` dense columns, `L` ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.hashing import hash_strings, mix, to_rows
from shadowsync.data.rows import Problem
from shadowsync.data.source import Feature, Pooling, Schema
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest

Mask = NDArray[np.bool_]
Rows = Annotated[int, Field(ge=1, le=1 << 32)]

_MOST = 1e38  # of a dense value; sums and products of larger ones are beyond float32


@dataclass(frozen=True)
class Column:
    """A categorical column.

    Attributes:
        rows: ids lie in `[0, rows)`.
        hashed: values are hashed to `[1, rows)`; else they are the ids.
        text: values are strings.
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

    def layout(self, types: Mapping[str, pl.DataType], place: str) -> "Layout":
        """The columns of a table with columns of these types.

        Args:
            types: by column.
            place: of the table, for messages.

        Raises:
            ConfigError: a column has no size.
            DataError: a column is missing, or of another type than it must be.
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
        return Layout(self, tuple(columns))


@dataclass(frozen=True)
class Layout:
    """The columns of a batch as a table holds them, the categorical ones in the batch's order."""

    options: TableOptions
    columns: tuple[Column, ...]

    def schema(self) -> Schema:
        """What a source of such tables yields."""
        options = self.options
        features = (
            Feature(c.name, c.rows, options.tables.get(c.name), c.listed, options.pooling.get(c.name, "sum"))
            for c in self.columns
        )
        return Schema(options.dense, tuple(features))


def type_of(name: str, types: Mapping[str, pl.DataType], place: str, key: str) -> pl.DataType:
    """Of a column that `key` names; raises `DataError` if the table at `place` has none such."""
    if name not in types:
        has = ", ".join(list(types)[:50])
        hint = nearest(name, types)
        if f"/{name}=" in place:
            hint = ": it is in the name of a folder, and columns that folders are named after are not read yet"
        raise DataError(f"{place}: there is no column {name!r} ({key}){hint}; the file has {has}")
    return types[name]


def batch_of(frame: pl.DataFrame, layout: Layout) -> Batch | None:
    """All rows as a batch; None if any of them has a problem."""
    labels = np.zeros(len(frame), dtype=np.float32)
    if layout.options.label is not None:
        labels = frame[layout.options.label].cast(pl.Float32).fill_null(-1).to_numpy().copy()
        if not ((labels == 0) | (labels == 1)).all():
            return None
    dense = np.empty((len(frame), len(layout.options.dense)), dtype=np.float32)
    for position, name in enumerate(layout.options.dense):
        dense[:, position] = _numbers(frame[name])
    if not (dense.max(initial=0) <= _MOST and dense.min(initial=0) >= -_MOST):  # not so either where one is no number
        return None
    if layout.options.log_dense:
        dense = np.log1p(np.maximum(dense, 0))
    listed = any(column.listed for column in layout.columns)
    ids = _bags(frame, layout) if listed else _singles(frame, layout)
    return None if ids is None else Batch(torch.from_numpy(labels), torch.from_numpy(dense), ids)


def problems(frame: pl.DataFrame, layout: Layout) -> list[Problem]:
    """The first problem of each bad row, in the order of the rows."""
    first: dict[int, Problem] = {}

    def note(bad: Mask, before: str, values: pl.Series | Mapping[int, int] | None, after: str, **more: str) -> None:
        for row in np.flatnonzero(bad).tolist():
            if row not in first:
                shown = "" if values is None else "missing" if values[row] is None else repr(values[row])
                first[row] = Problem(row, f"{before}{shown}{after}", **more)

    if layout.options.label is not None:
        label = frame[layout.options.label]
        numbers = label.cast(pl.Float32).fill_null(-1).to_numpy()
        note((numbers != 0) & (numbers != 1), f"the label ({label.name}) is ", label, ", it must be 0 or 1")
    for name in layout.options.dense:
        allowed = f", it must be a finite number of at most {_MOST:.0e}"
        note(~(np.abs(_numbers(frame[name])) <= _MOST), f"{name} is ", frame[name], allowed)
    for column in layout.columns:
        name, (flat, counts) = column.name, _flatten(frame[column.name], column.listed)
        if not column.hashed:
            rows, missing = np.repeat(np.arange(len(frame)), counts), flat.is_null().to_numpy()
            hashed = f"hash the column with data.hash_size={{{name}: 100000}}"
            remedy = f"{hashed}, which takes missing ones to row 0"
            note(_rows_with(missing, rows, len(frame)), f"{name} has no id", None, "", remedy=remedy)
            outside = ~missing & (flat.fill_null(0).to_numpy().astype(np.int64).view(np.uint64) >= column.rows)
            found = zip(rows[outside][::-1].tolist(), flat.filter(pl.Series(outside)).to_list()[::-1], strict=True)
            allowed = f", outside of 0 … {column.rows - 1} (data.rows)"
            remedy = f"{hashed}, or raise data.rows above its highest id"
            note(_rows_with(outside, rows, len(frame)), f"{name} has id ", dict(found), allowed, remedy=remedy)
        if column.weights is not None:
            flat, weight_counts = _flatten(frame[column.weights], listed=True)
            note(weight_counts != counts, f"{column.weights} and {name} are of different length", None, "")
            wrong = ~np.isfinite(flat.cast(pl.Float32).fill_null(np.nan).to_numpy())
            bad = _rows_with(wrong, np.repeat(np.arange(len(frame)), weight_counts), len(frame))
            note(bad, f"{column.weights} has a weight that is not a finite number", None, "")
    return [first[row] for row in sorted(first)]


def _numbers(series: pl.Series) -> NDArray[np.float32]:
    numbers: NDArray[np.float32] = series.cast(pl.Float32).fill_null(0.0).to_numpy()
    return numbers


def _singles(frame: pl.DataFrame, layout: Layout) -> Jagged | None:
    values = np.empty((len(layout.columns), len(frame)), dtype=np.int64)
    for position, column in enumerate(layout.columns):
        ids = _ids(frame[column.name], column)
        if ids is None:
            return None
        values[position] = ids
    return Jagged(torch.from_numpy(values.ravel()), None, None, len(layout.columns), len(frame))


def _bags(frame: pl.DataFrame, layout: Layout) -> Jagged | None:
    values, lengths, weights = [], [], []
    for column in layout.columns:
        flat, counts = _flatten(frame[column.name], column.listed)
        ids, weight = _ids(flat, column), np.ones(counts.sum(), dtype=np.float32)
        if column.weights is not None:
            flat, weight_counts = _flatten(frame[column.weights], listed=True)
            weight = flat.cast(pl.Float32).fill_null(np.nan).to_numpy()
            if not ((weight_counts == counts).all() and np.isfinite(weight).all()):
                return None
        if ids is None:
            return None
        values.append(ids)
        lengths.append(counts)
        weights.append(weight)
    offsets = np.zeros(len(layout.columns) * len(frame) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    weighted = any(column.weights for column in layout.columns)
    return Jagged(
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(offsets),
        torch.from_numpy(np.concatenate(weights)) if weighted else None,
        len(layout.columns),
        len(frame),
    )


def _flatten(series: pl.Series, listed: bool) -> tuple[pl.Series, NDArray[np.int64]]:
    """All values, and how many each row has; a missing list is an empty one."""
    if not listed:
        return series, np.ones(len(series), dtype=np.int64)
    counts = series.list.len().fill_null(0).to_numpy().astype(np.int64)
    return series.filter(pl.Series(counts > 0)).explode(), counts


def _ids(values: pl.Series, column: Column) -> NDArray[np.int64] | None:
    missing = values.is_null().to_numpy() if values.null_count() else None
    if not column.hashed:
        ids = values.to_numpy().astype(np.int64) if missing is None else None
        return ids if ids is not None and (ids.view(np.uint64) < column.rows).all() else None
    if column.text:
        hashes = hash_strings(values.cast(pl.String))
    else:
        hashes = mix(values.fill_null(0).to_numpy().astype(np.int64).view(np.uint64))
    rows = to_rows(hashes, np.uint64(column.rows))
    if missing is not None:
        rows[missing] = 0
    return rows


def _rows_with(flags: Mask, rows: NDArray[np.int64], count: int) -> Mask:
    found = np.zeros(count, dtype=np.bool_)
    found[rows[flags]] = True
    return found
