"""The positions of the largest values, in memory that does not grow with their number.

`torch.topk` takes 16 bytes a value; here the k-th largest is found by counting halves of the bit patterns, which for
non-negative numbers are ordered as the numbers are.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20
_HALF = 16


def largest(values: NDArray[Any], count: int, first: int = 0) -> NDArray[np.int64]:
    """Positions of the `count` largest values above 0, ascending; of fewer if fewer are above 0.

    Args:
        values: int32 or float32, none negative or NaN, `[R]`. They may grow meanwhile; then the choice is as of some
            moment of the search.
        count: how many at most.
        first: of equal values at the end of the choice, those from this position on are taken, and then those from 0.
    """
    bits = values.view(np.int32)
    positive = int(np.count_nonzero(bits))
    if min(count, positive) <= 0:
        return np.zeros(0, np.int64)
    if positive <= count:
        return np.flatnonzero(bits)[:count]
    threshold = _threshold(bits, count)
    above = np.concatenate([start + np.flatnonzero(part > threshold) for start, part in _chunks(bits)])[:count]
    equal = _first_equal(bits, threshold, count - len(above), first)
    return np.sort(np.concatenate([above, equal]))


def _threshold(bits: NDArray[np.int32], count: int) -> int:
    """The `count`-th largest value."""
    high, above = _bin(bits, count, None)
    low, _ = _bin(bits, count - above, high)
    return max(1, high << _HALF | low)


def _bin(bits: NDArray[np.int32], count: int, high: int | None) -> tuple[int, int]:
    """The upper half of the `count`-th largest, or under `high` its lower half, and how many lie above that."""
    found = np.zeros(1 << _HALF, np.int64)
    for _, part in _chunks(bits):
        halves = part >> _HALF if high is None else part[part >> _HALF == high] & (1 << _HALF) - 1
        found += np.bincount(halves, minlength=1 << _HALF)
    at_least = found[::-1].cumsum()[::-1]
    place = max(0, int(np.count_nonzero(at_least >= count)) - 1)
    return place, int(at_least[place] - found[place])


def _first_equal(bits: NDArray[np.int32], value: int, count: int, first: int) -> NDArray[np.int64]:
    parts = [np.zeros(0, np.int64)]
    for low, high in ((first, len(bits)), (0, first)):
        for start, part in _chunks(bits[low:high]):
            if count > 0:
                parts.append(low + start + np.flatnonzero(part == value)[:count])
                count -= len(parts[-1])
    return np.concatenate(parts)


def _chunks(bits: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.int32]]]:
    for start in range(0, len(bits), CHUNK):
        yield start, bits[start : start + CHUNK]
