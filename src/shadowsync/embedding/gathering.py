"""Pooling at the trainer, or not at all: every distinct row of a batch crosses once, and so does the sum of its
gradients, whatever features of the table it occurs in.

Rows have keys here, which run through all tables, and numbers on their servers (`RowNumbers`). A run is a stretch of
keys that are consecutive numbers of one server; an unsplit table is part of one run, and each part of a split one too,
so that no vector is pooled in parts.

`B` samples, `G` features of a group whose tables are `D` wide, `L` ids, `K` distinct rows.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.distinct import Distinct, bags_of, by_sample, find_distinct, sum_bags
from shadowsync.embedding.requests import Bounds, RowLookup, Selection, Selector, check_range, spread
from shadowsync.embedding.table import RowNumbers, Shard, Slot, Table
from shadowsync.models.vectors import JaggedVectors, VectorGradients


class Run(NamedTuple):
    """Keys of one group, from `first` up to the next run's, that are consecutive numbers of one server from `number`
    on."""

    server: int
    first: int
    number: int


class Occurrences(NamedTuple):
    """The ids of some members in one batch with their keys, int64 `[L]`, and a weight for each or None; pooled ones are
    in the order of the samples where every bag has one id."""

    ids: Jagged
    keys: Tensor
    weights: Tensor | None


@dataclass(frozen=True, eq=False)
class Members:
    """Features of a group that leave it in one form: pooled, or each with its rows `apart`, as sequences.

    Attributes:
        names: in the order of their columns.
        starts: the key of each feature's row 0, int64 `[G]`.
    """

    names: tuple[str, ...]
    selection: Selection
    dim: int
    starts: Tensor
    bounds: Bounds
    apart: bool

    def find(self, ids: Jagged) -> Occurrences:
        """The keys that occur among the ids of all features; raises `DataError` if one is not a row of its table."""
        chosen = self.selection.ids(ids)
        check_range(chosen, self.bounds)
        keys, weights = chosen.values + spread(self.starts, chosen), chosen.weights
        if not self.apart and chosen.offsets is None:
            keys, weights = by_sample(keys, chosen), None if weights is None else by_sample(weights, chosen)
        return Occurrences(chosen, keys, weights)

    def pool(self, rows: Tensor, inverse: Tensor, found: Occurrences) -> Tensor:
        """Pooled vectors, float32 `[B, G * D]`, from the distinct rows `[K, D]` and that of each occurrence `[L]`."""
        ids = found.ids
        if ids.offsets is None:
            vectors = rows.index_select(0, inverse)
            if found.weights is not None:
                vectors *= found.weights[:, None]
            return vectors.view(ids.samples, len(self.names) * self.dim)
        bags = sum_bags(rows, inverse, ids.offsets, found.weights)
        return bags.view(len(self.names), ids.samples, self.dim).transpose(0, 1).flatten(1)

    def vectors(self, rows: Tensor, inverse: Tensor, found: Occurrences) -> dict[str, JaggedVectors]:
        """The sequences of each feature, from the distinct rows `[K, D]` and that of each occurrence `[L]`."""
        values, offsets, samples = rows.index_select(0, inverse), found.ids.bag_offsets(), found.ids.samples
        if found.weights is not None:
            values *= found.weights[:, None]
        edges = offsets[torch.arange(len(self.names) + 1) * samples].tolist()
        cut = {name: slice(*edge) for name, edge in zip(self.names, pairwise(edges), strict=True)}
        return {
            name: JaggedVectors(name, values[part], offsets[at * samples : (at + 1) * samples + 1] - part.start)
            for at, (name, part) in enumerate(cut.items())
        }

    def brought(self, gradient: VectorGradients, found: Occurrences) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What each occurrence brings to its row, from the gradient of the client's output: the arguments of
        `Distinct.sum`."""
        if self.apart:
            return torch.cat([gradient.sequences[name] for name in self.names]), None, found.weights
        mine = self.selection.gradient(gradient.pooled).reshape(-1, self.dim)
        return mine, None if found.ids.offsets is None else bags_of(found.ids), found.weights


