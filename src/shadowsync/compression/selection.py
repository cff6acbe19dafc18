"""Which elements are large enough: an exact quantile now and then, one comparison per element in between.

Magnitudes are compared as the bits of float32 without the sign, which are in the order of the numbers they stand for;
NaN and infinities come last, so that they are found among the elements that are large enough. numpy does this several
times faster than torch on one core, and lets other threads run meanwhile.

`N` elements, `G` groups of columns, `C` columns.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shadowsync.compression.positions import Positions

Floats = NDArray[np.float32]
Bits = NDArray[np.int32]

CHUNK = 1 << 17
"""Elements that are compared at a time, so that what lies between two operations stays in the processor's cache."""
_MAGNITUDE = 0x7FFFFFFF
_LEAST = 1
"""The bits of the smallest number above zero: a zero never has to cross, it is what the other side fills in."""


def exact_floors(flat: Floats, keep: float, groups: Sequence[int] = ()) -> Bits:
    """`[G]` bits of the magnitude from which on an element belongs to the share `keep` of the largest in its group.

    Args:
        flat: `[N]`.
        keep: share of the elements, in (0, 1]; at least one.
        groups: widths that add up to C, where `flat` is `[N / C, C]`; none is one group.
    """
    magnitudes = flat.view(np.int32) & _MAGNITUDE
    if not groups:
        return np.array([_floor(magnitudes, keep)], np.int32)
    rows, edges = magnitudes.reshape(-1, sum(groups)), np.cumsum(groups)[:-1]
    return np.array([_floor(part.reshape(-1), keep) for part in np.split(rows, edges, axis=1)], np.int32)


def _floor(magnitudes: Bits, keep: float) -> int:
    if not len(magnitudes):
        return _LEAST
    place = len(magnitudes) - max(1, round(keep * len(magnitudes)))
    return max(_LEAST, int(np.partition(magnitudes, place)[place]))


def reach(flat: Floats, floors: Bits, groups: Sequence[int] = ()) -> Positions:
    """The positions of the elements `[N]` whose magnitude is not below the floor of their group, ascending."""
    columns = np.repeat(floors, groups) if groups else floors
    size = CHUNK if len(columns) == 1 else len(columns) * max(1, CHUNK // len(columns))
    bits, mask = np.empty(min(size, len(flat)), np.int32), np.empty(min(size, len(flat)), np.bool_)
    floor = columns[0] if len(columns) == 1 else np.tile(columns, len(bits) // len(columns))
    found = []
    for start in range(0, len(flat), size):
        part = flat[start : start + size].view(np.int32)
        long = len(part)
        np.bitwise_and(part, _MAGNITUDE, out=bits[:long])
        np.greater_equal(bits[:long], floor if floor.ndim == 0 else floor[:long], out=mask[:long])
        found.append(np.flatnonzero(mask[:long]) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def check_groups(groups: Sequence[int], shape: Sequence[int]) -> None:
    """Raises `ValueError` for widths that are not those of the columns of a tensor of that shape."""
    if groups and (min(groups) < 1 or not shape or sum(groups) != shape[-1]):
        raise ValueError(f"groups of {math.fsum(groups):g} columns in a tensor of shape {list(shape)}")
