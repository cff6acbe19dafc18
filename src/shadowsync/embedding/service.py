"""What an embedding server serves: pulls and pushes through codecs, global steps, and rows for saves."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.channel import Stream
from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.embedding.keys import Clock, Counts, Wanted
from shadowsync.embedding.messages import (
    Coded,
    Sent,
    id_type,
    pack_coded,
    tensors_of,
    unpack_coded,
    unpack_lookup,
    unpack_masks,
)
from shadowsync.embedding.requests import AnyLookup, Lookup, RowLookup, Shapes
from shadowsync.embedding.saves import MOST_ROWS, SaveMethods
from shadowsync.embedding.server import EmbeddingServer, RowStep, check_batch, check_step
from shadowsync.embedding.storage import StorageCounts
from shadowsync.embedding.table import Subject, described
from shadowsync.errors import DataError
from shadowsync.rpc.kept import USUAL, Kept, KeptLimits, Mask, PerClient, check_generation
from shadowsync.rpc.served import Client, served


@dataclass(frozen=True)
class _Asked:
    """A look-up that waits for its push, the shapes of its answer and of the gradients that are to come, and the mask
    under which it was answered, if it was under one."""

    lookup: AnyLookup
    shapes: Shapes
    mask: Mask | None


class _Client:
    """What is kept for one connection."""

    def __init__(self, limits: KeptLimits) -> None:
        self.asked: Kept[tuple[int, int], _Asked] = Kept(limits)
        self.masks = itertools.count()
        self.streams: dict[tuple[int, str, Subject], Stream] = {}


class EmbeddingService(SaveMethods):
    """Serves an `EmbeddingServer`; its methods may run in any number of threads at once.

    `pull` keeps its look-up until `push` or `hold_gradients` refers to it by its number, so that ids cross once. Where
    the answer holds a part of the elements, the gradient comes under the same mask; a look-up that is not kept any
    more, or has been answered again under another mask, comes again with its ids and the mask. What is kept is bounded
    for each client and freed when the client goes.

    `pull` is the codec of pooled vectors and rows, `push` that of their gradients; the server checks ids, row numbers
    and the shapes of gradients.
    """

    def __init__(
        self,
        server: EmbeddingServer,
        pull: Codec,
        push: Codec,
        limits: KeptLimits = USUAL,
        generation: int = 0,
    ) -> None:
        super().__init__(server)
        self._generation, self._plain, self._pull_codec, self._push_codec = generation, Plain(), pull, push
        self._clients = PerClient(lambda: _Client(limits))
        self._changed = torch.zeros(0, dtype=torch.int64)

    def client_gone(self, client: str) -> None:
        self._clients.forget(client)

    @property
    def kept(self) -> int:
        """Look-ups of all clients that wait for their push."""
        return sum(len(client.asked) for client in self._clients.values())

    @served(once=False)
    def pull(self, lookup: Lookup | RowLookup, stream: int | None, codec: str, client: Client) -> Coded:
        """As `EmbeddingServer.pull`, of a packed look-up, answered in the codec of that name.

        A client may have several streams, one for each worker; None says that no push will follow: who only predicts is
        to see the rows as they are.
        """
        asked = unpack_lookup(lookup, self.server.numbers.total)
        if stream is None:
            return pack_coded([self._plain.encode(found) for found in self.server.pull(asked)], self._plain.name)
        level, own = self._pull_codec.level(codec), self._clients.of(client)
        tensors = self.server.pull(asked)
        streams = [self._stream(own, (stream, level.name, s), level) for s in asked.subjects(self.server.numbers)]
        groups = asked.groups(self.server.slots) if level.by_feature else ()
        encoded = [way.encode(found, groups) for way, found in zip(streams, tensors, strict=True)]
        mask = Mask(next(own.masks), tuple(each.kept for each in encoded)) if level.sparse else None
        size = sum(tensor.nbytes for tensor in tensors_of(asked)) + (0 if mask is None else mask.nbytes)
        own.asked.keep((stream, asked.number), _Asked(asked, tuple(each.shape for each in encoded), mask), size)
        return pack_coded(encoded, level.name, None if mask is None else mask.number)

    @served()
    def rows_of(self, wanted: Wanted) -> Tensor:
        """As `EmbeddingServer.rows_of`."""
        return self.server.rows_of(wanted)

    def _stream(self, own: _Client, key: tuple[int, str, Subject], codec: Codec) -> Stream:
        if (found := own.streams.get(key)) is None:
            about = f"what is pulled of {described(self.server.shards, key[2])}"
            found = own.streams.setdefault(key, Stream(codec, about))  # atomic: of several that ask first, all get one
        return found

    @served(along=True)
    def push(self, sent: Sent, lr: float, client: Client) -> bool:
        """As `EmbeddingServer.push`; false if the look-up is not kept any more: nothing was done, and the ids have to
        come again. Raises `RunError` if the client is of another generation."""
        if not math.isfinite(lr):
            raise DataError(f"a learning rate of {lr} is not finite")
        found = self._arrived(sent, client)
        if found is not None:
            self.server.push(*found, lr)
        return found is not None

    @served()
    def hold_gradients(self, sent: Sent, batch: int, client: Client) -> bool:
        """As `push`, held under the number of the batch until a `commit` names it."""
        check_batch(batch)
        found = self._arrived(sent, client)
        if found is not None:
            self.server.hold(batch, *found)
        return found is not None

    def _arrived(self, sent: Sent, client: Client) -> tuple[AnyLookup, tuple[Tensor, ...]] | None:
        """The look-up and the gradients; None if it was dropped or never came, or was answered under another mask."""
        check_generation(self._generation, sent.generation)
        asked, gradients = self._clients.of(client).asked.take((sent.stream, sent.number)), sent.gradients
        if sent.lookup is not None:
            again = unpack_lookup(sent.lookup, self.server.numbers.total)
            shapes = self.server.shapes(again)
            mask = None if gradients.mask is None else Mask(gradients.mask, unpack_masks(sent.masks, shapes))
            asked = _Asked(again, shapes, mask)
        if asked is None:
            return None
        if gradients.mask is not None and (asked.mask is None or asked.mask.number != gradients.mask):
            return None
        kept = None if asked.mask is None or gradients.mask is None else asked.mask.kept
        decoded = unpack_coded(gradients, self._push_codec, asked.shapes, "gradients", kept)
        return asked.lookup, tuple(found.tensor for found in decoded)

    @served()
    def catch_up(self, clock: Clock) -> Clock:
        """As `EmbeddingServer.catch_up`."""
        return self.server.catch_up(clock)

    @served()
    def key_counts(self) -> Counts | None:
        """Of the dynamic tables, if there are any."""
        return self.server.keys

    @served()
    def stored_counts(self) -> StorageCounts | None:
        """Of rows on disk, where they are."""
        return self.server.stored

    @served()
    def commit(self, step: RowStep, generation: int) -> int:
        """As `EmbeddingServer.commit`; the memory of the gradients that waited when the step came, those of the step
        with them. Raises `RunError` if it is of another generation."""
        check_generation(self._generation, generation)
        check_step(step.weights, step.divisor, step.lr)
        held_bytes = self.server.held_bytes
        self.server.commit(step)
        return held_bytes

    # --- for a server that takes this one's place on another machine -------------------------------------------------

    @served()
    def follow(self) -> None:
        """From now on it is known which rows change.

        Raises:
            DataError: rows of this job stay where they are.
        """
        self.server.follow()

    @served()
    def changed(self, shard: int, first: int) -> Tensor:
        """Numbers of rows of a shard that changed since this was asked last, ascending, from the one at position
        `first` of them on: 0 looks anew, the rest comes by parts of `MOST_ROWS`. One at a time may ask."""
        if first == 0:
            self._changed = self.server.changed(shard)
        return self._changed[first : first + MOST_ROWS].to(id_type(self.server.shard(shard).table.rows))

    @served()
    def newest_step(self) -> int:
        """As `EmbeddingServer.stepped`."""
        return self.server.stepped

    @served()
    def held_gradient(self, position: int) -> tuple[int, RowLookup, tuple[Tensor, ...]] | None:
        """As `EmbeddingServer.held`; nobody adds or takes any meanwhile."""
        if (held := self.server.held(position)) is None:
            return None
        batch, (lookup, gradients) = held
        return batch, lookup, gradients

    # --- global steps ------------------------------------------------------------------------------------------------

    @served()
    def forget_held(self, stepped: int, generation: int) -> None:
        check_generation(self._generation, generation)
        self.server.forget_held(stepped)
