"""Turns named columns of a data frame into a batch, and says which rows cannot be turned.

`B` samples, `F` categorical features, `N` dense columns, `L` ids.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import Field, InstanceOf

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.columns import Categorical, Cross, Dense, Hash, Ids, Kind, Kinds, Rows, Vocabulary, declared
from shadowsync.data.files import Problem
from shadowsync.data.fitting import Learnt, told_apart, value_type
from shadowsync.data.learners import Fit
from shadowsync.data.source import Feature, Pooling, Schema
from shadowsync.data.values import NOTHING, Cells, Mask, as_numpy, form_of, numbers
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest

Types = Mapping[str, pl.DataType]

_NOT_WHOLE = ", which is no whole number: declare the column dense or as buckets, or cast it"
_MOST = 1e38  # of a dense value; sums and products of larger ones are beyond float32


@dataclass(frozen=True)
class Column:
    """A categorical column of a file.

    Attributes:
        kind: what becomes of it.
        forms: of the columns of the data whose values it tells apart (`values.form_of`), with their names.
        listed: a cell is a list of values.
        weights: the column of the ids' weights, lists as long as this column's.
    """

    name: str
    kind: Categorical
    forms: tuple[tuple[str, str], ...]
    listed: bool
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which named columns a batch is made of, and how: options of any source of tables."""

    internal: ClassVar[tuple[str, ...]] = ("learnt",)
    not_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("weight", "sample_weight", "sample_weights", "weight_column"),
        "all rows count alike, a row has no weight of its own yet; data.weights={COLUMN: WEIGHTS} is for the ids of a "
        "list column",
    )

    columns: Annotated[
        dict[str, str | dict[str, Any]],
        Field(
            description="by column, what becomes of it: the name of a kind, or a map of kind and its options (below). "
            "If categorical and dense are empty, too, it is inferred"
        ),
    ] = field(default_factory=dict)
    categorical: Annotated[
        tuple[str, ...], Field(description="categorical columns, in the model's order, before others of columns")
    ] = ()
    label: Annotated[
        str | None, Field(description="the column that holds 0 or 1; null: rows without labels, for predictions only")
    ] = "label"
    dense: Annotated[
        tuple[str, ...], Field(description="dense columns, in the model's order, before others of columns")
    ] = ()
    standardise: Annotated[
        bool,
        Field(
            description="dense columns get mean 0 and standard deviation 1, by the training rows, looked at before "
            "training starts; a missing value counts as the mean. false: they stay as they are"
        ),
    ] = True
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

    learnt: InstanceOf[Learnt] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: self._declared(name) for name in self.columns}
        for key in ("weights", "tables", "pooling", "rows", "hash_size"):
            named = getattr(self, key)
            for name in named if isinstance(named, dict) else ():
                if name in self.columns and key in ("rows", "hash_size"):
                    raise ConfigError(f"data.{key} names {name!r}, of which data.columns says it all: leave one out")
                if name not in self.categorical and not isinstance(given.get(name), Categorical):
                    hint = nearest(name, {*self.categorical, *self.columns})
                    raise ConfigError(f"data.{key} names {name!r}, which is not in data.categorical{hint}")
        weights = tuple(dict.fromkeys(self.weights.values()))
        for key, names in (
            ("dense", self.dense),
            ("categorical", self.categorical),
            ("weights", weights),
            ("columns", tuple(self.columns)),
        ):
            if repeated := {name for name in names if names.count(name) > 1}:
                raise ConfigError(f"data.{key} names {min(repeated)!r} twice: leave one out")
            if self.label in names:
                raise ConfigError(
                    f"data.{key} names {self.label!r}, which is the label (data.label): leave it out, as a model "
                    "cannot be given the answer"
                )
        for name, kind in given.items():
            self._check_kind(name, kind)
        if not (self.categorical or self.undeclared or any(isinstance(kind, Categorical) for kind in given.values())):
            raise ConfigError(
                "data.categorical is empty: name at least one column of ids, as data.categorical=[user] or "
                "data.columns.user=hash"
            )

    @property
    def undeclared(self) -> bool:
        """Nothing says what becomes of the columns: it is to be inferred."""
        return not (self.columns or self.categorical or self.dense)

    def _declared(self, name: str) -> Kind:
        dense = {"log": self.log_dense, "standardise": self.standardise}
        hashed = {"rows": self.hash_size} if isinstance(self.hash_size, int) else {}
        return declared(name, self.columns[name], {"dense": dense, "hash": hashed, "cross": hashed})

    def _check_kind(self, name: str, kind: Kind) -> None:
        for key, names in (("dense", self.dense), ("categorical", self.categorical)):
            if name in names and isinstance(kind, Dense) != (key == "dense"):
                raise ConfigError(f"data.{key} names {name!r}, which is {kind.name} in data.columns: leave one out")
        if isinstance(kind, Cross) and self.label in kind.of:
            raise ConfigError(f"data.columns.{name}.of names {self.label!r}, which is the label (data.label)")
        taken = f"{name}_missing" in {*self.columns, *self.dense, *self.categorical}
        if isinstance(kind, Dense) and kind.missing == "indicator" and taken:
            raise ConfigError(
                f"data.columns.{name}.missing=indicator makes a column {name}_missing, which there is already: rename "
                "that one"
            )

    @functools.cached_property
    def kinds(self) -> Kinds:
        """What becomes of each column; of a trained model as it was then. Raises `ConfigError` if one has no size."""
        if self.learnt is not None:
            return self.learnt.kinds
        given = {name: self._declared(name) for name in self.columns}
        plain = Dense(log=self.log_dense, standardise=self.standardise)
        dense = {
            **dict.fromkeys(self.dense, plain),
            **{n: kind for n, kind in given.items() if isinstance(kind, Dense)},
        }
        ids: dict[str, Categorical] = {}
        for name in dict.fromkeys((*self.categorical, *given)):
            kind = given.get(name)
            if isinstance(kind, Categorical):
                ids[name] = kind
            elif kind is None:
                rows, hashed = self.size(name)
                ids[name] = Hash(rows) if hashed else Ids(rows)
        for name, table in self.tables.items():
            other = next(other for other, its in self.tables.items() if its == table)
            if ids[name] != ids[other] and isinstance(ids[name], Vocabulary) | isinstance(ids[other], Vocabulary):
                raise ConfigError(
                    f"data.tables puts {other!r} and {name!r} into one table, and they are declared otherwise: a value "
                    "has one row only if data.columns says the same of both"
                )
        return Kinds(dense, ids)

    @property
    def plain_dense(self) -> list[str]:
        """The dense columns whose numbers stay as they are."""
        return [name for name, kind in self.kinds.dense.items() if kind.plain]

    def with_learnt(self, learnt: Learnt | None) -> Self:
        """As a model was trained; None of one that was trained before anything was learnt of columns."""
        return replace(self, standardise=False) if learnt is None else replace(self, learnt=learnt)

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
        """All columns of the data that are read."""
        label = () if self.label is None else (self.label,)
        of = [part for name, kind in self.kinds.all() for part in (kind.of if isinstance(kind, Cross) else (name,))]
        return list(dict.fromkeys((*label, *of, *self.weights.values())))

    def read_as(self, types: Types, place: str) -> tuple[Column, ...]:
        """The categorical columns of the table at `place` whose columns have these types; none if nothing is declared.

        Raises:
            ConfigError: a column has no size.
            DataError: any column is missing, or of another type than it must be.
        """

        def need(condition: bool, key: str, name: str, allowed: str) -> None:
            if not condition:
                held = f"column {name!r} ({key}) holds {types[name]}"
                raise DataError(f"{place}: {held}, it must hold {allowed}")

        def number(kind: object) -> bool:
            return isinstance(kind, pl.DataType) and (kind.is_numeric() or kind == pl.Boolean)

        def key_of(name: str, key: str) -> str:
            return f"data.columns.{name}" if name in self.columns else f"data.{key}"

        if self.undeclared and self.learnt is None:
            return ()
        if self.label is not None:
            need(
                number(type_of(self.label, types, place, "data.label")), "data.label", self.label, "one number per row"
            )
        columns = []
        for name, kind in self.kinds.all():
            key = key_of(name, "dense" if isinstance(kind, Dense) else "categorical")
            parts = kind.of if isinstance(kind, Cross) else (name,)
            held = [type_of(part, types, place, key) for part in parts]
            listed = isinstance(held[0], pl.List | pl.Array)
            for part, one in zip(parts, held, strict=True):
                value = one if isinstance(kind, Dense) else value_type(one)
                allowed = kind.refusal(value)
                need(allowed is None, key, part, allowed or "")
                need(not isinstance(kind, Cross) or one == value, key, part, "one value per row, to be crossed")
            if not isinstance(kind, Categorical):
                continue
            weights = self.weights.get(name)
            if weights is not None:
                need(listed, key, name, "lists, as data.weights gives their ids weights")
                held_there = type_of(weights, types, place, "data.weights")
                of_numbers = isinstance(held_there, pl.List) and number(held_there.inner)
                need(of_numbers, "data.weights", weights, "lists of numbers")
            columns.append(Column(name, kind, self._forms(name, kind, types, place), listed, weights))
        return tuple(columns)

    def _forms(self, name: str, kind: Categorical, types: Types, place: str) -> tuple[tuple[str, str], ...]:
        """Raises `DataError` if the model was trained on others."""
        forms = []
        for part in told_apart({name: kind}):
            form = form_of(value_type(types[part])) or ""
            trained = None if self.learnt is None else self.learnt.fit(part).form
            if trained is not None and NOTHING not in (form, trained) and form != trained:
                raise DataError(
                    f"{place}: column {part!r} holds {types[part]}, and the model was trained on {trained}: cast it, "
                    "as its values would be others"
                )
            forms.append((part, form))
        return tuple(forms)

    def read_alike(self, tables: Sequence[tuple[Types, str]]) -> tuple[Column, ...]:
        """As `read_as` of several tables, each with its place; where a column of one has only nulls the others say what
        it is. Raises also `DataError` if one of them holds a column otherwise than another."""
        found = [self.read_as(types, place) for types, place in tables]
        merged = []
        for same in zip(*found, strict=True):
            known: dict[str, tuple[object, int]] = {}
            for number, column in enumerate(same):
                types, place = tables[number]
                for part, form in column.forms or ((column.name, ""),):
                    if types[part] == pl.Null:
                        continue
                    held = (form, column.listed)
                    before, first = known.setdefault(part, (held, number))
                    if held != before:  # its ids would differ
                        raise DataError(
                            f"{place}: column {part!r} holds {types[part]}, in {tables[first][1]} it holds "
                            f"{tables[first][0][part]}: write all files with the same types"
                        )
            merged.append(next((column for column in same if column.listed), same[0]))
        return tuple(merged)

    def schema(self, columns: Sequence[Column]) -> Schema:
        """What a source of tables with these columns yields."""
        dense = [
            (name, f"{name}_missing")[: 1 + (kind.missing == "indicator")] for name, kind in self.kinds.dense.items()
        ]
        features = (
            Feature(c.name, self.table_rows(c), self.tables.get(c.name), c.listed, self.pooling.get(c.name, "sum"))
            for c in columns
        )
        return Schema(tuple(name for names in dense for name in names), tuple(features))

    def table_rows(self, column: Column) -> int:
        """Ids of the column lie in `[0, rows)`."""
        if self.learnt is None:
            return column.kind.table_rows(None, Fit())
        return column.kind.table_rows(self.learnt.values.get(column.name), self.learnt.fit(column.name))


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
        labels = as_numpy(given.cast(pl.Float32), -1).copy()
        note((labels != 0) & (labels != 1), f"the label ({options.label}) is ", given, ", it must be 0 or 1")
    dense = _dense(frame, options, note)
    jagged = _ids(frame, options, columns, note)
    batch = Batch(torch.from_numpy(labels), torch.from_numpy(dense), jagged)
    return batch, [first[row] for row in sorted(first)]


