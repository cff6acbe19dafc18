"""An embedding server behind a wire."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shadowsync.compression.channel import Stream
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.plain import Plain
from shadowsync.embedding.line import slot_widths
from shadowsync.embedding.messages import (
    Coded,
    CommitAsked,
    ForgetAsked,
    PullAsked,
    PushAsked,
    Pushed,
    ReadAsked,
    Shapes,
    StepAsked,
    check_shapes,
    pack_coded,
    unpack_coded,
    unpack_ids,
    unpack_masks,
)
from shadowsync.embedding.requests import unpack_rows
from shadowsync.embedding.saves import SaveMethods
from shadowsync.embedding.server import EmbeddingServer, Lookup, RowLookup, RowStep
from shadowsync.embedding.step_messages import Committed, check_batch, checked_weights
from shadowsync.embedding.table import of_features, of_rows
from shadowsync.errors import DataError
from shadowsync.rpc.kept import FIRST, USUAL, Generation, Kept, KeptLimits, Mask, PerClient
from shadowsync.rpc.served import Served
from shadowsync.rpc.service import Method, Payload


@dataclass(frozen=True)
class _Asked:
    """A look-up that waits for its push.

    Attributes:
        lookup: as it was asked for.
        shapes: of its answer, and of the gradients that are to come.
        mask: under which it was answered; None if it was under none.
    """

    lookup: Lookup | RowLookup
    shapes: Shapes
    mask: Mask | None


class _Client:
    """What is kept for one connection."""

    def __init__(self, limits: KeptLimits) -> None:
        self._kept: Kept[tuple[int, int], _Asked] = Kept(limits)
        self._masks = itertools.count()
        self._streams: dict[tuple[object, ...], Stream] = {}

    def answer(
        self, stream: int | None, lookup: Lookup | RowLookup, encoded: Sequence[Encoded], codec: Codec
    ) -> Payload:
        """The reply to a pull; its look-up and its mask are kept until its push comes, where one will (`stream`)."""
        if stream is None:
            return Payload.of(*pack_coded(encoded, codec.name))
        mask = Mask(next(self._masks), tuple(each.kept for each in encoded)) if codec.sparse else None
        size = _bytes(lookup) + (0 if mask is None else mask.nbytes)
        self._kept.keep((stream, lookup.number), _Asked(lookup, tuple(each.shape for each in encoded), mask), size)
        return Payload.of(*pack_coded(encoded, codec.name, None if mask is None else mask.number))

    def take(self, stream: int, number: int, mask: int | None) -> _Asked | None:
        """The look-up, which is not kept any more; None if it was dropped or never came, or has another mask."""
        found = self._kept.take((stream, number))
        if found is None or mask is None:
            return found
        return found if found.mask is not None and found.mask.number == mask else None

    def encoder(self, codec: Codec, stream: int, route: tuple[object, ...], about: Callable[[], str]) -> Stream:
        """Of the answers to that stream about that."""
        key = (stream, codec.name, *route)
        # setdefault is atomic: of several threads that ask first, all get one
        return self._streams.get(key) or self._streams.setdefault(key, Stream(codec, f"what is pulled of {about()}"))

    @property
    def kept(self) -> int:
        """Look-ups that wait for their push."""
        return len(self._kept)


def _bytes(lookup: Lookup | RowLookup) -> int:
    if isinstance(lookup, RowLookup):
        return lookup.rows.nbytes
    return sum(t.nbytes for t in (lookup.ids.values, lookup.ids.offsets, lookup.ids.weights) if t is not None)


class EmbeddingService:
    """Serves an `EmbeddingServer`; its methods may run in any number of threads at once.

    `pull` and `read` keep their look-up until `push` and `step` refer to it by its number, so that ids cross once.
    Where the answer holds a part of the elements, the gradient comes under the same mask; a look-up that is not kept
    any more, or has been answered again under another mask, comes again with its ids and the mask. What is kept is
    bounded for each client and freed when the client goes. Rows go out as they are between two pushes, and come in, as
    `SaveMethods` has it.

    Args:
        server: what is served; checks ids, row numbers and the shapes of gradients.
        pull: codec of pooled vectors and rows.
        push: codec of their gradients.
        limits: what is kept for a client.
        generation: whose pushes are applied.
    """

    def __init__(
        self,
        server: EmbeddingServer,
        pull: Codec,
        push: Codec,
        limits: KeptLimits = USUAL,
        generation: Generation = FIRST,
    ) -> None:
        self.methods: Mapping[str, Method] = {
            "pull": Method(self._pull, once=False),
            "push": Method(self._push),
            "read": Method(self._read, once=False),
            "step": Method(self._step),
            "commit": Method(self._commit),
            "forget_held": Method(self._forget_held),
            **Served(SaveMethods(server)).methods,
        }
        self.server = self._server = server
        self._generation = generation
        self._plain = Plain()
        self._pull_codec = pull
        self._push_codec = push
        self._clients = PerClient(lambda: _Client(limits))

    def client_gone(self, client: str) -> None:
        """As `Service.client_gone`."""
        self._clients.forget(client)

    def close(self) -> None:
        """Nothing to end."""

    def _codec(self, asked: PullAsked | ReadAsked) -> Codec:
        """Who only predicts is to see the rows as they are."""
        return self._plain if asked.number is None else self._pull_codec.level(asked.codec)

    @property
    def kept(self) -> int:
        """Look-ups of all clients that wait for their push."""
        return sum(client.kept for client in self._clients.values())

    def _pull(self, request: Payload) -> Payload:
        asked, client = request.read(PullAsked), self._clients.of(request.client)
        lookup, codec = unpack_ids(asked.ids, request.tensors, asked.number or 0), self._codec(asked)
        encoder = client.encoder(
            codec, asked.stream, lookup.slots, partial(of_features, self._server.shards, lookup.slots)
        )
        pooled = self._server.pull(lookup)
        encoded = encoder.encode(pooled, slot_widths(self._server.shards, lookup) if codec.by_feature else ())
        return client.answer(_stream(asked), lookup, [encoded], codec)

    def _push(self, request: Payload) -> Payload:
        asked = request.read(PushAsked)
        self._generation.check(asked.generation)
        split = 0 if asked.ids is None else asked.ids.tensor_count
        found = self._clients.of(request.client).take(asked.stream, asked.number, asked.gradient.mask)
        if asked.ids is not None:
            lookup = unpack_ids(asked.ids, request.tensors[:split], asked.number)
            shapes = (self._server.pooled_shape(lookup),)
            mask, split = _mask(asked.gradient, request.tensors, split, shapes)
            found = _Asked(lookup, shapes, mask)
        if found is None or not isinstance(found.lookup, Lookup):
            return Payload.of(Pushed(False))
        gradients = self._gradients(asked.gradient, request.tensors[split:], asked.lr, found)
        if asked.held is None:
            self._server.push(found.lookup, gradients[0], asked.lr)
        else:
            check_batch(asked.held)
            self._server.hold(asked.held, found.lookup, gradients[0])
        return Payload.of(Pushed(True))

    def _read(self, request: Payload) -> Payload:
        asked, client = request.read(ReadAsked), self._clients.of(request.client)
        numbers = unpack_rows(request.tensors, self._server.numbers.total)
        lookup, codec = RowLookup(asked.shards, numbers, asked.number or 0), self._codec(asked)
        rows = self._server.read_rows(lookup)
        dims = [width.dim for width in self._server.numbers.widths]
        encoders = [
            client.encoder(codec, asked.stream, ("rows", dim), partial(of_rows, self._server.shards, dim))
            for dim in dims
        ]
        encoded = [encoder.encode(found) for encoder, found in zip(encoders, rows, strict=True)]
        return client.answer(_stream(asked), lookup, encoded, codec)

    def _step(self, request: Payload) -> Payload:
        asked = request.read(StepAsked)
        self._generation.check(asked.generation)
        split = 0 if asked.shards is None else 1
        found = self._clients.of(request.client).take(asked.stream, asked.number, asked.gradients.mask)
        if asked.shards is not None:
            numbers = unpack_rows(request.tensors[:split], self._server.numbers.total)
            lookup = RowLookup(asked.shards, numbers, asked.number)
            shapes = self._server.row_shapes(lookup)
            mask, split = _mask(asked.gradients, request.tensors, split, shapes)
            found = _Asked(lookup, shapes, mask)
        if found is None or not isinstance(found.lookup, RowLookup):
            return Payload.of(Pushed(False))
        gradients = self._gradients(asked.gradients, request.tensors[split:], asked.lr, found)
        if asked.held is None:
            self._server.step_rows(found.lookup, gradients, asked.lr)
        else:
            check_batch(asked.held)
            self._server.hold_rows(asked.held, found.lookup, gradients)
        return Payload.of(Pushed(True))

    def _commit(self, request: Payload) -> Payload:
        asked = request.read(CommitAsked)
        self._generation.check(asked.generation)
        weights = checked_weights(asked.batches, asked.weights, asked.divisor, asked.lr)
        held_bytes = self._server.held_bytes
        self._server.commit(RowStep(asked.step, weights, asked.divisor, asked.lr, asked.below))
        return Payload.of(Committed(held_bytes))

    def _forget_held(self, request: Payload) -> Payload:
        asked = request.read(ForgetAsked)
        self._generation.check(asked.generation)
        self._server.forget_held(asked.stepped)
        return Payload()

    def _gradients(self, coded: Coded, frames: Sequence[Tensor], lr: float, asked: _Asked) -> tuple[Tensor, ...]:
        if not math.isfinite(lr):
            raise DataError(f"a learning rate of {lr} is not finite")
        check_shapes(coded, asked.shapes, "gradients")
        kept = None if asked.mask is None or coded.mask is None else asked.mask.kept
        return tuple(found.tensor for found in unpack_coded(coded, frames, self._push_codec, kept))


def _stream(asked: PullAsked | ReadAsked) -> int | None:
    """Of the push that will follow; None if none will."""
    return None if asked.number is None else asked.stream


def _mask(coded: Coded, tensors: Sequence[Tensor], start: int, shapes: Shapes) -> tuple[Mask | None, int]:
    """The mask that comes with a look-up that comes again, from tensor `start` on, and where the frames begin."""
    if coded.mask is None:
        return None, start
    split = start + len(shapes)
    return Mask(coded.mask, unpack_masks(tensors[start:split], shapes)), split
