"""The trainer's side of the embedding servers: one pull and one push for all tables, however they are placed.

`B` samples, `F` features of the source, `D_f` width of feature f's table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.catalog import check_tables
from shadowsync.embedding.requests import check_shape
from shadowsync.embedding.routing import Route, Router, local_ids
from shadowsync.embedding.server import Lookup
from shadowsync.embedding.table import Shard, Table, group_by_table
from shadowsync.errors import ConfigError


class Server(Protocol):
    """What the client needs of an embedding server, near or behind a wire."""

    @property
    def shards(self) -> Sequence[Shard]:
        """What the server holds."""

    def pull(self, lookup: Lookup) -> Tensor:
        """As `EmbeddingServer.pull`."""

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> None:
        """As `EmbeddingServer.push`."""


@dataclass(frozen=True)
class Pulled:
    """Pooled vectors and what the push of their gradient needs.

    Attributes:
        pooled: float32 `[B, Σ D_f]`, tables in their order and features in their table's.
        lookups: what each route asked its server.
    """

    pooled: Tensor
    lookups: tuple[tuple[Route, Lookup], ...]


class EmbeddingClient:
    """Routes look-ups to the servers that hold the rows and puts the answers together.

    Pulls and pushes may come from several threads, in any order and number.

    Attributes:
        columns: each feature's columns in `Pulled.pooled`, by name, in their order.
        width: all columns, `Σ D_f`.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[str], servers: Sequence[Server]) -> None:
        """
        Args:
            tables: all tables of the job, in the order of the configuration.
            features: names of the features of the batches, in the order of the source's schema.
            servers: together they hold every row once.

        Raises:
            ConfigError: tables and features do not fit each other, or the servers do not hold every row once.
        """
        check_tables(tables, features)
        _check_held_once(tables, [server.shards for server in servers])
        self._servers = tuple(servers)
        self._feature_count = len(features)
        self._router = Router(tables, features, [server.shards for server in servers])
        self.columns = self._router.columns.span
        self.width = self._router.columns.width

    def pull(self, ids: Jagged) -> Pulled:
        """Pooled vectors for the ids of all features, in the order of the source's schema.

        Raises:
            DataError: an id is not a row of its table, or the tensors of `ids` do not fit each other.
        """
        check_shape(ids, self._feature_count)
        # single ids need no mean, and where all ids carry weights already there is nothing to keep apart
        apart = ids.offsets is not None and ids.weights is None
        fan = self._router.apart if apart else self._router.together
        lookups = tuple((route, Lookup(route.slots, local_ids(ids, route))) for route in fan.routes)
        answers = [self._servers[route.server].pull(lookup) for route, lookup in lookups]
        return Pulled(self._router.assemble(fan, answers, ids.samples), lookups)

    def push(self, pulled: Pulled, gradient: Tensor, lr: float) -> None:
        """Applies the optimizer to every row that was looked up, once per push.

        Args:
            pulled: what `pull` returned.
            gradient: of the loss with respect to `pulled.pooled`, float32 `[B, Σ D_f]`.
            lr: learning rate of this step.
        """
        for route, lookup in pulled.lookups:
            self._servers[route.server].push(lookup, self._router.gradient_for(route, gradient), lr)


def _check_held_once(tables: Sequence[Table], servers: Sequence[Sequence[Shard]]) -> None:
    held = group_by_table(shard for shards in servers for shard in shards)
    for table in tables:
        spans = [(shard.start, shard.stop) for shard in held.get(table.name, ()) if shard.table == table]
        edges = [0, *(stop for _, stop in spans)]
        if [start for start, _ in spans] != edges[:-1] or edges[-1] != table.rows:
            raise ConfigError(f"table {table.name}: the servers do not hold each of its {table.rows} rows exactly once")
