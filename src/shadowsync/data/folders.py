"""Columns that folders are named after, as in `day=2024-01-01/part-0.parquet`, and files chosen by them."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Literal

import polars as pl
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from shadowsync.data.files import File
from shadowsync.errors import DataError


def _said(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(given)
    except ValidationError:
        raise ValueError("it must be a value, a list of values, or {from: …, to: …} with one of them or both") from None


Value = int | str | date
Wanted = Annotated[
    Value
    | Annotated[tuple[Value, ...], Field(min_length=1)]
    | Annotated[dict[Literal["from", "to"], Value], Field(min_length=1)],
    WrapValidator(_said),
]
"""One value, several, or all from one to another, both included."""
Found = tuple[File, Mapping[str, pl.Series]]
"""A file, and one value of each column that its folders are named after."""

_MISSING = "__HIVE_DEFAULT_PARTITION__"


def chosen_files(key: str, files: Sequence[File], wanted: Mapping[str, Wanted]) -> list[Found]:
    """Those whose folders have wanted values. A column holds integers or dates if all files, chosen or not, do, else
    text, and null where a file has none of it.

    Raises:
        DataError: there are none; names the configuration `key`.
    """
    named = [dict(file.partitions) for file in files]
    columns = {
        name: _typed(pl.Series(name, [one.get(name) for one in named], pl.String).replace(_MISSING, None))
        for name in dict.fromkeys(name for one in named for name in one)
    }
    left = pl.Series([True] * len(files))
    for name, values in wanted.items():
        if name not in columns:
            has = ", ".join(f"{column}=…" for column in columns) or "none"
            raise DataError(
                f"{key} names {name!r}, which is in the name of no folder; of such folders there are: {has}"
            )
        left &= _matches(key, columns[name], values).fill_null(value=False)
    if not left.any():
        bounds = ((name, columns[name].drop_nulls().sort()) for name in wanted)
        there = " and ".join(f"{name} from {values[0]} to {values[-1]}" for name, values in bounds)
        raise DataError(f"{key} leaves none of the {len(files)} files, which have {there}")
    return [(files[n], {name: columns[name].slice(n, 1) for name in named[n]}) for n in left.arg_true().to_list()]


def _matches(key: str, column: pl.Series, wanted: Wanted) -> pl.Series:
    if not isinstance(wanted, dict):
        return column.is_in(_given(key, column, wanted if isinstance(wanted, tuple) else (wanted,)))
    kept = column.is_not_null()
    if "from" in wanted:
        kept &= column >= _given(key, column, [wanted["from"]])[0]
    if "to" in wanted:
        kept &= column <= _given(key, column, [wanted["to"]])[0]
    return kept


def _given(key: str, column: pl.Series, values: Sequence[Value]) -> pl.Series:
    """The user's values as the type of the column."""
    text = pl.Series([str(value) for value in values], dtype=pl.String)
    typed = _as(text, column.dtype)
    if typed.null_count():
        wrong = text.filter(typed.is_null())[0]
        raise DataError(
            f"{key}.{column.name}={wrong}: the folders hold {column.dtype}, such as {column.drop_nulls()[0]}"
        )
    return typed


def _typed(text: pl.Series) -> pl.Series:
    for kind in (pl.Int64(), pl.Date()):
        if (typed := _as(text, kind)).null_count() == text.null_count() < len(text):
            return typed
    return text


def _as(text: pl.Series, kind: pl.DataType) -> pl.Series:
    """Null where it is not of that kind."""
    return text.str.to_date("%Y-%m-%d", strict=False) if kind == pl.Date else text.cast(kind, strict=False)
