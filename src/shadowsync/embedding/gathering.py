"""Pooling at the trainer: every distinct row of a batch crosses once, and so does the sum of its gradients.

Rows have keys here, which run through all tables, and numbers on their servers (`RowNumbers`). A run is a stretch of
keys that are consecutive numbers of one server; an unsplit table is part of one run, and each part of a split one too,
so that no vector is pooled in parts.

`B` samples, `G` features of a group whose tables are `D` wide, `L` ids, `K` distinct rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.distinct import Distinct, find_distinct, sum_bags
from shadowsync.embedding.requests import Bounds, check_range, spread
from shadowsync.embedding.selection import Selection
from shadowsync.embedding.server import RowLookup
from shadowsync.embedding.slot_groups import bags_of, by_sample


@dataclass(frozen=True)
class Run:
    """Keys of one group, up to the next run's, that are consecutive numbers of one server.

    Attributes:
        server: its position.
        first: the first key.
        number: the first key's number.
    """

    server: int
    first: int
    number: int


@dataclass(frozen=True, eq=False)
class Group:
    """Features whose tables have one width and one pooling.

    Attributes:
        names: the features, in the order of their columns.
        selection: the same features.
        dim: the width.
        starts: the key of each feature's row 0, int64 `[G]`.
        rows: how many keys there are.
        bounds: which ids there are.
        runs: all keys, ascending.
        edges: the first key of each run.
    """

    names: tuple[str, ...]
    selection: Selection
    dim: int
    starts: Tensor
    rows: int
    bounds: Bounds
    runs: tuple[Run, ...]
    edges: NDArray[np.int64]

    def find(self, ids: Jagged) -> "Found":
        """The group's distinct rows among the ids of all features.

        Raises:
            DataError: an id is not a row of its table.
        """
        chosen = self.selection.ids(ids)
        check_range(chosen, self.bounds)
        keys, weights = chosen.values + spread(self.starts, chosen), chosen.weights
        if chosen.offsets is None:
            keys, weights = by_sample(keys, chosen), None if weights is None else by_sample(weights, chosen)
        distinct = find_distinct(keys.numpy(), self.rows)
        cut = [*np.searchsorted(distinct.keys, self.edges).tolist(), len(distinct.keys)]
        return Found(chosen, weights, distinct, cut)

    def pool(self, rows: Tensor, found: "Found") -> Tensor:
        """Pooled vectors, float32 `[B, G * D]`, from the distinct rows `[K, D]`."""
        ids, inverse = found.ids, found.distinct.inverse
        if ids.offsets is None:
            vectors = rows.index_select(0, inverse)
            if found.weights is not None:
                vectors *= found.weights[:, None]
            return vectors.view(ids.samples, len(self.names) * self.dim)
        bags = sum_bags(rows, inverse, ids.offsets, found.weights)
        return bags.view(len(self.names), ids.samples, self.dim).transpose(0, 1).flatten(1)

    def sum(self, gradient: Tensor, found: "Found") -> Tensor:
        """Each distinct row's gradient, float32 `[K, D]`, from that of the client's output."""
        mine = self.selection.gradient(gradient).reshape(-1, self.dim)
        index = None if found.ids.offsets is None else bags_of(found.ids)
        return found.distinct.sum(mine, index, found.weights)


@dataclass(frozen=True)
class Found:
    """The distinct rows of a group in one batch.

    Attributes:
        ids: the group's.
        weights: of the ids in the order of the occurrences, which is sample by sample where every bag has one id.
        distinct: their keys.
        cut: run r's keys are `distinct.keys[cut[r]:cut[r + 1]]`.
    """

    ids: Jagged
    weights: Tensor | None
    distinct: Distinct
    cut: list[int]

    def counts(self) -> list[int]:
        """Distinct rows of each run."""
        return [stop - start for start, stop in pairwise(self.cut)]


class Place(NamedTuple):
    """A run by the positions of its group and of itself there."""

    group: int
    run: int


@dataclass(frozen=True)
class Asked:
    """What one server is asked for.

    Attributes:
        server: its position.
        shards: positions of the shards.
        dims: the server's widths.
        places: for each width the runs in the order of their numbers.
    """

    server: int
    shards: tuple[int, ...]
    dims: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]


@dataclass(frozen=True)
class Gathering:
    """A plan for some tables: their groups, and which server is asked for which runs."""

    groups: tuple[Group, ...]
    asked: tuple[Asked, ...]

    def find(self, ids: Jagged, number: Callable[[], int]) -> "Gathered":
        """The distinct rows of a batch.

        Args:
            ids: of all features.
            number: gives the next look-up's.

        Raises:
            DataError: an id is not a row of its table.
        """
        found = [group.find(ids) for group in self.groups]
        return Gathered(self, found, [self._lookup(asked, found, number()) for asked in self.asked])

    def _lookup(self, asked: Asked, found: Sequence[Found], number: int) -> RowLookup:
        numbers = [np.empty(0, np.int64)]
        for place in (place for places in asked.places for place in places):
            run, mine = self.groups[place.group].runs[place.run], found[place.group]
            keys = mine.distinct.keys[mine.cut[place.run] : mine.cut[place.run + 1]]
            numbers.append(keys + (run.number - run.first))
        return RowLookup(asked.shards, torch.from_numpy(np.concatenate(numbers)), number)


@dataclass(frozen=True)
class Gathered:
    """The distinct rows of one batch, asked for and given gradients.

    Attributes:
        plan: the tables'.
        found: for each group.
        lookups: for each of `plan.asked`.
    """

    plan: Gathering
    found: list[Found]
    lookups: list[RowLookup]

    def pool(self, answers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """For each group pooled vectors `[B, G * D]`, from the rows that the servers answered."""
        pieces: dict[Place, Tensor] = {}
        counts = [found.counts() for found in self.found]
        for asked, answer in zip(self.plan.asked, answers, strict=True):
            for places, rows in zip(asked.places, answer, strict=True):
                sizes = [counts[place.group][place.run] for place in places]
                pieces |= zip(places, rows.split_with_sizes(sizes), strict=True)
        pooled = []
        for index, (group, found) in enumerate(zip(self.plan.groups, self.found, strict=True)):
            parts = [pieces[Place(index, run)] for run in range(len(group.runs))]
            pooled.append(group.pool(_joined(parts, group.dim), found))
        return pooled

    def sums(self, gradient: Tensor) -> list[tuple[Tensor, ...]]:
        """For each of `plan.asked` the rows' gradients by width, from that of the client's output `[B, Σ D_f]`."""
        pieces: Mapping[int, Sequence[Tensor]] = {
            index: group.sum(gradient, found).split_with_sizes(found.counts())
            for index, (group, found) in enumerate(zip(self.plan.groups, self.found, strict=True))
        }
        return [
            tuple(_joined([pieces[place.group][place.run] for place in places], dim) for places, dim in by_width)
            for by_width in (zip(asked.places, asked.dims, strict=True) for asked in self.plan.asked)
        ]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.zeros(0, dim)
