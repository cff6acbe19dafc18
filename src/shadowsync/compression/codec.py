"""The seam between a tensor and the bytes that cross the network."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from shadowsync.errors import DataError, NonFiniteTensor


class NotFinite(ValueError):
    """A tensor holds NaN or infinities, which a codec that weighs or scales its elements cannot carry.

    Whoever encodes knows what the tensor is called (`naming`); a codec may say to which part of its input it belongs
    (`of`). The first of them is at the position `first` of the flattened tensor.
    """

    def __init__(self, tensor: Tensor, of: str = "") -> None:
        self.tensor, self.named = tensor, bool(of)
        bad = (~torch.isfinite(tensor)).nonzero()
        self.first = int((~torch.isfinite(tensor)).flatten().nonzero()[0]) if len(bad) else 0
        where = f", the first at {bad[0].tolist()}" if len(bad) and tensor.dim() else ""
        super().__init__(f"{len(bad):,} of {tensor.numel():,} elements{of} are NaN or infinite{where}")


Rate = Callable[[], float]
"""A trainer's learning rate now, as a share of the full one, in [0, 1]."""


def full_rate() -> float:
    """Where nobody says what it is."""
    return 1.0


PartOf = Callable[[int], str]
"""What the element at a position of the flattened tensor belongs to (a parameter)."""


@contextmanager
def naming(tensor: str, part_of: PartOf | None = None) -> Iterator[None]:
    """Gives the tensor that is encoded inside its name, where that fails; `part_of` says where its first bad element
    lies, unless the codec has done so.

    Raises:
        NonFiniteTensor: in place of `NotFinite`.
    """
    try:
        yield
    except NotFinite as error:
        inside = "" if part_of is None or error.named else f", in {part_of(error.first)}"
        raise NonFiniteTensor(
            f"{tensor} cannot be sent: {error}{inside}; a lower learning rate may keep it finite"
        ) from error


@dataclass(frozen=True)
class Encoded:
    """A tensor as it crosses the network: the frames that do, and the shape to decode to.

    Attributes:
        state: what the codec remembers from one message of a stream to the next (residuals, thresholds).
        kept: positions (int64, ascending, in the flattened tensor) of the elements that cross; None if all do.
        refreshes: thresholds that were chosen anew for this message.
        early: those of them that came early, because the share that crosses had left its band.
    """

    frames: tuple[Tensor, ...]
    shape: tuple[int, ...]
    state: Any = None
    kept: Tensor | None = None
    refreshes: int = 0
    early: int = 0

    @property
    def byte_count(self) -> int:
        return sum(frame.nbytes for frame in self.frames)

    @property
    def kept_count(self) -> int:
        return math.prod(self.shape) if self.kept is None else len(self.kept)


@dataclass(frozen=True)
class Decoded:
    """What frames stand for: float32, zero where nothing crossed, and the positions that did, as `Encoded.kept`."""

    tensor: Tensor
    kept: Tensor | None = None

    @property
    def kept_count(self) -> int:
        return self.tensor.numel() if self.kept is None else len(self.kept)


