"""A quarter or an eighth of the bytes: 8 or 4 bits per element, and a scale per row.

`N` elements, `R` rows that share a scale, `W` elements in a row.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from shadowsync.compression.codec import Codec, Encoded, NotFinite, as_numbers
from shadowsync.compression.positions import MAGNITUDE, check_groups

CHUNK = 1 << 18
"""Elements that are worked on at a time, so that what lies between two operations stays in the processor's cache."""
NARROW = 8
"""A tensor whose rows are shorter is cut into blocks as a vector is: a scale per row would outweigh the rows."""
BLOCK = 256
"""Elements that share a scale where nothing else says how many."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_NAN = 0x7FC00000
"""The bits of one."""
_ZERO = 8
"""What stands for 0 in 4 bits."""

Rounding = Annotated[
    Literal["nearest", "stochastic"],
    Field(description="to the nearest level, or up or down at random so that the mean is right, at half the speed"),
]
Seed = Annotated[int, Field(ge=0, lt=1 << 63, description="of stochastic rounding")]
Block = Annotated[
    Annotated[int, Field(ge=8, le=1 << 20)] | None,
    Field(
        description="elements that share a scale: of a tensor without rows, of longer rows that it divides evenly, or "
        "of several rows whose width divides it; more costs fewer bytes and rounds more coarsely. null: each feature's "
        f"vector has a scale of its own, and {BLOCK} elements of what has no features",
    ),
]

ROUNDING = ("rounding", "seed", "block")
"""The options of rounding, and why the seed has no effect beside the default."""
NEAREST = "with rounding=nearest: set rounding=stochastic"


@dataclass(frozen=True)
class Draws:
    """How many messages of the stream were rounded at random so far."""

    count: int = 0

    def tensors(self) -> dict[str, Tensor]:
        return {"draws": torch.tensor(self.count)}


@dataclass(frozen=True)
class LowBit(Codec):
    """`q = round(x / s)`, `s = max |x| / steps` over a row of the last dimension, over each feature's part of it, or
    over a block of a vector.

    Scales are bfloat16, rounded up so that nothing has to be cut off: half the bytes of float32, for an error that is
    at most 1/128 larger. All parts of a row are of one width (`row_width`), so that the number of scales says how rows
    were cut, and the other side need not know of features; where several rows share a scale, both go by `block`.
    Rounding at random draws from a generator that is seeded anew for each message with `seed`, the number of the
    message, and bits of the tensor itself: the same messages round the same in every run, and streams that carry
    different numbers do not round alike.
    """

    steps: ClassVar[int]
    """Steps from 0 to the largest magnitude."""

    rounding: Rounding = "nearest"
    seed: Seed = 0
    block: Block = None

    @abstractmethod
    def _packed(self, levels: Tensor) -> Tensor:
        """The `N` levels (int8) as they cross, one-dimensional; may be written over."""

    @abstractmethod
    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        """The `count` levels (int8) again; raises `ValueError` for a frame of another type or length."""

    def encode(self, tensor: Tensor, state: Draws | None = None, groups: Sequence[int] = ()) -> Encoded:
        flat = as_numbers(tensor).view(-1)
        check_groups(groups, tensor.shape)
        width = row_width(tuple(tensor.shape), self.block, groups)
        levels = torch.empty(flat.shape, dtype=torch.int8)
        scales = torch.empty(-(-len(flat) // width))
        noise, after = None, None
        if self.rounding == "stochastic":
            sample = flat[:: max(1, len(flat) // 64)].view(torch.int32).to(torch.int64).sum().item()
            count = 0 if state is None else state.count
            noise = np.random.Generator(np.random.SFC64((self.seed, count, int(sample) & 0xFFFFFFFF)))
            after = Draws(count + 1)
        # one piece of memory for all pieces of the tensor: new memory for each costs as much as the work
        work = torch.empty(min(len(flat), max(width, CHUNK)))
        for part, rows, cut in _parts(len(flat), width):
            values = flat[part].view(-1, cut)
            scaled = work[: values.numel()].view(-1, cut)
            scales[rows] = scale = _scales(values, self.steps, scaled)
            torch.mul(values, scale.reciprocal().unsqueeze(1), out=scaled)
            if noise is not None:
                # the odd numbers between -2^15 and 2^15, each as likely: their mean is zero
                drawn = noise.integers(0, 1 << 64, size=-(-scaled.numel() // 4), dtype=np.uint64).view(np.int16)
                odd = torch.from_numpy(drawn[: scaled.numel()]).bitwise_or_(1).to(torch.float32)
                scaled.view(-1).add_(odd, alpha=2**-16)
            levels[part].view(-1, cut).copy_(scaled.round_().clamp_(-self.steps, self.steps))
        if not bool(torch.isfinite(scales).all()):
            raise NotFinite(tensor)
        frames = (self._packed(levels), scales.to(torch.bfloat16)) if len(flat) else ()
        return Encoded(frames, tuple(tensor.shape), after)

    @property
    def by_feature(self) -> bool:
        return self.block is None

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.rounding == "nearest":
            yield "seed", NEAREST

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if not count and not frames:
            return torch.zeros(shape)
        packed, scales = frames
        if scales.dtype != torch.bfloat16:
            raise ValueError(f"scales are {scales.dtype}, not bfloat16")
        width = self._width(shape, scales.numel())
        levels, scales = self._unpacked(packed.reshape(-1), count), scales.reshape(-1).to(torch.float32)
        out = torch.empty(count)
        whole = count // width * width
        torch.mul(levels[:whole].view(-1, width), scales[: whole // width, None], out=out[:whole].view(-1, width))
        torch.mul(levels[whole:], scales[whole // width :], out=out[whole:])
        if len(scales) and float(scales.max()) * self.steps > _LARGEST:
            out.clamp_(-_LARGEST, _LARGEST)  # a scale that was rounded up may lead out of float32
        return out.view(shape)

    def _width(self, shape: tuple[int, ...], scales: int) -> int:
        """The elements that share a scale, where there are so many scales."""
        count, columns = math.prod(shape), _columns(shape)
        width = row_width(shape, self.block)
        if scales == -(-count // width):
            return width
        cuts, rest = divmod(scales, max(1, count // max(1, columns)))  # of a row, where its features cut it
        width = columns // max(1, cuts)
        if not cuts or rest or columns % cuts or width < NARROW:
            raise ValueError(f"{scales} scales are not those of a tensor {list(shape)}")
        return width

    def restored(self, tensors: Mapping[str, Tensor]) -> Draws | None:
        if not tensors:
            return None
        if set(tensors) != {"draws"}:
            raise ValueError(f"{self.name} remembers draws, but got {', '.join(sorted(tensors))}")
        draws = tensors["draws"]
        if draws.numel() != 1 or not 0 <= int(draws) < 1 << 63:
            raise ValueError(f"draws are {list(draws.shape) if draws.numel() > 1 else draws.tolist()}")
        return Draws(int(draws))


def row_width(shape: tuple[int, ...], block: int | None, groups: Sequence[int] = ()) -> int:
    """W: elements that share a scale; the last of them may be fewer.

    Rows are cut into parts of one width, at features: `groups` of unequal widths at what divides them all, and narrow
    ones several together.
    """
    width = _columns(shape)
    if width < NARROW or (block is not None and block % width == 0):
        return block or BLOCK
    if block is None and groups:
        step = math.gcd(*groups)
        return next(cut for cut in range(-(-NARROW // step) * step, width + 1, step) if width % cut == 0)
    cut = block or BLOCK
    return cut if width > cut and width % cut == 0 else width


def _columns(shape: tuple[int, ...]) -> int:
    return shape[-1] if len(shape) > 1 else 0


def _parts(count: int, width: int) -> Iterator[tuple[slice, slice, int]]:
    """Elements, rows and width of the pieces to work on: some whole rows each, then the rest of a vector."""
    step, whole = max(1, CHUNK // width), count // width
    for row in range(0, whole, step):
        end = min(whole, row + step)
        yield slice(row * width, end * width), slice(row, end), width
    if rest := count % width:
        yield slice(whole * width, count), slice(whole, whole + 1), rest


def _scales(values: Tensor, levels: int, work: Tensor) -> Tensor:
    """`[R]` scales of `[R, W]` values: bfloat16 numbers, none too small for its row, NaN or infinite where it is.

    `work` is written over. Magnitudes are compared as integers, which is several times faster for short rows.
    """
    magnitudes = torch.bitwise_and(values.view(torch.int32), MAGNITUDE, out=work.view(torch.int32))
    scales = magnitudes.amax(1).view(torch.float32).div_(levels)
    scales.view(torch.int32).clamp_max_(_NAN).add_(0xFFFF).bitwise_and_(-0x10000)
    return scales.clamp_min_(SMALLEST_SCALE)


@dataclass(frozen=True)
class Int8(LowBit):
    """Integers from -127 to 127 times a scale per row: off by at most 1/252 of the largest magnitude of the row
    (1/254, and the scale is up to 1/128 larger), or twice that with `rounding=stochastic`.

    Symmetric and linear, as is common for activations and gradients; the scale is that of a row (an embedding, a
    sample) instead of a whole tensor.
    """

    name: ClassVar[str] = "int8"
    steps: ClassVar[int] = 127

    def _packed(self, levels: Tensor) -> Tensor:
        return levels

    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        if packed.dtype != torch.int8 or len(packed) != count:
            raise ValueError(f"{len(packed)} levels of {packed.dtype} for {count} elements")
        return packed


@dataclass(frozen=True)
class Int4(LowBit):
    """Integers from -7 to 7, two in a byte, times a scale per row: off by at most 1/13.9 of the row's largest
    magnitude (1/14, and the scale is up to 1/128 larger), or twice that with `rounding=stochastic`.

    As `int8` with fewer levels; without error feedback, `rounding=stochastic` keeps the mean of what is sent right.
    """

    name: ClassVar[str] = "int4"
    steps: ClassVar[int] = 7

    def _packed(self, levels: Tensor) -> Tensor:
        even = levels if len(levels) % 2 == 0 else pad(levels, (0, 1))
        packed = torch.empty(len(even) // 2, dtype=torch.uint8)
        work = torch.empty(min(len(packed), CHUNK), dtype=torch.int16)
        for some, part in zip(torch.split(packed, CHUNK), torch.split(even, 2 * CHUNK), strict=True):
            pairs = part.add_(_ZERO).view(torch.int16)  # a + 256 b becomes a + 16 b
            some.copy_(pairs.bitwise_or_(torch.bitwise_right_shift(pairs, 4, out=work[: len(pairs)])))
        return packed

    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        if packed.dtype != torch.uint8 or len(packed) != -(-count // 2):
            raise ValueError(f"{len(packed)} pairs of {packed.dtype} for {count} elements")
        levels = torch.empty(2 * len(packed), dtype=torch.int8)
        work = torch.empty(min(len(packed), CHUNK), dtype=torch.int16)
        for some, part in zip(torch.split(levels, 2 * CHUNK), torch.split(packed, CHUNK), strict=True):
            pairs = some.view(torch.int16).copy_(part)
            shifted = torch.bitwise_left_shift(pairs, 4, out=work[: len(part)])
            pairs.bitwise_or_(shifted).bitwise_and_(0x0F0F)
            some.sub_(_ZERO)
        return levels[:count]
