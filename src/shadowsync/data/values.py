"""Values of a column of a table, whatever type they come as, in the forms that `serving` turns into numbers and ids.

`L` values of a column, which are as many as its rows unless they come in lists.
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.serving import DAY_US, NOTHING, TEXTS, Cells, Ids, Known, Mask, Words, hash_bytes, hash_texts, mix

pa: Any = pyarrow  # has no types

LONG = ("Int128", "UInt128")
"""Types, as polars calls them, of whole numbers that no id holds."""
_INLINE, _LENGTH, _HALF = 12, np.uint64(0xFFFFFFFF), np.uint64(32)


def form_of(kind: pl.DataType) -> str | None:
    """In which form values of this type are told apart: those of one form may come in several types (whole numbers of
    any width, also as floats), and equal values of two forms are not the same. None for types that hold no values that
    can be told apart."""
    if kind == pl.Null:
        return NOTHING
    if kind in (pl.String, pl.Categorical, pl.Enum) or str(kind) in LONG:
        return "strings"
    if kind.is_decimal():
        return "decimals"
    if kind.is_integer() or kind.is_float() or kind == pl.Boolean:
        return "integers"
    return str(kind.base_type()).lower() if kind.is_temporal() else None


def is_list(kind: pl.DataType) -> bool:
    """Whether cells are lists of values."""
    return isinstance(kind, pl.List | pl.Array)


def value_type(kind: pl.DataType) -> pl.DataType:
    """Of the values of a column, which may come in lists."""
    inner = kind.inner if isinstance(kind, pl.List | pl.Array) else kind
    assert isinstance(inner, pl.DataType)
    return inner


def shown_type(kind: pl.DataType) -> str:
    """A type in a message: as polars calls it, but of an Enum only how many values it has."""
    if isinstance(kind, pl.Enum):
        return f"Enum of {len(kind.categories)} values"
    if isinstance(kind, pl.List):
        return f"List({shown_type(value_type(kind))})"
    return str(kind)


def has_numbers(kind: pl.DataType) -> bool:
    """Whether `numbers` takes values of this type."""
    return kind.is_numeric() or kind.is_temporal() or kind in (pl.Boolean, pl.Null)


def numbers(values: pl.Series) -> NDArray[np.float64]:
    """`[L]`, 0 where missing: of booleans 0 and 1, of dates, times and durations days, from 1970 on."""
    kind = values.dtype
    if not kind.is_temporal():
        return as_numpy(values.cast(pl.Float64), 0)
    if kind == pl.Date:
        return as_numpy(values.to_physical().cast(pl.Float64), 0)
    return as_numpy(microseconds(values).cast(pl.Float64), 0) / DAY_US  # polars divides by multiplying, not as exactly


def minutes_of(values: pl.Series) -> NDArray[np.float64]:
    """Of dates, of text that holds dates, and of seconds, since 1970, `[L]`; NaN where that is not known."""
    if values.dtype == pl.String:
        seconds = values.cast(pl.Float64, strict=False)
        if seconds.null_count() == values.null_count():
            values = seconds
        else:
            with contextlib.suppress(pl.exceptions.ComputeError):  # of no format: all of them are bad
                values = values.str.to_datetime(strict=False)
    if values.dtype == pl.String:
        return np.full(len(values), np.nan)
    found = numbers(values) * 1440 if values.dtype.is_temporal() else numbers(values) / 60
    return np.where(nulls(values), np.nan, found)


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


def integers(values: pl.Series) -> Ids:
    """`[L]`, 0 where missing; those beyond int64 by the same 64 bits, floats without their fraction. It may be the
    memory of the column, to be read only."""
    if values.dtype.is_float():
        values = values.cast(pl.Int64, strict=False)
    elif values.dtype == pl.Boolean:
        values = values.cast(pl.Int8)
    elif values.dtype.is_temporal():
        values = values.to_physical() if values.dtype == pl.Date else microseconds(values)
    found = as_numpy(values, 0)
    return found.view(np.int64) if found.dtype == np.uint64 else found.astype(np.int64, copy=False)


def words(values: pl.Series) -> Words:
    """A hash of each value, of any type that has a form, `[L]`; of missing ones it says nothing."""
    if form_of(values.dtype) in TEXTS:
        return hash_strings(texts(values))
    return mix(integers(values).astype(np.uint64))


def hash_strings(strings: pl.Series) -> Words:
    """One word per string, from its UTF-8 bytes; a missing string counts as empty."""
    given = strings.rechunk()
    array = given.to_arrow(compat_level=pl.CompatLevel.newest())
    # Arrow's views: 4 bytes of length, then the string itself if it has at most 12 bytes, filled up with zeros
    views = np.frombuffer(array.buffers()[1], dtype="<u8").reshape(-1, 2)[array.offset : array.offset + len(array)]
    lengths, missing = (views[:, 0] & _LENGTH).astype(np.int64), nulls(given)
    if lengths.max(initial=0) > _INLINE:
        return _hash_long(given.fill_null(""))
    lengths[missing] = 1  # not the shortest one

    def words_at(position: int, where: Any) -> Words:
        ends = views[where, 1]
        return ends >> _HALF if position else np.asarray(views[where, 0] >> _HALF | ends << _HALF)

    hashes = hash_texts(lengths, words_at)
    hashes[missing] = mix(np.zeros(1, dtype=np.uint64))[0]
    return hashes


def _hash_long(strings: pl.Series) -> Words:
    array = strings.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.large_binary())
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.zeros(edges[-1] + 8, dtype=np.uint8)
    if data is not None:
        text[: edges[-1]] = np.frombuffer(data, dtype=np.uint8, count=edges[-1])
    return hash_bytes(text, edges)


def as_numpy(values: pl.Series, missing: float) -> NDArray[Any]:
    """With `missing` for those that are."""
    if not values.null_count():
        return values.to_numpy()
    found: NDArray[Any] = values.to_arrow().fill_null(missing).to_numpy(zero_copy_only=False)
    return found


def nulls(values: pl.Series) -> Mask:
    """Which are missing, `[L]`: from Arrow's bits, as polars takes a tenth of a millisecond to set up an expression."""
    array = values.to_arrow(compat_level=pl.CompatLevel.newest())
    if not array.null_count:
        return np.zeros(len(values), dtype=np.bool_)
    if (bits := array.buffers()[0]) is None:
        return np.ones(len(values), dtype=np.bool_)  # of the type that holds nothing else
    there = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    found: Mask = there[array.offset : array.offset + len(array)] == 0
    return found