def _dense(frame: pl.DataFrame, options: TableOptions, note: Callable[..., None]) -> NDArray[np.float32]:
    """`[B, N]`; what is far from float32's range is noted before anything becomes of it."""
    kinds = options.kinds.dense
    dense = np.empty((len(frame), len(kinds)), dtype=np.float32)
    for position, name in enumerate(kinds):
        column = frame[name]
        plain = numbers(column) if column.dtype.is_temporal() else column
        dense[:, position] = as_numpy(plain.cast(pl.Float32), 0)
    if not (dense.max(initial=0) <= _MOST and dense.min(initial=0) >= -_MOST):  # not so either where one is no number
        allowed = f", it must be a finite number of at most {_MOST:.0e}"
        for name, found in zip(kinds, dense.T, strict=True):
            note(~(np.abs(found) <= _MOST), f"{name} is ", frame[name], allowed)
    indicators = {}
    for position, (name, kind) in enumerate(kinds.items()):
        column = frame[name]
        if not kind.plain or (isinstance(kind.missing, float) and column.null_count()):
            fit = Fit() if options.learnt is None else options.learnt.fit(name)
            with np.errstate(over="ignore", invalid="ignore"):  # of numbers that were noted
                dense[:, position] = kind.numbers(column, dense[:, position], fit)
        if kind.missing == "indicator":
            indicators[position + 1] = column.is_null().to_numpy()
        elif kind.missing == "error" and column.null_count():
            note(column.is_null().to_numpy(), f"{name} is missing", None, "")
    return np.insert(dense, list(indicators), np.array(list(indicators.values())).T, axis=1) if indicators else dense


