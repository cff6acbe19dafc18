"""The trainer's end of the wire to one embedding server."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shadowsync.compression.channel import Channel, Stream
from shadowsync.embedding.line import About, RowRoute, embedding_stream, slot_widths
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
    pack_ids,
    pack_masks,
    unpack_coded,
)
from shadowsync.embedding.requests import Bounds, bounds_of, check_range, id_type, pack_rows, raw_bytes
from shadowsync.embedding.server import Lookup, RowLookup, RowStep
from shadowsync.embedding.step_messages import held_bytes
from shadowsync.embedding.table import RowNumbers, Shard, slots_of
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.kept import USUAL, Kept, KeptLimits, Mask
from shadowsync.rpc.pending import Mapped, Pending, Promise
from shadowsync.rpc.service import Meta, Payload


@dataclass(frozen=True)
class Remote:
    """How to reach a server.

    Attributes:
        connection: to an `EmbeddingService`. When the server is replaced and the connection led to the new one, calls
            go on there; a push whose look-up the new server never saw brings its ids again.
        shards: what the server holds (see `shards_of`).
        position: of the server among those that share the lines.
        stream: of this client among those that share the connection, one for each worker: numbers of look-ups and
            what codecs remember are its own.
        timeout_s: the deadline of every call; None leaves it to the connection.
        learns: pushes follow the pulls; False for a client that only predicts: the server keeps nothing, and sends the
            rows as they are, whatever the codec (the line of pulls has to be `plain`).
        generation: of the parts that this client belongs to.
        limits: of the masks that wait for their push; beyond, the oldest is dropped, and the gradient goes whole.
    """

    connection: Connection
    shards: tuple[Shard, ...]
    position: int
    stream: int = 0
    timeout_s: float | None = None
    learns: bool = True
    generation: int = 0
    limits: KeptLimits = USUAL


@dataclass(frozen=True)
class _Message:
    """A request; `sent` and `raw` are what is counted when it goes, in bytes, beside what was counted before."""

    method: str
    meta: Meta
    tensors: tuple[Tensor, ...]
    sent: int = 0
    raw: int = 0


@dataclass(frozen=True)
class _Sent:
    """Gradients as they cross.

    Attributes:
        coded, frames: of the gradients.
        positions: of their mask, for a look-up that has to come again.
    """

    coded: Coded
    frames: tuple[Tensor, ...]
    positions: Callable[[], tuple[Tensor, ...]]

    def message(self, method: str, meta: Meta, ids: tuple[Tensor, ...] | None, raw_ids: int = 0) -> _Message:
        """With the ids; if they go again, with the mask, and all of it is counted: in fp32 it would, without a mask and
        with `raw_ids` bytes of ids, have gone again too."""
        if ids is None:
            return _Message(method, meta, self.frames)
        tensors = (*ids, *self.positions(), *self.frames)
        gradients = sum(4 * math.prod(shape) for shape in self.coded.shapes)
        return _Message(method, meta, tensors, _bytes(tensors), raw_ids + gradients)


class EmbeddingRemote:
    """An embedding server as a worker sees it (`embedding.client.Server`): codecs and counts as `EmbeddingLine`'s.

    Args:
        remote: the way to it.
        pulls: the way of the pooled vectors and rows; the codec is the server's.
        pushes: the way of their gradients.
    """

    def __init__(self, remote: Remote, pulls: Channel, pushes: Channel) -> None:
        self.shards = remote.shards
        self._remote = remote
        self._pulls = pulls
        self._pushes = pushes
        self._slots = slots_of(remote.shards)
        self._id_type = id_type(max((shard.rows for shard in remote.shards), default=0))
        self._numbers = RowNumbers(remote.shards)
        self._bounds = bounds_of(self._slots)
        self._kept: Kept[int, Mask] = Kept(remote.limits)

    def pull(self, lookup: Lookup) -> Pending[Tensor]:
        """As `EmbeddingServer.pull`; an id outside its shard is refused here."""
        shape = lookup.ids.samples, self._check(lookup).width
        ids, tensors = pack_ids(lookup, self._id_type)
        self._pulls.count(*[_bytes(tensors)] * 2)
        meta = PullAsked(self._remote.stream, self._number(lookup), ids, self._pulls.now.codec.name)
        return Mapped(partial(self._only, lookup.number, shape), self._call(_Message("pull", meta, tensors)))

    def read_rows(self, lookup: RowLookup) -> Pending[tuple[Tensor, ...]]:
        """As `EmbeddingServer.read_rows`."""
        numbers = pack_rows(lookup.rows, self._numbers.total)
        self._pulls.count(numbers.nbytes, raw_bytes(lookup.rows, self._numbers.total))
        codec = self._pulls.now.codec.name
        meta = ReadAsked(self._remote.stream, self._number(lookup), lookup.shards, codec)
        return Mapped(
            partial(self._decode, lookup.number, self._numbers.shapes(lookup.rows)),
            self._call(_Message("read", meta, (numbers,))),
        )

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> Pending[None]:
        """As `EmbeddingServer.push`."""
        return self._push(lookup, gradient, lr, None)

    def hold(self, number: int, lookup: Lookup, gradient: Tensor) -> Pending[None]:
        """As `EmbeddingServer.hold`."""
        return self._push(lookup, gradient, 0.0, number)

    def step_rows(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> Pending[None]:
        """As `EmbeddingServer.step_rows`."""
        return self._step(lookup, gradients, lr, None)

    def hold_rows(self, number: int, lookup: RowLookup, gradients: Sequence[Tensor]) -> Pending[None]:
        """As `EmbeddingServer.hold_rows`."""
        return self._step(lookup, gradients, 0.0, number)

    def commit(self, step: RowStep) -> Pending[int]:
        """As `EmbeddingServer.commit`; answered with the bytes of the gradients that waited."""
        weights = step.weights
        meta = CommitAsked(
            step.step,
            tuple(weights),
            tuple(weights.values()),
            step.divisor,
            step.lr,
            step.below,
            self._remote.generation,
        )
        return Mapped(held_bytes, self._call(_Message("commit", meta, ())))

    def forget_held(self, stepped: int) -> Pending[None]:
        """As `EmbeddingServer.forget_held`."""
        meta = ForgetAsked(stepped, self._remote.generation)
        return Mapped(lambda _: None, self._call(_Message("forget_held", meta, ())))

    def _push(self, lookup: Lookup, gradient: Tensor, lr: float, held: int | None) -> Pending[None]:
        sent = self._encode(lookup, [(lookup.slots, gradient)])

        def message(again: bool) -> _Message:
            ids, tensors = pack_ids(lookup, self._id_type) if again else (None, None)
            meta = PushAsked(self._remote.stream, lookup.number, lr, sent.coded, ids, self._remote.generation, held)
            return sent.message("push", meta, tensors, _bytes(tensors or ()))

        return _Delivery(self._call if held is not None else self._call_along, message, self._pushes)

    def _step(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float, held: int | None) -> Pending[None]:
        sent = self._encode(lookup, [(RowRoute(width), gradient) for width, gradient in enumerate(gradients)])

        def message(again: bool) -> _Message:
            tensors = (pack_rows(lookup.rows, self._numbers.total),) if again else None
            shards = lookup.shards if again else None
            meta = StepAsked(self._remote.stream, lookup.number, lr, sent.coded, shards, self._remote.generation, held)
            return sent.message("step", meta, tensors, raw_bytes(lookup.rows, self._numbers.total))

        return _Delivery(self._call if held is not None else self._call_along, message, self._pushes)

    def _check(self, lookup: Lookup) -> Bounds:
        """Before ids are narrowed to 32 bits, where one that is too large could become another row's."""
        bounds = self._bounds(lookup.slots)
        check_range(lookup.ids, bounds)
        return bounds

    def _number(self, lookup: Lookup | RowLookup) -> int | None:
        return lookup.number if self._remote.learns else None

    def _call(self, message: _Message) -> Pending[Payload]:
        payload = Payload.of(message.meta, message.tensors)
        return self._remote.connection.call(message.method, payload, self._remote.timeout_s)

    def _call_along(self, message: _Message) -> Pending[Payload]:
        """A push that nobody waits for travels with the next pull."""
        payload = Payload.of(message.meta, message.tensors)
        return self._remote.connection.call_along(message.method, payload, self._remote.timeout_s)

    def _encode(self, lookup: Lookup | RowLookup, gradients: Sequence[tuple[About, Tensor]]) -> _Sent:
        """In the codec of pushes now; under the mask of their pull, if it came under one, whatever pulls are in now."""
        line, mask = self._pushes.now, self._kept.take(lookup.number)
        if mask is None:
            groups = slot_widths(self.shards, lookup) if line.codec.by_feature else ()
            streams = [(self._stream(line, about), gradient.contiguous()) for about, gradient in gradients]
            encoded = [stream.encode(found, groups=groups) for stream, found in streams]
            return _Sent(*pack_coded(encoded, line.codec.name), lambda: ())
        if len(mask.kept) != len(gradients):
            raise DataError(f"{len(gradients)} gradients came for a pull of {len(mask.kept)} tensors")
        encoded = [
            self._stream(line, about, masked=True).encode_under(gradient.contiguous(), kept)
            for (about, gradient), kept in zip(gradients, mask.kept, strict=True)
        ]
        coded, frames = pack_coded(encoded, line.codec.name, mask.number)
        return _Sent(coded, frames, lambda: pack_masks(mask.kept, coded.shapes))

    def _stream(self, line: Channel, about: About, masked: bool = False) -> Stream:
        return embedding_stream(line, self.shards, self._remote.position, (about, "gradients", "for"), masked)

    def _decode(self, number: int, shapes: Shapes, answer: Payload) -> tuple[Tensor, ...]:
        coded = answer.read(Coded)
        check_shapes(coded, shapes, "vectors")
        codec = self._pulls.codec.level(coded.codec)
        decoded = unpack_coded(coded, answer.tensors, codec)
        tensors = tuple(found.tensor for found in decoded)
        self._pulls.count(_bytes(answer.tensors), _bytes(tensors))
        if codec.sparse:
            elements, kept = sum(t.numel() for t in tensors), sum(found.kept_count for found in decoded)
            self._pulls.count_kept(elements, kept, coded.refreshes, coded.early)
        if coded.mask is not None:
            mask = Mask(coded.mask, tuple(found.kept for found in decoded))
            self._kept.keep(number, mask, mask.nbytes)
        return tensors

    def _only(self, number: int, shape: tuple[int, int], answer: Payload) -> Tensor:
        (tensor,) = self._decode(number, (shape,), answer)
        return tensor


class _Delivery(Promise[None]):
    """A push until it is applied: sent once with the number of its look-up and, if that is unknown, with its ids."""

    def __init__(
        self, call: Callable[[_Message], Pending[Payload]], message: Callable[[bool], _Message], line: Channel
    ) -> None:
        super().__init__()
        self._request = call
        self._message = message
        self._line = line
        self._send(again=False)

    def _send(self, again: bool) -> None:
        message = self._message(again)
        self._line.count(message.sent, message.raw)
        answer = self._request(message)
        answer.then(lambda _: self._answered(answer, again))

    def _answered(self, answer: Pending[Payload], again: bool) -> None:
        try:
            known = answer.result().read(Pushed).known
            if not known and again:
                raise RunError("an embedding server does not accept a push that brings its ids")
            if not known:
                self._send(again=True)
        except BaseException as error:  # whoever waits is to hear of it, not the thread that serves the connection
            self.fail(error)
            return
        if known:
            self.keep(None)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
