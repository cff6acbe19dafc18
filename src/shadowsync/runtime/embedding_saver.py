"""Who saves the rows of an embedding server behind a wire, beside training."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.embedding.table import Rows, RowSet, Shard
from shadowsync.recovery.snapshot import TABLE_WIDE
from shadowsync.runtime.embedding_messages import PickAsked, Picked, SaveBegun, SavedTold, SinglesAsked, as_int64
from shadowsync.runtime.embedding_rows import CHUNK_BYTES, UNDER_WAY, RemoteRows, tensors_of
from shadowsync.runtime.embedding_saves import MOST_ROWS
from shadowsync.runtime.lines import id_type
from shadowsync.runtime.wire.connection import Answer, Connection
from shadowsync.runtime.wire.errors import PeerLost
from shadowsync.runtime.wire.service import Meta


@dataclass(frozen=True)
class RemoteSave:
    """One save of a server (`EmbeddingService`), from the word that it begins to the word that it is written.

    Attributes:
        connection: to the service.
        number: of the save.
        compares: the server wants to hear what was written.
        timeout_s: the deadline of every call; None leaves it to the connection.
        chunk_bytes: weights in one message.
    """

    connection: Connection
    number: int
    compares: bool
    timeout_s: float | None = None
    chunk_bytes: int = CHUNK_BYTES

    @classmethod
    def begin(
        cls, connection: Connection, timeout_s: float | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> "RemoteSave":
        """A save begins; the one before it is over."""
        begun = connection.call("begin_save", timeout_s=timeout_s).result().read(SaveBegun)
        return cls(connection, begun.save, begun.compares, timeout_s, chunk_bytes)

    def everything(self, shards: Sequence[Shard]) -> Iterator[Rows]:
        """All rows, in chunks.

        Args:
            shards: what the server holds.

        Raises:
            PeerLost: another server has taken the place.
        """
        return self._rows.read_shards(dict(enumerate(shards)), self.chunk_bytes, self.number)

    def changed(self, shards: Sequence[Shard], end_of_round: bool) -> Iterator[Rows | RowSet]:
        """The rows that are to be saved now: one `RowSet` a shard, or the shard as a whole in chunks.

        Args:
            shards: what the server holds.
            end_of_round: small tables are due too.

        Raises:
            PeerLost: as `everything`.
        """
        for index, shard in enumerate(shards):
            picked = self._pick(index, end_of_round)
            if picked is None:
                yield from self._rows.read_shards({index: shard}, self.chunk_bytes, self.number)
            else:
                yield RowSet(shard.table, shard.start, shard.stop, picked, self._copy(index, shard, picked))

    @property
    def _rows(self) -> RemoteRows:
        return RemoteRows(self.connection, self.timeout_s)

    def saved(self, index: int, shard: Shard, rows: Rows | RowSet) -> None:
        """Rows of the shard at that position are safely written; a server that took the place does not hear of it."""
        weights = rows.tensors["weight"]
        step = self._rows_at_once(shard)
        for first in range(0, max(1, len(weights)), step):
            part = weights[first : first + step]
            start, single = rows.start + first, []
            if isinstance(rows, RowSet):
                start, single = rows.start, [self._narrow(shard, rows.numbers[first : first + step])]
            told = SavedTold(self.number, index, start, start + len(part), bool(single))
            self._call("saved", told, [*single, *([part.contiguous()] if self.compares else [])]).result()

    def _pick(self, index: int, end_of_round: bool) -> Tensor | None:
        parts: list[Tensor] = []
        while True:
            asked = PickAsked(self.number, index, end_of_round, sum(map(len, parts)))
            answer = self._call("pick", asked).result()
            picked = answer.read(Picked)
            if not picked.known:
                raise PeerLost("an embedding server was replaced while its rows were chosen")
            if picked.whole:
                return None
            parts.append(as_int64(answer.tensors[0]))
            if sum(map(len, parts)) >= picked.total or not len(parts[-1]):
                return torch.cat(parts)

    def _copy(self, index: int, shard: Shard, numbers: Tensor) -> dict[str, Tensor]:
        step = self._rows_at_once(shard)
        asked: deque[tuple[int, Future[Answer]]] = deque()
        copies: dict[str, Tensor] = {}
        for first in range(0, max(1, len(numbers)), step):
            part = self._narrow(shard, numbers[first : first + step])
            asked.append((first, self._call("singles", SinglesAsked(self.number, index), [part])))
            if len(asked) >= UNDER_WAY:
                _put(copies, len(numbers), *asked.popleft())
        while asked:
            _put(copies, len(numbers), *asked.popleft())
        return copies

    def _rows_at_once(self, shard: Shard) -> int:
        return min(MOST_ROWS, max(1, self.chunk_bytes // (4 * shard.table.dim)))

    def _narrow(self, shard: Shard, numbers: Tensor) -> Tensor:
        return numbers.to(id_type(shard.table.rows))

    def _call(self, method: str, meta: Meta, tensors: Sequence[Tensor] = ()) -> Future[Answer]:
        return self.connection.call(method, meta, tensors, self.timeout_s)


def _put(copies: dict[str, Tensor], total: int, first: int, future: Future[Answer]) -> None:
    """Adds a chunk to the copies of `total` rows; of tensors of the table as a whole the last one stays."""
    for name, tensor in tensors_of(future.result()).items():
        if name in TABLE_WIDE:
            copies[name] = tensor
        else:
            whole = copies.setdefault(name, tensor.new_empty((total, *tensor.shape[1:])))
            whole[first : first + len(tensor)] = tensor
