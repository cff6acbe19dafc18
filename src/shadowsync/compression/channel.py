"""What crosses between two roles: tensors pass a codec and are counted, also where nothing is really sent."""

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Decoded, Encoded, PartOf, naming

_LOG = logging.getLogger(__name__)


class Counter(Protocol):
    """Adds up bytes (`metrics.wire.WireCounter`)."""

    def add(self, kind: str, sent: int, raw: int) -> None:
        """Counts one message: `sent` bytes of it on the wire, `raw` bytes of it uncompressed."""
        ...

    def add_kept(self, kind: str, elements: int, kept: int, refreshes: int, early: int) -> None:
        """Counts of one message the elements, those that crossed, and the thresholds chosen for it."""
        ...


class Encoder:
    """A codec with what it remembers of the messages of one sender to one receiver about one thing.

    Args:
        codec: the codec.
        about: what the messages are called in errors.
        part_of: what the element at a position belongs to, for errors.
    """

    def __init__(self, codec: Codec, about: str = "a tensor", part_of: PartOf | None = None) -> None:
        self._codec, self._about, self._part_of = codec, about, part_of
        self._state: Any = None
        self._lock = threading.Lock()

    def encode(self, tensor: Tensor, groups: Sequence[int] = ()) -> Encoded:
        """The next message; `groups` as `Codec.encode` has them.

        Raises:
            NonFiniteTensor: the tensor holds NaN or infinities, and the codec cannot carry them.
        """
        return self._next(lambda state: self._codec.encode(tensor, state, groups))

    def encode_under(self, tensor: Tensor, kept: Tensor | None) -> Encoded:
        """The next message, of the elements at `kept` alone; raises as `encode`. All messages are of one sort."""
        return self._next(lambda state: self._codec.encode_under(tensor, kept, state))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what the codec remembers, by name; nothing if it remembers nothing yet."""
        with self._lock:
            return {} if self._state is None else dict(self._state.tensors())

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Goes on from what `tensors` gave; False, and nothing is changed, if it is not this codec's."""
        try:
            state = self._codec.restored(tensors)
        except ValueError:
            return False
        with self._lock:
            self._state = state
        return True

    def _next(self, encode: Callable[[Any], Encoded]) -> Encoded:
        with (
            self._lock,
            naming(self._about, self._part_of),
        ):  # workers of one trainer may share a stream; each message starts from the state of the last
            encoded = encode(self._state)
            self._state = encoded.state
        return encoded


class Restoring(Protocol):
    """Goes on from what was kept of a worker's gradients."""

    def restore(self, tensors: Mapping[str, Tensor], /) -> bool:
        """As `Encoder.restore`."""
        ...


def restore_all(workers: Iterable[tuple[Restoring, Mapping[str, Tensor]]]) -> None:
    """`restore` of each worker; a word in the log where a residual is lost."""
    refused = [tensors for worker, tensors in workers if not worker.restore(tensors)]
    lost = sum(any(name.endswith("residual") for name in tensors) for tensors in refused)
    if lost:
        _LOG.warning(
            "what %d workers had not sent of their gradients is not of this codec: it is lost, and they start from "
            "nothing",
            lost,
        )


class Stream:
    """The messages of one sender to one receiver about one thing: what the codec remembers belongs to them alone."""

    def __init__(self, line: "Line", about: str, part_of: PartOf | None = None) -> None:
        self._line = line
        self.encoder = Encoder(line.codec, about, part_of)

    def send(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """The float32 tensor as the receiver sees it; `times` messages of its size are counted."""
        encoded = self.encode(tensor, times)
        return self._line.codec.decode(encoded.frames, encoded.shape)

    def cross(self, tensor: Tensor, groups: Sequence[int] = ()) -> Decoded:
        """As `send`, with the positions that crossed."""
        encoded = self.encode(tensor, groups=groups)
        return self._line.codec.decode_kept(encoded.frames, encoded.shape)

    def send_under(self, tensor: Tensor, kept: Tensor | None) -> Tensor:
        """The float32 tensor as the receiver sees it, who knows which elements come; the others are zero."""
        encoded = self.encode_under(tensor, kept)
        return self._line.codec.decode_under(encoded.frames, encoded.shape, kept)

    def encode(self, tensor: Tensor, times: float = 1.0, groups: Sequence[int] = ()) -> Encoded:
        """The message that stands for the float32 tensor, counted `times` times."""
        encoded = self.encoder.encode(tensor, groups)
        self._line.count(round(encoded.byte_count * times), round(tensor.numel() * tensor.element_size() * times))
        if self._line.codec.sparse:
            self._line.count_kept(tensor.numel(), encoded.kept_count, encoded.refreshes, encoded.early)
        return encoded

    def encode_under(self, tensor: Tensor, kept: Tensor | None) -> Encoded:
        """The message that stands for the elements at `kept`, counted."""
        encoded = self.encoder.encode_under(tensor, kept)
        self._line.count(encoded.byte_count, tensor.numel() * tensor.element_size())
        self._line.count_kept(tensor.numel(), encoded.kept_count)
        return encoded


@dataclass(frozen=True)
class Line:
    """One direction of traffic of one kind (`pull`, `push` or `dense`), in any number of streams."""

    kind: str
    codec: Codec
    counter: Counter
    _streams: dict[Hashable, Stream] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stream(
        self, key: Hashable, about: Callable[[], str] | str = "a tensor", part_of: PartOf | None = None
    ) -> Stream:
        """The stream of that key, the same one each time; `about` and `part_of` as in `Encoder`, when it is made."""
        found = self._streams.get(key)
        if found is not None:
            return found
        named = about if isinstance(about, str) else about()
        # setdefault is atomic: of several threads that ask first, all get one stream
        return self._streams.setdefault(key, Stream(self, named, part_of))

    def count(self, sent: int, raw: int) -> None:
        """Counts one message, in bytes."""
        self.counter.add(self.kind, sent, raw)

    def count_kept(self, elements: int, kept: int, refreshes: int = 0, early: int = 0) -> None:
        """Counts the elements of one message, and those that crossed."""
        self.counter.add_kept(self.kind, elements, kept, refreshes, early)

    @property
    def now(self) -> "Line":
        """The line that the next message takes: this one, unless its codec changes while a job runs."""
        return self


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
