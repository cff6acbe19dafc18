"""An embedding server that takes the place of one on another machine, while that one goes on being trained.

The rows are copied as they are, then again those that changed meanwhile, as often as there are many; the last ones,
and what else a server keeps, while everybody stands still. So nothing of what was pushed is lost or done twice, and
training waits for the rows of a moment, not for the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.embedding.messages import as_int64, total_bytes
from shadowsync.embedding.saves import (
    CHUNK_BYTES,
    COPY_S,
    MOST_ROWS,
    ask_for_singles,
    in_order,
    read_rows,
    rows_at_once,
)
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import RowSet
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.served import ask, each, served


@dataclass(frozen=True)
class Copied:
    """What has crossed: rows, and the bytes of all that belongs to them."""

    rows: int
    bytes: int

    def plus(self, other: "Copied") -> "Copied":
        return Copied(self.rows + other.rows, self.bytes + other.bytes)


class ArrivingService(EmbeddingService):
    """Serves a server whose rows are to become those of another one, and afterwards as any.

    Args:
        server: all of whose rows are to come; they are zero.
        source: the way to the `EmbeddingService` that has them.
        pull, push, generation: as `EmbeddingService` has them.
    """

    def __init__(
        self, server: EmbeddingServer, source: Connection, pull: Codec, push: Codec, generation: int = 0
    ) -> None:
        super().__init__(server, pull, push, generation=generation)
        self._source = source

    @served()
    def take_all(self) -> Copied:
        """Copies every row, each as of one moment; from the beginning on it is known which of them change."""
        ask(self._source, EmbeddingService.follow)
        copied = Copied(0, 0)
        for rows in read_rows(self._source, self.server.shards):
            self.server.take(rows)
            copied = copied.plus(Copied(rows.stop - rows.start, total_bytes(rows.tensors.values())))
        return copied

    @served()
    def take_changed(self) -> Copied:
        """Copies the rows that have changed since they were copied last."""
        copied = Copied(0, 0)
        for index, shard in enumerate(self.server.shards):
            for numbers in self._numbers(index):
                at_once = rows_at_once(shard, CHUNK_BYTES)
                asked = ask_for_singles(self._source, None, index, shard, numbers, at_once)
                for part, tensors in zip(torch.split(numbers, at_once), in_order(asked), strict=True):
                    self.server.take(RowSet(shard.table, shard.start, shard.stop, part, tensors))
                    copied = copied.plus(Copied(len(part), total_bytes(tensors.values())))
        return copied

    @served(timeout_s=COPY_S)
    def take_over(self) -> Copied:
        """As `take_changed`, when nobody changes anything any more; and all that is not in the rows. This server then
        is what the other one was, but that none of its rows count as saved."""
        copied = self.take_changed()
        self.server.take_over(ask(self._source, EmbeddingService.key_counts))
        self.server.forget_held(ask(self._source, EmbeddingService.newest_step))
        for batch, lookup, gradients in each(self._source, EmbeddingService.held_gradient):
            self.server.hold(batch, lookup, gradients)
        self._source.close()
        return copied

    def _numbers(self, index: int) -> Iterator[Tensor]:
        first = 0
        while len(numbers := as_int64(ask(self._source, EmbeddingService.changed, index, first))):
            yield numbers
            first += len(numbers)
            if len(numbers) < MOST_ROWS:
                return
