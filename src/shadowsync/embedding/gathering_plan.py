"""Makes the plan by which rows are gathered from their servers: see `gathering`."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from shadowsync.embedding.gathering import Asked, Gathering, Group, Members, Place, PooledMembers, Run, SequenceMembers
from shadowsync.embedding.numbering import RowNumbers
from shadowsync.embedding.requests import Bounds
from shadowsync.embedding.selection import Selector
from shadowsync.embedding.table import Shard, Slot, Table

M = TypeVar("M", bound=Members)


class Piece(NamedTuple):
    """A shard as its server holds it."""

    server: int
    number: int
    shard: Shard


def plan_gathering(
    tables: Sequence[Table], chosen: Set[str], selector: Selector, servers: Sequence[Sequence[Shard]]
) -> Gathering:
    """The plan for the tables named in `chosen`, placed on these servers, which hold each row once."""
    numbers = [RowNumbers(shards) for shards in servers]
    pieces: dict[str, list[Piece]] = {}
    for server, shards in enumerate(servers):
        for start, shard in zip(numbers[server].starts, shards, strict=True):
            pieces.setdefault(shard.table.name, []).append(Piece(server, start, shard))
    # a mean needs weights, which slow a sum down
    kinds: dict[tuple[int, bool], list[Table]] = {}
    for table in tables:
        if table.name in chosen:
            kinds.setdefault((table.dim, "mean" in table.poolings.values()), []).append(table)
    groups = tuple(_group(members, selector, pieces) for members in kinds.values())
    return Gathering(groups, tuple(_asked(groups, chosen, servers, numbers)))


def _group(members: Sequence[Table], selector: Selector, pieces: dict[str, list[Piece]]) -> Group:
    # tables that lie side by side on a server get adjacent keys, so that there are few runs
    ordered = sorted(members, key=lambda table: min(pieces[table.name], key=lambda piece: piece.shard.start)[:2])
    held = [piece for table in ordered for piece in sorted(pieces[table.name], key=lambda piece: piece.shard.start)]
    starts = dict(
        zip([table.name for table in ordered], accumulate((t.rows for t in ordered), initial=0), strict=False)
    )
    slots = [Slot(Shard(table, 0, table.rows), feature) for table in members for feature in table.features]
    apart = {feature for table in members for feature in table.sequences}
    runs = _runs(held)
    return Group(
        pooled=_members(PooledMembers, [slot for slot in slots if slot.feature not in apart], selector, starts),
        sequences=_members(SequenceMembers, [slot for slot in slots if slot.feature in apart], selector, starts),
        dim=members[0].dim,
        rows=sum(table.rows for table in members),
        runs=runs,
        edges=np.array([run.first for run in runs]),
    )


def _members(kind: type[M], slots: Sequence[Slot], selector: Selector, starts: Mapping[str, int]) -> M | None:
    if not slots:
        return None
    names = tuple(slot.feature for slot in slots)
    first = torch.tensor([starts[slot.shard.table.name] for slot in slots])
    return kind(names, selector.select(names), slots[0].shard.table.dim, first, Bounds.of(slots))


def _runs(pieces: Sequence[Piece]) -> tuple[Run, ...]:
    """The runs of pieces that have consecutive keys."""
    runs: list[Run] = []
    key = 0
    for piece in pieces:
        goes_on = runs and (runs[-1].server, runs[-1].number - runs[-1].first) == (piece.server, piece.number - key)
        if not goes_on:
            runs.append(Run(piece.server, key, piece.number))
        key += piece.shard.rows
    return tuple(runs)


def _asked(
    groups: Sequence[Group], chosen: Set[str], servers: Sequence[Sequence[Shard]], numbers: Sequence[RowNumbers]
) -> Iterator[Asked]:
    for server, shards in enumerate(servers):
        mine = tuple(index for index, shard in enumerate(shards) if shard.table.name in chosen)
        if mine:
            dims = tuple(width.dim for width in numbers[server].widths)
            yield Asked(server, mine, dims, tuple(_places(groups, server, dim) for dim in dims))


def _places(groups: Sequence[Group], server: int, dim: int) -> tuple[Place, ...]:
    """The runs of one width on one server, in the order of their numbers."""
    found = [
        (run.number, Place(index, position))
        for index, group in enumerate(groups)
        if group.dim == dim
        for position, run in enumerate(group.runs)
        if run.server == server
    ]
    return tuple(place for _, place in sorted(found))
