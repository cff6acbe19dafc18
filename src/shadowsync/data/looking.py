"""What the columns of a table look like, and what should become of each where nobody says it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import polars as pl

from shadowsync.data.fitting import TrainingRows
from shadowsync.data.values import form_of, is_list, shown_type, value_type
from shadowsync.errors import DataError
from shadowsync.registry import nearest

LOOKED_AT = 500_000
"""Rows, spread over all of them."""
LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "is_conversion", "purchase", "like")
"""Names that a label usually has, the likeliest first; capital letters do not matter."""
ROLES = ("label", "weight")
"""Why a column is left out of what a model is given, though it is read."""
_CODES = 256  # whole numbers of at most so many values are codes or small counts: each can have a row of its own
_WORDS = 10_000  # texts of at most so many values make a vocabulary
_SHARE_OF_ROWS = 0.95  # with more values than this share of the rows, hardly any comes again
_FEW_ROWS = 1_000
_DATES = 20
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Look:
    """A column as it looks in `rows` rows; of lists, their values.

    Attributes:
        distinct: about so many different values; None of types whose values are not told apart.
        low, high: the smallest and the largest value; None where that has no meaning.
        becomes: as `data.columns` declares it, or None where it is left out.
        why: it is left out, or is the label.
    """

    name: str
    type: pl.DataType
    rows: int
    nulls: int
    distinct: int | None
    low: object
    high: object
    becomes: dict[str, Any] | None
    why: str


@dataclass(frozen=True)
class Looks:
    """All columns of a table, of which `looked_at` of `rows` rows were looked at; the label is one of them."""

    columns: tuple[Look, ...]
    label: str | None
    rows: int
    looked_at: int

    @property
    def declared(self) -> dict[str, dict[str, Any]]:
        """As `data.columns` takes it."""
        return {look.name: look.becomes for look in self.columns if look.becomes is not None}

    @property
    def sentence(self) -> str:
        """What becomes of the columns, for whoever did not say it."""
        kinds: dict[str, list[str]] = {}
        for name, becomes in self.declared.items():
            kinds.setdefault(becomes["kind"], []).append(name)
        left_out = [f"{one.name} ({one.why})" for one in self.columns if one.becomes is None and one.why not in ROLES]
        told = [f"{kind} {', '.join(names)}" for kind, names in kinds.items()]
        told += [f"left out {', '.join(left_out)}"] if left_out else []
        labels = ", ".join(one.name for one in self.columns if one.why == "label")
        return f"the columns as they look, which data.columns changes: label {labels}; {'; '.join(told)}"


def look(source: TrainingRows, label: str | None, answers: Mapping[str, str] = _NONE) -> Looks:
    """Looks at about `LOOKED_AT` rows.

    `answers` are columns of labels and weights, each with the key that names it. `label` is `data.label`; left at its
    default, it is looked for among usual names, unless `data.labels` names others.

    Raises:
        DataError: there is no label, or no column that `answers` names, or the files hold other columns.
    """
    types = next(iter(source.types()))
    for name, key in answers.items():
        if name not in types and key != "data.label":
            has = ", ".join(list(types)[:50])
            raise DataError(f"there is no column {name!r} ({key}){nearest(name, types)}; there are {has}")
    try:
        frame = pl.concat(source.frames(list(types), LOOKED_AT), how="vertical_relaxed")
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"what becomes of the columns cannot be inferred, as the files hold others or of other types: "
            f"{str(error).splitlines()[0]}; declare them (data.columns)"
        ) from error
    label = None if "data.labels" in answers.values() else _label(types, label)
    said = {name: "weight" if key == "data.weight" else "label" for name, key in answers.items()}
    said |= {} if label is None else {label: "label"}
    return Looks(tuple(_look(frame[name], said.get(name)) for name in types), label, source.rows, len(frame))


def _label(types: Mapping[str, pl.DataType], label: str | None) -> str:
    """Raises `DataError` if there is none."""
    lower = {name.lower(): name for name in reversed(list(types))}
    if label is not None and label in types:
        return label
    usual = next((lower[name] for name in LABELS if name in lower), None)
    if label != "label" or usual is None:
        raise DataError(
            f"there is no column {label or 'label'!r}: say which one holds 0 or 1 with data.label=NAME; there are "
            f"{', '.join(list(types)[:50])}"
        )
    return usual


def _look(column: pl.Series, said: str | None) -> Look:
    kind = value_type(column.dtype)
    values = column.explode() if is_list(column.dtype) else column
    told = form_of(kind) is not None and not kind.is_nested()
    given = values.drop_nulls() if told else values.clear()
    given = given.drop_nans() if kind.is_float() else given
    ordered = len(given) > 0 and kind not in (pl.Categorical, pl.Enum)
    distinct = int(pl.select(pl.lit(given).approx_n_unique()).item()) if len(given) else 0 if told else None
    low, high = (given.min(), given.max()) if ordered else (None, None)
    meaning = said or _meaning(column, distinct)
    becomes, why = (None, meaning) if isinstance(meaning, str) else (meaning, "")
    return Look(column.name, column.dtype, len(column), column.null_count(), distinct, low, high, becomes, why)


def _meaning(column: pl.Series, distinct: int | None) -> dict[str, Any] | str:
    """As `data.columns` declares it, or why it is left out."""
    kind, listed = value_type(column.dtype), is_list(column.dtype)
    if distinct is None:
        return f"it holds {shown_type(column.dtype)}"
    if distinct <= 1:
        return "it is empty" if distinct == 0 else "it holds one value only"
    if kind.is_float() or kind.is_decimal() or kind == pl.Duration:
        return "it holds lists of fractions" if listed else {"kind": "dense"}
    if kind.is_temporal():
        return {"kind": "buckets", "count": _DATES}
    present = len(column) - column.null_count()
    if not listed and present >= _FEW_ROWS and distinct > _SHARE_OF_ROWS * present:
        return "it holds another value in nearly every row"
    few = distinct <= (_CODES if kind.is_integer() else _WORDS)
    return {"kind": "vocabulary"} if few else {"kind": "hash", "rows": _round_up(2 * distinct)}


def _round_up(number: int) -> int:
    """To one digit and zeros."""
    unit = int("1".ljust(len(str(number)), "0"))
    return -(-number // unit) * unit
