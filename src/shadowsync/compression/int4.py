"""An eighth of the bytes: 4 bits per element, and a scale per row."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowsync.compression.int8 import CHUNK, LowBit

_ZERO = 8
"""What stands for 0 in 4 bits."""


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
