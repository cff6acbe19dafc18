"""The seam of priority saving: which rows of a shard are worth writing next.

CPR, arXiv 2011.02999, section 5: instead of every row each T_save, the share r of the rows each r · T_save.
`R` rows of a shard, numbered from 0 in it; `D` their width; `K` rows picked.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.embedding.watching import RowWatch
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate

CHUNK = 1 << 20
_HALF = 16


class RowPriority(RowWatch):
    """A way to choose rows, as it follows one shard all of whose rows are saved as they are when it is made.

    Args:
        weights: the shard's, float32 `[R, D]`.
        share: r, the share of the rows that will be picked at a time, in (0, 1].
        seed: of its random choices.
        allocate: gives the memory to which `seen` writes (`seen_parts`); others in other processes may have it, too, of
            which nothing but `seen` is called.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros) -> None: ...

    @classmethod
    @abstractmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        """Elements and type of what is allocated for a shard."""

    @classmethod
    def memory_bytes(cls, rows: int, dim: int, share: float) -> int:
        """Memory that one for `rows` rows of `dim` floats holds on to."""
        return sum(count * dtype.itemsize for count, dtype in cls.seen_parts(rows, share))


def checked(rows: Tensor, count: int) -> NDArray[np.int64]:
    """Row numbers as an array; `IndexError` if one is outside `[0, count)`; 3 µs for 13,000."""
    found: NDArray[Any] = rows.numpy()
    if len(found) and int(found.view(np.uint64).max()) >= count:  # a negative number is a huge one here
        wrong = found[(found < 0) | (found >= count)][0]
        raise IndexError(f"row {wrong} is not a row of a shard of {count} rows")
    return found


def not_zero(values: NDArray[Any]) -> NDArray[np.int64]:
    """Positions of what is not 0, each as of some moment: other processes may write meanwhile, which numpy refuses."""
    return np.concatenate([np.zeros(0, np.int64), *(at + np.flatnonzero(part != 0) for at, part in _chunks(values))])


def largest(values: NDArray[Any], count: int, first: int = 0) -> NDArray[np.int64]:
    """Positions of the `count` largest values above 0, ascending; of fewer if fewer are above 0.

    In memory that does not grow with their number: `torch.topk` takes 16 bytes a value; here the k-th largest is found
    by counting halves of the bit patterns, which for non-negative numbers are ordered as the numbers are.

    `values` are int32 or float32, none negative or NaN, `[R]`. They may grow meanwhile; then the choice is as of some
    moment of the search. Of equal values at its end those from position `first` on are taken, and then those from 0.
    """
    bits = values.view(np.int32)
    positive = int(np.count_nonzero(bits))
    if min(count, positive) <= 0:
        return np.zeros(0, np.int64)
    if positive <= count:
        return not_zero(bits)[:count]
    high, more = _half(bits, count, None)
    low, _ = _half(bits, count - more, high)
    threshold = max(1, high << _HALF | low)
    found = [np.concatenate([start + np.flatnonzero(part > threshold) for start, part in _chunks(bits)])[:count]]
    left = count - len(found[0])
    for begin, end in ((first, len(bits)), (0, first)):
        for start, part in _chunks(bits[begin:end]):
            if left > 0:
                found.append(begin + start + np.flatnonzero(part == threshold)[:left])
                left -= len(found[-1])
    return np.sort(np.concatenate(found))


def _half(bits: NDArray[np.int32], count: int, high: int | None) -> tuple[int, int]:
    """The upper half of the `count`-th largest, or under `high` its lower half, and how many lie above that."""
    found = np.zeros(1 << _HALF, np.int64)
    for _, part in _chunks(bits):
        halves = part >> _HALF if high is None else part[part >> _HALF == high] & (1 << _HALF) - 1
        found += np.bincount(halves, minlength=1 << _HALF)
    at_least = found[::-1].cumsum()[::-1]
    place = max(0, int(np.count_nonzero(at_least >= count)) - 1)
    return place, int(at_least[place] - found[place])


def _chunks(bits: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for start in range(0, len(bits), CHUNK):
        yield start, bits[start : start + CHUNK]
