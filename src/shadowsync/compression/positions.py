"""Which elements of a flattened tensor cross: ascending positions as the fewest bytes.

`N` elements of the tensor, `K` positions. Three forms, told apart by length and first byte:

- no bytes at all: all elements cross.
- 0, then a bit for each of the N elements.
- b in 2 … 24, then gaps between positions as numbers of b bits. A gap g is `g // M` times M = 2^b − 1, an escape, and
  then `g % M`: a Golomb code (Golomb, Run-length encodings, 1966) whose quotients are escapes, so that numpy decodes it
  without a loop. Within 10 % of the entropy where positions are drawn independently. The end is filled with ones, which
  is an escape without a position behind it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]
Bytes = NDArray[np.uint8]

MASK = 0
NARROWEST, WIDEST = 2, 24
_SPARSE = 8
"""Gaps are tried where at most one of so many elements crosses: a mask is as short elsewhere, and quicker."""


def pack(kept: Positions, count: int) -> Tensor:
    """The frame (uint8) of `[K]` positions in `count` = N elements; K may not be 0 or N."""
    if len(kept) * _SPARSE <= count:
        gaps = np.diff(kept, prepend=-1) - 1
        width, bits = _narrowest(gaps, count)
        if bits < count:
            return torch.from_numpy(np.concatenate((np.array([width], np.uint8), _pack_gaps(gaps, width))))
    mask = np.zeros(count, np.bool_)
    mask[kept] = True
    return torch.from_numpy(np.concatenate((np.array([MASK], np.uint8), np.packbits(mask))))


def unpack(frame: Tensor, count: int) -> Positions | None:
    """The positions of a frame; None where all N = `count` elements cross.

    Raises:
        ValueError: it is no such frame. At most a few times N numbers have been allocated by then.
    """
    if frame.dtype != torch.uint8 or frame.dim() != 1:
        raise ValueError(f"positions are a row of bytes, not {frame.dtype} {list(frame.shape)}")
    data: Bytes = frame.numpy()
    if not len(data):
        return None
    form, body = int(data[0]), data[1:]
    if form == MASK:
        return _unpack_mask(body, count)
    if not NARROWEST <= form <= WIDEST:
        raise ValueError(f"positions have the form {form}, which is none")
    return _unpack_gaps(body, form, count)


def _narrowest(gaps: Positions, count: int) -> tuple[int, int]:
    """The width in bits with which the gaps take the fewest, and how many that are."""
    usual = (count // len(gaps)).bit_length()
    widths = range(max(NARROWEST, usual - 2), min(WIDEST, usual + 2) + 1)
    costs = [(width * (len(gaps) + int((gaps // _escape(width)).sum())), width) for width in widths]
    bits, width = min(costs)
    return width, bits


def _escape(width: int) -> int:
    return (1 << width) - 1


def _pack_gaps(gaps: Positions, width: int) -> Bytes:
    times, rest = np.divmod(gaps, _escape(width))
    ends = np.cumsum(times + 1) - 1
    symbols = np.full(ends[-1] + 1, _escape(width), np.uint32)
    symbols[ends] = rest
    if width == 8:
        return symbols.astype(np.uint8)
    room = _room(width)
    bits = np.unpackbits(symbols.astype(room).view(np.uint8)).reshape(len(symbols), -1)[:, -width:]
    return np.packbits(np.concatenate((bits.reshape(-1), np.ones(-bits.size % 8, np.uint8))))


def _room(width: int) -> np.dtype[Any]:
    """The smallest type of big-endian numbers that has so many bits."""
    return np.dtype(">u1" if width <= 8 else ">u2" if width <= 16 else ">u4")


def _unpack_gaps(body: Bytes, width: int, count: int) -> Positions:
    escape = _escape(width)
    if len(body) > -(-count // 8):
        raise ValueError(f"{len(body)} bytes of gaps are more than a mask of {count} elements takes")
    symbols = _symbols(body, width)
    ends = np.flatnonzero(symbols != escape)
    steps = symbols.astype(np.int64)
    steps[ends] += 1
    kept: Positions = np.cumsum(steps)[ends] - 1
    if not len(kept) or kept[-1] >= count or (len(symbols) - 1 - ends[-1]) * width >= 8:
        raise ValueError(f"gaps do not lead to positions in {count} elements")
    return kept


def _symbols(body: Bytes, width: int) -> NDArray[np.uint32]:
    if width == 8:
        return body.astype(np.uint32)
    whole = len(body) * 8 // width
    room = _room(width)
    bits = np.zeros((whole, 8 * room.itemsize), np.uint8)
    bits[:, -width:] = np.unpackbits(body, count=whole * width).reshape(whole, width)
    return np.packbits(bits).view(room).astype(np.uint32)


def _unpack_mask(body: Bytes, count: int) -> Positions:
    if len(body) != -(-count // 8):
        raise ValueError(f"a mask of {len(body)} bytes is not one of {count} elements")
    kept: Positions = np.flatnonzero(np.unpackbits(body).view(np.bool_))
    if len(kept) and kept[-1] >= count:
        raise ValueError(f"a mask names an element behind the last of {count}")
    return kept
