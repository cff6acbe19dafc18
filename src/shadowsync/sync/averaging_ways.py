"""How one trainer's vector is averaged with those of others in other processes: whole, or as differences.

`P` dense parameters, `n` members of a ring.
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shadowsync.compression.channel import Counter, Line
from shadowsync.compression.codec import Codec, Encoded, naming
from shadowsync.compression.differences import PublicCopy, count, longest
from shadowsync.compression.plain import Plain
from shadowsync.rpc.bundle import bundle, frames_of
from shadowsync.sync.averaging import Ground
from shadowsync.sync.ring import Ring

T = TypeVar("T")


class Come(Protocol):
    """Waits for what a ring promised; what it raises is to pass."""

    def __call__(self, future: Future[T], /) -> T: ...


@dataclass
class Parcel:
    """A trainer's vector during one average, in which it may be sent several times.

    Attributes:
        vector: `[P]`, as it moves where vectors cross whole; not the live replica.
        message: the difference, where the last attempt began with differences.
        whole: the last attempt sent the vector.
    """

    vector: Tensor
    message: Encoded | None = None
    whole: bool = True


class Way(ABC):
    """One trainer's end; what it keeps changes only where an average counts."""

    @abstractmethod
    def pack(self, weights: Tensor) -> Parcel:
        """A parcel of the replica `[P]`, as it is now.

        Raises:
            NonFiniteTensor: it holds NaN or infinities, and the codec cannot carry them.
        """

    @abstractmethod
    def mean(self, parcel: Parcel, ring: Ring, ground: Ground, come: Come) -> Tensor:
        """The average `[P]` through the ring, the same bits for all members."""

    @abstractmethod
    def settle(self, parcel: Parcel, average: Tensor, members: int) -> None:
        """The average counts, and so do its bytes."""

    @abstractmethod
    def missed(self, between: bool, ground: Ground) -> bool:
        """As `Group.missed`, where others averaged without this trainer `between` its last two averages."""

    @abstractmethod
    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""

    def alone(self, parcel: Parcel) -> Tensor:
        """The average of a ring of one."""
        parcel.message, parcel.whole = None, True
        return parcel.vector.to(torch.float32)


class Vectors(Way):
    """Vectors cross, and are added up, in the codec's own type.

    Bytes are counted as 2 (n − 1) / n of what moved.

    Args:
        codec: with a number for each element.
        counter: adds up the bytes.
        about: what the vectors are called in errors.
    """

    def __init__(self, codec: Codec, counter: Counter, about: str) -> None:
        self._codec, self._counter, self._about = codec, counter, about

    def pack(self, weights: Tensor) -> Parcel:
        with naming(self._about):
            encoded = self._codec.encode(weights)
        (vector,) = encoded.frames
        if vector.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr():
            vector = vector.clone()  # workers go on writing to it
        return Parcel(vector)

    def mean(self, parcel: Parcel, ring: Ring, ground: Ground, come: Come) -> Tensor:
        return come(ring.mean(parcel.vector))

    def settle(self, parcel: Parcel, average: Tensor, members: int) -> None:
        share, raw = 2 * (members - 1) / members, parcel.vector.numel() * torch.float32.itemsize
        self._counter.add("dense", round(parcel.vector.nbytes * share), round(raw * share))

    def missed(self, between: bool, ground: Ground) -> bool:
        return between

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        weights.lerp_(target, alpha)


class Differences(Way):
    """Differences cross, from each member to each other one (`PublicCopy`).

    Args:
        codec: any.
        counter: adds up the bytes.
        about: what the vectors are called in errors.
    """

    def __init__(self, codec: Codec, counter: Counter, about: str) -> None:
        self._line = Line("dense", codec, counter)
        self._copy = PublicCopy(codec, about)

    def pack(self, weights: Tensor) -> Parcel:
        return Parcel(weights.clone())

    def mean(self, parcel: Parcel, ring: Ring, ground: Ground, come: Come) -> Tensor:
        parcel.whole = True
        parcel.message = (parcel.message or self._copy.encode(parcel.vector)) if ground.complete else None
        if parcel.message is not None:
            messages = come(ring.gather(bundle(parcel.message.frames), longest(parcel.vector)))
            if messages is not None:
                parcel.whole = False
                return self._copy.mean([frames_of(message) for message in messages])
        return come(ring.mean(parcel.vector))

    def settle(self, parcel: Parcel, average: Tensor, members: int) -> None:
        self._copy.settle(parcel.vector, average, parcel.message, parcel.whole)
        count(self._line, parcel.vector, members, None if parcel.whole else parcel.message)

    def missed(self, between: bool, ground: Ground) -> bool:
        return not ground.common

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        self._copy.approach(weights, target, alpha)


def way_of(codec: Codec, counter: Counter, about: str) -> Way:
    """Vectors cross where they can be added up as they are encoded, else differences."""
    if codec.everything or codec.ladder[0].elementwise:
        return Vectors(Plain() if codec.everything else codec, counter, about)
    return Differences(codec, counter, about)
