"""What crosses between two roles: tensors pass a codec and are counted, also where nothing is really sent."""

from dataclasses import dataclass

from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.embedding.server import EmbeddingServer, Lookup
from shadowsync.embedding.table import Shard
from shadowsync.metrics.wire import WireCounter


@dataclass(frozen=True)
class Line:
    """One direction of traffic of one kind (`pull`, `push` or `dense`)."""

    kind: str
    codec: Codec
    counter: WireCounter

    def send(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """The float32 tensor as the receiver sees it; `times` messages of its size are counted."""
        encoded = self.codec.encode(tensor)
        raw = tensor.numel() * tensor.element_size()
        self.counter.add(self.kind, round(encoded.byte_count * times), round(raw * times))
        return self.codec.decode(encoded.frames, encoded.shape)


@dataclass(frozen=True)
class EmbeddingLine:
    """An embedding server as a trainer sees it: a connection with the server's own methods.

    The ids of a pull are counted with it; a push refers to them, so that only the gradient is sent.
    """

    server: EmbeddingServer
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
        self.pulls.counter.add(self.pulls.kind, asked, asked)
        return self.pulls.send(self.server.pull(lookup))

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> None:
        """As `EmbeddingServer.push`."""
        self.server.push(lookup, self.pushes.send(gradient), lr)
