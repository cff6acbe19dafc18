"""Which server holds which rows: bin packing by measured cost, within the servers' memory.

Items are tables, or row parts of huge and of costly ones; each goes, the costliest first, to the server with the least
cost so far that has room for it (longest processing time first: Graham 1969). Pure and deterministic: what is measured
decides where a part goes, and the counts of ids how many there are, so that a job's sums are the same every time.
"""

import heapq
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import torch

from shadowsync.data.batch import Jagged
from shadowsync.embedding.keys import KEY_BYTES
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.table import WAYS, Shard, Table
from shadowsync.errors import ConfigError

WORTH_CUTTING_BYTES = 64 << 20
SURROGATE_ROWS = 1 << 15
BAG_IDS = 6.0
"""As many ids take as long as a bag does: pooled it is as quick as one, but a vector and its gradient cross for it."""
WORTH_CUTTING = 0.8
"""What a cut of a costly table leaves of its cost to a server, at most: none of single ids is cut."""


class Cost(NamedTuple):
    """What a pull and a push of a table take; a part pools as many bags as the whole, and its share of the ids.

    Attributes:
        seconds: in any unit.
        bags, ids: in a sample, more than 0 together.
    """

    seconds: float
    bags: float = 1.0
    ids: float = 1.0

    def of(self, share: float) -> float:
        """Of a part with that share of the rows."""
        return self.seconds * self.work(share) / self.work(1.0)

    def work(self, share: float) -> float:
        """Likewise, counted and not measured."""
        return BAG_IDS * self.bags + self.ids * share


class Item(NamedTuple):
    """A shard of the table at that position, with its cost and its bytes."""

    shard: Shard
    position: int
    cost: float
    bytes: int


def place(
    tables: Sequence[Table],
    costs: Mapping[str, Cost],
    optimizer: RowOptimizer,
    servers: int,
    capacity_bytes: int | None = None,
    split_rows: int | None = None,
    cut_costly: bool = False,
) -> tuple[tuple[Shard, ...], ...]:
    """The shards of each server, ordered by table and row; every row is in exactly one.

    Args:
        costs: of each table by its name (see `measure_costs`).
        optimizer: of the rows, whose state takes memory beside them.
        capacity_bytes: what each server can hold; None for no limit.
        split_rows: tables of more rows are cut into parts of at most this many; None cuts only a table that is larger
            than a server may be, or than an even share of all memory (and than 64 MiB, below which an uneven share
            hurts nobody).
        cut_costly: tables of many ids in a sample are cut, too, where the busiest server has less to do then: every
            part pools and sends a vector for every sample again, so this is for servers that work side by side.

    Raises:
        ConfigError: the tables do not fit the servers' memory.
    """
    parts = costly_parts(tables, costs, servers) if cut_costly else {}
    items = cut(tables, costs, optimizer, servers, capacity_bytes, split_rows, parts)
    by_cost = sorted(items, key=lambda item: (-item.cost, item.position, item.shard.start))
    by_bytes = sorted(items, key=lambda item: (-item.bytes, item.position, item.shard.start))
    # cost first packs best; where that leaves no room for a big table, big tables first packs tightest
    packed = _pack(by_cost, servers, capacity_bytes) or _pack(by_bytes, servers, capacity_bytes)
    if packed is None:
        needed, largest = sum(item.bytes for item in items), max(items, key=lambda item: item.bytes)
        raise ConfigError(
            f"the embedding tables need {needed:,} bytes (the largest piece, {largest.shard.key}, {largest.bytes:,}) "
            f"and do not fit {servers} servers of {capacity_bytes or 0:,} bytes each: raise "
            "embedding.servers, or set embedding.split_rows lower"
        )
    ordered = (sorted(found, key=lambda item: (item.position, item.shard.start)) for found in packed)
    return tuple(tuple(item.shard for item in found) for found in ordered)


