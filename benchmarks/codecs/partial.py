"""A part of the elements in each message, one part after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from shadowsync.compression.codec import Codec, Encoded, as_numbers, nothing
from shadowsync.compression.threshold import SMALL


@dataclass(frozen=True)
class Turn:
    """Messages so far."""

    number: int = 0

    def tensors(self) -> dict[str, Tensor]:
        return {"number": torch.tensor(self.number)}


@dataclass(frozen=True)
class Partial(Codec):
    """Of a change every `parts`-th element crosses, beginning with another one in each message: what DistGNN's cd-r
    does with the aggregates of a graph's cut nodes (arXiv 2104.06700). Nothing is selected, and no positions cross.
    Small tensors cross whole, as under a threshold."""

    name: ClassVar[str] = "partial"
    sparse: ClassVar[bool] = True

    parts: Annotated[int, Field(ge=1, le=SMALL)] = 10

    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        return Encoded((as_numbers(tensor),), tuple(tensor.shape), state)

    def encode_change(self, change: Tensor, known: Tensor, rate: float, state: Turn | None = None) -> Encoded:
        if change.numel() < SMALL:
            return self.encode(change, state)
        number = 0 if state is None else state.number
        begin, flat = number % self.parts, as_numbers(change).view(-1)
        kept = torch.arange(begin, len(flat), self.parts)
        frames = (torch.tensor([begin], dtype=torch.int32), flat[kept])
        return Encoded(frames, tuple(change.shape), Turn(number + 1), kept)

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        if len(frames) == 1:
            return frames[0].view(shape)
        tensor = nothing(shape)
        tensor.view(-1)[int(frames[0]) :: self.parts] = frames[1]
        return tensor

    def restored(self, tensors: Mapping[str, Tensor]) -> Turn | None:
        return Turn(int(tensors["number"])) if tensors else None
