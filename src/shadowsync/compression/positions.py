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
Gaps = NDArray[Any]
"""`[K]` uint8 or int64."""

MASK = 0
NARROWEST, WIDEST = 2, 24
_NARROW = 8
"""Symbols of so many bits fit a byte, and eight of them a number of 64 bits."""
_EIGHT = 8
_DENSEST = 0.32
"""Gaps are tried up to this share of elements: behind it they save 6 % of a mask at most, and are too slow for that."""
_SAMPLE = 1 << 14
"""Gaps by which the width is chosen, about."""


def pack(kept: Positions, count: int) -> Tensor:
    """The frame (uint8) of `[K]` positions in `count` = N elements; K may not be 0, and N of them need no frame."""
    if len(kept) <= _DENSEST * count:
        gaps = np.diff(kept, prepend=-1) - 1
        width = _narrowest(gaps, count)
        gaps = _small(gaps, width)
        times = gaps // gaps.dtype.type(_escape(width))
        symbols = len(gaps) + int(times.sum(dtype=np.int64))
        if symbols * width < count:
            return torch.from_numpy(_pack_gaps(gaps, times, symbols, width))
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


def _small(gaps: Positions, width: int) -> Gaps:
    """The gaps as bytes where they are short, because that is quicker."""
    return gaps.astype(np.uint8) if width <= _NARROW and gaps.max() <= _escape(_NARROW) else gaps


def _narrowest(gaps: Positions, count: int) -> int:
    """The width in bits with which the gaps take the fewest, by a sample of them."""
    usual, some = min((count // len(gaps)).bit_length(), WIDEST), gaps[:: 1 + len(gaps) // _SAMPLE]
    widths = range(max(NARROWEST, usual - 2), min(WIDEST, usual + 2) + 1)
    return min((width * (len(some) + int((some // _escape(width)).sum())), width) for width in widths)[1]


def _escape(width: int) -> int:
    return (1 << width) - 1


def _pack_gaps(gaps: Gaps, times: Gaps, count: int, width: int) -> Bytes:
    """The form and its body; `times` are the escapes of each gap, `count` the symbols that they all make."""
    escape, room = _escape(width), np.uint8 if width <= _NARROW else np.uint32
    symbols: NDArray[Any] = np.full(-(-count // _EIGHT) * _EIGHT, escape, room)
    rest = gaps - times * gaps.dtype.type(escape)
    if count == len(gaps):
        symbols[:count] = rest
    else:
        ends = np.cumsum(times, dtype=np.int64)
        ends += np.arange(len(ends))
        symbols[ends] = rest
    packed = _pack_narrow(symbols, width) if width <= _NARROW else _pack_wide(symbols, width)
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


def _pack_wide(symbols: NDArray[np.uint32], width: int) -> Bytes:
    bits = np.unpackbits(symbols.astype(_room(width)).view(np.uint8)).reshape(len(symbols), -1)[:, -width:]
    return np.packbits(bits.reshape(-1))


def _room(width: int) -> np.dtype[Any]:
    """The smaller type of big-endian numbers that has so many bits."""
    return np.dtype(">u2" if width <= 16 else ">u4")


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


def _symbols(body: Bytes, width: int) -> NDArray[Any]:
    """What is whole among the numbers of b bits."""
    whole = len(body) * 8 // width
    if width <= _NARROW:
        return _unpack_narrow(body, width)[:whole]
    room = _room(width)
    bits = np.zeros((whole, 8 * room.itemsize), np.uint8)
    bits[:, -width:] = np.unpackbits(body, count=whole * width).reshape(whole, width)
    return np.packbits(bits).view(room).astype(np.uint32)


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


def _unpack_mask(body: Bytes, count: int) -> Positions:
    if len(body) != -(-count // 8):
        raise ValueError(f"a mask of {len(body)} bytes is not one of {count} elements")
    kept: Positions = np.flatnonzero(np.unpackbits(body).view(np.bool_))
    if len(kept) and kept[-1] >= count:
        raise ValueError(f"a mask names an element behind the last of {count}")
    return kept
