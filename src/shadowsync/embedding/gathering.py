"""Pooling at the trainer, or not at all: every distinct row of a batch crosses once, and so does the sum of its
gradients, whatever features of the table it occurs in.

Rows of one width have keys here: server after server, and on each in the order of their numbers there (`RowNumbers`).
So the distinct keys of a batch, ascending, are what the servers are asked for, one after the other.

`B` samples, `G` features of a group whose tables are `D` wide, `L` ids, `K` distinct rows, `S` servers.
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
from shadowsync.embedding.requests import Bounds, RowLookup, Selection, Selector, check_range, mean_factors, spread
from shadowsync.embedding.table import RowNumbers, Shard, Slot, Table
from shadowsync.models.vectors import JaggedVectors, VectorGradients


class Occurrences(NamedTuple):
    """The ids of some members in one batch with their keys, int64 `[L]`, a weight for each or None, and a factor for
    the sum of each bag or None; pooled ones are in the order of the samples where every bag has one id."""

    ids: Jagged
    keys: Tensor
    weights: Tensor | None
    factors: Tensor | None


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
        """Those among the ids of all features; raises `DataError` if one is not a row of its table."""
        chosen, mean = self.selection.ids(ids), self.selection.mean
        check_range(chosen, self.bounds)
        keys, weights = chosen.values + spread(self.starts, chosen), chosen.weights
        if not self.apart and chosen.offsets is None:
            keys, weights = by_sample(keys, chosen), None if weights is None else by_sample(weights, chosen)
        factors = None if mean is None or chosen.offsets is None else mean_factors(chosen, mean)
        return Occurrences(chosen, keys, weights, factors)

    def pool(self, rows: Tensor, inverse: Tensor, found: Occurrences) -> Tensor:
        """Pooled vectors, float32 `[B, G * D]`, from the distinct rows `[K, D]` and that of each occurrence `[L]`."""
        ids = found.ids
        if ids.offsets is None:
            vectors = rows.index_select(0, inverse)
            if found.weights is not None:
                vectors *= found.weights[:, None]
            return vectors.view(ids.samples, len(self.names) * self.dim)
        bags = sum_bags(rows, inverse, ids.offsets, found.weights)
        if found.factors is not None:  # weights of the ids would slow the sum down, that of the other features too
            bags *= found.factors[:, None]
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
        if found.factors is not None:
            mine = mine * by_sample(found.factors, found.ids)[:, None]
        return mine, None if found.ids.offsets is None else bags_of(found.ids), found.weights


class Found(NamedTuple):
    """The distinct rows of a group in one batch: server s's keys are `distinct.keys[cut[s]:cut[s + 1]]`."""

    occurrences: list[Occurrences]
    distinct: Distinct
    cut: list[int]


@dataclass(frozen=True, eq=False)
class WidthGroup:
    """Features whose tables have one width: those that are pooled, and those that are not, if there are any.

    Attributes:
        edges: the first key of each server, and one beyond the last, int64 `[S + 1]`.
        pieces: of tables that are cut, whose rows are counted beyond the last key before it is known in which part they
            are: the first row of each part as it is counted there, and what leads from there to its key, 0 before the
            first; both int64. None if all tables are whole.
    """

    members: tuple[Members, ...]
    dim: int
    edges: NDArray[np.int64]
    pieces: tuple[Tensor, Tensor] | None

    @property
    def pooled(self) -> tuple[str, ...]:
        return () if self.members[0].apart else self.members[0].names

    def find(self, ids: Jagged) -> Found:
        """The group's distinct rows among the ids of all features."""
        occurrences = [members.find(ids) for members in self.members]
        keys = _joined([found.keys for found in occurrences])
        if self.pieces is not None:
            keys = keys + self.pieces[1][torch.bucketize(keys, self.pieces[0], right=True)]
        distinct = find_distinct(keys.numpy(), int(self.edges[-1]))
        return Found(occurrences, distinct, np.searchsorted(distinct.keys, self.edges).tolist())

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


class Asked(NamedTuple):
    """What one server is asked for: rows of `shards`; of each width there, ascending, `shifts` lead from keys to
    numbers."""

    server: int
    shards: tuple[int, ...]
    shifts: Mapping[int, int]


@dataclass(frozen=True)
class Gathering:
    """A plan for some tables: their groups, and what each server is asked for."""

    groups: tuple[WidthGroup, ...]
    asked: tuple[Asked, ...]

    def find(self, ids: Jagged, numbers: Iterator[int]) -> "Gathered":
        """The distinct rows among the ids of all features, with numbers for the look-ups; raises as `Members.find`."""
        found = {group.dim: group.find(ids) for group in self.groups}
        lookups = []
        for server, shards, shifts in self.asked:
            rows = [
                found[dim].distinct.keys[slice(*found[dim].cut[server : server + 2])] + shift
                for dim, shift in shifts.items()
                if dim in found
            ]
            lookups.append((server, RowLookup(shards, torch.from_numpy(np.concatenate(rows)), next(numbers))))
        return Gathered(self, found, lookups)


