"""Which server holds which rows: bin packing by measured cost, within the servers' memory.

Items are tables, or row parts of huge ones; each goes, the costliest first, to the server with the least cost so far
that has room for it (longest processing time first: Graham 1969). Pure and deterministic.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
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


class Item(NamedTuple):
    """A shard of the table at that position, with its cost and its bytes."""

    shard: Shard
    position: int
    cost: float
    bytes: int


def place(
    tables: Sequence[Table],
    costs: Mapping[str, float],
    optimizer: RowOptimizer,
    servers: int,
    capacity_bytes: int | None = None,
    split_rows: int | None = None,
) -> tuple[tuple[Shard, ...], ...]:
    """The shards of each server, ordered by table and row; every row is in exactly one.

    Args:
        costs: of each table by its name, in any unit (see `measure_costs`); a part costs its share of the rows.
        optimizer: of the rows, whose state takes memory beside them.
        capacity_bytes: what each server can hold; None for no limit.
        split_rows: tables of more rows are cut into parts of at most this many; None cuts only a table that is larger
            than a server may be, or than an even share of all memory (and than 64 MiB, below which an uneven share
            hurts nobody). A costly table is no reason to cut it: every part must pool and send a vector for every
            sample again, so that two parts cost nearly twice as much as one.

    Raises:
        ConfigError: the tables do not fit the servers' memory.
    """
    items = cut(tables, costs, optimizer, servers, capacity_bytes, split_rows)
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
    costs: Mapping[str, float],
    optimizer: RowOptimizer,
    servers: int,
    capacity_bytes: int | None = None,
    split_rows: int | None = None,
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
        edges = sorted({_edge(table, part, parts) for part in range(parts + 1)})
        for start, stop in pairwise(edges):
            cost = costs[table.name] * (stop - start) / table.rows
            items.append(Item(Shard(table, start, stop), position, cost, (stop - start) * each))
    return items


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
) -> dict[str, float]:
    """Seconds that one pull and one push of each table take, by the table's name: the median over batches and repeats.

    A surrogate of at most 32,768 rows stands for the table, with ids folded into it: this keeps how many ids there are
    and how often the frequent ones repeat, costs a few MB, and leaves out only misses of the processor's caches on
    tables larger than that. `batches` are a few real ones, not empty, of these `features`.
    """
    costs = {}
    for table in tables:
        positions = [features.index(feature) for feature in table.features]
        rows = min(table.rows, SURROGATE_ROWS)
        surrogate = Shard(replace(table, rows=rows), 0, rows)
        held = storage([surrogate], [0] * len(positions), optimizer, 0)
        seconds = []
        for batch in batches:
            ids = batch.select(positions)
            folded, wanted = replace(ids, values=ids.values % rows), range(ids.feature_count)
            gradient = torch.ones_like(held.pull(folded, wanted))
            held.push(folded, wanted, gradient, 0.0)  # the first look-up plans and warms up
            for _ in range(repeats):
                start = clock()
                held.pull(folded, wanted)
                held.push(folded, wanted, gradient, 0.0)
                seconds.append(clock() - start)
        costs[table.name] = statistics.median(seconds)
    return costs
