"""Nothing is changed: the exact member of the family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Encoded


@dataclass(frozen=True)
class Plain(Codec):
    """float32 as it stands; no copy is made."""

    name: ClassVar[str] = "plain"
    elementwise: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        return Encoded((tensor,), tuple(tensor.shape))

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        (numbers,) = frames
        if numbers.dtype != torch.float32:
            raise ValueError(f"numbers are {numbers.dtype}, not float32")
        return numbers.view(shape)
