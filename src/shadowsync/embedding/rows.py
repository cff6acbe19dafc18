"""Rows in and out of an embedding server behind a wire, for checkpoints."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from shadowsync.embedding.saves import SaveMethods
from shadowsync.embedding.table import Rows, Shard
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending, all_of
from shadowsync.rpc.served import ask, later

T = TypeVar("T")

CHUNK_BYTES = 16 << 20
UNDER_WAY = 2
"""Chunks asked for or given at once: one crosses while the next is copied."""


@dataclass(frozen=True)
class RemoteRows:
    """The rows of a server (`SaveMethods`) with their optimizer state, each as of one moment.

    Rows of one moment are read only while nobody pushes.
    """

    connection: Connection

    def read(self, shards: Sequence[Shard], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Rows]:
        """All rows, shard by shard and in their order, in chunks whose weights take about `chunk_bytes` at most.

        Args:
            shards: what the server holds.
            chunk_bytes: in one message.
        """
        chunks = [
            (index, shard, start, min(start + step, shard.stop))
            for index, shard in enumerate(shards)
            for step in [max(1, chunk_bytes // (4 * shard.table.dim))]
            for start in range(shard.start, shard.stop, step)
        ]
        asked = (later(self.connection, SaveMethods.rows, index, start, stop) for index, _, start, stop in chunks)
        for (_, shard, start, _), tensors in zip(chunks, in_order(asked), strict=True):
            yield Rows(shard.table, start, tensors)

    def write(self, found: Iterable[Rows]) -> None:
        """Overwrites rows with their optimizer state, those of them that the server holds, as they are found.

        Whatever ends it, nothing of it is under way any more.

        Args:
            found: no row twice; one chunk of them crosses while the next is looked for.

        Raises:
            DataError: the tensors are not those of this server's rows.
        """
        shards = ask(self.connection, SaveMethods.shards)
        under_way: deque[Pending[None]] = deque()
        try:
            for shard, start, stop, tensors in (part for rows in found for part in _parts(shards, rows)):
                under_way.append(later(self.connection, SaveMethods.load_rows, shard, start, stop, tensors))
                if len(under_way) >= UNDER_WAY:
                    under_way.popleft().result()
        finally:
            with contextlib.suppress(ShadowSyncError):
                all_of(under_way).result()
        for answered in under_way:
            answered.result()


def in_order(asked: Iterable[Pending[T]]) -> Iterator[T]:
    """The answers in their order, with some messages under way."""
    under_way: deque[Pending[T]] = deque()
    for pending in asked:
        under_way.append(pending)
        if len(under_way) >= UNDER_WAY:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _parts(shards: Sequence[Shard], rows: Rows) -> Iterator[tuple[int, int, int, Mapping[str, Tensor]]]:
    """What each of the shards gets of the rows: its position, the first row, one beyond the last, and the tensors."""
    count = len(rows.tensors["weight"])
    for index, shard in enumerate(shards):
        start, stop = max(rows.start, shard.start), min(rows.start + count, shard.stop)
        if shard.table == rows.table and start < stop:
            first, last = start - rows.start, stop - rows.start
            yield index, start, stop, {n: t[first:last] if len(t) == count else t for n, t in rows.tensors.items()}
