"""What is learnt of one column in a pass over the training rows, frame by frame, in bounded memory.

`V` values of a vocabulary, `L` values of a column.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.data.hashing import Words
from shadowsync.data.values import form_of, integers, numbers, texts, words
from shadowsync.errors import DataError

SAMPLE = 1_000_000
"""Values of a column of which quantiles are taken; of more, so many are drawn."""
MOST_VALUES = 20_000_000
"""Different values of a column that are counted for a vocabulary."""
_MERGED = 1 << 21
_LARGEST = 1e38  # larger ones are no numbers of float32, and their rows are bad


class Fit(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was learnt of a column; at its defaults nothing was.

    Attributes:
        form: of the values, as `values.form_of` says.
        mean, scale: a number becomes `(x − mean) / scale`.
        low, high: bounds to which numbers are moved before that.
        edges: between buckets, ascending.
    """

    form: str | None = None
    mean: float = 0.0
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    edges: tuple[float, ...] = ()


class Values:
    """The `V` values of a vocabulary, in the order of their ids: text, or whole numbers."""

    def __init__(self, values: pl.Series) -> None:
        self.values = values
        found = words(values)
        self._order = np.argsort(found, kind="stable")
        self._sorted = found[self._order]

    def __len__(self) -> int:
        return len(self.values)

    def find(self, wanted: Words) -> NDArray[np.int64]:
        """The position of each value by its word, −1 where there is none, `[L]`."""
        if not len(self._sorted):
            return np.full(len(wanted), -1, dtype=np.int64)
        places = np.searchsorted(self._sorted, wanted)
        np.minimum(places, len(self._sorted) - 1, out=places)
        return np.where(self._sorted[places] == wanted, self._order[places], -1)

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint keeps them: whole numbers, or the bytes of all texts and where each ends."""
        if self.values.dtype != pl.String:
            return {"numbers": torch.from_numpy(integers(self.values).copy())}
        lengths = self.values.str.len_bytes().to_numpy().astype(np.int64)
        text = "".join(self.values.to_list()).encode()
        return {
            "text": torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8),
            "ends": _tensor(lengths.cumsum()),
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Values":
        """The inverse of `tensors`; `ValueError` if they are none of a vocabulary."""
        if tensors.keys() == {"numbers"}:
            return cls(pl.Series(tensors["numbers"].numpy(), dtype=pl.Int64))
        if tensors.keys() != {"text", "ends"}:
            raise ValueError(f"it has {', '.join(tensors) or 'nothing'}")
        ends, text = tensors["ends"].tolist(), tensors["text"].numpy().tobytes()
        starts = [0, *ends][: len(ends)]
        if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > len(text)):
            raise ValueError("its texts end before they begin")
        return cls(pl.Series([text[a:b].decode() for a, b in zip(starts, ends, strict=True)], dtype=pl.String))


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


class Learner(ABC):
    """Sees the values of a column, some after the others."""

    @abstractmethod
    def see(self, values: pl.Series) -> None:
        """Of some rows; missing ones are null."""

    @abstractmethod
    def learnt(self) -> tuple[Fit, Values | None]:
        """Of what was seen."""


class Moments:
    """Mean and standard deviation of numbers that come in pieces (Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        if not len(values):
            return
        mean, count = float(values.mean()), self._count + len(values)
        apart = mean - self._mean
        self._squares += float(np.square(values - mean).sum()) + apart * apart * self._count * len(values) / count
        self._mean += apart * len(values) / count
        self._count = count

    def fit(self) -> tuple[float, float]:
        """Mean, and the deviation, which is 1 where all numbers are the same: they become 0."""
        deviation = float(np.sqrt(self._squares / max(self._count, 1)))
        same = deviation <= 1e-14 * abs(self._mean)
        return self._mean, 1.0 if same else deviation


class Sample:
    """About `SAMPLE` numbers, each with the same chance; which ones does not change from run to run."""

    def __init__(self, share: float) -> None:
        self._share, self._drawn = share, np.random.default_rng(0)
        self._kept: list[NDArray[np.float64]] = []

    def add(self, values: NDArray[np.float64]) -> None:
        if self._share < 1:
            values = values[self._drawn.random(len(values)) < self._share]
        self._kept.append(values)

    def all(self) -> NDArray[np.float64]:
        return np.concatenate([np.empty(0), *self._kept])


class Counts(Learner):
    """How often each value of a vocabulary comes; the most frequent ones get the first ids."""

    def __init__(self, name: str, min_count: int, max_size: int) -> None:
        self._name, self._min_count, self._max_size = name, min_count, max_size
        self._parts: list[pl.DataFrame] = []
        self._held = 0

    def see(self, values: pl.Series) -> None:
        given = values.drop_nulls()
        if not len(given):
            return
        plain = texts(given) if form_of(given.dtype) == "text" else pl.Series(integers(given))
        if self._parts and self._parts[0]["value"].dtype != plain.dtype:
            raise DataError(f"data.tables shares the table of {self._name!r} with a column of another type: cast one")
        part = plain.alias("value").value_counts(name="count").select("value", pl.col("count").cast(pl.Int64))
        self._parts.append(part)
        self._held += len(part)
        if self._held > _MERGED + 2 * len(self._parts[0]):
            self._merge()

    def learnt(self) -> tuple[Fit, Values]:
        self._merge()
        if not self._parts:
            return Fit(), Values(pl.Series([], dtype=pl.String))
        counted = self._parts[0].filter(pl.col("count") >= self._min_count)
        chosen = counted.sort(["count", "value"], descending=[True, False]).head(self._max_size)
        return Fit(), Values(chosen["value"])

    def _merge(self) -> None:
        if self._parts:
            self._parts = [pl.concat(self._parts).group_by("value").agg(pl.col("count").sum())]
            self._held = len(self._parts[0])
        if self._held > MOST_VALUES:
            raise DataError(
                f"column {self._name!r} has more than {MOST_VALUES:,} different values, which no vocabulary holds: "
                f"hash it with data.columns.{self._name}={{kind: hash, rows: 1000000}}"
            )


def seen_numbers(values: pl.Series) -> NDArray[np.float64]:
    """Those that are there and that float32 holds."""
    found: NDArray[np.float64] = numbers(values).drop_nulls().to_numpy()
    return found[np.abs(found) <= _LARGEST]  # not so either where one is no number