def _ids(frame: pl.DataFrame, options: TableOptions, columns: Sequence[Column], note: Callable[..., None]) -> Jagged:
    """Of all features, each with as many ids per sample as there are values."""

    @functools.cache
    def cells_of(name: str) -> Cells:
        cells = Cells(frame[name])
        if cells.flat.dtype.is_float() and name in whole:
            given = cells.flat.fill_null(0).cast(pl.Float64)
            same = given.cast(pl.Int64, strict=False).cast(pl.Float64) == given
            note(cells.rows_with(~same.fill_null(False).to_numpy()), f"{name} is ", frame[name], _NOT_WHOLE)
        return cells

    learnt = options.learnt
    whole = told_apart({column.name: column.kind for column in columns})
    weighted = any(column.weights for column in columns)
    values, lengths, weights = [], [], []
    for column in columns:
        name, kind = column.name, column.kind
        if isinstance(kind, Cross):
            ids, counts = kind.pairs(*map(cells_of, kind.of)), np.ones(len(frame), dtype=np.int64)
        else:
            cells = cells_of(name)
            fit, known = (Fit(), None) if learnt is None else (learnt.fit(name), learnt.values.get(name))
            ids, counts = kind.ids(cells, fit, known), cells.counts
            if isinstance(kind, Ids):
                _check_ids(ids, cells, name, kind, note)
            elif cells.missing is not None:
                if kind.takes_missing:
                    ids[cells.missing] = 0
                else:
                    note(cells.rows_with(cells.missing), f"{name} is missing", None, "")
        values.append(ids)
        lengths.append(counts)
        if column.weights is not None:
            weights.append(_weights(Cells(frame[column.weights]), column.weights, name, counts, note))
        elif weighted:
            weights.append(np.ones(len(ids), dtype=np.float32))
    listed = any(column.listed for column in columns)
    return Jagged(
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(np.append(0, np.cumsum(np.concatenate(lengths)))) if listed else None,
        torch.from_numpy(np.concatenate(weights)) if weighted else None,
        len(columns),
        len(frame),
    )


