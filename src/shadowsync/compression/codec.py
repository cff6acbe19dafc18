"""The seam between a tensor and the bytes that cross the network."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Encoded:
    """A tensor as it crosses the network: frames of raw bytes-like tensors, and the shape to decode to.

    `state` is what the codec remembers from one message of a stream to the next (residuals, thresholds).
    """

    frames: tuple[Tensor, ...]
    shape: tuple[int, ...]
    state: Any = None

    @property
    def byte_count(self) -> int:
        """Bytes of all frames."""
        return sum(frame.numel() * frame.element_size() for frame in self.frames)


class Codec(ABC):
    """Turns fp32 tensors into frames and back. Holds hyper-parameters only; moving state goes in and out."""

    name: ClassVar[str]

    @abstractmethod
    def encode(self, tensor: Tensor, state: Any = None) -> Encoded:
        """Frames of a float32 tensor of any shape; `state` is what the last message of this stream returned."""

    @abstractmethod
    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The float32 tensor that the frames stand for."""
