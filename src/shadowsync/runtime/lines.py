"""What crosses between two roles: tensors pass a codec and are counted, also where nothing is really sent."""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shadowsync.aggregation.stepping import DenseGradient, DenseStepper, Version
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.data.batch import Jagged
from shadowsync.embedding.pending import DONE, Callback, Done, Pending
from shadowsync.embedding.server import EmbeddingServer, Lookup, RowLookup
from shadowsync.embedding.table import Shard

T = TypeVar("T")

_INT32_ROWS = 1 << 31


class Counter(Protocol):
    """Adds up bytes (`metrics.wire.WireCounter`)."""

    def add(self, kind: str, sent: int, raw: int) -> None:
        """Counts one message: `sent` bytes of it on the wire, `raw` bytes of it uncompressed."""
        ...


class Encoder:
    """A codec with what it remembers of the messages of one sender to one receiver about one thing."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._state: Any = None
        self._lock = threading.Lock()

    def encode(self, tensor: Tensor) -> Encoded:
        """The next message."""
        with self._lock:  # workers of one trainer may share a stream; each message starts from the state of the last
            encoded = self._codec.encode(tensor, self._state)
            self._state = encoded.state
        return encoded


class Stream:
    """The messages of one sender to one receiver about one thing: what the codec remembers belongs to them alone."""

    def __init__(self, line: "Line") -> None:
        self._line = line
        self._encoder = Encoder(line.codec)

    def send(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """The float32 tensor as the receiver sees it; `times` messages of its size are counted."""
        encoded = self.encode(tensor, times)
        return self._line.codec.decode(encoded.frames, encoded.shape)

    def encode(self, tensor: Tensor, times: float = 1.0) -> Encoded:
        """The message that stands for the float32 tensor, counted `times` times."""
        encoded = self._encoder.encode(tensor)
        self._line.count(round(encoded.byte_count * times), round(tensor.numel() * tensor.element_size() * times))
        return encoded


@dataclass(frozen=True)
class Line:
    """One direction of traffic of one kind (`pull`, `push` or `dense`), in any number of streams."""

    kind: str
    codec: Codec
    counter: Counter
    _streams: dict[Hashable, Stream] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stream(self, key: Hashable) -> Stream:
        """The stream of that key, the same one each time."""
        found = self._streams.get(key)
        # setdefault is atomic: of several threads that ask first, all get one stream
        return found if found is not None else self._streams.setdefault(key, Stream(self))

    def count(self, sent: int, raw: int) -> None:
        """Counts one message, in bytes."""
        self.counter.add(self.kind, sent, raw)

    @property
    def float_bytes(self) -> float:
        """Bytes on the wire of one float, as the codec encodes numbers of all sizes."""
        numbers = torch.linspace(-1, 1, 1 << 12).view(-1, 16)
        return self.codec.encode(numbers).byte_count / numbers.numel()


def id_type(rows: int) -> torch.dtype:
    """How ids in `[0, rows)` cross: int32 where they fit."""
    return torch.int32 if rows <= _INT32_ROWS else torch.int64


def id_bytes(ids: Jagged, shards: Sequence[Shard]) -> int:
    """Bytes of the ids of a look-up in these shards as they cross, with offsets (int32) and weights (float32)."""
    per_id = id_type(max((shard.rows for shard in shards), default=0)).itemsize + (0 if ids.weights is None else 4)
    return ids.values.numel() * per_id + (0 if ids.offsets is None else ids.offsets.numel() * 4)


@dataclass(frozen=True)
class EmbeddingLine:
    """An embedding server in this process as a worker sees it over a wire: codecs are applied and bytes counted.

    The ids of a pull are counted with it; a push refers to them, so that only the gradient is sent. Every route
    (the slots that are asked for together) is a stream of its own in either direction, and so are the rows of each
    width.

    Attributes:
        server: the other end.
        position: of the server among those that share the two lines.
        pulls: the way of the pooled vectors and rows.
        pushes: the way of their gradients.
    """

    server: EmbeddingServer
    position: int
    pulls: Line
    pushes: Line

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What the server holds."""
        return self.server.shards

    def pull(self, lookup: Lookup) -> Pending[Tensor]:
        """As `EmbeddingServer.pull`."""
        asked = id_bytes(lookup.ids, self.server.shards)
        self.pulls.count(asked, asked)
        return Done(self._stream(self.pulls, lookup.slots).send(self.server.pull(lookup)))

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> Pending[None]:
        """As `EmbeddingServer.push`."""
        self.server.push(lookup, self._stream(self.pushes, lookup.slots).send(gradient), lr)
        return DONE

    def read_rows(self, lookup: RowLookup) -> Pending[tuple[Tensor, ...]]:
        """As `EmbeddingServer.read_rows`."""
        asked = lookup.rows.numel() * id_type(self.server.numbers.total).itemsize
        self.pulls.count(asked, asked)
        return Done(self._by_width(self.pulls, self.server.read_rows(lookup)))

    def step_rows(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> Pending[None]:
        """As `EmbeddingServer.step_rows`."""
        self.server.step_rows(lookup, self._by_width(self.pushes, gradients), lr)
        return DONE

    def hold(self, number: int, lookup: Lookup, gradient: Tensor) -> Pending[None]:
        """As `EmbeddingServer.hold`."""
        self.server.hold(number, lookup, self._stream(self.pushes, lookup.slots).send(gradient))
        return DONE

    def hold_rows(self, number: int, lookup: RowLookup, gradients: Sequence[Tensor]) -> Pending[None]:
        """As `EmbeddingServer.hold_rows`."""
        self.server.hold_rows(number, lookup, self._by_width(self.pushes, gradients))
        return DONE

    def _by_width(self, line: Line, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._stream(line, ("rows", width)).send(tensor) for width, tensor in enumerate(tensors))

    def _stream(self, line: Line, about: Hashable) -> Stream:
        return line.stream((self.position, about))


class _Later(Pending[T]):
    """An answer that is found when somebody asks for it; one thread."""

    def __init__(self, find: Callable[[], T]) -> None:
        self._find = find
        self._found: list[T] = []

    def result(self) -> T:
        if not self._found:
            self._found.append(self._find())
        return self._found[0]

    def done(self) -> bool:
        return True

    def then(self, callback: Callback) -> None:
        callback(None)


@dataclass(frozen=True)
class DenseLine:
    """The dense part of gradient methods in this process as a worker sees it over a wire.

    Attributes:
        stepper: the other end.
        line: of the dense part.
        worker: whose streams these are.
    """

    stepper: DenseStepper
    line: Line
    worker: Hashable

    def newer(self, than: int) -> Pending[Version | None]:
        """As `DenseStepper.newer`, when the answer is asked for: nothing has to cross before."""
        return _Later(lambda: self._newer(than))

    def _newer(self, than: int) -> Version | None:
        found = self.stepper.newer(than)
        return None if found is None else Version(found.number, self._stream("parameters").send(found.flat))

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseStepper.hold`."""
        self.stepper.hold(number, replace(gradient, flat=self._stream("gradients").send(gradient.flat)))
        return DONE

    def _stream(self, about: str) -> Stream:
        return self.line.stream((about, self.worker))