def _weights(
    cells: Cells, column: str, of: str, counts: NDArray[np.int64], note: Callable[..., None]
) -> NDArray[np.float32]:
    """Of the ids of the column `of`, of which each row has so many."""
    found: NDArray[np.float32] = as_numpy(cells.flat.cast(pl.Float32), np.nan)
    note(cells.counts != counts, f"{column} and {of} are of different length", None, "")
    if not np.isfinite(found).all():
        note(cells.rows_with(~np.isfinite(found)), f"{column} has a weight that is not a finite number", None, "")
    return found


def _check_ids(ids: NDArray[np.int64], cells: Cells, name: str, kind: Ids, note: Callable[..., None]) -> None:
    """Notes rows with ids that the table has not."""
    outside = ids.view(np.uint64) >= kind.rows
    hashed = f"hash the column with data.hash_size={{{name}: 100000}}"
    if cells.missing is not None:
        if kind.takes_missing:
            outside &= ~cells.missing
        else:
            remedy = f"{hashed}, which takes missing ones to row 0"
            note(cells.rows_with(cells.missing), f"{name} has no id", None, "", remedy=remedy)
    if outside.any():
        rows = np.repeat(np.arange(len(cells.counts)), cells.counts)[outside]
        found = dict(zip(rows[::-1].tolist(), cells.flat.filter(pl.Series(outside))[::-1], strict=True))
        allowed = f", outside of 0 … {kind.rows - 1} (data.rows)"
        remedy = f"{hashed}, or raise data.rows above its highest id"
        note(cells.rows_with(outside), f"{name} has id ", found, allowed, remedy=remedy)
