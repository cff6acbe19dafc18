"""Channels between two roles: tensors pass a codec and are counted, also where nothing is really sent.

`p` elements of a vector.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Decoded, Encoded, PartOf, naming, received
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import DataError


@dataclass(frozen=True)
class Channel:
    """One direction of traffic of one kind (`pull`, `push` or `dense`), in any number of streams.

    Attributes:
        chosen: names the level of the codec to send in now, where that changes while the job runs; there is then one
            channel for each level, with streams of its own, and `now` is the one for the next message.
    """

    kind: str
    codec: Codec
    counter: WireCounter
    chosen: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    _streams: dict[Hashable, "Stream"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _levels: dict[str, "Channel"] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def now(self) -> "Channel":
        """The channel that the next message takes."""
        if self.chosen is None:
            return self
        name = self.chosen()
        # setdefault is atomic, here and below: of several threads that ask first, all get one
        return self._levels.get(name) or self._levels.setdefault(
            name, Channel(self.kind, self.codec.level(name), self.counter)
        )

    def stream(
        self, key: Hashable, about: Callable[[], str] | str = "a tensor", part_of: PartOf | None = None
    ) -> "Stream":
        """The stream of that key, the same one each time; `about` and `part_of` as in `Stream`, when it is made."""
        found = self._streams.get(key)
        if found is not None:
            return found
        named = about if isinstance(about, str) else about()
        return self._streams.setdefault(key, Stream(self.codec, named, part_of, self))

    def plain(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Tensors as the receiver sees them under a codec that is `exact`: they are counted, and nothing else."""
        same = tuple(tensors)
        size = sum(tensor.nbytes for tensor in same)
        self.count(size, size)
        return same

    def count(self, sent: int, raw: int) -> None:
        self.counter.add(self.kind, sent, raw)

    def count_kept(self, elements: int, kept: int, refreshes: int = 0, early: int = 0) -> None:
        self.counter.add_kept(self.kind, elements, kept, refreshes, early)