class Found(NamedTuple):
    """The distinct rows of a group in one batch: run r's keys are the `counts[r]` in
    `distinct.keys[cut[r]:cut[r + 1]]`."""

    occurrences: list[Occurrences]
    distinct: Distinct
    cut: list[int]
    counts: list[int]


@dataclass(frozen=True, eq=False)
class Group:
    """Features whose tables have one width: those that are pooled, and those that are not, if there are any.

    Attributes:
        rows: how many keys there are.
        runs: all keys, ascending.
        edges: the first key of each run.
    """

    members: tuple[Members, ...]
    dim: int
    rows: int
    runs: tuple[Run, ...]
    edges: NDArray[np.int64]

    @property
    def pooled(self) -> tuple[str, ...]:
        """The features that are pooled."""
        return () if self.members[0].apart else self.members[0].names

    def find(self, ids: Jagged) -> Found:
        """The group's distinct rows among the ids of all features."""
        occurrences = [members.find(ids) for members in self.members]
        distinct = find_distinct(_joined([found.keys for found in occurrences]).numpy(), self.rows)
        cut = [*np.searchsorted(distinct.keys, self.edges).tolist(), len(distinct.keys)]
        return Found(occurrences, distinct, cut, [stop - start for start, stop in pairwise(cut)])

    def sum(self, gradient: VectorGradients, found: Found) -> Tensor:
        """Each distinct row's gradient, float32 `[K, D]`, from that of the client's output."""
        pairs = zip(self.members, found.occurrences, strict=True)
        brought = [members.brought(gradient, occurrences) for members, occurrences in pairs]
        if len(brought) == 1:
            return found.distinct.sum(*brought[0])
        starts = accumulate((len(vectors) for vectors, _, _ in brought), initial=0)
        which = [
            start + (torch.arange(len(vectors)) if index is None else index)
            for start, (vectors, index, _) in zip(starts, brought, strict=False)
        ]
        weights = None
        if any(own is not None for _, _, own in brought):
            pairs_of = zip(brought, which, strict=True)
            weights = torch.cat([torch.ones(len(index)) if own is None else own for (_, _, own), index in pairs_of])
        return found.distinct.sum(torch.cat([vectors for vectors, _, _ in brought]), torch.cat(which), weights)


@dataclass(frozen=True)
class Asked:
    """What one server is asked for: `places` are for each of its widths the runs in the order of their numbers, by the
    positions of their group and there."""

    server: int
    shards: tuple[int, ...]
    dims: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Gathering:
    """A plan for some tables: their groups, and which server is asked for which runs."""

    groups: tuple[Group, ...]
    asked: tuple[Asked, ...]

    def find(self, ids: Jagged, numbers: Iterator[int]) -> "Gathered":
        """The distinct rows among the ids of all features, with numbers for the look-ups; raises as `Members.find`."""
        found = [group.find(ids) for group in self.groups]
        lookups = []
        for asked in self.asked:
            rows = [np.empty(0, np.int64)]
            for group, position in (place for places in asked.places for place in places):
                run, mine = self.groups[group].runs[position], found[group]
                keys = mine.distinct.keys[mine.cut[position] : mine.cut[position + 1]]
                rows.append(keys + (run.number - run.first))
            lookup = RowLookup(asked.shards, torch.from_numpy(np.concatenate(rows)), next(numbers))
            lookups.append((asked.server, lookup))
        return Gathered(self, found, lookups)


