"""Rows in fewer bytes than float32 takes: the kinds of numbers in which checkpoints hold them.

Each row is coded by itself, into as many bytes as any other of its width, so that any range of rows is read without the
rest. `K` rows, `D` numbers in each, `B` bytes that one takes.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowsync.compression import bf16
from shadowsync.registry import members

EXACT = "fp32"
"""Rows as they are."""
SQUARES = frozenset({"momentum", "exp_avg_sq"})
"""Names of tensors of squares: steps are divided by their roots, so none may become 0 that was not."""
CHUNK = 1 << 18
"""Numbers that are coded at a time, so that what lies between two operations stays in the processor's cache."""
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_SMALLEST_ROOT = _SMALLEST**0.5
_SCALE_BYTES = 2


class RowValues(ABC):
    """A kind of numbers in which rows and their optimizer state are written.

    What `decode` has given is given again, to the bit, when it is encoded and decoded anew: nothing drifts, however
    often a run goes on from its checkpoints or a chain is rewritten. A row of finite numbers stays one, and one that
    holds NaN or an infinity does not become one.
    """

    name: ClassVar[str]

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """B of a row of `dim` numbers."""

    @abstractmethod
    def encode(self, rows: Tensor, squares: bool) -> Tensor:
        """Rows, float32 `[K, D]`, as uint8 `[K, B]`; of `squares`, none below 0, none becomes 0 that was not."""

    @abstractmethod
    def decode(self, stored: Tensor, squares: bool, rows: Tensor) -> None:
        """Fills `rows`, float32 `[K, D]`, from what `encode` gave."""

    def of_width(self, dim: int) -> "RowValues":
        """This, or bfloat16 where that takes no more bytes, as for a single number with a scale of its own."""
        return min(Bf16(), self, key=lambda kind: kind.row_bytes(dim))

    def restored(self, rows: Tensor) -> Tensor:
        """What a checkpoint gives back of weights, float32 `[K, D]`."""
        kind, back = self.of_width(rows.shape[1]), torch.empty(rows.shape)
        kind.decode(kind.encode(rows.contiguous(), squares=False), False, back)
        return back


@functools.cache
def row_values(name: str) -> RowValues | None:
    """The kind called `name`; None for `fp32`, which is no coding."""
    if name == EXACT:
        return None
    kind: type[RowValues] = members("shadowsync.checkpoint", RowValues)[name]
    return kind()


def row_width(tensor: Tensor) -> int:
    """D of a tensor of rows, `[K]` or `[K, D]`."""
    return prod(tensor.shape[1:])


@dataclass(frozen=True)
class Bf16(RowValues):
    """bfloat16, to the nearest: 8 bits of precision, the range of float32."""

    name: ClassVar[str] = "bf16"

    def row_bytes(self, dim: int) -> int:
        return 2 * dim

    def encode(self, rows: Tensor, squares: bool) -> Tensor:
        (numbers,) = bf16.Bf16().encode(rows).frames
        if squares:
            numbers.masked_fill_((numbers == 0) & (rows > 0), _SMALLEST)
        return numbers.view(torch.uint8)

    def decode(self, stored: Tensor, squares: bool, rows: Tensor) -> None:
        rows.copy_(stored.view(torch.bfloat16))


@dataclass(frozen=True)
class Scaled(RowValues):
    """Whole numbers to the nearest, times a scale of the row; of squares it is the roots that are written so.

    A scale is the largest magnitude over `steps`, as bfloat16 to the nearest, which is off by 1/256 at most. With up to
    127 steps the largest number of a row is so always `steps` scales, off by half a scale at most as the others. That
    product is exact in float32, and its scale is the same again. A square that is not 0 has one step at least: it comes
    back as 4/9 of what it was at worst, or too large. A row that holds NaN or an infinity comes back as NaN.

    A row is its scale and then its numbers.
    """

    steps: ClassVar[int]
    """Of the largest magnitude."""
    root_steps: ClassVar[int]
    """Of the root of the largest square."""

    @abstractmethod
    def _packed(self, levels: Tensor, squares: bool) -> Tensor:
        """Whole numbers, float32 `[K, D]`, as uint8; they may be written over."""

    @abstractmethod
    def _unpack(self, packed: Tensor, squares: bool, rows: Tensor) -> None:
        """Fills `rows` with the whole numbers."""

    def encode(self, rows: Tensor, squares: bool) -> Tensor:
        values, steps, least = rows, self.steps, _SMALLEST
        if squares:
            values, steps, least = rows.sqrt(), self.root_steps, _SMALLEST_ROOT
        scales = values.abs().amax(1, keepdim=True).div_(steps).clamp_min_(least).to(torch.bfloat16)
        scales.masked_fill_(scales.isinf(), torch.nan)
        levels = values.div(scales.to(torch.float32)).round_()
        if squares:
            levels.masked_fill_((levels == 0) & (values > 0), 1)
        levels.nan_to_num_(0).clamp_(-steps, steps)
        return torch.cat((scales.view(torch.uint8), self._packed(levels, squares)), 1)

    def decode(self, stored: Tensor, squares: bool, rows: Tensor) -> None:
        scales = stored[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        self._unpack(stored[:, _SCALE_BYTES:], squares, rows)
        rows.mul_(scales.to(torch.float32))
        if squares:
            rows.square_()
        rows.clamp_(-_LARGEST, _LARGEST)  # a scale that was rounded up may lead out of float32


@dataclass(frozen=True)
class Int8(Scaled):
    """Integers from -127 to 127 times a scale per row: off by at most 1/253 of the largest magnitude of the row,
    where that is above 1e-36."""

    name: ClassVar[str] = "int8"
    steps: ClassVar[int] = 127
    root_steps: ClassVar[int] = 127

    def row_bytes(self, dim: int) -> int:
        return _SCALE_BYTES + dim

    def _packed(self, levels: Tensor, squares: bool) -> Tensor:
        return levels.to(torch.int8).view(torch.uint8)

    def _unpack(self, packed: Tensor, squares: bool, rows: Tensor) -> None:
        rows.copy_(packed.view(torch.int8))


@dataclass(frozen=True)
class Int4(Scaled):
    """Integers from -7 to 7, for roots of squares from 0 to 15, two in a byte, times a scale per row: off by at most
    1/13.9 of the largest magnitude of the row, where that is above 1e-36."""

    name: ClassVar[str] = "int4"
    steps: ClassVar[int] = 7
    root_steps: ClassVar[int] = 15

    def row_bytes(self, dim: int) -> int:
        return _SCALE_BYTES + -(-dim // 2)

    def _packed(self, levels: Tensor, squares: bool) -> Tensor:
        whole = levels.add_(_zero(squares)).to(torch.uint8)
        return whole[:, ::2] | pad(whole[:, 1::2], (0, levels.shape[1] % 2)) << 4

    def _unpack(self, packed: Tensor, squares: bool, rows: Tensor) -> None:
        rows[:, ::2] = packed & 15
        rows[:, 1::2] = (packed >> 4)[:, : rows.shape[1] // 2]
        rows.sub_(_zero(squares))


def _zero(squares: bool) -> int:
    """What stands for 0 in 4 bits."""
    return 0 if squares else 8
