"""What crosses between two roles: tensors pass a codec and are counted, also where nothing is really sent."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.embedding.server import EmbeddingServer, Lookup
from shadowsync.embedding.table import Shard


class Counter(Protocol):
    """Adds up bytes (`metrics.wire.WireCounter`)."""

    def add(self, kind: str, sent: int, raw: int) -> None:
        """Counts one message: `sent` bytes of it on the wire, `raw` bytes of it uncompressed."""
        ...


class Stream:
    """The messages of one sender to one receiver about one thing: what the codec remembers belongs to them alone."""

    def __init__(self, line: "Line") -> None:
        self._line = line
        self._state: Any = None
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """The float32 tensor as the receiver sees it; `times` messages of its size are counted."""
        codec = self._line.codec
        with self._lock:  # workers of one trainer may share a stream; each message starts from the state of the last
            encoded = codec.encode(tensor, self._state)
            self._state = encoded.state
        self._line.count(round(encoded.byte_count * times), round(tensor.numel() * tensor.element_size() * times))
        return codec.decode(encoded.frames, encoded.shape)


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


@dataclass(frozen=True)
class EmbeddingLine:
    """An embedding server as a worker sees it: a connection with the server's own methods.

    The ids of a pull are counted with it; a push refers to them, so that only the gradient is sent. Every route
    (the slots that are asked for together) is a stream of its own in either direction.

    Attributes:
        server: the other end.
        position: of the server among those that share the two lines.
        pulls: the way of the pooled vectors.
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

    def pull(self, lookup: Lookup) -> Tensor:
        """As `EmbeddingServer.pull`."""
        ids = lookup.ids
        asked = sum(t.numel() * t.element_size() for t in (ids.values, ids.offsets, ids.weights) if t is not None)
        self.pulls.count(asked, asked)
        return self._stream(self.pulls, lookup).send(self.server.pull(lookup))

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> None:
        """As `EmbeddingServer.push`."""
        self.server.push(lookup, self._stream(self.pushes, lookup).send(gradient), lr)

    def _stream(self, line: Line, lookup: Lookup) -> Stream:
        return line.stream((self.position, lookup.slots))
