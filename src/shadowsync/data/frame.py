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
from torch import Tensor

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.columns import Categorical, Cross, Dense, Hash, Ids, Keys, Kind, Kinds, Rows, Vocabulary, declared
from shadowsync.data.files import Problem
from shadowsync.data.fitting import Learnt
from shadowsync.data.labels import FAMILIES, Task, task_of
from shadowsync.data.source import Feature, Pooling, Schema
from shadowsync.data.values import SeriesCells, as_numpy, form_of, is_list, minutes_of, shown_type, value_type
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest
from shadowsync.serving import NOTHING, Mask, Transforms, alike, indicator_of, told

Types = Mapping[str, pl.DataType]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which named columns a batch is made of, and how: options of any source of tables."""

    internal: ClassVar[tuple[str, ...]] = ("learnt",)
    not_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("sample_weight", "sample_weights", "weight_column"), "it is called data.weight"
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
    labels: Annotated[
        dict[str, str | dict[str, Any]],
        Field(
            description="in place of label, the columns that are learnt, each with its loss (logloss, mse, poisson, "
            "package.module:function) or a map of loss, like and weight; several need a model that answers all of them"
        ),
    ] = field(default_factory=dict)
    weight: Annotated[
        str | None,
        Field(description="the column of the rows' weights in the loss and in measures; null: all count alike"),
    ] = None
    time: Annotated[
        str | None,
        Field(description="the column that says when a row was, dates or seconds since 1970, for a ttl of dynamic ids"),
    ] = None
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
            if answer := next((name for name in self.answers if name in names), None):
                raise ConfigError(
                    f"data.{key} names {answer!r}, which is {self._role(answer)}: leave it out, as a model cannot be "
                    "given the answer"
                )
        if self.labels and self.label != "label":
            raise ConfigError("data.label has no effect beside data.labels: leave one of them out")
        _ = self.tasks  # what is wrong with them is said at once
        if self.weight is not None and self.weight in (*self.labels, self.label):
            raise ConfigError(f"data.weight={self.weight} is a label: give the column of the rows' weights")
        if self.time in self.answers:
            raise ConfigError(
                f"data.time={self.time} is {self._role(self.time)}: give the column that says when a row was"
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

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:
        """What is learnt, as if there were labels where there are none."""
        return tuple(task_of(*given) for given in self.labels.items()) or (Task(self.label or "label"),)

    @property
    def answers(self) -> dict[str, str]:
        """The columns of labels, and then of weights, that are read, each with the key that names it."""
        labels = dict.fromkeys(self.labels, "data.labels") or ({} if self.label is None else {self.label: "data.label"})
        return labels if self.weight is None or not labels else {**labels, self.weight: "data.weight"}

    def unlabelled(self) -> Self:
        """For rows that may be without answers."""
        return replace(self, label=None, labels={}, weight=None, time=None)

    def _role(self, answer: str) -> str:
        """Of a column that is an answer."""
        key = self.answers[answer]
        return f"the {'weight' if key == 'data.weight' else 'label'} ({key})"

    def _declared(self, name: str) -> Kind:
        dense = {"log": self.log_dense, "standardise": self.standardise}
        hashed = {"rows": self.hash_size} if isinstance(self.hash_size, int) else {}
        return declared(name, self.columns[name], {"dense": dense, "hash": hashed, "cross": hashed})

    def _check_kind(self, name: str, kind: Kind) -> None:
        for key, names in (("dense", self.dense), ("categorical", self.categorical)):
            if name in names and isinstance(kind, Dense) != (key == "dense"):
                raise ConfigError(f"data.{key} names {name!r}, which is {kind.name} in data.columns: leave one out")
        if isinstance(kind, Cross) and (used := [part for part in kind.of if part in self.answers]):
            raise ConfigError(f"data.columns.{name}.of names {used[0]!r}, which is {self._role(used[0])}")
        taken, known = indicator_of(name), {*self.columns, *self.dense, *self.categorical}
        if isinstance(kind, Dense) and kind.missing == "indicator" and taken in known:
            raise ConfigError(
                f"data.columns.{name}.missing=indicator makes a column {taken}, which there is already: rename that one"
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
        return [name for name, kind in self.kinds.dense.items() if not kind.log and kind.sees == "nothing"]

    @functools.cached_property
    def _learnt(self) -> Learnt:
        return Learnt(self.kinds, {}, {}, 0) if self.learnt is None else self.learnt

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
        of = [part for name, kind in self.kinds.all() for part in kind.parts(name)]
        return list(dict.fromkeys((*self.answers, *of, *self.weights.values(), *([self.time] if self.time else ()))))

    def read_alike(self, tables: Sequence[tuple[Types, str]]) -> Transforms:
        """What becomes of the columns of tables, each with its place; where one has only nulls of a column, or lists
        without values, the others say what it is, and if none does, what the model was trained on. Nothing becomes of
        any column if nothing is declared.

        Raises:
            ConfigError: a column has no size.
            DataError: any column is missing, of another type than it must be, or than in another table.
        """
        listed = {name: name in self.weights or self._learnt.fit(name).listed for name in self.kinds.ids}
        seen: dict[tuple[str, str, str], tuple[object, int]] = {}
        for number, (types, place) in enumerate(tables if self.kinds.dense or self.kinds.ids else ()):
            self._check_types(types, place)
            for name, kind in self.kinds.ids.items():
                for part in kind.parts(name):
                    if types[part] == pl.Null:
                        continue
                    listed[name], form = is_list(types[part]), form_of(value_type(types[part]))
                    facts: dict[str, object] = {"listed": listed[name]}
                    if kind.tells_apart and form != NOTHING:
                        facts["form"] = form
                    for what, held in facts.items():
                        before, first = seen.setdefault((name, part, what), (held, number))
                        if held != before:  # its ids would differ
                            there, elsewhere = tables[first]
                            raise DataError(
                                f"{place}: column {part!r} holds {shown_type(types[part])}, in {elsewhere} it holds "
                                f"{shown_type(there[part])}: write all files with the same types"
                            )
        known = {name: values.known for name, values in self._learnt.values.items()}
        return Transforms({**self._learnt.described(), "weights": self.weights}, known, listed)

    def _check_types(self, types: Types, place: str) -> None:
        """Raises `DataError` if the table at `place` lacks a column, or holds it as what it must not be."""

        def need(condition: bool, key: str, name: str, allowed: str) -> None:
            if not condition:
                held = f"column {name!r} ({key}) holds {shown_type(types[name])}"
                raise DataError(f"{place}: {held}, it must hold {allowed}")

        def number(kind: object) -> bool:
            return isinstance(kind, pl.DataType) and (kind.is_numeric() or kind == pl.Boolean)

        for name, key in self.answers.items():
            need(number(type_of(name, types, place, key)), key, name, "one number per row")
        if self.time is not None:
            held = type_of(self.time, types, place, "data.time")
            timed = held.is_numeric() or held in (pl.Date, pl.Datetime, pl.String)
            need(timed, "data.time", self.time, "dates, or seconds since 1970")
        for name, kind in self.kinds.all():
            dense, parts = isinstance(kind, Dense), kind.parts(name)
            key = f"data.columns.{name}" if name in self.columns else "data.dense" if dense else "data.categorical"
            for part in parts:
                held = type_of(part, types, place, key)
                value = held if dense else value_type(held)
                allowed = kind.refusal(value)
                need(allowed is None, key, part, allowed or "")
                need(not isinstance(kind, Cross) or held == value, key, part, "one value per row, to be crossed")
                trained = self._learnt.fit(part).form
                if not dense and not alike(form_of(value), trained):
                    raise DataError(
                        f"{place}: column {part!r} holds {shown_type(held)}, and the model was trained on {trained}: "
                        "cast it, as its values would be others"
                    )
            if name in self.pooling and self.learnt is None and name not in {*self.tables, *self.tables.values()}:
                listed = is_list(types[parts[0]]) or types[parts[0]] == pl.Null
                need(dense or listed, "data.pooling", parts[0], "lists, as it says how their rows are pooled")
            weights = None if dense else self.weights.get(name)
            if weights is not None:
                listed = is_list(types[parts[0]]) or types[parts[0]] == pl.Null
                need(listed, key, parts[0], "lists, as data.weights gives their ids weights")
                held = type_of(weights, types, place, "data.weights")
                numbers = value_type(held) == pl.Null or (is_list(held) and number(value_type(held)))
                need(numbers, "data.weights", weights, "lists of numbers")

    def schema(self, columns: Transforms) -> Schema:
        """What a source of tables with these columns yields."""
        features = []
        for c in columns.ids:
            kind, pooling = self.kinds.ids[c.name], self.pooling.get(c.name, "sum")
            ids = kind.ids(c.name, self._learnt.fit(c.name).form) if isinstance(kind, Keys) else None
            features.append(Feature(c.name, c.table_rows, self.tables.get(c.name), bool(c.listed), pooling, ids))
        return Schema(columns.names, tuple(features))

    def described(self) -> Mapping[str, Any]:
        values = {name: values.values.to_list() for name, values in self._learnt.values.items()}
        return {**self._learnt.described(), "weights": self.weights, "values": values}


def type_of(name: str, types: Mapping[str, pl.DataType], place: str, key: str) -> pl.DataType:
    """Of a column that `key` names; raises `DataError` if the table at `place` has none such."""
    if name not in types:
        has = ", ".join(list(types)[:50])
        hint = nearest(name, types)
        if f"/{name}=" in place:
            hint = f": it is in the name of a folder, so give as the path the folder above, or a pattern ({name}=*)"
        raise DataError(f"{place}: there is no column {name!r} ({key}){hint}; the file has {has}")
    return types[name]


def batch_of(frame: pl.DataFrame, options: TableOptions, columns: Transforms) -> tuple[Batch, list[Problem]]:
    """All rows as a batch, and the first problem of each bad row in their order; with any, the batch is of no use."""
    first: dict[int, Problem] = {}

    def note(bad: Mask, before: str, values: Any = None, after: str = "", remedy: str | None = None) -> None:
        for row in np.flatnonzero(bad).tolist():
            if row not in first:
                given = {} if remedy is None else {"remedy": remedy}
                first[row] = Problem(row, told(row, before, values, after), **given)

    labels, row_weights = _answers(frame, options, note)
    listed = {name for column in columns.ids if column.listed for name in (column.name, column.weights)}

    def cells_of(name: str, for_ids: bool) -> SeriesCells:
        nothing = name in listed and frame[name].dtype == pl.Null
        return SeriesCells(frame[name].cast(pl.List(pl.Int64)) if nothing else frame[name], for_ids)

    inputs = columns.of(len(frame), cells_of, note)
    values, offsets, weights = (None if each is None else torch.from_numpy(each) for each in inputs[1:])
    assert values is not None
    jagged = Jagged(values, offsets, weights, len(columns.ids), len(frame))
    times = None if options.time is None else _times(frame[options.time], note)
    batch = Batch(labels, torch.from_numpy(inputs.dense), jagged, row_weights, times)
    return batch, [first[row] for row in sorted(first)]


def _times(values: pl.Series, note: Callable[..., None]) -> Tensor:
    """Minutes since 1970, int32 `[B]`."""
    minutes = minutes_of(values)
    bad = ~((minutes >= 0) & (minutes < 1 << 31))
    note(bad, f"the time ({values.name}) is ", values, ", it must be a date from 1970 on, or seconds since then")
    return torch.from_numpy(np.where(bad, 0, minutes).astype(np.int32))


def _answers(frame: pl.DataFrame, options: TableOptions, note: Callable[..., None]) -> tuple[Tensor, Tensor | None]:
    """Labels `[B]` or `[B, T]`, zeros where there are none, and the rows' weights."""
    if not options.answers:
        return torch.zeros(len(frame)), None

    def read(name: str, before: str, allowed: str, fits: Callable[[NDArray[np.float32]], Mask]) -> Tensor:
        values = as_numpy(frame[name].cast(pl.Float32), np.nan).copy()
        note(~fits(values), before, frame[name], f", it must be {allowed}")
        return torch.from_numpy(values)

    labels = [read(t.name, f"the label ({t.name}) is ", t.family.labels, t.family.fits) for t in options.tasks]
    weight, counts = options.weight, FAMILIES["poisson"]
    weights = None if weight is None else read(weight, f"the weight ({weight}) is ", counts.labels, counts.fits)
    return labels[0] if len(labels) == 1 else torch.stack(labels, dim=1), weights
