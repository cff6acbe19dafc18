"""What is learnt of the training rows before any of them is trained: one pass, and what of it a checkpoint keeps."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import polars as pl
from torch import Tensor

from shadowsync.data.columns import Buckets, Categorical, Dense, Fit, Kinds, Vocabulary, declared
from shadowsync.data.source import Schema
from shadowsync.data.values import SeriesCells, Values, form_of, is_list, value_type
from shadowsync.serving import NOTHING

ENOUGH_ROWS = 4_000_000
"""Rows, spread over all of them, that tell a mean, a deviation or a quantile well enough: to some thousandths of a
deviation. A vocabulary is made of all rows."""
SAMPLE = 1_000_000
"""Rows whose values quantiles are taken of; of more, so many are drawn."""
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

    def described(self) -> dict[str, Any]:
        """As `serving.Transforms` takes it, without vocabularies."""
        plain: dict[str, Any] = msgspec.to_builtins(self.state())
        return plain

    def tensors(self) -> dict[str, Tensor]:
        """The values of vocabularies, by names of their own among others."""
        return {
            f"{_TENSORS}{number}.{part}": tensor
            for number, name in enumerate(self.kinds.ids)
            if name in self.values
            for part, tensor in self.values[name].tensors().items()
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

    def check(self, schema: Schema) -> None:
        """`ValueError` if a vocabulary has more values than the table of its column has rows for."""
        for one in schema.features:
            if one.name in self.values and (rows := len(self.values[one.name]) + 2) > one.rows:
                raise ValueError(
                    f"the vocabulary of {one.name} needs {rows} rows and its table has {one.rows}: it is of another run"
                )

    def sentence(self, of: int) -> str | None:
        """What was learnt of the `of` training rows, for the user; None if nothing was."""
        told = [f"{name} has {len(values):,} values" for name, values in self.values.items()]
        buckets = [name for name, kind in self.kinds.ids.items() if isinstance(kind, Buckets)]
        told += [f"{name} {len(self.fit(name).edges) + 1} buckets" for name in buckets]
        scaled = [name for name, kind in self.kinds.dense.items() if kind.standardise]
        if scaled:
            told.append(f"{_listed(scaled)} {'is' if len(scaled) == 1 else 'are'} standardised")
        drawn = any(kind.sees == "sample" for _, kind in self.kinds.all()) and self.rows > SAMPLE
        some = f", quantiles from {SAMPLE:,} of them" if drawn else ""
        return f"learnt from {self.rows:,} of {of:,} training rows{some}: {_listed(told)}" if told else None


def learn(kinds: Kinds, tables: Mapping[str, str], source: TrainingRows) -> Learnt:
    """One pass over the training rows, or over `ENOUGH_ROWS` of them; none where nothing is to be learnt.

    Vocabularies that share one of `tables`, by column, are one. Raises `DataError` for a vocabulary that is too large,
    and what reading raises.
    """
    learning = {name: kind for name, kind in kinds.all() if kind.sees != "nothing"}
    vocabularies = [name for name, kind in learning.items() if isinstance(kind, Vocabulary)]
    most = source.rows if vocabularies else min(source.rows, ENOUGH_ROWS)
    first = {name: name for name in learning}
    for name in reversed(vocabularies):
        first |= {other: name for other in vocabularies if name in tables and tables.get(other) == tables[name]}
    parts: dict[str, list[pl.DataFrame]] = {name: [] for name in first.values()}
    rows = 0
    for number, frame in enumerate(source.frames(list(learning), most) if learning else ()):
        rows += len(frame)
        sample = frame if most <= SAMPLE else frame.sample(fraction=SAMPLE / most, seed=number)
        for name, kind in learning.items():
            seen, column = parts[first[name]], (sample if kind.sees == "sample" else frame)[name]
            seen.append(kind.seen(SeriesCells(column).flat))
            if isinstance(kind, Vocabulary):
                seen[:] = kind.merged(seen, first[name])
    found = {
        name: learning[name].fit(pl.concat([p for p in of if len(p)] or of[:1])) for name, of in parts.items() if of
    }
    learnt = {name: found[one] for name, one in first.items() if one in found}
    fits = {name: fit for name, fit in learnt.items() if isinstance(fit, Fit)}
    for name, form in _forms(kinds.ids, source).items():
        fits[name] = msgspec.structs.replace(fits.get(name, Fit()), form=form)
    for part in [one for name, kind in kinds.ids.items() for one in kind.parts(name)]:
        if any(is_list(types[part]) for types in source.types()):
            fits[part] = msgspec.structs.replace(fits.get(part, Fit()), listed=True)
    return Learnt(kinds, fits, {name: own for name, own in learnt.items() if isinstance(own, Values)}, rows)


def told_apart(kinds: Mapping[str, Categorical]) -> list[str]:
    """The columns of the data whose values are told apart, so that their form matters."""
    return list(dict.fromkeys(part for name, kind in kinds.items() if kind.tells_apart for part in kind.parts(name)))


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