class Stream:
    """The messages of one sender to one receiver about one thing: what the codec remembers belongs to them alone.

    `about` and `part_of` are for errors (`naming`); `channel` counts messages, unless whoever sends them does.
    """

    def __init__(
        self, codec: Codec, about: str = "a tensor", part_of: PartOf | None = None, channel: Channel | None = None
    ) -> None:
        self.codec, self._about, self._part_of, self._channel = codec, about, part_of, channel
        self._state: Any = None
        self._lock = threading.Lock()

    def encode(self, tensor: Tensor, groups: Sequence[int] = ()) -> Encoded:
        """The next message; as `Codec.encode`, but `NonFiniteTensor` names what cannot cross."""
        encoded = self._next(lambda state: self.codec.encode(tensor, state, groups))
        if self._channel is not None:
            self._channel.count(encoded.byte_count, tensor.nbytes)
            if self.codec.sparse:
                self._channel.count_kept(tensor.numel(), encoded.kept_count, encoded.refreshes, encoded.early)
        return encoded

    def encode_change(self, change: Tensor, known: Tensor, rate: float) -> Encoded:
        """The next message, as `Codec.encode_change`; raises as `encode`. Its bytes are counted by whoever sends it."""
        return self._next(lambda state: self.codec.encode_change(change, known, rate, state))

    def encode_under(self, tensor: Tensor, kept: Tensor | None) -> Encoded:
        """The next message, of the elements at `kept` alone; raises as `encode`. All messages are of one sort."""
        encoded = self._next(lambda state: self.codec.encode_under(tensor, kept, state))
        if self._channel is not None:
            self._channel.count(encoded.byte_count, tensor.nbytes)
            self._channel.count_kept(tensor.numel(), encoded.kept_count)
        return encoded

    def _next(self, encode: Callable[[Any], Encoded]) -> Encoded:
        # workers of one trainer may share a stream; each message starts from the state of the last
        with self._lock, naming(self._about, self._part_of):
            encoded = encode(self._state)
            self._state = encoded.state
        return encoded

    def cross(self, tensor: Tensor, groups: Sequence[int] = ()) -> Decoded:
        """The float32 tensor as the receiver sees it, with the positions that crossed."""
        if self.codec.exact:
            if self._channel is not None:
                self._channel.count(tensor.nbytes, tensor.nbytes)
            return Decoded(tensor)
        encoded = self.encode(tensor, groups)
        return self.codec.decode_kept(encoded.frames, encoded.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what the codec remembers, by name; nothing if it remembers nothing yet."""
        with self._lock:
            return {} if self._state is None else dict(self._state.tensors())

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Goes on from what `tensors` gave; False, and nothing is changed, if it is not this codec's."""
        try:
            state = self.codec.restored(tensors)
        except ValueError:
            return False
        with self._lock:
            self._state = state
        return True


@dataclass(frozen=True)
class Message:
    """What crosses of a vector, in either direction.

    Attributes:
        frames: of the codec.
        whole: nothing is left out; where differences may cross, the one frame is the float32 vector itself.
        kept: number of elements that cross, of a difference; `refreshes` and `early` as in `Encoded`.
        rate: the sender's, as in `Codec.encode_change`, for an answer.
    """

    frames: tuple[Tensor, ...]
    whole: bool = True
    kept: int = 0
    refreshes: int = 0
    early: int = 0
    rate: float = 1.0

    @classmethod
    def of_difference(cls, encoded: Encoded, rate: float = 1.0) -> "Message":
        return cls(encoded.frames, False, encoded.kept_count, encoded.refreshes, encoded.early, rate)

    def count(self, channel: Channel, elements: int) -> None:
        channel.count(sum(frame.nbytes for frame in self.frames), elements * torch.float32.itemsize)
        if not self.whole and channel.codec.sparse:
            channel.count_kept(elements, self.kept, self.refreshes, self.early)


class Differences:
    """What the receiver has of the sender's vector, kept alike at both ends, bit for bit: a vector that both know
    crosses as the difference from it.

    The first message is the vector in float32, each further one `Q(w − known)`, and both ends add that. What the codec
    leaves out stays in the difference, so that there is no residual to keep, and none to lose: a side that forgot, or
    took another's place, gets the vector again, and so does whoever is sent another codec's messages. Where nothing is
    left out every message is the vector, and nothing is known.

    `known` is `[p]`, None before the first message, and not to be kept by the caller.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._codec: Codec | None = None
        self.known: Tensor | None = None

    def encode(self, codec: Codec, vector: Tensor, rate: float = 1.0) -> Message:
        """The next message, at that learning rate (`Codec.encode_change`); this end counts on its arrival."""
        self._begin(codec)
        if codec.everything:
            return Message((vector,))
        if self.known is None:
            self.known = vector.clone()  # who trains goes on writing to it
            return Message((self.known.clone(),))
        encoded = self._stream.encode_change(vector - self.known, self.known, rate)
        self.known.add_(self._stream.codec.decode(encoded.frames, encoded.shape))
        return Message.of_difference(encoded, rate)

    def take(self, codec: Codec, message: Message, shape: tuple[int, ...]) -> Tensor | None:
        """The receiver's end: what is known after that message; None if it needs one before that never came. Raises
        `DataError` for frames of something else."""
        self._begin(codec)
        frames = message.frames
        if message.whole:
            if len(frames) != 1 or frames[0].shape != shape or frames[0].dtype != torch.float32:
                raise DataError(
                    f"the frames of {self._about} are none of codec {codec.name}: {len(frames)} are not a float32 "
                    f"vector {list(shape)}"
                )
            if codec.everything:
                return frames[0]
            self.known = frames[0].clone()
        elif self.known is not None:
            with received(self._about, codec):
                self.known.add_(self._stream.codec.decode(frames, shape))
        return self.known

    def forget(self) -> None:
        """It is not known what arrived."""
        self.known = None

    def moved(self, by: Tensor) -> None:
        """Both ends know that the sender took so much off its vector."""
        if self.known is not None:
            self.known.sub_(by)

    def _begin(self, codec: Codec) -> None:
        if codec is not self._codec and (self._codec is None or codec.name != self._codec.name):
            self._codec, self.known = codec, None
            self._stream = Stream(codec.of_differences(), self._about)


def float_bytes(codec: Codec) -> float:
    """Bytes on the wire of one float, as the codec encodes numbers of all sizes."""
    return codec.encode(numbers := _numbers()).byte_count / numbers.numel()


def pulled_and_pushed_bytes(pull: Codec, push: Codec) -> float:
    """Bytes on the wire of one float and of its gradient, which goes back under the mask of what came, if there is
    one."""
    there = pull.encode(numbers := _numbers())
    back = push.encode_under(numbers, there.kept) if pull.sparse else push.encode(numbers)
    return (there.byte_count + back.byte_count) / numbers.numel()


def _numbers() -> Tensor:
    return torch.linspace(-1, 1, 1 << 12).view(-1, 16)