class Codec(ABC):
    """Turns fp32 tensors into frames and back. Holds hyper-parameters only; moving state goes in and out.

    A state is worth one message: what `encode` returns takes its place, and may use its memory from the message after
    that one on. A message that was given up can be encoded again from the same state. For checkpoints it has a method
    `tensors`: copies of all of it by name, numbers as tensors without dimensions; `restored` takes them back.

    Frames may come from anyone: `decode` checks them, and raises one of `ValueError`, `TypeError`, `IndexError` and
    `RuntimeError` where they are none of such a tensor. The shape has to be known to be right.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Every bit is kept."""
    sparse: ClassVar[bool] = False
    """What does not cross reads as zero, so that only gradients, differences and activations can be sent."""
    elementwise: ClassVar[bool] = False
    """A message is one tensor with a floating-point number for each element, so that sums can be taken of it."""
    selecting: ClassVar[frozenset[str]] = frozenset()
    """Options that say which elements cross; `encode_under` has no use for them."""

    @abstractmethod
    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        """Frames of a float32 tensor of any shape, which is left as it is.

        Args:
            state: what the last message of this stream returned.
            groups: widths of the groups of columns (features) in the last dimension, for codecs that look at each of
                them apart (`by_feature`); none is one group.

        Raises:
            NotFinite: the codec cannot carry what the tensor holds.
        """

    def encode_change(self, change: Tensor, known: Tensor, rate: float, state: Any = None) -> Encoded:
        """Frames of a change of what the receiver has, `known`, of one shape with it. What is left out is in the next
        change, so that the codec keeps none of it.

        Args:
            rate: the learning rate as a share of the full one, in [0, 1].

        Raises:
            NotFinite: as `encode`.
        """
        return self.encode(change, state)

    @abstractmethod
    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The float32 tensor that the frames stand for."""

    def decode_kept(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Decoded:
        """As `decode`, with the positions that crossed: the mask that both sides now know."""
        return Decoded(self.decode(frames, shape))

    def encode_under(self, tensor: Tensor, kept: Tensor | None, state: Any = None) -> Encoded:
        """Frames of the elements at `kept` alone, whose positions the other side knows (DCT-MP's way back).

        Raises:
            NotFinite: one of those elements is NaN or infinite, whatever else the codec can carry; and as `encode`.
        """
        if kept is None:
            return self.encode(tensor, state)
        values = tensor.detach().reshape(-1)[kept]
        if not bool(values.isfinite().all()):
            raise NotFinite(tensor)
        encoded = self.encode(values, state)
        return Encoded(encoded.frames, tuple(tensor.shape), encoded.state, kept)

    def decode_under(self, frames: Sequence[Tensor], shape: tuple[int, ...], kept: Tensor | None) -> Tensor:
        """The float32 tensor of frames that `encode_under` made with the same `kept`; zero elsewhere."""
        if kept is None:
            return self.decode(frames, shape)
        values = self.decode(frames, (len(kept),))
        if values.dtype != torch.float32:
            raise ValueError(f"values are {values.dtype}, not float32")
        tensor = nothing(shape)
        tensor.view(-1)[kept] = values
        return tensor

    @property
    def by_feature(self) -> bool:
        """`encode` looks at groups of columns, so that they have to be given."""
        return False

    @property
    def by_known(self) -> bool:
        """What crosses is chosen by what the receiver has (`encode_change`); whatever else is encoded crosses whole."""
        return False

    @property
    def levels(self) -> "tuple[Codec, ...]":
        """The codecs that messages may be in, weakest first; but for `auto` it is the codec itself."""
        return (self,)

    def level(self, name: str) -> "Codec":
        """The level of that name, as a message has it; the first one for an empty name. Raises `DataError` if there is
        none."""
        for codec in self.levels:
            if name in ("", codec.name):
                return codec
        allowed = ", ".join(codec.name for codec in self.levels)
        raise DataError(
            f"a message names what its receiver does not take: codec {name[:20]!r} is not one that this job sends in; "
            f"allowed: {allowed}"
        )

    def unused(self) -> Iterator[tuple[str, str]]:
        """Options that have no effect beside the others, and what makes it so, behind "has no effect"."""
        yield from ()

    @property
    def everything(self) -> bool:
        """All elements cross as they are, whatever is in them."""
        return self.exact

    def of_differences(self) -> "Codec":
        """The codec for a stream of differences from what the receiver has, which hold what was left out before."""
        return self

    def resolved(self, key: str) -> Self:
        """Defaults filled in for what the configuration key says (`compression.pull`, `.push`, `.dense`); raises
        `ConfigError` for an option that makes no sense there."""
        return self

    def thresholds(self, state: Any) -> Tensor | None:
        """The magnitudes `[G]`, by group, from which on elements crossed in the message that left this state; None
        where everything did."""
        return None

    def restored(self, tensors: Mapping[str, Tensor]) -> Any:
        """The state whose `tensors()` these are; raises `ValueError` if they are none of a state of this codec."""
        if tensors:
            raise ValueError(f"{self.name} remembers nothing, but got {', '.join(sorted(tensors))}")
        return None


def in_vain(
    key: str, codec: Codec, given: Mapping[str, Any], found: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Of the options `found` without effect (`Codec.unused`) those that were given at `key`, each with a sentence; at
    its default one does no harm."""
    defaults = {field.name: field.default for field in fields(codec)}  # type: ignore[arg-type]
    for option, why in found:
        if option in given and given[option] != defaults.get(option):
            yield option, f"{key}.{option}={given[option]} has no effect {why}, or leave it out"


@contextmanager
def received(what: str, codec: Codec) -> Iterator[None]:
    """Around the decoding of frames of something that came over the wire: `DataError` in place of whatever a codec
    raises that did not make them."""
    try:
        yield
    except Exception as error:
        raise DataError(f"the frames of {what} are none of codec {codec.name}") from error


def nothing(shape: tuple[int, ...]) -> Tensor:
    """Zeros (float32), of which memory is taken only where somebody touches them; raises `ValueError` where there is no
    such shape, or no memory for it."""
    try:
        return torch.from_numpy(np.zeros(shape, np.float32))
    except MemoryError as error:
        raise ValueError(f"a tensor of shape {list(shape)} has no room in memory") from error


def as_numbers(tensor: Tensor) -> Tensor:
    """The tensor as contiguous float32 in main memory, not copied where it is that already."""
    return tensor.detach().to("cpu", torch.float32).contiguous()