class SeriesCells(Cells):
    """A column of a data frame. A missing list is an empty one; `for_ids`, NaN is missing."""

    def __init__(self, column: pl.Series, for_ids: bool = True) -> None:
        self.rows, self.flat, self.counts = column, column, None
        if isinstance(column.dtype, pl.Array):
            column = column.arr.to_list()
        if is_list(column.dtype):
            self.counts = column.list.len().fill_null(0).to_numpy().astype(np.int64)
            self.flat = column.filter(pl.Series(self.counts > 0)).explode()
        if self.flat.dtype == pl.Null:
            self.flat = self.flat.cast(pl.Int64)
        if for_ids and self.flat.dtype.is_float():
            self.flat = self.flat.fill_nan(None)
        self.missing = nulls(self.flat) if self.flat.null_count() else None

    @functools.cached_property
    def words(self) -> Words:
        return words(self.flat)

    @functools.cached_property
    def integers(self) -> Ids:
        return integers(self.flat)

    @functools.cached_property
    def numbers(self) -> NDArray[np.float64]:
        return numbers(self.flat)

    @functools.cached_property
    def floats(self) -> NDArray[np.float32]:
        exact = self.flat.dtype.is_temporal() or self.flat.dtype.is_decimal()
        return self.numbers.astype(np.float32) if exact else as_numpy(self.flat.cast(pl.Float32), 0)

    @functools.cached_property
    def fractions(self) -> Mask | None:
        if not self.flat.dtype.is_float():
            return None
        given = self.flat.fill_null(0).cast(pl.Float64)
        whole = given.cast(pl.Int64, strict=False).cast(pl.Float64) == given
        found: Mask = ~whole.fill_null(False).to_numpy()
        return found if found.any() else None


class Values:
    """The `V` values of a vocabulary, in the order of their ids: text, or whole numbers."""

    def __init__(self, values: pl.Series) -> None:
        self.values, self.known = values, Known(words(values))

    def __len__(self) -> int:
        return len(self.values)

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint keeps them: whole numbers, or the bytes of all texts and where each ends."""
        if self.values.dtype != pl.String:
            return {"numbers": torch.from_numpy(integers(self.values).copy())}
        ends = self.values.str.len_bytes().cast(pl.Int64).cum_sum().to_torch()
        text = "".join(self.values.to_list()).encode()
        return {"text": torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8), "ends": ends}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Values":
        """The inverse of `tensors`; `ValueError` if they are none of a vocabulary."""
        if tensors.keys() == {"numbers"}:
            return cls(pl.Series(tensors["numbers"].numpy(), dtype=pl.Int64))
        if tensors.keys() != {"text", "ends"}:
            raise ValueError(f"it has {', '.join(tensors) or 'nothing'}")
        ends, text = [0, *tensors["ends"].tolist()], tensors["text"].numpy().tobytes()
        if ends != sorted(ends) or ends[-1] > len(text):
            raise ValueError("its texts end before they begin")
        found = [text[start:end].decode() for start, end in itertools.pairwise(ends)]
        return cls(pl.Series(found, dtype=pl.String))
