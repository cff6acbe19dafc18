"""The trainer's side of the embedding servers: one pull and one push for all tables, however they are placed.

`B` samples, `F` features of the source, `D_f` width of feature f's table.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.catalog import check_tables
from shadowsync.embedding.gathering import Gathered
from shadowsync.embedding.requests import check_shape
from shadowsync.embedding.routing import NEVER, Fan, Route, Router, UniqueChoice, UniqueRows
from shadowsync.embedding.server import EmbeddingServer, Lookup, RowLookup
from shadowsync.embedding.table import Shard, Table, group_by_table
from shadowsync.errors import ConfigError, DataError
from shadowsync.models.vectors import JaggedVectors, VectorGradients
from shadowsync.rpc.pending import DONE, Done, Pending, all_of


class Server(Protocol):
    """What the client needs of an embedding server, near or behind a wire.

    Every method returns when the request is on its way; a gradient is not to be written to before its answer is there.
    """

    @property
    def shards(self) -> Sequence[Shard]:
        """What the server holds."""

    def pull(self, lookup: Lookup) -> Pending[Tensor]:
        """As `EmbeddingServer.pull`."""

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> Pending[None]:
        """As `EmbeddingServer.push`."""

    def read_rows(self, lookup: RowLookup) -> Pending[tuple[Tensor, ...]]:
        """As `EmbeddingServer.read_rows`."""

    def step_rows(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> Pending[None]:
        """As `EmbeddingServer.step_rows`."""

    def hold(self, number: int, lookup: Lookup, gradient: Tensor) -> Pending[None]:
        """As `EmbeddingServer.hold`."""

    def hold_rows(self, number: int, lookup: RowLookup, gradients: Sequence[Tensor]) -> Pending[None]:
        """As `EmbeddingServer.hold_rows`."""


_ByLookup = Callable[[Server, Lookup, Tensor], Pending[None]]
_ByRow = Callable[[Server, RowLookup, Sequence[Tensor]], Pending[None]]


@dataclass(frozen=True)
class Near:
    """An embedding server in this process: it has answered when the call returns."""

    server: EmbeddingServer

    @property
    def shards(self) -> Sequence[Shard]:
        """What the server holds."""
        return self.server.shards

    def pull(self, lookup: Lookup) -> Pending[Tensor]:
        """As `Server.pull`."""
        return Done(self.server.pull(lookup))

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> Pending[None]:
        """As `Server.push`."""
        self.server.push(lookup, gradient, lr)
        return DONE

    def read_rows(self, lookup: RowLookup) -> Pending[tuple[Tensor, ...]]:
        """As `Server.read_rows`."""
        return Done(self.server.read_rows(lookup))

    def step_rows(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> Pending[None]:
        """As `Server.step_rows`."""
        self.server.step_rows(lookup, gradients, lr)
        return DONE

    def hold(self, number: int, lookup: Lookup, gradient: Tensor) -> Pending[None]:
        """As `Server.hold`."""
        self.server.hold(number, lookup, gradient)
        return DONE

    def hold_rows(self, number: int, lookup: RowLookup, gradients: Sequence[Tensor]) -> Pending[None]:
        """As `Server.hold_rows`."""
        self.server.hold_rows(number, lookup, gradients)
        return DONE


@dataclass(frozen=True)
class Prepared:
    """What servers are going to be asked for a batch.

    Attributes:
        fan: the ways to them.
        samples: `B`.
        lookups: what each route is to ask its server.
        gathered: the distinct rows to be read, if there are any.
    """

    fan: Fan
    samples: int
    lookups: tuple[tuple[Route, Lookup], ...]
    gathered: Gathered | None


@dataclass(frozen=True)
class Pulled:
    """A batch's vectors and what the push of their gradient needs.

    Attributes:
        pooled: float32 `[B, Σ D_f]`, tables in their order and features in their table's.
        lookups: what each route asked its server.
        gathered: the distinct rows that pooled vectors were made of here, and sequences, if there are any.
        sequences: by feature, of those with `pooling=none`.
    """

    pooled: Tensor
    lookups: tuple[tuple[Route, Lookup], ...]
    gathered: Gathered | None = None
    sequences: Mapping[str, JaggedVectors] = field(default_factory=dict)


class EmbeddingClient:
    """Routes look-ups to the servers that hold the rows and puts the answers together.

    Pulls and pushes may come from several threads, in any order and number.

    Attributes:
        columns: each pooled feature's columns in `Pulled.pooled`, by name, in their order.
        width: all columns, `Σ D_f`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[str],
        servers: Sequence[Server | EmbeddingServer],
        unique: UniqueRows = NEVER,
    ) -> None:
        """
        Args:
            tables: all tables of the job, in the order of the configuration.
            features: names of the features of the batches, in the order of the source's schema.
            servers: together they hold every row once.
            unique: where duplicates are removed before rows and gradients cross.

        Raises:
            ConfigError: tables and features do not fit each other, or the servers do not hold every row once.
        """
        held = [server.shards for server in servers]
        check_tables(tables, features)
        _check_held_once(tables, held)
        self._servers = [Near(server) if isinstance(server, EmbeddingServer) else server for server in servers]
        self._feature_count = len(features)
        self._router = Router(tables, features, held)
        self._unique = UniqueChoice(unique, tables, features, held)
        self._numbers = itertools.count()
        self.columns = self._router.columns.span
        self.width = self._router.columns.width

    def pull(self, ids: Jagged) -> Pulled:
        """Pooled vectors and sequences for the ids of all features, in the order of the source's schema.

        Raises:
            DataError: an id is not a row of its table, or the tensors of `ids` do not fit each other.
        """
        return self.fetch(self.prepare(ids))

    def prepare(self, ids: Jagged) -> Prepared:
        """What can be done of a `pull` before the servers are asked; raises as `pull`."""
        check_shape(ids, self._feature_count)
        # single ids need no mean, and where all ids carry weights already there is nothing to keep apart
        apart = ids.offsets is not None and ids.weights is None
        fan = self._router.fan(apart, self._unique.tables(ids))
        gathered = None if fan.gathering is None else fan.gathering.find(ids, self._next_number)
        lookups = tuple((route, Lookup(route.slots, route.ids(ids), self._next_number())) for route in fan.routes)
        return Prepared(fan, ids.samples, lookups, gathered)

    def fetch(self, prepared: Prepared) -> Pulled:
        """The rest of a `pull`, with the rows as they are now.

        All servers are asked before the first answer is waited for. Raises what they or the way to them find out.
        """
        fan, samples, lookups, gathered = prepared.fan, prepared.samples, prepared.lookups, prepared.gathered
        pooled = [self._servers[route.server].pull(lookup) for route, lookup in lookups]
        rows = self._read(gathered) if gathered else []
        answers = [pending.result() for pending in pooled]
        if gathered is None:
            return Pulled(fan.assemble(answers, samples), lookups)
        more, sequences = gathered.put_together([pending.result() for pending in rows])
        return Pulled(fan.assemble([*answers, *more], samples), lookups, gathered, sequences)

    def push(self, pulled: Pulled, gradient: VectorGradients | Tensor, lr: float) -> Pending[None]:
        """Applies the optimizer to every row that was looked up, once per push.

        Args:
            pulled: what `pull` returned.
            gradient: of the loss with respect to `pulled.pooled` and the values of `pulled.sequences`; a tensor is
                that of the pooled vectors, where there are no sequences. Not to be written to before the end.
            lr: learning rate of this step.

        Returns:
            Ends when every server has applied it.

        Raises:
            DataError: the gradient is not of the shape and type of the vectors. What a server or the way to it finds
                out, the answer raises.
        """
        return self._send(
            pulled,
            gradient,
            lambda server, lookup, mine: server.push(lookup, mine, lr),
            lambda server, lookup, sums: server.step_rows(lookup, sums, lr),
        )

    def hold(self, pulled: Pulled, gradient: VectorGradients | Tensor, number: int) -> Pending[None]:
        """Has the servers hold a batch's gradients until a global step names it (`EmbeddingServer.commit`).

        Args:
            pulled, gradient: as in `push`.
            number: of the batch, unique among those that are held.

        Returns:
            Ends when every server holds its part.

        Raises:
            DataError: as `push`.
        """
        return self._send(
            pulled,
            gradient,
            lambda server, lookup, mine: server.hold(number, lookup, mine),
            lambda server, lookup, sums: server.hold_rows(number, lookup, sums),
        )

    def _send(
        self, pulled: Pulled, gradient: VectorGradients | Tensor, by_lookup: _ByLookup, by_row: _ByRow
    ) -> Pending[None]:
        if isinstance(gradient, Tensor):
            gradient = VectorGradients(gradient)
        _check_fits(gradient, pulled)
        pushes = [
            by_lookup(self._servers[route.server], lookup, route.selection.gradient(gradient.pooled))
            for route, lookup in pulled.lookups
        ]
        if (gathered := pulled.gathered) is not None:
            given = zip(gathered.plan.asked, gathered.lookups, gathered.sums(gradient), strict=True)
            pushes += [by_row(self._servers[asked.server], lookup, sums) for asked, lookup, sums in given]
        return all_of(pushes)

    def _next_number(self) -> int:
        return next(self._numbers)

    def _read(self, gathered: Gathered) -> list[Pending[tuple[Tensor, ...]]]:
        pairs = zip(gathered.plan.asked, gathered.lookups, strict=True)
        return [self._servers[asked.server].read_rows(lookup) for asked, lookup in pairs]


