"""An embedding server behind a wire."""

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.embedding.holding import RowStep
from shadowsync.embedding.server import EmbeddingServer, Lookup, RowLookup
from shadowsync.embedding.table import Rows
from shadowsync.errors import DataError
from shadowsync.runtime.embedding_messages import (
    Coded,
    CommitAsked,
    ForgetAsked,
    PullAsked,
    PushAsked,
    Pushed,
    ReadAsked,
    RowsAsked,
    RowsFound,
    RowsGiven,
    ShardInfo,
    Shards,
    StepAsked,
    pack_coded,
    row_numbers,
    unpack_coded,
    unpack_ids,
)
from shadowsync.runtime.embedding_saves import SaveMethods, check_size
from shadowsync.runtime.generation import FIRST, Generation
from shadowsync.runtime.lines import Encoder
from shadowsync.runtime.step_messages import Committed
from shadowsync.runtime.wire.service import Method, Reply, Request


@dataclass(frozen=True)
class KeptLimits:
    """How many look-ups of one client wait for their push; beyond, the oldest is dropped and has to come again.

    Attributes:
        count: look-ups; more lets more pulls be ahead of their pushes.
        bytes: of their ids.
    """

    count: int = 1024
    bytes: int = 256 << 20


class _Client:
    """What is kept for one connection."""

    def __init__(self, limits: KeptLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Lookup | RowLookup] = OrderedDict()
        self._bytes = 0
        self.encoders: dict[tuple[object, ...], Encoder] = {}

    def keep(self, stream: int, lookup: Lookup | RowLookup) -> None:
        """Until its push comes, or newer ones need the room."""
        with self._lock:
            self._remove((stream, lookup.number))
            self._kept[stream, lookup.number] = lookup
            self._bytes += _bytes(lookup)
            while len(self._kept) > self._limits.count or self._bytes > self._limits.bytes:
                self._remove(next(iter(self._kept)))

    def take(self, stream: int, number: int) -> Lookup | RowLookup | None:
        """The look-up, which is not kept any more; None if it was dropped or never came."""
        with self._lock:
            return self._remove((stream, number))

    def encoder(self, codec: Codec, about: tuple[object, ...]) -> Encoder:
        """The stream back to this client about that."""
        found = self.encoders.get(about)
        # setdefault is atomic: of several threads that ask first, all get one
        return found if found is not None else self.encoders.setdefault(about, Encoder(codec))

    @property
    def kept(self) -> int:
        """Look-ups that wait for their push."""
        return len(self._kept)

    def _remove(self, key: tuple[int, int]) -> Lookup | RowLookup | None:
        found = self._kept.pop(key, None)
        self._bytes -= 0 if found is None else _bytes(found)
        return found


def _bytes(lookup: Lookup | RowLookup) -> int:
    if isinstance(lookup, RowLookup):
        return lookup.rows.nbytes
    return sum(t.nbytes for t in (lookup.ids.values, lookup.ids.offsets, lookup.ids.weights) if t is not None)


