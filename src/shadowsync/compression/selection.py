"""Which elements are large enough: an exact quantile now and then, one comparison per element in between.

Magnitudes are selected as the bits of float32 without the sign, which are in the order of the numbers they stand for,
NaN and infinities last; and whatever is not below the threshold counts as large, so that those are always found. numpy
does both several times faster than torch on one core, and lets other threads run meanwhile.

`N` elements, `G` groups of columns, `C` columns.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shadowsync.compression.positions import Bytes, Positions

Floats = NDArray[np.float32]
Bits = NDArray[np.int32]

CHUNK = 1 << 17
"""Elements that are compared at a time, so that what lies between two operations stays in the processor's cache."""
_MANY, _FEW = 16, 128
"""Where more than one of so many elements crosses, all bits are looked at; or words of 2 bytes in place of 8."""
MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign: as integers in the order of the magnitudes, infinities and NaN last."""
LEAST = 1
"""The bits of the smallest number above zero: a zero never has to cross, it is what the other side fills in."""


def exact_floors(flat: Floats, keep: float, groups: Sequence[int] = ()) -> Bits:
    """`[G]` bits of the magnitude from which on an element belongs to the share `keep` of the largest in its group.

    Args:
        flat: `[N]`.
        keep: share of the elements, in (0, 1]; at least one.
        groups: widths that add up to C, where `flat` is `[N / C, C]`; none is one group.
    """
    magnitudes = flat.view(np.int32) & MAGNITUDE
    if not groups:
        return np.array([_floor(magnitudes, keep)], np.int32)
    rows, edges = magnitudes.reshape(-1, sum(groups)), np.cumsum(groups)[:-1]
    return np.array([_floor(part.reshape(-1), keep) for part in np.split(rows, edges, axis=1)], np.int32)


def _floor(magnitudes: Bits, keep: float) -> int:
    if not len(magnitudes):
        return LEAST
    place = len(magnitudes) - max(1, round(keep * len(magnitudes)))
    return max(LEAST, int(np.partition(magnitudes, place)[place]))


def reach(flat: Floats, floors: Bits, groups: Sequence[int] = ()) -> Positions:
    """The positions of the elements `[N]` whose magnitude is not below the floor of their group, ascending.

    NaN is among them: it is not below anything.
    """
    return positions_of(mask_of(flat, floors, groups), len(flat))


def mask_of(flat: Floats, floors: Bits, groups: Sequence[int] = ()) -> Bytes:
    """The elements that `reach` finds as bits, whole words of 8 bytes; those behind the last element mean nothing."""
    columns = (np.repeat(floors, groups) if groups else floors).view(np.float32)
    size = 8 * len(columns) * max(1, CHUNK // (8 * len(columns)))  # whole bytes of a mask, whole rows
    magnitudes, below = np.empty(min(size, len(flat)), np.float32), np.empty(min(size, len(flat)), np.bool_)
    floor = columns if len(columns) == 1 else np.resize(columns, len(magnitudes))
    mask = np.empty(-(-len(flat) // 64) * 8, np.uint8)
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        long = len(part)
        np.abs(part, out=magnitudes[:long])
        np.less(magnitudes[:long], floor[:long], out=below[:long])
        mask[start // 8 : -(-(start + long) // 8)] = np.packbits(below[:long])
    return np.invert(mask, out=mask)


def positions_of(mask: Bytes, count: int) -> Positions:
    """The positions of the ones among the first `count` bits of a mask, whose bits behind them are cleared.

    numpy is quick where a tenth or more of what it looks at is not zero, or next to nothing. So words of the mask are
    looked at first, then the bytes of those that hold a bit, then the bits of those.
    """
    mask[-(-count // 8) :] = 0
    if count % 8:
        mask[count // 8] &= 0xFF00 >> count % 8 & 0xFF
    ones = int(np.bitwise_count(mask).sum(dtype=np.int64))
    if ones * _MANY > count:
        return _nonzero(np.unpackbits(mask, count=count))
    size = 2 if ones * _FEW > count else 8
    words = mask.view(np.uint16 if size == 2 else np.uint64)
    held = _nonzero(words)
    octets = words[held].view(np.uint8)
    inside = _nonzero(octets)
    bits = _nonzero(np.unpackbits(octets[inside]))
    places = held[inside // size] * size + inside % size
    found: Positions = places[bits >> 3] * 8 + (bits & 7)
    return found


def _nonzero(numbers: NDArray[Any]) -> Positions:
    found: Positions = np.flatnonzero(numbers != 0)
    return found


def check_groups(groups: Sequence[int], shape: Sequence[int]) -> None:
    """Raises `ValueError` for widths that are not those of the columns of a tensor of that shape."""
    if groups and (min(groups) < 1 or not shape or sum(groups) != shape[-1]):
        raise ValueError(f"groups of {math.fsum(groups):g} columns in a tensor of shape {list(shape)}")