def _check_fits(gradient: VectorGradients, pulled: Pulled) -> None:
    _check_like("vectors", gradient.pooled, pulled.pooled)
    for feature, found in pulled.sequences.items():
        if feature not in gradient.sequences:
            raise DataError(f"there is no gradient for the sequences of feature {feature}")
        _check_like(f"the sequences of feature {feature},", gradient.sequences[feature], found.values)


def _check_like(what: str, gradient: Tensor, vectors: Tensor) -> None:
    if gradient.shape != vectors.shape or gradient.dtype != vectors.dtype:
        raise DataError(
            f"a gradient of {gradient.dtype} {list(gradient.shape)} does not fit {what} of {vectors.dtype} "
            f"{list(vectors.shape)}"
        )


def _check_held_once(tables: Sequence[Table], servers: Sequence[Sequence[Shard]]) -> None:
    held = group_by_table(shard for shards in servers for shard in shards)
    for table in tables:
        spans = [(shard.start, shard.stop) for shard in held.get(table.name, ()) if shard.table == table]
        edges = [0, *(stop for _, stop in spans)]
        if [start for start, _ in spans] != edges[:-1] or edges[-1] != table.rows:
            raise ConfigError(f"table {table.name}: the servers do not hold each of its {table.rows} rows exactly once")
