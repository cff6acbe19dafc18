"""The rows of embedding servers in this process, copied beside training, reported as saved, and lost."""

from collections.abc import Collection, Sequence

from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, RowSet, shares_of
from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.under_way import UnderWay, held, numbers_of

TOLD_ROWS = 1 << 20
"""Reported at once: each takes 8 bytes meanwhile."""


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

    def saved(self, copies: Sequence[Rows | RowSet]) -> None:
        """As `Session.rows_saved`."""
        for index, save in self._under_way.saves(copies).items():
            server = self._servers[index]
            for shard, rows in held(server.shards, copies):
                _tell(server, save, shard, rows)

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
    picked, shard = server.pick(index, end_of_round), server.shards[index]
    if picked is None:
        return _whole(server, index)
    return RowSet(shard.table, shard.start, shard.stop, picked, server.copy_rows(index, picked))


def _whole(server: EmbeddingServer, index: int) -> Rows:
    shard = server.shards[index]
    return Rows(shard.table, shard.start, server.copy_rows(index, range(shard.start, shard.stop)))


def _tell(server: EmbeddingServer, save: int, shard: int, rows: Rows | RowSet) -> None:
    numbers, weights = numbers_of(rows), rows.tensors["weight"]
    for first in range(0, max(1, len(numbers)), TOLD_ROWS):
        part = slice(first, first + TOLD_ROWS)
        server.rows_saved(save, shard, numbers[part], weights[part])
