"""Which server holds which rows: bin packing by measured cost, within the servers' memory.

Items are tables, or row parts of huge ones; each goes, the costliest first, to the server with the least cost so far
that has room for it (longest processing time first: Graham 1969). Pure and deterministic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shadowsync.embedding.optimizers import RowRule
from shadowsync.embedding.table import Shard, Table
from shadowsync.errors import ConfigError

WORTH_CUTTING_BYTES = 64 << 20


@dataclass(frozen=True)
class Servers:
    """The bins.

    Attributes:
        count: number of servers.
        capacity_bytes: what each can hold; None for no limit.
        split_rows: tables of more rows are cut into parts of at most this many; None cuts only a table that is larger
            than a server may be, or than an even share of all memory (and than 64 MiB, below which an uneven share
            hurts nobody). A costly table is no reason to cut it: every part must pool and send a vector for every
            sample again, so that two parts cost nearly twice as much as one.
    """

    count: int
    capacity_bytes: int | None = None
    split_rows: int | None = None


@dataclass(frozen=True)
class Item:
    """What is packed: a shard with its cost (any unit) and its bytes."""

    shard: Shard
    position: int
    cost: float
    bytes: int


def place(
    tables: Sequence[Table], costs: Mapping[str, float], rule: type[RowRule], servers: Servers
) -> tuple[tuple[Shard, ...], ...]:
    """The shards of each server, ordered by table and row.

    Args:
        tables: all tables; every row of theirs is in exactly one shard of the result.
        costs: each table's cost by name, in any unit (see `profile.measure_costs`); a part of a table costs its share
            of the rows.
        rule: the optimizer, whose state takes memory beside the rows.
        servers: the bins.

    Raises:
        ConfigError: the tables do not fit the servers' memory.
    """
    items = cut(tables, costs, rule, servers)
    by_cost = sorted(items, key=lambda item: (-item.cost, item.position, item.shard.start))
    by_bytes = sorted(items, key=lambda item: (-item.bytes, item.position, item.shard.start))
    # cost first packs best; where that leaves no room for a big table, big tables first packs tightest
    packed = _pack(by_cost, servers) or _pack(by_bytes, servers)
    if packed is None:
        raise ConfigError(_does_not_fit(items, servers))
    return tuple(_in_order(found) for found in packed)


def row_wise(tables: Sequence[Table], rule: type[RowRule], servers: Servers) -> tuple[tuple[Shard, ...], ...]:
    """Every table cut evenly over all servers, as `place` returns it: each server has the same share of the rows.

    Every server pools and sends a vector of every table for every sample, so this costs more than `place`; what one
    server loses is then spread alike over all tables.

    Raises:
        ConfigError: the tables do not fit the servers' memory.
    """
    most = sum(-(-table.rows // servers.count) * rule.row_bytes(table.dim) for table in tables)
    if servers.capacity_bytes is not None and most > servers.capacity_bytes:
        raise ConfigError(
            f"each of {servers.count} embedding servers would hold {most / 2**30:.1f} GiB and may hold "
            f"{servers.capacity_bytes / 2**30:.1f}: raise embedding.servers or cluster.server_memory_gib"
        )
    found: list[tuple[Shard, ...]] = []
    for number in range(servers.count):
        spans = ((t, t.rows * number // servers.count, t.rows * (number + 1) // servers.count) for t in tables)
        found.append(tuple(Shard(table, start, stop) for table, start, stop in spans if start < stop))
    return tuple(found)


def cut(tables: Sequence[Table], costs: Mapping[str, float], rule: type[RowRule], servers: Servers) -> list[Item]:
    """The tables, or their parts, as items; the parts of one table differ by at most one row."""
    share = sum(table.rows * rule.row_bytes(table.dim) for table in tables) / servers.count
    items = []
    for position, table in enumerate(tables):
        row_bytes = rule.row_bytes(table.dim)
        parts = -(-table.rows // min(table.rows, _most_rows(table, row_bytes, share, servers)))
        edges = [table.rows * part // parts for part in range(parts + 1)]
        for start, stop in pairwise(edges):
            cost = costs[table.name] * (stop - start) / table.rows
            items.append(Item(Shard(table, start, stop), position, cost, (stop - start) * row_bytes))
    return items


def _most_rows(table: Table, row_bytes: int, share: float, servers: Servers) -> int:
    """The most rows of a table that stay together."""
    limit = max(share, WORTH_CUTTING_BYTES) if servers.count > 1 else table.rows * row_bytes
    if servers.split_rows is not None:
        limit = servers.split_rows * row_bytes
    if servers.capacity_bytes is not None:
        limit = min(limit, servers.capacity_bytes)
    return max(1, int(limit // row_bytes))


def _pack(items: Sequence[Item], servers: Servers) -> list[list[Item]] | None:
    """Each item to the cheapest server with room; None if an item finds no room."""
    packed: list[list[Item]] = [[] for _ in range(servers.count)]
    cost, held = [0.0] * servers.count, [0] * servers.count
    capacity = float("inf") if servers.capacity_bytes is None else servers.capacity_bytes
    for item in items:
        room = [server for server in range(servers.count) if held[server] + item.bytes <= capacity]
        if not room:
            return None
        server = min(room, key=lambda server: (cost[server], held[server], server))
        packed[server].append(item)
        cost[server] += item.cost
        held[server] += item.bytes
    return packed


def _in_order(items: Sequence[Item]) -> tuple[Shard, ...]:
    return tuple(item.shard for item in sorted(items, key=lambda item: (item.position, item.shard.start)))


def _does_not_fit(items: Sequence[Item], servers: Servers) -> str:
    needed, largest = sum(item.bytes for item in items), max(items, key=lambda item: item.bytes)
    return (
        f"the embedding tables need {needed:,} bytes (the largest piece, {largest.shard.key}, {largest.bytes:,}) and "
        f"do not fit {servers.count} servers of {servers.capacity_bytes or 0:,} bytes each: raise embedding.servers, "
        "or set embedding.split_rows lower"
    )