@dataclass(frozen=True)
class Gathered:
    """The distinct rows of one batch, asked for and given gradients: found for each group, and looked up at the servers
    at these positions, for each of `plan.asked`."""

    plan: Gathering
    found: list[Found]
    lookups: list[tuple[int, RowLookup]]

    def put_together(self, answers: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], dict[str, JaggedVectors]]:
        """What becomes of the rows that the servers answered.

        Returns:
            for each group that has any, pooled vectors `[B, G * D]`; and all sequences, by feature.
        """
        pieces: dict[tuple[int, int], Tensor] = {}
        for asked, answer in zip(self.plan.asked, answers, strict=True):
            for places, rows in zip(asked.places, answer, strict=True):
                sizes = [self.found[group].counts[run] for group, run in places]
                pieces |= zip(places, rows.split_with_sizes(sizes), strict=True)
        pooled: list[Tensor] = []
        sequences: dict[str, JaggedVectors] = {}
        for index, (group, found) in enumerate(zip(self.plan.groups, self.found, strict=True)):
            rows = _joined([pieces[index, run] for run in range(len(group.runs))])
            inverses = found.distinct.inverse.split_with_sizes([len(each.keys) for each in found.occurrences])
            for members, inverse, occurrences in zip(group.members, inverses, found.occurrences, strict=True):
                if members.apart:
                    sequences |= members.vectors(rows, inverse, occurrences)
                else:
                    pooled.append(members.pool(rows, inverse, occurrences))
        return pooled, sequences

    def sums(self, gradient: VectorGradients) -> list[tuple[Tensor, ...]]:
        """For each of `plan.asked` the rows' gradients by width, from that of the client's output."""
        pieces: list[Sequence[Tensor]] = [
            group.sum(gradient, found).split_with_sizes(found.counts)
            for group, found in zip(self.plan.groups, self.found, strict=True)
        ]
        return [
            tuple(
                _joined([pieces[group][run] for group, run in places]) if places else torch.zeros(0, dim)
                for places, dim in zip(asked.places, asked.dims, strict=True)
            )
            for asked in self.plan.asked
        ]


def plan_gathering(
    tables: Sequence[Table], chosen: Set[str], selector: Selector, servers: Sequence[Sequence[Shard]]
) -> Gathering:
    """The plan for the tables named in `chosen`, placed on these servers, which hold each row once."""
    numbers = [RowNumbers(shards) for shards in servers]
    pieces: dict[str, list[tuple[int, int, Shard]]] = {}  # of each table, by row: server, first number there, shard
    for server, shards in enumerate(servers):
        for start, shard in zip(numbers[server].starts, shards, strict=True):
            pieces.setdefault(shard.table.name, []).append((server, start, shard))
    for found in pieces.values():
        found.sort(key=lambda piece: piece[2].start)
    # a mean needs weights, which slow a sum down
    kinds: dict[tuple[int, bool], list[Table]] = {}
    for table in tables:
        if table.name in chosen:
            kinds.setdefault((table.dim, "mean" in table.poolings.values()), []).append(table)
    groups = tuple(_group(members, selector, pieces) for members in kinds.values())
    asked = []
    for server, shards in enumerate(servers):
        if mine := tuple(index for index, shard in enumerate(shards) if shard.table.name in chosen):
            dims = tuple(width.dim for width in numbers[server].widths)
            places = [
                sorted(
                    (run.number, (index, position))
                    for index, group in enumerate(groups)
                    for position, run in enumerate(group.runs)
                    if group.dim == dim and run.server == server
                )
                for dim in dims
            ]
            asked.append(Asked(server, mine, dims, tuple(tuple(place for _, place in own) for own in places)))
    return Gathering(groups, tuple(asked))


def _group(tables: Sequence[Table], selector: Selector, pieces: Mapping[str, list[tuple[int, int, Shard]]]) -> Group:
    # tables that lie side by side on a server get adjacent keys, so that there are few runs
    ordered = sorted(tables, key=lambda table: pieces[table.name][0][:2])
    starts = accumulate((table.rows for table in ordered), initial=0)
    start_of = dict(zip([table.name for table in ordered], starts, strict=False))
    runs: list[Run] = []
    key = 0
    for server, number, shard in (piece for table in ordered for piece in pieces[table.name]):
        if not runs or (runs[-1].server, runs[-1].number - runs[-1].first) != (server, number - key):
            runs.append(Run(server, key, number))
        key += shard.rows
    members = []
    for apart in (False, True):
        chosen = [(table, name) for table in tables for name in table.features if (name in table.sequences) == apart]
        if chosen:
            names, dim = tuple(name for _, name in chosen), chosen[0][0].dim
            first = torch.tensor([start_of[table.name] for table, _ in chosen])
            bounds = Bounds.of([Slot(Shard(table, 0, table.rows), name) for table, name in chosen])
            members.append(Members(names, selector.select(names), dim, first, bounds, apart))
    edges = np.array([run.first for run in runs])
    return Group(tuple(members), tables[0].dim, sum(table.rows for table in tables), tuple(runs), edges)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
