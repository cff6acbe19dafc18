"""An embedding server as a worker sees it, wherever it is: what crosses passes the codecs and is counted."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace
from torch import Tensor

from shadowsync.compression.channel import Channel, Stream
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.embedding.keys import Wanted
from shadowsync.embedding.messages import (
    Coded,
    Sent,
    id_type,
    pack_coded,
    pack_lookup,
    pack_masks,
    raw_bytes,
    tensors_of,
    total_bytes,
    unpack_coded,
)
from shadowsync.embedding.requests import AnyLookup, RowLookup, Shapes, bounds_of, check_range
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import RowNumbers, Shard, Subject, described, slots_of
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.kept import USUAL, Kept, KeptLimits, Mask
from shadowsync.rpc.pending import DONE, Done, Mapped, Pending, Promise
from shadowsync.rpc.served import Client, later

ANY = Client("")
P = ParamSpec("P")
R = TypeVar("R")
UNCOUNTED = Channel("", Plain(), WireCounter())
"""Tensors as they are, whose bytes nobody looks at."""


class ServerProxy:
    """Asks an `EmbeddingService`, over a connection or in this process; there the server itself, where codecs change
    nothing.

    Ids cross with a pull alone: a push refers to them by the number of the look-up. When the server is replaced and the
    connection led to the new one, calls go on there; a push whose look-up the new server never saw brings its ids
    again. Every set of slots that are asked for together is a stream of its own in either direction, and so are the
    rows of each width. Where a pull brings a part of its elements, the gradient goes back under the same mask: of what
    did not come, the model saw zeros, and nothing is learnt.

    Every method returns when the request is on its way; a gradient is not to be written to before its answer is there.

    Args:
        position: of the server among those that share the channels.
        pulls: the way of pooled vectors and rows; `pushes` that of their gradients.
        stream: of this worker among those that share the connection: numbers of look-ups and what codecs remember are
            its own. None for who only predicts: the server keeps nothing, and sends the rows as they are, whatever the
            codec (`pulls` has to be `plain`).
        limits: of the masks that wait for their push; beyond, the oldest is dropped, and the gradient goes whole.
    """

    def __init__(
        self,
        service: Connection | EmbeddingService,
        shards: Sequence[Shard],
        position: int,
        pulls: Channel,
        pushes: Channel,
        stream: int | None = 0,
        generation: int = 0,
        limits: KeptLimits = USUAL,
    ) -> None:
        self.shards = tuple(shards)
        self._service, self._position, self._pulls, self._pushes = service, position, pulls, pushes
        self._stream, self._generation = stream, generation
        plain = pulls.codec.exact and pushes.codec.exact
        self._server = service.server if plain and isinstance(service, EmbeddingService) else None
        self._slots, self._numbers = slots_of(self.shards), RowNumbers(self.shards)
        self._bounds = bounds_of(self._slots)
        self._id_type = id_type(max((shard.rows for shard in shards), default=0))
        self._masks: Kept[int, Mask] = Kept(limits)

    @classmethod
    def near(
        cls,
        server: EmbeddingServer,
        position: int,
        pulls: Channel = UNCOUNTED,
        pushes: Channel = UNCOUNTED,
        stream: int = 0,
        limits: KeptLimits = USUAL,
    ) -> "ServerProxy":
        """Of a server in this process or its memory."""
        service = EmbeddingService(server, pulls.codec, pushes.codec)
        return cls(service, server.shards, position, pulls, pushes, stream, limits=limits)

    def _ask(
        self, method: Callable[Concatenate[EmbeddingService, P], R], *args: P.args, **more: P.kwargs
    ) -> Pending[R]:
        if isinstance(self._service, EmbeddingService):
            return Done(method(self._service, *args, **more))
        return later(self._service, method, *args, **more)

    def pull(self, lookup: AnyLookup) -> Pending[tuple[Tensor, ...]]:
        """As `EmbeddingServer.pull`; an id outside its shard is refused before it crosses."""
        if self._server is not None and self._pulls is UNCOUNTED:
            return Done(self._server.pull(lookup))
        if isinstance(lookup, RowLookup):
            shapes, packed = self._numbers.shapes(lookup.rows), self._pack(lookup)
        else:
            bounds = self._bounds(lookup.slots)
            shapes, packed = ((lookup.ids.samples, bounds.width),), lookup
            if not isinstance(
                self._service, EmbeddingService
            ):  # an id that is too large could be another row's when it is narrowed to 32 bits
                check_range(lookup.ids, bounds)
                packed = self._pack(lookup)
        self._pulls.count(*self._id_bytes(lookup, packed))
        if self._server is not None:
            return Done(self._pulls.plain(self._server.pull(lookup)))
        codec = self._pulls.now.codec.name
        coded = self._ask(EmbeddingService.pull, packed, self._stream, codec, ANY)
        return Mapped(partial(self._decode, lookup.number, shapes), coded)

    def expect(self, lookup: AnyLookup) -> None:
        """As `EmbeddingServer.expect`, where it is in this process or its memory; over a network a pull that is under
        way early does as much."""
        if isinstance(self._service, EmbeddingService):
            self._service.server.expect(lookup)

    def rows_of(self, wanted: Wanted) -> Pending[Tensor]:
        """As `EmbeddingServer.rows_of`."""
        if isinstance(self._service, EmbeddingService):
            return Done(self._service.server.rows_of(wanted))
        self._pulls.count(wanted.keys.nbytes, wanted.keys.nbytes)
        return self._ask(EmbeddingService.rows_of, wanted)

    def push(self, lookup: AnyLookup, gradients: Sequence[Tensor], lr: float) -> Pending[None]:
        if self._server is not None:
            self._server.push(lookup, self._pushes.plain(gradients), lr)
            return DONE
        return self._deliver(lookup, gradients, lambda sent: self._ask(EmbeddingService.push, sent, lr, ANY))

    def hold(self, batch: int, lookup: AnyLookup, gradients: Sequence[Tensor]) -> Pending[None]:
        if self._server is not None:
            self._server.hold(batch, lookup, self._pushes.plain(gradients))
            return DONE
        method = EmbeddingService.hold_gradients
        return self._deliver(lookup, gradients, lambda sent: self._ask(method, sent, batch, ANY))

    def _pack(self, lookup: AnyLookup) -> AnyLookup:
        return pack_lookup(lookup, self._id_type, self._numbers.total)

    def _id_bytes(self, lookup: AnyLookup, packed: AnyLookup) -> tuple[int, int]:
        """What the ids of a look-up take as they cross, and would take as numbers."""
        if isinstance(lookup, RowLookup):
            return total_bytes(tensors_of(packed)), raw_bytes(lookup.rows, self._numbers.total)
        ids = lookup.ids
        size = len(ids.values) * (self._id_type.itemsize + (0 if ids.weights is None else 4))
        size += 0 if ids.offsets is None else 4 * len(ids.offsets)
        return size, size

    def _decode(self, number: int, shapes: Shapes, coded: Coded) -> tuple[Tensor, ...]:
        codec = self._pulls.codec.level(coded.codec)
        decoded = unpack_coded(coded, codec, shapes, "vectors")
        tensors = tuple(found.tensor for found in decoded)
        self._pulls.count(coded.byte_count, total_bytes(tensors))
        if codec.sparse:
            elements, kept = sum(t.numel() for t in tensors), sum(found.kept_count for found in decoded)
            self._pulls.count_kept(elements, kept, coded.refreshes, coded.early)
        if coded.mask is not None:
            mask = Mask(coded.mask, tuple(found.kept for found in decoded))
            self._masks.keep(number, mask, mask.nbytes)
        return tensors

    def _encode(self, lookup: AnyLookup, gradients: Sequence[Tensor], mask: Mask | None) -> Coded:
        """In the codec of pushes now; under the mask of their pull, if it came under one, whatever pulls are in now."""
        channel, gradients = self._pushes.now, [gradient.contiguous() for gradient in gradients]
        streams = [self._stream_of(channel, subject, mask is not None) for subject in lookup.subjects(self._numbers)]
        if mask is None:
            groups = lookup.groups(self._slots) if channel.codec.by_feature else ()
            encoded = [stream.encode(found, groups) for stream, found in zip(streams, gradients, strict=True)]
            return pack_coded(encoded, channel.codec.name)
        under = zip(streams, gradients, mask.kept, strict=True)
        return pack_coded([s.encode_under(found, kept) for s, found, kept in under], channel.codec.name, mask.number)

    def _stream_of(self, channel: Channel, subject: Subject, masked: bool) -> Stream:
        """Gradients under the mask of their pull are a stream of their own."""
        return channel.stream(
            (self._position, subject, masked),
            lambda: f"the gradients of {described(self.shards, subject)} for embedding server {self._position}",
        )

    def _deliver(
        self, lookup: AnyLookup, gradients: Sequence[Tensor], send: Callable[[Sent], Pending[bool]]
    ) -> Pending[None]:
        """Ends when the gradients are applied or held: sent once with the number of their look-up and, if that is
        unknown, with its ids and its mask. They are encoded once, so that what a codec holds back is not sent twice."""
        mask = self._masks.take(lookup.number)
        if mask is not None and len(mask.kept) != len(gradients):
            raise DataError(f"{len(gradients)} gradients came for a pull of {len(mask.kept)} tensors")
        coded = self._encode(lookup, gradients, mask)
        first = Sent(lookup.number, coded, self._stream or 0, self._generation)
        answer = send(first)
        if isinstance(answer, Done) and answer.result():
            return DONE
        delivered = Promise[None]()

        def with_ids() -> Sent:
            packed, masks = self._pack(lookup), () if mask is None else pack_masks(mask.kept, coded.shapes)
            ids, raw_ids = self._id_bytes(lookup, packed)
            # in fp32 all of it would, without a mask, have gone again too
            raw = raw_ids + sum(4 * math.prod(shape) for shape in coded.shapes)
            self._pushes.count(ids + total_bytes(masks) + coded.byte_count, raw)
            return replace(first, lookup=packed, masks=masks)

        def answered(answer: Pending[bool], again: bool) -> None:
            try:
                if answer.result():
                    delivered.keep(None)
                elif again:
                    raise RunError("an embedding server does not accept a push that brings its ids")
                else:
                    brought = send(with_ids())
                    brought.then(lambda _: answered(brought, again=True))
            except BaseException as error:  # whoever waits is to hear of it, not the thread that serves the connection
                delivered.fail(error)

        answer.then(lambda _: answered(answer, again=False))
        return delivered
