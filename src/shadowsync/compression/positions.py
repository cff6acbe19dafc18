"""Which elements of a flattened tensor cross: those that are large enough, and their positions as the fewest bytes.

An exact quantile says now and then what is large enough; in between an element costs one comparison. Magnitudes are
selected as the bits of float32 without the sign, which are in the order of the numbers they stand for, NaN and
infinities last; and whatever is not below the threshold counts as large, so that those are always found. numpy does
both several times faster than torch on one core, and lets other threads run meanwhile.

Positions cross in one of three forms, told apart by length and first byte:

- no bytes at all: all elements cross.
- 0, then a bit for each of the N elements.
- b in 2 … 24, then gaps between positions as numbers of b bits. A gap g is `g // M` times M = 2^b − 1, an escape, and
  then `g % M`: a Golomb code (Golomb, Run-length encodings, 1966) whose quotients are escapes, so that numpy decodes it
  without a loop. Within 10 % of the entropy where positions are drawn independently. The end is filled with ones, which
  is an escape without a position behind it.

`N` elements, `K` positions, `G` groups of columns, `C` columns.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bits = NDArray[np.int32]
Gaps = NDArray[Any]
"""`[K]` uint8 or int64."""

CHUNK = 1 << 17
"""Elements that are compared at a time, so that what lies between two operations stays in the processor's cache."""
_MANY, _FEW = 16, 128
"""Where more than one of so many elements crosses, all bits are looked at; or words of 2 bytes in place of 8."""
MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign: as integers in the order of the magnitudes, infinities and NaN last."""
LEAST = 1
"""The bits of the smallest number above zero: a zero never has to cross, it is what the other side fills in."""

MASK = 0
NARROWEST, WIDEST = 2, 24
_NARROW = 8
"""Symbols of so many bits fit a byte, and eight of them a number of 64 bits."""
_EIGHT = 8
_DENSEST = 0.32
"""Gaps are tried up to this share of elements: behind it they save 6 % of a mask at most, and are too slow for that."""
_SAMPLE = 1 << 14
"""Gaps by which the width is chosen, about."""


def exact_floors(flat: Floats, keep: float, groups: Sequence[int] = ()) -> Bits:
    """`[G]` bits of the magnitude from which on an element of `[N]` belongs to the share `keep` of the largest (at
    least one) in its group; `groups` are widths that add up to C, where `flat` is `[N / C, C]`."""
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
    """The positions of the elements `[N]` whose magnitude is not below the floor of their group, ascending; without
    groups there is one floor, or one for each element.

    NaN is among them: it is not below anything.
    """
    return positions_of(mask_of(flat, floors, groups), len(flat))


def mask_of(flat: Floats, floors: Bits, groups: Sequence[int] = ()) -> Bytes:
    """The elements that `reach` finds as bits, whole words of 8 bytes; those behind the last element mean nothing."""
    columns = (np.repeat(floors, groups) if groups else floors).view(np.float32)
    for_each = len(columns) == len(flat)
    size = CHUNK if for_each else 8 * len(columns) * max(1, CHUNK // (8 * len(columns)))  # whole bytes, whole rows
    magnitudes, below = np.empty(min(size, len(flat)), np.float32), np.empty(min(size, len(flat)), np.bool_)
    floor = columns if for_each or len(columns) == 1 else np.resize(columns, len(magnitudes))
    mask = np.empty(-(-len(flat) // 64) * 8, np.uint8)
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        long = len(part)
        np.abs(part, out=magnitudes[:long])
        np.less(magnitudes[:long], floor[start : start + long] if for_each else floor[:long], out=below[:long])
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


def pack(kept: Positions, count: int) -> Tensor:
    """The frame (uint8) of `[K]` positions in `count` = N elements; K may not be 0, and N of them need no frame."""
    if len(kept) <= _DENSEST * count:
        gaps: Gaps = np.diff(kept, prepend=-1) - 1
        # the width with which they take the fewest bits, by a sample of them
        usual, some = min((count // len(gaps)).bit_length(), WIDEST), gaps[:: 1 + len(gaps) // _SAMPLE]
        widths = range(max(NARROWEST, usual - 2), min(WIDEST, usual + 2) + 1)
        width = min((w * (len(some) + int((some // _escape(w)).sum())), w) for w in widths)[1]
        if width <= _NARROW and gaps.max() <= _escape(_NARROW):
            gaps = gaps.astype(np.uint8)  # quicker
        times = gaps // gaps.dtype.type(_escape(width))
        symbols = len(gaps) + int(times.sum(dtype=np.int64))
        if symbols * width < count:
            return torch.from_numpy(_pack_gaps(gaps, times, symbols, width))
    mask = np.zeros(count, np.bool_)
    mask[kept] = True
    return torch.from_numpy(np.concatenate((np.array([MASK], np.uint8), np.packbits(mask))))


def unpack(frame: Tensor, count: int) -> Positions | None:
    """The positions of a frame; None where all N = `count` elements cross. Raises `ValueError` if it is no such frame,
    having allocated at most a few times N numbers."""
    if frame.dtype != torch.uint8 or frame.dim() != 1:
        raise ValueError(f"positions are a row of bytes, not {frame.dtype} {list(frame.shape)}")
    data: Bytes = frame.numpy()
    if not len(data):
        return None
    form, body = int(data[0]), data[1:]
    if form != MASK:
        return _unpack_gaps(body, form, count)
    if len(body) != -(-count // 8):
        raise ValueError(f"a mask of {len(body)} bytes is not one of {count} elements")
    kept: Positions = np.flatnonzero(np.unpackbits(body).view(np.bool_))
    if len(kept) and kept[-1] >= count:
        raise ValueError(f"a mask names an element behind the last of {count}")
    return kept


def _escape(width: int) -> int:
    return (1 << width) - 1


def _room(width: int) -> np.dtype[Any]:
    """The smaller type of big-endian numbers that has so many bits."""
    return np.dtype(">u2" if width <= 16 else ">u4")


def _pack_gaps(gaps: Gaps, times: Gaps, count: int, width: int) -> Bytes:
    """The form and its body; `times` are the escapes of each gap, `count` the symbols that they all make."""
    escape, kind = _escape(width), np.uint8 if width <= _NARROW else np.uint32
    symbols: NDArray[Any] = np.full(-(-count // _EIGHT) * _EIGHT, escape, kind)
    rest = gaps - times * gaps.dtype.type(escape)
    if count == len(gaps):
        symbols[:count] = rest
    else:
        ends = np.cumsum(times, dtype=np.int64)
        ends += np.arange(len(ends))
        symbols[ends] = rest
    if width <= _NARROW:
        packed = _pack_narrow(symbols, width)
    else:
        bits = np.unpackbits(symbols.astype(_room(width)).view(np.uint8)).reshape(len(symbols), -1)[:, -width:]
        packed = np.packbits(bits.reshape(-1))
    return np.concatenate((np.array([width], np.uint8), packed[: -(-count * width // 8)]))


def _pack_narrow(symbols: Bytes, width: int) -> Bytes:
    """Eight symbols of b bits are b bytes: neighbours are put together three times over."""
    if width == _NARROW:
        return symbols
    pairs: NDArray[Any] = symbols.reshape(-1, 2)
    twos = (pairs[:, 0].astype(np.uint16) << width) | pairs[:, 1]
    pairs = twos.reshape(-1, 2)
    fours = (pairs[:, 0].astype(np.uint32) << 2 * width) | pairs[:, 1]
    pairs = fours.reshape(-1, 2)
    eights = (pairs[:, 0].astype(np.uint64) << 4 * width) | pairs[:, 1]
    octets: Bytes = eights.astype(">u8").view(np.uint8).reshape(-1, 8)[:, -width:]
    return octets.reshape(-1)


def _unpack_gaps(body: Bytes, width: int, count: int) -> Positions:
    if not NARROWEST <= width <= WIDEST:
        raise ValueError(f"positions have the form {width}, which is none")
    if len(body) > -(-count // 8):
        raise ValueError(f"{len(body)} bytes of gaps are more than a mask of {count} elements takes")
    whole = len(body) * 8 // width  # symbols that are complete
    if width <= _NARROW:
        symbols: NDArray[Any] = _unpack_narrow(body, width)[:whole]
    else:
        room = _room(width)
        bits = np.zeros((whole, 8 * room.itemsize), np.uint8)
        bits[:, -width:] = np.unpackbits(body, count=whole * width).reshape(whole, width)
        symbols = np.packbits(bits).view(room).astype(np.uint32)
    ends = np.flatnonzero(symbols != _escape(width))
    steps = symbols.astype(np.int64)
    steps[ends] += 1
    kept: Positions = np.cumsum(steps)[ends] - 1
    if not len(kept) or kept[-1] >= count or (len(symbols) - 1 - ends[-1]) * width >= 8:
        raise ValueError(f"gaps do not lead to positions in {count} elements")
    return kept


def _unpack_narrow(body: Bytes, width: int) -> Bytes:
    """As `_pack_narrow`, from the end."""
    if width == _NARROW:
        return body
    octets = np.zeros((-(-len(body) // width), 8), np.uint8)
    full = len(body) // width
    octets[:full, -width:] = body[: full * width].reshape(full, width)
    octets[full:, 8 - width : 8 - width + len(body) % width] = body[full * width :]
    eights: NDArray[Any] = octets.view(">u8").astype(np.uint64).reshape(-1)
    fours = np.empty((len(eights), 2), np.uint32)
    np.right_shift(eights, 4 * width, out=fours[:, 0], casting="unsafe")
    np.bitwise_and(eights, (1 << 4 * width) - 1, out=fours[:, 1], casting="unsafe")
    twos = np.empty((2 * len(eights), 2), np.uint16)
    np.right_shift(fours.reshape(-1), 2 * width, out=twos[:, 0], casting="unsafe")
    np.bitwise_and(fours.reshape(-1), (1 << 2 * width) - 1, out=twos[:, 1], casting="unsafe")
    ones = np.empty((4 * len(eights), 2), np.uint8)
    np.right_shift(twos.reshape(-1), width, out=ones[:, 0], casting="unsafe")
    np.bitwise_and(twos.reshape(-1), (1 << width) - 1, out=ones[:, 1], casting="unsafe")
    return ones.reshape(-1)