@dataclass(frozen=True)
class Gathered:
    """The distinct rows of one batch, by width, and the look-up at each server that is asked for some."""

    plan: Gathering
    found: Mapping[int, Found]
    lookups: list[tuple[int, RowLookup]]

    def put_together(self, answers: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], dict[str, JaggedVectors]]:
        """What becomes of the rows that the servers answered.

        Returns:
            for each group that has any, pooled vectors `[B, G * D]`; and all sequences, by feature.
        """
        by_width = [
            dict(zip(asked.shifts, rows, strict=True)) for asked, rows in zip(self.plan.asked, answers, strict=True)
        ]
        pooled: list[Tensor] = []
        sequences: dict[str, JaggedVectors] = {}
        for group in self.plan.groups:
            found, rows = self.found[group.dim], _joined([own[group.dim] for own in by_width if group.dim in own])
            inverses = found.distinct.inverse.split_with_sizes([len(each.keys) for each in found.occurrences])
            for members, inverse, occurrences in zip(group.members, inverses, found.occurrences, strict=True):
                if members.apart:
                    sequences |= members.vectors(rows, inverse, occurrences)
                else:
                    pooled.append(members.pool(rows, inverse, occurrences))
        return pooled, sequences

    def sums(self, gradient: VectorGradients) -> list[tuple[Tensor, ...]]:
        """For each of `lookups` the rows' gradients by width, from that of the client's output."""
        pieces = {
            group.dim: group.sum(gradient, found).split_with_sizes(
                [stop - start for start, stop in pairwise(found.cut)]
            )
            for group in self.plan.groups
            for found in [self.found[group.dim]]
        }
        return [
            tuple(pieces[dim][asked.server] if dim in pieces else torch.zeros(0, dim) for dim in asked.shifts)
            for asked in self.plan.asked
        ]


def plan_gathering(
    tables: Sequence[Table], chosen: Set[str], selector: Selector, servers: Sequence[Sequence[Shard]]
) -> Gathering:
    """The plan for the tables named in `chosen`, placed on these servers, which hold each row once."""
    numbers = [RowNumbers(shards) for shards in servers]
    by_width: dict[int, list[Table]] = {}
    for table in tables:
        if table.name in chosen:
            by_width.setdefault(table.dim, []).append(table)
    groups = {dim: _group(found, selector, servers, numbers) for dim, found in by_width.items()}
    asked = []
    for server, shards in enumerate(servers):
        if mine := tuple(index for index, shard in enumerate(shards) if shard.table.name in chosen):
            shifts = {
                width.dim: width.start - int(groups[width.dim].edges[server]) if width.dim in groups else 0
                for width in numbers[server].widths
            }
            asked.append(Asked(server, mine, shifts))
    return Gathering(tuple(groups.values()), tuple(asked))


def _group(
    tables: Sequence[Table], selector: Selector, servers: Sequence[Sequence[Shard]], numbers: Sequence[RowNumbers]
) -> WidthGroup:
    """Of tables of one width."""
    dim = tables[0].dim
    widths = [held.width(dim) for held in numbers]
    edges = [*accumulate((width.stop - width.start for width in widths), initial=0)]
    parts: dict[str, list[tuple[int, int]]] = {}  # of each table, by row: the first row of a part and its key
    for server, shards in enumerate(servers):
        for shard, number in zip(shards, numbers[server].starts, strict=True):
            if shard.table.dim == dim:
                key = edges[server] + number - widths[server].start
                parts.setdefault(shard.table.name, []).append((shard.start, key))
    starts: dict[str, int] = {}
    beyond, firsts, shifts = edges[-1], list[int](), [0]
    for table in tables:
        found = sorted(parts[table.name])
        starts[table.name] = found[0][1] if len(found) == 1 else beyond
        if len(found) > 1:
            firsts += [beyond + start for start, _ in found]
            shifts += [key - beyond - start for start, key in found]
            beyond += table.rows
    members = []
    for apart in (False, True):
        pairs = [(table, name) for table in tables for name in table.features if (name in table.sequences) == apart]
        if pairs:
            names, first = tuple(name for _, name in pairs), torch.tensor([starts[table.name] for table, _ in pairs])
            bounds = Bounds.of([Slot(Shard(table, 0, table.rows), name) for table, name in pairs])
            members.append(Members(names, selector.select(names), dim, first, bounds, apart))
    pieces = (torch.tensor(firsts), torch.tensor(shifts)) if firsts else None
    return WidthGroup(tuple(members), dim, np.array(edges), pieces)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
