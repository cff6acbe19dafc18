"""A quarter of the bytes: 8 bits per element, and a scale per row."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.compression.low_bit import LowBit


@dataclass(frozen=True)
class Int8(LowBit):
    """Integers from -127 to 127 times a scale per row: off by at most 1/252 of the largest magnitude of the row
    (1/254, and the scale is up to 1/128 larger), or twice that with `rounding=stochastic`.

    Symmetric and linear, as is common for activations and gradients; the scale is that of a row (an embedding, a
    sample) instead of a whole tensor.
    """

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = 127

    def _packed(self, levels: Tensor) -> Tensor:
        return levels

    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        if packed.dtype != torch.int8 or len(packed) != count:
            raise ValueError(f"{len(packed)} levels of {packed.dtype} for {count} elements")
        return packed