def row_wise(
    tables: Sequence[Table], optimizer: RowOptimizer, servers: int, capacity_bytes: int | None = None
) -> tuple[tuple[Shard, ...], ...]:
    """Every table cut evenly over all servers, as `place` returns it; raises as that.

    Every server pools and sends a vector of every table for every sample, so this costs more than `place`; what one
    server loses is then spread alike over all tables.
    """
    most = sum(-(-table.rows // servers) * row_bytes(table, optimizer) for table in tables)
    if capacity_bytes is not None and most > capacity_bytes:
        raise ConfigError(
            f"each of {servers} embedding servers would hold {most / 2**30:.1f} GiB and may hold "
            f"{capacity_bytes / 2**30:.1f}: raise embedding.servers or cluster.server_memory_gib"
        )
    found: list[tuple[Shard, ...]] = []
    for number in range(servers):
        spans = ((t, _edge(t, number, servers), _edge(t, number + 1, servers)) for t in tables)
        found.append(tuple(Shard(table, start, stop) for table, start, stop in spans if start < stop))
    return tuple(found)


def cut(
    tables: Sequence[Table],
    costs: Mapping[str, Cost],
    optimizer: RowOptimizer,
    servers: int,
    capacity_bytes: int | None = None,
    split_rows: int | None = None,
    least_parts: Mapping[str, int] | None = None,
) -> list[Item]:
    """The tables, or their parts, as items; the parts of one table differ by at most one row, or set of rows."""
    share = sum(table.rows * row_bytes(table, optimizer) for table in tables) / servers
    items = []
    for position, table in enumerate(tables):
        each = row_bytes(table, optimizer)
        limit = max(share, WORTH_CUTTING_BYTES) if servers > 1 else table.rows * each
        if split_rows is not None:
            limit = split_rows * each
        if capacity_bytes is not None:
            limit = min(limit, capacity_bytes)
        parts = -(-table.rows // min(table.rows, max(1, int(limit // each))))
        parts = max(parts, (least_parts or {}).get(table.name, 1))
        edges = sorted({_edge(table, part, parts) for part in range(parts + 1)})
        for start, stop in pairwise(edges):
            cost = costs[table.name].of((stop - start) / table.rows)
            items.append(Item(Shard(table, start, stop), position, cost, (stop - start) * each))
    return items


def costly_parts(tables: Sequence[Table], costs: Mapping[str, Cost], servers: int) -> dict[str, int]:
    """In how many parts tables are cut that would keep a server longer than an even share of all work does, by a tenth
    and more, where parts are so much cheaper than the whole that it pays; none if the busiest server gains nothing."""
    whole = {table.name: costs[table.name].work(1.0) for table in tables}
    share = 1.1 * sum(whole.values()) / servers
    parts = {t.name: min(t.rows, servers, ceil(whole[t.name] / share)) for t in tables}
    parts = {n: count for n, count in parts.items() if costs[n].work(1 / count) <= WORTH_CUTTING * whole[n]}
    counts = {name: parts.get(name, 1) for name in whole}
    works = [costs[name].work(1 / count) for name, count in counts.items() for _ in range(count)]
    return parts if _busiest(works, servers) < _busiest(list(whole.values()), servers) else {}


def _busiest(works: Sequence[float], servers: int) -> float:
    """What the busiest server has to do, where the costliest goes first to the one that has the least."""
    loads = [0.0] * servers
    for work in sorted(works, reverse=True):
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads)


def row_bytes(table: Table, optimizer: RowOptimizer) -> int:
    """Memory of one row with all that is kept of it."""
    return optimizer.row_bytes(table.dim) + (0 if table.ids is None else KEY_BYTES)


def _edge(table: Table, part: int, parts: int) -> int:
    """Where a table that is cut evenly is cut before a part; the sets of a dynamic table stay whole."""
    unit = 1 if table.ids is None else WAYS
    return table.rows // unit * part // parts * unit


def _pack(items: Sequence[Item], servers: int, capacity_bytes: int | None) -> list[list[Item]] | None:
    """Each item to the cheapest server with room; None if an item finds no room."""
    packed: list[list[Item]] = [[] for _ in range(servers)]
    cost, held = [0.0] * servers, [0] * servers
    capacity = float("inf") if capacity_bytes is None else capacity_bytes
    for item in items:
        room = [server for server in range(servers) if held[server] + item.bytes <= capacity]
        if not room:
            return None
        server = min(room, key=lambda server: (cost[server], held[server], server))
        packed[server].append(item)
        cost[server] += item.cost
        held[server] += item.bytes
    return packed


def measure_costs(
    tables: Sequence[Table],
    features: Sequence[str],
    batches: Sequence[Jagged],
    storage: type[Storage],
    optimizer: RowOptimizer,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Cost]:
    """What one pull and one push of each table take, by the table's name: the median over batches and repeats.

    A surrogate of at most 32,768 rows stands for the table, with ids folded into it: this keeps how many ids there are
    and how often the frequent ones repeat, costs a few MB, and leaves out only misses of the processor's caches on
    tables larger than that. `batches` are a few real ones, not empty, of these `features`.
    """
    costs, samples = {}, sum(batch.samples for batch in batches)
    for table in tables:
        positions = [features.index(feature) for feature in table.features]
        rows = min(table.rows, SURROGATE_ROWS)
        surrogate = Shard(replace(table, rows=rows), 0, rows)
        held = storage([surrogate], [0] * len(positions), optimizer, 0)
        seconds, looked_up = [], 0
        for batch in batches:
            ids = batch.select(positions)
            looked_up += len(ids.values)
            folded, wanted = replace(ids, values=ids.values % rows), range(ids.feature_count)
            gradient = torch.ones_like(held.pull(folded, wanted))
            held.push(folded, wanted, gradient, 0.0)  # the first look-up plans and warms up
            for _ in range(repeats):
                start = clock()
                held.pull(folded, wanted)
                held.push(folded, wanted, gradient, 0.0)
                seconds.append(clock() - start)
        costs[table.name] = Cost(statistics.median(seconds), len(positions), looked_up / samples)
    return costs
