"""Rows in and out of an embedding server behind a wire, for checkpoints."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from torch import Tensor

from shadowsync.embedding.messages import RowsAsked, RowsFound, RowsGiven, Shards
from shadowsync.embedding.table import Rows, Shard
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.errors import PeerLost

CHUNK_BYTES = 16 << 20
UNDER_WAY = 2
"""Chunks asked for or given at once: one crosses while the next is copied."""


@dataclass(frozen=True)
class RemoteRows:
    """The rows of a server (`EmbeddingService`) with their optimizer state, each as of one moment.

    Rows of one moment are read only while nobody pushes.

    Attributes:
        connection: to the service.
        timeout_s: the deadline of every call; None leaves it to the connection.
    """

    connection: Connection
    timeout_s: float | None = None

    def shards(self) -> tuple[Shard, ...]:
        """What the server holds."""
        answer = self.connection.call("shards", timeout_s=self.timeout_s).result()
        return tuple(info.shard() for info in answer.read(Shards).shards)

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors kept for each table."""
        found = {}
        for index, shard in enumerate(self.shards()):
            asked = RowsAsked(index, shard.start, shard.start + 1)
            answer = self.connection.call("rows", asked, timeout_s=self.timeout_s).result()
            found[shard.table.name] = answer.read(RowsFound).names
        return found

    def read(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Rows]:
        """All rows, shard by shard and in their order, in chunks whose weights take about `chunk_bytes` at most."""
        return self.read_shards(dict(enumerate(self.shards())), chunk_bytes)

    def read_shards(
        self, shards: Mapping[int, Shard], chunk_bytes: int = CHUNK_BYTES, save: int | None = None
    ) -> Iterator[Rows]:
        """As `read`, of some shards.

        Args:
            shards: by their position at the server.
            chunk_bytes: as in `read`.
            save: the number of the save that they are for.

        Raises:
            PeerLost: that save is not under way any more: another server has taken the place.
        """
        under_way: deque[tuple[Shard, RowsAsked, Future[Answer]]] = deque()
        for shard, asked in _chunks(shards, chunk_bytes, save):
            under_way.append((shard, asked, self.connection.call("rows", asked, timeout_s=self.timeout_s)))
            if len(under_way) >= UNDER_WAY:
                yield _found(*under_way.popleft())
        while under_way:
            yield _found(*under_way.popleft())

    def write(self, found: Iterable[Rows]) -> None:
        """Overwrites rows with their optimizer state, those of them that the server holds, as they are found.

        Whatever ends it, nothing of it is under way any more.

        Args:
            found: no row twice; one chunk of them crosses while the next is looked for.

        Raises:
            DataError: the tensors are not those of this server's rows.
        """
        shards = self.shards()
        under_way: deque[Future[Answer]] = deque()
        try:
            for given, tensors in (part for rows in found for part in _parts(shards, rows)):
                under_way.append(self.connection.call("load_rows", given, tensors, self.timeout_s))
                if len(under_way) >= UNDER_WAY:
                    under_way.popleft().result()
        finally:
            wait(under_way)
        for answered in under_way:
            answered.result()


def _parts(shards: Sequence[Shard], rows: Rows) -> Iterator[tuple[RowsGiven, list[Tensor]]]:
    """What each of the shards gets of the rows."""
    count = len(rows.tensors["weight"])
    for index, shard in enumerate(shards):
        start, stop = max(rows.start, shard.start), min(rows.start + count, shard.stop)
        if shard.table == rows.table and start < stop:
            first, last = start - rows.start, stop - rows.start
            tensors = [t[first:last] if len(t) == count else t for t in rows.tensors.values()]
            yield RowsGiven(index, start, stop, tuple(rows.tensors)), [t.contiguous() for t in tensors]


def _chunks(shards: Mapping[int, Shard], chunk_bytes: int, save: int | None) -> Iterator[tuple[Shard, RowsAsked]]:
    for index, shard in shards.items():
        step = max(1, chunk_bytes // (4 * shard.table.dim))
        for start in range(shard.start, shard.stop, step):
            yield shard, RowsAsked(index, start, min(start + step, shard.stop), save)


def _found(shard: Shard, asked: RowsAsked, future: Future[Answer]) -> Rows:
    return Rows(shard.table, asked.start, tensors_of(future.result()))


def tensors_of(answer: Answer) -> dict[str, Tensor]:
    """The tensors of rows by name.

    Raises:
        PeerLost: the save that they are for is not under way any more.
    """
    found = answer.read(RowsFound)
    if not found.known:
        raise PeerLost("an embedding server was replaced while its rows were copied")
    return dict(zip(found.names, answer.tensors, strict=True))
