"""An embedding server as a worker sees it without a wire, and what both ends of a wire call its messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shadowsync.compression.channel import Channel, Stream
from shadowsync.data.batch import Jagged
from shadowsync.embedding.requests import id_type, pack_rows, raw_bytes
from shadowsync.embedding.server import EmbeddingServer, Lookup, RowLookup
from shadowsync.embedding.table import Shard, of_features, of_rows, slots_of
from shadowsync.rpc.kept import USUAL, Kept, KeptLimits, Mask
from shadowsync.rpc.pending import DONE, Done, Pending


@dataclass(frozen=True)
class RowRoute:
    """Distinct rows of one width; the first one is 0."""

    width: int


About = RowRoute | tuple[int, ...]
"""Which route a message takes: rows, or the slots that are asked for together."""


def id_bytes(ids: Jagged, shards: Sequence[Shard]) -> int:
    """Bytes of the ids of a look-up in these shards as they cross, with offsets (int32) and weights (float32)."""
    per_id = id_type(max((shard.rows for shard in shards), default=0)).itemsize + (0 if ids.weights is None else 4)
    return ids.values.numel() * per_id + (0 if ids.offsets is None else ids.offsets.numel() * 4)


@dataclass(frozen=True)
class EmbeddingLine:
    """An embedding server in this process as a worker sees it over a wire: codecs are applied and bytes counted.

    The ids of a pull are counted with it; a push refers to them, so that only the gradient is sent. Every route
    (the slots that are asked for together) is a stream of its own in either direction, and so are the rows of each
    width. Where a pull brings a part of its elements, the gradient goes back under the same mask: of what did not come,
    the model saw zeros, and nothing is learnt.

    Attributes:
        server: the other end.
        position: of the server among those that share the two lines.
        pulls: the way of the pooled vectors and rows.
        pushes: the way of their gradients.
        limits: of the masks that wait for their push; beyond, the oldest is dropped, and the gradient goes whole.
    """

    server: EmbeddingServer
    position: int
    pulls: Channel
    pushes: Channel
    limits: KeptLimits = USUAL
    _kept: Kept[int, Mask] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kept", Kept(self.limits))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What the server holds."""
        return self.server.shards

    def pull(self, lookup: Lookup) -> Pending[Tensor]:
        """As `EmbeddingServer.pull`."""
        asked = id_bytes(lookup.ids, self.server.shards)
        self.pulls.count(asked, asked)
        (pooled,) = self._cross(lookup, [(lookup.slots, self.server.pull(lookup))])
        return Done(pooled)

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> Pending[None]:
        """As `EmbeddingServer.push`."""
        (arrived,) = self._back(lookup, [(lookup.slots, gradient)])
        self.server.push(lookup, arrived, lr)
        return DONE

    def read_rows(self, lookup: RowLookup) -> Pending[tuple[Tensor, ...]]:
        """As `EmbeddingServer.read_rows`."""
        total = self.server.numbers.total
        self.pulls.count(pack_rows(lookup.rows, total).nbytes, raw_bytes(lookup.rows, total))
        return Done(self._cross(lookup, _by_width(self.server.read_rows(lookup))))

    def step_rows(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> Pending[None]:
        """As `EmbeddingServer.step_rows`."""
        self.server.step_rows(lookup, self._back(lookup, _by_width(gradients)), lr)
        return DONE

    def hold(self, number: int, lookup: Lookup, gradient: Tensor) -> Pending[None]:
        """As `EmbeddingServer.hold`."""
        (arrived,) = self._back(lookup, [(lookup.slots, gradient)])
        self.server.hold(number, lookup, arrived)
        return DONE

    def hold_rows(self, number: int, lookup: RowLookup, gradients: Sequence[Tensor]) -> Pending[None]:
        """As `EmbeddingServer.hold_rows`."""
        self.server.hold_rows(number, lookup, self._back(lookup, _by_width(gradients)))
        return DONE

    def _cross(self, lookup: Lookup | RowLookup, tensors: Sequence[tuple[About, Tensor]]) -> tuple[Tensor, ...]:
        """What arrives of an answer."""
        if self.pulls.codec.exact:
            return self.pulls.plain(tensor for _, tensor in tensors)
        streams = [(self._stream(self.pulls, about, "vectors", "from"), tensor) for about, tensor in tensors]
        groups = slot_widths(self.server.shards, lookup) if self.pulls.codec.by_feature else ()
        decoded = [stream.cross(tensor, groups) for stream, tensor in streams]
        if not self.pulls.codec.sparse:
            return tuple(found.tensor for found in decoded)
        mask = Mask(0, tuple(found.kept for found in decoded))
        self._kept.keep(lookup.number, mask, mask.nbytes)
        return tuple(found.tensor for found in decoded)

    def _back(self, lookup: Lookup | RowLookup, gradients: Sequence[tuple[About, Tensor]]) -> tuple[Tensor, ...]:
        """What arrives of gradients."""
        if self.pushes.codec.exact and not self.pulls.codec.sparse:
            return self.pushes.plain(gradient for _, gradient in gradients)
        mask = self._kept.take(lookup.number) if self.pulls.codec.sparse else None
        if mask is not None:
            pairs = zip(gradients, mask.kept, strict=True)
            return tuple(
                self._stream(self.pushes, about, "gradients", "for", masked=True).send_under(gradient, kept)
                for (about, gradient), kept in pairs
            )
        groups = slot_widths(self.server.shards, lookup) if self.pushes.codec.by_feature else ()
        streams = [(self._stream(self.pushes, about, "gradients", "for"), gradient) for about, gradient in gradients]
        return tuple(stream.cross(gradient, groups).tensor for stream, gradient in streams)

    def _stream(self, line: Channel, about: About, what: str, way: str, masked: bool = False) -> Stream:
        return embedding_stream(line, self.server.shards, self.position, (about, what, way), masked)


def embedding_stream(
    line: Channel, shards: Sequence[Shard], position: int, about: tuple[About, str, str], masked: bool = False
) -> Stream:
    """The stream of one route to one embedding server or back, named by its features or tables.

    Args:
        line: of pulls or pushes.
        shards: what the server holds.
        position: of the server.
        about: the route, what crosses (`vectors` or `gradients`), and `from` or `for`.
        masked: gradients under the mask of their pull: a stream of its own.
    """
    route, what, way = about

    def named() -> str:
        of = of_rows(shards, _dim(shards, route.width)) if isinstance(route, RowRoute) else of_features(shards, route)
        return f"the {what} of {of} {way} embedding server {position}"

    return line.stream((position, route, masked), named)


def _dim(shards: Sequence[Shard], width: int) -> int:
    return sorted({shard.table.dim for shard in shards})[width]


def _by_width(tensors: Sequence[Tensor]) -> list[tuple[About, Tensor]]:
    return [(RowRoute(width), tensor) for width, tensor in enumerate(tensors)]


def slot_widths(shards: Sequence[Shard], lookup: Lookup | RowLookup) -> tuple[int, ...]:
    """Columns of each feature in the answer to a look-up; for distinct rows none, as their columns are no features."""
    if isinstance(lookup, RowLookup):
        return ()
    slots = slots_of(shards)
    return tuple(slots[slot].shard.table.dim for slot in lookup.slots)
