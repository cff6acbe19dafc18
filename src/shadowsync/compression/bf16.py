"""Half the bytes: each value rounded to bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Encoded

LARGEST = torch.finfo(torch.bfloat16).max
"""What is larger would be rounded to infinity."""


@dataclass(frozen=True)
class Bf16(Codec):
    """bfloat16, rounded to nearest even: 8 bits of precision, the range of float32; what is finite stays so."""

    name: ClassVar[str] = "bf16"
    elementwise: ClassVar[bool] = True

    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        low, high = tensor.aminmax() if tensor.numel() else (0.0, 0.0)
        if not (low >= -LARGEST and high <= LARGEST):  # or NaN is among them
            tensor = torch.where(tensor.isfinite(), tensor.clamp(-LARGEST, LARGEST), tensor)
        return Encoded((tensor.to(torch.bfloat16),), tuple(tensor.shape))

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        (numbers,) = frames
        if numbers.dtype != torch.bfloat16:
            raise ValueError(f"numbers are {numbers.dtype}, not bfloat16")
        return numbers.view(shape).to(torch.float32)
