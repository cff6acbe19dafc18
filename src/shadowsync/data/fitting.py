"""What is learnt of the training rows before any of them is trained: one pass, and what of it a checkpoint keeps."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import polars as pl
from torch import Tensor

from shadowsync.data.columns import Buckets, Categorical, Cross, Dense, Ids, Kinds, Vocabulary, declared
from shadowsync.data.learners import SAMPLE, Fit, Learner, Values
from shadowsync.data.values import NOTHING, Cells, form_of

ENOUGH_ROWS = 4_000_000
"""Rows, spread over all of them, that tell a mean, a deviation or a quantile well enough: to some thousandths of a
deviation. A vocabulary is made of all rows."""
_TENSORS = "values."


class TrainingRows(Protocol):
    """Rows of a table, or a part of them, whose columns can be read as they lie."""

    rows: int

    def frames(self, columns: Collection[str], most_rows: int) -> Iterator[pl.DataFrame]:
        """Those columns of about so many rows, spread evenly over all of them, without rows that cannot be parsed."""

    def types(self) -> Iterable[Mapping[str, pl.DataType]]:
        """Of all columns, of each file."""


class LearntState(msgspec.Struct, frozen=True):
    """What a checkpoint's manifest has of it, beside the values of vocabularies."""

    dense: dict[str, dict[str, Any]]
    ids: dict[str, dict[str, Any]]
    fits: dict[str, Fit]
    rows: int


class Learnt:
    """What becomes of the columns of a trained model, and what was learnt of them.

    Attributes:
        kinds: what becomes of each.
        fits: by the name of the column in the data; those of which nothing was learnt may be absent.
        values: of vocabularies.
        rows: training rows that were looked at.
    """

    def __init__(self, kinds: Kinds, fits: Mapping[str, Fit], values: Mapping[str, Values], rows: int) -> None:
        self.kinds, self.fits, self.values, self.rows = kinds, fits, values, rows

    def fit(self, name: str) -> Fit:
        return self.fits.get(name, Fit())

    def state(self) -> LearntState:
        """As JSON takes it; `tensors` has the rest."""
        dense, ids = ({name: kind.described() for name, kind in of_kind.items()} for of_kind in self.kinds)
        return LearntState(dense, ids, dict(self.fits), self.rows)

    def tensors(self) -> dict[str, Tensor]:
        """The values of vocabularies, by names of their own among others."""
        numbered = ((number, self.values.get(name)) for number, name in enumerate(self.kinds.ids))
        return {
            f"{_TENSORS}{number}.{part}": tensor
            for number, values in numbered
            if values is not None
            for part, tensor in values.tensors().items()
        }

    @classmethod
    def of(cls, state: LearntState, tensors: Mapping[str, Tensor]) -> "Learnt":
        """The inverse of both; `ValueError` or `ConfigError` if they are none of a checkpoint."""
        dense, ids = (
            {name: declared(name, kind, {}) for name, kind in of_kind.items()} for of_kind in (state.dense, state.ids)
        )
        kinds = Kinds(
            {name: kind for name, kind in dense.items() if isinstance(kind, Dense)},
            {name: kind for name, kind in ids.items() if isinstance(kind, Categorical)},
        )
        values = {}
        for number, (name, kind) in enumerate(kinds.ids.items()):
            if isinstance(kind, Vocabulary):
                start = f"{_TENSORS}{number}."
                own = {key.removeprefix(start): found for key, found in tensors.items() if key.startswith(start)}
                values[name] = Values.of(own)
        return cls(kinds, state.fits, values, state.rows)

    def metadata(self) -> dict[str, Any]:
        """All of it as plain JSON values, for whoever applies it elsewhere."""
        plain: dict[str, Any] = msgspec.to_builtins(self.state())
        return {**plain, "values": {name: values.values.to_list() for name, values in self.values.items()}}

    def sentence(self, of: int) -> str | None:
        """What was learnt of the `of` training rows, for the user; None if nothing was."""
        told = [f"{name} has {len(values):,} values" for name, values in self.values.items()]
        told += [
            f"{name} {len(self.fit(name).edges) + 1} buckets"
            for name, kind in self.kinds.ids.items()
            if isinstance(kind, Buckets)
        ]
        scaled = [name for name, kind in self.kinds.dense.items() if kind.standardise]
        if scaled:
            told.append(f"{_listed(scaled)} {'is' if len(scaled) == 1 else 'are'} standardised")
        drawn = [kind for _, kind in self.kinds.all() if isinstance(kind, Buckets) or getattr(kind, "clip", None)]
        some = f", quantiles from {SAMPLE:,} of them" if drawn and self.rows > SAMPLE else ""
        return f"learnt from {self.rows:,} of {of:,} training rows{some}: {_listed(told)}" if told else None


def learn(kinds: Kinds, tables: Mapping[str, str], source: TrainingRows) -> Learnt:
    """One pass over the training rows, or over `ENOUGH_ROWS` of them; none where nothing is to be learnt.

    Vocabularies that share one of `tables`, by column, are one. Raises `DataError` for a vocabulary that is too large,
    and what reading raises.
    """
    most = source.rows if any(kind.learns_of_all for _, kind in kinds.all()) else min(source.rows, ENOUGH_ROWS)
    share = SAMPLE / max(most, 1)
    learners: dict[str, Learner] = {}
    of_table: dict[str, Learner] = {}
    for name, kind in kinds.all():
        if kind.learns:
            learners[name] = kind.learner(name, share)
            if kind.learns_of_all and name in tables:
                learners[name] = of_table.setdefault(tables[name], learners[name])
    rows = 0
    for frame in source.frames(list(learners), most) if learners else ():
        rows += len(frame)
        for name, learner in learners.items():
            learner.see(Cells(frame[name]).flat)
    found = {name: learner.learnt() for name, learner in learners.items()}
    fits = {name: fit for name, (fit, _) in found.items()}
    for name, form in _forms(kinds.ids, source).items():
        fits[name] = msgspec.structs.replace(fits.get(name, Fit()), form=form)
    values = {name: values for name, (_, values) in found.items() if values is not None}
    return Learnt(kinds, fits, values, rows)


def told_apart(kinds: Mapping[str, Categorical]) -> list[str]:
    """The columns of the data whose values are told apart, so that their form matters."""
    names: list[str] = []
    for name, kind in kinds.items():
        if isinstance(kind, Cross):
            names += kind.of
        elif not isinstance(kind, Ids | Buckets):
            names.append(name)
    return list(dict.fromkeys(names))


def value_type(kind: pl.DataType) -> pl.DataType:
    """Of the values of a column, which may come in lists."""
    inner = kind.inner if isinstance(kind, pl.List | pl.Array) else kind
    assert isinstance(inner, pl.DataType)
    return inner


def _forms(kinds: Mapping[str, Categorical], source: TrainingRows) -> dict[str, str]:
    """Of each column whose values are told apart; in a file that has only nulls of it, it has any form."""
    found: dict[str, str] = {}
    for types in source.types():
        for name in told_apart(kinds):
            form = form_of(value_type(types[name]))
            if form is not None and found.get(name, NOTHING) == NOTHING:
                found[name] = form
    return found


def _listed(words: list[str]) -> str:
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
