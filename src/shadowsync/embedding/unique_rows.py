"""Which tables cross the network as distinct rows, and which as pooled vectors."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shadowsync.data.batch import Jagged
from shadowsync.embedding.table import Shard, Table, group_by_table

ID_BYTES = 4
REQUEST_BYTES = 1 << 14
"""What one more request to a server costs besides its contents: some 0.1 ms, in which 1 Gbit/s carries this much."""
WORTH = 0.9
"""Finding duplicates takes processor time, so that it has to save a tenth of the traffic."""


@dataclass(frozen=True)
class UniqueRows:
    """When duplicates are removed before rows and gradients cross.

    Attributes:
        mode: `always` and `never` for all tables; `auto` wherever that is less traffic.
        float_bytes: what one float takes there and back together, as the codecs of pulls and pushes encode it.
        every: pulls between two estimates of `auto`.
    """

    mode: Literal["auto", "always", "never"] = "never"
    float_bytes: float = 8.0
    every: int = 500


NEVER = UniqueRows()


@dataclass(frozen=True)
class Traffic:
    """Bytes of one table in one batch, both ways."""

    pooled: float
    unique: float


class UniqueChoice:
    """Chooses tables, from the traffic of a batch now and then; the choice holds until the next estimate."""

    def __init__(
        self, settings: UniqueRows, tables: Sequence[Table], features: Sequence[str], servers: Sequence[Sequence[Shard]]
    ) -> None:
        self._settings = settings
        self._positions = {feature: index for index, feature in enumerate(features)}
        held = group_by_table(shard for shards in servers for shard in shards)
        self._parts = {name: len(shards) for name, shards in held.items()}
        self._servers = len(servers)
        self._pulls = itertools.count()
        self._pooled = tuple(table for table in tables if not table.sequences)
        self._forced = frozenset(table.name for table in tables if table.sequences or settings.mode == "always")
        self._chosen = self._forced

    def tables(self, ids: Jagged) -> frozenset[str]:
        """Names of the tables whose distinct rows are asked for in this pull: always those of which a feature is a
        sequence, so that rows which it shares with others cross once and take one step.

        Args:
            ids: of all features; checked for shape, not for range.
        """
        if self._settings.mode == "auto" and next(self._pulls) % self._settings.every == 0 and ids.samples:
            found = choose({table.name: self._traffic(table, ids) for table in self._pooled}, self._servers)
            self._chosen = self._forced | found
        return self._chosen

    def _traffic(self, table: Table, ids: Jagged) -> Traffic:
        mine = ids.select([self._positions[feature] for feature in table.features])
        vector = table.dim * self._settings.float_bytes
        weighted = mine.weights is not None or (mine.offsets is not None and "mean" in table.poolings.values())
        per_bag = vector + (0 if mine.offsets is None else ID_BYTES)
        per_id = ID_BYTES * (1 + weighted)
        pooled = len(mine.values) * per_id + self._parts[table.name] * mine.samples * len(table.features) * per_bag
        distinct = len(np.unique(mine.values.numpy()))
        return Traffic(pooled, distinct * vector + number_bytes(distinct, table.rows))


def number_bytes(count: int, rows: int) -> float:
    """About what the numbers of so many distinct of all rows take: as gaps `log2(e rows / count)` bits each, which is
    the entropy of rows that are drawn independently. Tables of unlike density on one server take more."""
    return count * min(ID_BYTES, math.log2(math.e * rows / count) / 8) if count else 0.0


def choose(traffic: Mapping[str, Traffic], servers: int) -> frozenset[str]:
    """The tables that should cross as distinct rows.

    Those that get smaller, if all in all that is worth the search; the others come along unless what pooling them
    saves pays for requests of their own.
    """
    smaller = frozenset(name for name, found in traffic.items() if found.unique <= found.pooled)
    others = [found for name, found in traffic.items() if name not in smaller]
    apart = sum(found.pooled for found in others) + servers * REQUEST_BYTES
    chosen = smaller if others and apart < sum(found.unique for found in others) else frozenset(traffic)
    crossing = sum(found.unique if name in chosen else found.pooled for name, found in traffic.items())
    crossing += servers * REQUEST_BYTES if chosen != frozenset(traffic) else 0
    return chosen if smaller and crossing <= WORTH * sum(f.pooled for f in traffic.values()) else frozenset()