class EmbeddingService:
    """Serves an `EmbeddingServer`; its methods may run in any number of threads at once.

    `pull` and `read` keep their look-up until `push` and `step` refer to it by its number, so that ids cross once.
    What is kept is bounded for each client and freed when the client goes. Rows go out as they are between two pushes
    (see `embedding_saves` for those that are saved beside training).

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
        limits: KeptLimits = KeptLimits(),
        generation: Generation = FIRST,
    ) -> None:
        self.methods: Mapping[str, Method] = {
            "pull": Method(self._pull, once=False),
            "push": Method(self._push),
            "read": Method(self._read, once=False),
            "step": Method(self._step),
            "shards": Method(self._shards, once=False),
            "load_rows": Method(self._load_rows),
            "commit": Method(self._commit),
            "forget_held": Method(self._forget_held),
            **SaveMethods(server, self._rows).methods,
        }
        self._server = server
        self._generation = generation
        self._plain = Plain()
        self._pull_codec = pull
        self._push_codec = push
        self._limits = limits
        self._clients: dict[str, _Client] = {}

    def client_gone(self, client: str) -> None:
        """As `Service.client_gone`."""
        self._clients.pop(client, None)

    def close(self) -> None:
        """Nothing to end."""

    def _codec(self, asked: PullAsked | ReadAsked) -> Codec:
        """Who only predicts is to see the rows as they are."""
        return self._plain if asked.number is None else self._pull_codec

    @property
    def kept(self) -> int:
        """Look-ups of all clients that wait for their push."""
        return sum(client.kept for client in list(self._clients.values()))

    def _client(self, request: Request) -> _Client:
        found = self._clients.get(request.client)
        return found if found is not None else self._clients.setdefault(request.client, _Client(self._limits))

    def _pull(self, request: Request) -> Reply:
        asked, client = request.read(PullAsked), self._client(request)
        lookup = unpack_ids(asked.ids, request.tensors, asked.number or 0)
        pooled = self._server.pull(lookup)
        if asked.number is not None:
            client.keep(asked.stream, lookup)
        encoder = client.encoder(self._codec(asked), (asked.stream, lookup.slots))
        return Reply(*pack_coded([encoder.encode(pooled)]))

    def _push(self, request: Request) -> Reply:
        asked = request.read(PushAsked)
        self._generation.check(asked.generation)
        split = 0 if asked.ids is None else asked.ids.tensor_count
        lookup = self._client(request).take(asked.stream, asked.number)
        if asked.ids is not None:
            lookup = unpack_ids(asked.ids, request.tensors[:split], asked.number)
        if not isinstance(lookup, Lookup):
            return Reply(Pushed(False))
        gradients = self._gradients(asked.gradient, request.tensors[split:], asked.lr)
        if len(gradients) != 1:
            raise DataError(f"a push brings one gradient, not {len(gradients)}")
        _check_held(asked.held)
        if asked.held is None:
            self._server.push(lookup, gradients[0], asked.lr)
        else:
            self._server.hold(asked.held, lookup, gradients[0])
        return Reply(Pushed(True))

    def _read(self, request: Request) -> Reply:
        asked, client = request.read(ReadAsked), self._client(request)
        lookup = RowLookup(asked.shards, row_numbers(request.tensors), asked.number or 0)
        rows = self._server.read_rows(lookup)
        if asked.number is not None:
            client.keep(asked.stream, lookup)
        encoders = [client.encoder(self._codec(asked), (asked.stream, "rows", width)) for width in range(len(rows))]
        return Reply(*pack_coded([encoder.encode(found) for encoder, found in zip(encoders, rows, strict=True)]))

    def _step(self, request: Request) -> Reply:
        asked = request.read(StepAsked)
        self._generation.check(asked.generation)
        split = 0 if asked.shards is None else 1
        lookup = self._client(request).take(asked.stream, asked.number)
        if asked.shards is not None:
            lookup = RowLookup(asked.shards, row_numbers(request.tensors[:split]), asked.number)
        if not isinstance(lookup, RowLookup):
            return Reply(Pushed(False))
        gradients = self._gradients(asked.gradients, request.tensors[split:], asked.lr)
        _check_held(asked.held)
        if asked.held is None:
            self._server.step_rows(lookup, gradients, asked.lr)
        else:
            self._server.hold_rows(asked.held, lookup, gradients)
        return Reply(Pushed(True))

    def _commit(self, request: Request) -> Reply:
        asked = request.read(CommitAsked)
        self._generation.check(asked.generation)
        _check_finite(asked.lr, *asked.weights, 1.0 if asked.divisor is None else asked.divisor)
        if len(asked.batches) != len(asked.weights) or (asked.divisor is not None and not asked.divisor > 0):
            raise DataError(
                f"{len(asked.batches)} batches with {len(asked.weights)} weights and divisor {asked.divisor} make no "
                "global step"
            )
        weights = dict(zip(asked.batches, asked.weights, strict=True))
        held_bytes = self._server.held_bytes
        self._server.commit(RowStep(asked.step, weights, asked.divisor, asked.lr, asked.below))
        return Reply(Committed(held_bytes))

    def _forget_held(self, request: Request) -> Reply:
        asked = request.read(ForgetAsked)
        self._generation.check(asked.generation)
        self._server.forget_held(asked.stepped)
        return Reply()

    def _gradients(self, coded: Coded, frames: Sequence[Tensor], lr: float) -> tuple[Tensor, ...]:
        _check_finite(lr)
        return unpack_coded(coded, frames, self._push_codec)

    def _shards(self, _: Request) -> Reply:
        return Reply(Shards(tuple(ShardInfo.of(shard) for shard in self._server.shards)))

    def _rows(self, request: Request) -> Reply:
        asked = request.read(RowsAsked)
        if asked.save is not None and not self._server.is_under_way(asked.save):
            return Reply(RowsFound((), False))
        self._part(asked)
        check_size(self._server, asked.shard, asked.stop - asked.start)
        found = self._server.copy_rows(asked.shard, range(asked.start, asked.stop))
        return Reply(RowsFound(tuple(found)), tuple(found.values()))

    def _load_rows(self, request: Request) -> Reply:
        given = request.read(RowsGiven)
        own = self._part(given)
        tensors = dict(zip(given.names, request.tensors, strict=False))
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if len(given.names) != len(request.tensors) or shapes != {n: (t.dtype, t.shape) for n, t in own.items()}:
            raise DataError(
                f"{_described(tensors)} do not fit rows {given.start} to {given.stop - 1} of a shard that has "
                f"{_described(own)}"
            )
        table = self._server.shards[given.shard].table
        self._server.load([Rows(table, given.start, tensors)], partial=True)
        return Reply()

    def _part(self, asked: RowsAsked | RowsGiven) -> dict[str, Tensor]:
        """Live views of the rows; a tensor that belongs to the table as a whole is there in each part."""
        state = self._server.state()
        if not 0 <= asked.shard < len(state):
            raise DataError(f"shard {asked.shard} is asked for and this server has {len(state)} shards")
        own = state[asked.shard]
        count = len(own.tensors["weight"])
        first, last = asked.start - own.start, asked.stop - own.start
        if not 0 <= first < last <= count:
            raise DataError(
                f"rows {asked.start} to {asked.stop - 1} of table {own.table.name} are asked for and this server has "
                f"{own.start} to {own.start + count - 1}"
            )
        return {name: t[first:last] if len(t) == count else t for name, t in own.tensors.items()}


def _check_finite(*numbers: float) -> None:
    for number in numbers:
        if not math.isfinite(number):
            raise DataError(f"a learning rate or weight of {number} is not finite")


def _check_held(number: int | None) -> None:
    if number is not None and number < 0:
        raise DataError(f"a gradient came for batch {number}: they count from 0")


def _described(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "no tensors"
