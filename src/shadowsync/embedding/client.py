"""The trainer's side of the embedding servers: one pull and one push for all tables, however they are placed.

`B` samples, `F` features of the source, `D_f` width of feature f's table.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.gathering import Gathered
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.requests import AnyLookup, Lookup, check_shape
from shadowsync.embedding.routing import NEVER, Fan, Route, Router, UniqueChoice, UniqueRows
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table, check_tables, group_by_table
from shadowsync.embedding.translation import Translation
from shadowsync.errors import ConfigError, DataError
from shadowsync.models.vectors import JaggedVectors, VectorGradients
from shadowsync.rpc.pending import Pending, all_of


@dataclass(frozen=True)
class Prepared:
    """What servers are going to be asked for a batch of `samples`: by each route, and for the distinct rows to be read,
    if there are any."""

    fan: Fan
    samples: int
    lookups: tuple[tuple[Route, Lookup], ...]
    gathered: Gathered | None


@dataclass(frozen=True)
class Pulled:
    """A batch's vectors and what the push of their gradient needs, as in `Prepared`.

    Attributes:
        pooled: float32 `[B, Σ D_f]`, tables in their order and features in their table's.
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
        admits: a look-up may give rows to keys that have none.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[str],
        servers: Sequence[ServerProxy | EmbeddingServer],
        unique: UniqueRows = NEVER,
        admits: bool = False,
    ) -> None:
        """For all tables of the job, in the order of the configuration, and the features of the source, in that of its
        schema; `unique` says where duplicates are removed before rows and gradients cross. Who trains `admits` keys of
        dynamic tables that have no row yet.

        Raises:
            ConfigError: tables and features do not fit each other, or the servers do not hold every row once.
        """
        held = [server.shards for server in servers]
        check_tables(tables, features)
        _check_held_once(tables, held)
        self._feature_count = len(features)
        self._router = Router(tables, features, held)
        self._choose = partial(UniqueChoice, unique, tables, features, held)
        self._here: set[int] = set()
        self._servers = [self._way(position, server) for position, server in enumerate(servers)]
        self._unique = self._choose(self._here)
        self._translation = Translation(tables, features, held, admits)
        self.admits = admits and bool(self._translation)
        self._numbers = itertools.count()
        self.columns, self.width = self._router.selector.columns, self._router.selector.width

    def reach(self, position: int, server: ServerProxy | EmbeddingServer) -> None:
        """A server is reached so from now on, which holds what it held before; while nothing is pushed."""
        self._here.discard(position)
        self._servers[position] = self._way(position, server)
        self._unique = self._choose(self._here)

    def _way(self, position: int, server: ServerProxy | EmbeddingServer) -> ServerProxy:
        if not isinstance(server, EmbeddingServer):
            return server
        self._here.add(position)
        return ServerProxy.near(server, position)

    def pull(self, ids: Jagged) -> Pulled:
        """Pooled vectors and sequences for the ids of all features, in the order of the source's schema.

        Raises:
            DataError: an id is not a row of its table, or the tensors of `ids` do not fit each other.
        """
        return self.fetch(self.prepare(ids))

    def prepare(self, ids: Jagged, minute: int = 0) -> Prepared:
        """What can be done of a `pull` before the servers are asked, when it is so many minutes after 1970 by the data,
        or 0; raises as `pull`."""
        check_shape(ids, self._feature_count)
        if self._translation:
            ids = self._translation.rows(ids, self._servers, minute)
        # single ids need no mean, and where all ids carry weights already there is nothing to keep apart
        apart = ids.offsets is not None and ids.weights is None
        fan = self._router.fan(apart, self._unique.tables(ids))
        gathered = None if fan.gathering is None else fan.gathering.find(ids, self._numbers)
        lookups = tuple((route, Lookup(route.slots, route.ids(ids), next(self._numbers))) for route in fan.routes)
        return Prepared(fan, ids.samples, lookups, gathered)

    def expect(self, ids: Jagged) -> None:
        """This is going to be pulled: servers of this machine with rows on disk have read them when this returns."""
        prepared = self.prepare(ids)
        wanted: list[tuple[int, AnyLookup]] = [(route.server, lookup) for route, lookup in prepared.lookups]
        for server, lookup in [*wanted, *([] if prepared.gathered is None else prepared.gathered.lookups)]:
            self._servers[server].expect(lookup)

    def fetch(self, prepared: Prepared) -> Pulled:
        """The rest of a `pull`, with the rows as they are now.

        All servers are asked before the first answer is waited for. Raises what they or the way to them find out.
        """
        fan, samples, lookups, gathered = prepared.fan, prepared.samples, prepared.lookups, prepared.gathered
        wanted: list[tuple[int, AnyLookup]] = [(route.server, lookup) for route, lookup in lookups]
        wanted += [] if gathered is None else gathered.lookups
        asked: dict[int, Pending[tuple[Tensor, ...]]] = {}
        for at in sorted(range(len(wanted)), key=lambda at: wanted[at][0] in self._here):  # they answer at once
            server, lookup = wanted[at]
            asked[at] = self._servers[server].pull(lookup)
        answers = [asked[at].result() for at in range(len(wanted))]
        pooled = [answer[0] for answer in answers[: len(lookups)]]
        if gathered is None:
            return Pulled(fan.assemble(pooled, samples), lookups)
        more, sequences = gathered.put_together(answers[len(lookups) :])
        return Pulled(fan.assemble([*pooled, *more], samples), lookups, gathered, sequences)

    def push(self, pulled: Pulled, gradient: VectorGradients | Tensor, lr: float) -> Pending[None]:
        """Applies the optimizer to every row that was looked up, once per push; ends when every server has applied it.

        `gradient` is of the loss with respect to `pulled.pooled` and the values of `pulled.sequences`; a tensor is that
        of the pooled vectors, where there are no sequences. It is not to be written to before the end.

        Raises:
            DataError: the gradient is not of the shape and type of the vectors. What a server or the way to it finds
                out, the answer raises.
        """
        return self._send(pulled, gradient, lambda server, lookup, mine: server.push(lookup, mine, lr))

    def hold(self, pulled: Pulled, gradient: VectorGradients | Tensor, number: int) -> Pending[None]:
        """As `push`, but servers hold the gradients until a global step names the batch's number, unique among those
        that are held (`EmbeddingServer.commit`)."""
        return self._send(pulled, gradient, lambda server, lookup, mine: server.hold(number, lookup, mine))

    def _send(
        self,
        pulled: Pulled,
        gradient: VectorGradients | Tensor,
        send: Callable[[ServerProxy, AnyLookup, Sequence[Tensor]], Pending[None]],
    ) -> Pending[None]:
        if isinstance(gradient, Tensor):
            gradient = VectorGradients(gradient)
        _check_fits(gradient, pulled)
        sent = [
            send(self._servers[route.server], lookup, (route.selection.gradient(gradient.pooled),))
            for route, lookup in pulled.lookups
        ]
        if (gathered := pulled.gathered) is not None:
            pairs = zip(gathered.lookups, gathered.sums(gradient), strict=True)
            sent += [send(self._servers[server], lookup, sums) for (server, lookup), sums in pairs]
        return all_of(sent)


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
