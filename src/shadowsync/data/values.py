"""Cells of a column, whatever type they come as: as numbers, and as words of 64 bits that tell values apart.

`L` values of a column, which are as many as its rows unless they come in lists.
"""

import functools
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from shadowsync.data.hashing import Words, hash_strings, mix

Mask = NDArray[np.bool_]

NOTHING = "nothing"
"""The form of values that are all missing."""
_DAY_US = 86_400_000_000
_LONG = ("Int128", "UInt128")


def form_of(kind: pl.DataType) -> str | None:
    """In which form values of this type are told apart: those of one form may come in several types (whole numbers of
    any width, also as floats), and equal values of two forms are not the same. None for types that hold no values that
    can be told apart."""
    if kind == pl.Null:
        return NOTHING
    if kind in (pl.String, pl.Categorical, pl.Enum) or kind.is_decimal() or str(kind) in _LONG:
        return "text"
    if kind.is_integer() or kind.is_float() or kind == pl.Boolean:
        return "integers"
    return str(kind.base_type()).lower() if kind.is_temporal() else None


def has_numbers(kind: pl.DataType) -> bool:
    """Whether `numbers` takes values of this type."""
    return kind.is_numeric() or kind.is_temporal() or kind in (pl.Boolean, pl.Null)


def numbers(values: pl.Series) -> pl.Series:
    """As float64, missing ones kept: of booleans 0 and 1, of dates, times and durations days, from 1970 on."""
    kind = values.dtype
    if not kind.is_temporal():
        return values.cast(pl.Float64)
    if kind == pl.Date:
        return values.to_physical().cast(pl.Float64)
    return microseconds(values).cast(pl.Float64) / _DAY_US


def microseconds(values: pl.Series) -> pl.Series:
    """Datetimes, durations and times of day in one unit, whatever theirs is."""
    if values.dtype == pl.Time:
        return values.to_physical() // 1000
    return values.dt.cast_time_unit("us").to_physical()


def texts(values: pl.Series) -> pl.Series:
    """As strings; a decimal without the zeros that only its scale gives it."""
    strings = values.cast(pl.String)
    if isinstance(values.dtype, pl.Decimal) and values.dtype.scale:
        return strings.str.strip_chars_end("0").str.strip_chars_end(".")
    return strings


def integers(values: pl.Series) -> NDArray[np.int64]:
    """`[L]`, 0 where missing; those beyond int64 by the same 64 bits, floats without their fraction."""
    if values.dtype.is_float():
        values = values.cast(pl.Int64, strict=False)
    elif values.dtype.is_temporal() and values.dtype != pl.Date:
        values = microseconds(values)
    else:
        values = values.cast(pl.Int8) if values.dtype == pl.Boolean else values.to_physical()
    return as_numpy(values, 0).astype(np.int64)


def words(values: pl.Series) -> Words:
    """A hash of each value, of any type that has a form, `[L]`; of missing ones it says nothing."""
    if form_of(values.dtype) == "text":
        return hash_strings(texts(values))
    return mix(integers(values).view(np.uint64))


def as_numpy(values: pl.Series, missing: float) -> NDArray[Any]:
    """With `missing` for those that are; filling takes polars a tenth of a millisecond, also where there are none."""
    return (values.fill_null(missing) if values.null_count() else values).to_numpy()


class Cells:
    """A column of `B` rows: its values one after the other, and how many each row has.

    Attributes:
        flat: the values `[L]`; what is no number among floats is missing, and of a column of nulls all are.
        counts: int64 `[B]`; a missing list is an empty one.
    """

    def __init__(self, column: pl.Series) -> None:
        kind = column.dtype
        if isinstance(kind, pl.Array):
            column = column.arr.to_list()
        if isinstance(kind, pl.List | pl.Array):
            self.counts = column.list.len().fill_null(0).to_numpy().astype(np.int64)
            flat = column.filter(pl.Series(self.counts > 0)).explode()
        else:
            flat, self.counts = column, np.ones(len(column), dtype=np.int64)
        if flat.dtype == pl.Null:
            flat = flat.cast(pl.Int64)
        self.flat = flat.fill_nan(None) if flat.dtype.is_float() else flat

    @functools.cached_property
    def words(self) -> Words:
        """As the function; not to be changed."""
        return words(self.flat)

    @functools.cached_property
    def missing(self) -> Mask | None:
        """Which values are, `[L]`; None if none is."""
        return self.flat.is_null().to_numpy() if self.flat.null_count() else None

    def rows_with(self, flags: Mask) -> Mask:
        """Which rows have a flag among their values, `[B]`."""
        found = np.zeros(len(self.counts), dtype=np.bool_)
        found[np.repeat(np.arange(len(self.counts)), self.counts)[flags]] = True
        return found
