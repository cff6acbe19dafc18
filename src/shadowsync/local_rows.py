"""The rows of embedding servers in this process, copied beside training, reported as saved, and lost."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.written import Written
from shadowsync.embedding.live_rows import Copy, live_set, live_shard
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, RowSet, parts_of, shares_of
from shadowsync.under_way import UnderWay, held

CHUNK_BYTES = 16 << 20
"""Copied at once: memory of this size is used again and again."""
TOLD_ROWS = 1 << 20
"""Reported at once, fewer where the weights belong to it: each takes 8 bytes meanwhile."""


class LocalRows:
    """As the methods of `Session` of these names; saves come from one thread at a time, beside all else."""

    def __init__(self, servers: Sequence[EmbeddingServer]) -> None:
        self._servers = servers
        self._under_way: UnderWay[int] = UnderWay()

    def changed(self, end_of_round: bool) -> tuple[Rows | RowSet, ...]:
        """As `Session.changed_rows`."""
        numbers = self._begin()
        copies = tuple(
            _picked(server, index, end_of_round) for server in self._servers for index in range(len(server.shards))
        )
        self._under_way.began(numbers, copies)
        return copies

    def beside(self) -> tuple[Rows, ...]:
        """As `Session.rows_beside`."""
        numbers = self._begin()
        copies = tuple(_whole(server, index) for server in self._servers for index in range(len(server.shards)))
        self._under_way.began(numbers, copies)
        return copies

    def _begin(self) -> dict[int, int]:
        return {index: server.begin_save() for index, server in enumerate(self._servers)}

    def saved(self, copies: Sequence[Rows | RowSet], written: Written) -> None:
        """As `Session.rows_saved`."""
        for index, save in self._under_way.saves(copies).items():
            server = self._servers[index]
            for shard, rows in held(server.shards, copies):
                _tell(server, save, shard, rows, written)

    def lose(self, servers: Collection[int], saved: LoadedCheckpoint | None) -> None:
        """Those servers' rows become what the checkpoint holds, without one their initial values.

        Pushes to them wait meanwhile, as they would for a replacement; nobody else does.

        Raises:
            CheckpointError: it has other tables, another optimizer, or is damaged.
        """
        for index in servers:
            server = self._servers[index]
            server.lose(None if saved is None else saved.rows_of(server.shards))

    def shares(self) -> tuple[float, ...]:
        """As `Session.row_shares`."""
        return shares_of([server.shards for server in self._servers])


def _picked(server: EmbeddingServer, index: int, end_of_round: bool) -> Rows | RowSet:
    picked = server.pick(index, end_of_round)
    if picked is None:
        return _whole(server, index)
    return live_set(server.shards[index], picked, _nothing(server, index), _copy(server, index, picked))


def _whole(server: EmbeddingServer, index: int) -> Rows:
    shard = server.shards[index]
    return live_shard(shard, _nothing(server, index), _copy(server, index, range(shard.start, shard.stop)))


def _nothing(server: EmbeddingServer, index: int) -> Mapping[str, Tensor]:
    return server.copy_rows(index, torch.zeros(0, dtype=torch.int64))


def _copy(server: EmbeddingServer, index: int, numbers: Tensor | range) -> Copy:
    step = max(1, CHUNK_BYTES // server.row_bytes(index))

    def copy(first: int, last: int) -> Iterator[Mapping[str, Tensor]]:
        for start in range(first, max(first + 1, last), step):
            yield server.copy_rows(index, numbers[start : min(start + step, last)])

    return copy


def _tell(server: EmbeddingServer, save: int, shard: int, rows: Rows | RowSet, written: Written) -> None:
    most = max(1, CHUNK_BYTES // (4 * rows.table.dim)) if server.compares else TOLD_ROWS
    for part in parts_of(rows, most):
        server.rows_saved(save, shard, part, written(rows.table, part) if server.compares else None)
