"""Pooling at the trainer, or not at all: every distinct row of a batch crosses once, and so does the sum of its
gradients, whatever features of the table it occurs in.

Rows have keys here, which run through all tables, and numbers on their servers (`RowNumbers`). A run is a stretch of
keys that are consecutive numbers of one server; an unsplit table is part of one run, and each part of a split one too,
so that no vector is pooled in parts.

`B` samples, `G` features of a group whose tables are `D` wide, `L` ids, `K` distinct rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
from shadowsync.models.sequences import JaggedVectors, VectorGradients


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
class Members(ABC):
    """Features of a group that leave it in one form.

    Attributes:
        names: the features, in the order of their columns.
        selection: the same features.
        dim: the width.
        starts: the key of each feature's row 0, int64 `[G]`.
        bounds: which ids there are.
    """

    names: tuple[str, ...]
    selection: Selection
    dim: int
    starts: Tensor
    bounds: Bounds

    def find(self, ids: Jagged) -> "Occurrences":
        """The keys that occur among the ids of all features.

        Raises:
            DataError: an id is not a row of its table.
        """
        chosen = self.selection.ids(ids)
        check_range(chosen, self.bounds)
        return Occurrences(chosen, chosen.values + spread(self.starts, chosen), chosen.weights)

    @abstractmethod
    def brought(self, gradient: VectorGradients, found: "Occurrences") -> "Brought":
        """What each occurrence brings to its row, from the gradient of the client's output."""


class PooledMembers(Members):
    """Features whose rows are added up for each sample."""

    def find(self, ids: Jagged) -> "Occurrences":
        found = super().find(ids)
        if found.ids.offsets is not None:
            return found
        weights = None if found.weights is None else by_sample(found.weights, found.ids)
        return Occurrences(found.ids, by_sample(found.keys, found.ids), weights)

    def pool(self, rows: Tensor, inverse: Tensor, found: "Occurrences") -> Tensor:
        """Pooled vectors, float32 `[B, G * D]`, from the distinct rows `[K, D]` and that of each occurrence `[L]`."""
        ids = found.ids
        if ids.offsets is None:
            vectors = rows.index_select(0, inverse)
            if found.weights is not None:
                vectors *= found.weights[:, None]
            return vectors.view(ids.samples, len(self.names) * self.dim)
        bags = sum_bags(rows, inverse, ids.offsets, found.weights)
        return bags.view(len(self.names), ids.samples, self.dim).transpose(0, 1).flatten(1)

    def brought(self, gradient: VectorGradients, found: "Occurrences") -> "Brought":
        mine = self.selection.gradient(gradient.pooled).reshape(-1, self.dim)
        return Brought(mine, None if found.ids.offsets is None else bags_of(found.ids), found.weights)


class SequenceMembers(Members):
    """Features whose rows stay apart."""

    def vectors(self, rows: Tensor, inverse: Tensor, found: "Occurrences") -> dict[str, JaggedVectors]:
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

    def brought(self, gradient: VectorGradients, found: "Occurrences") -> "Brought":
        return Brought(torch.cat([gradient.sequences[name] for name in self.names]), None, found.weights)


@dataclass(frozen=True)
class Occurrences:
    """The ids of some members in one batch.

    Attributes:
        ids: the members'.
        keys: of the ids, int64 `[L]`; pooled ones are in the order of the samples where every bag has one id.
        weights: one for each key, float32 `[L]`, or None for ones.
    """

    ids: Jagged
    keys: Tensor
    weights: Tensor | None


class Brought(NamedTuple):
    """Gradients that occurrences bring to their rows, as `Distinct.sum` takes them: `vectors[which] * weights`."""

    vectors: Tensor
    which: Tensor | None
    weights: Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    """Features whose tables have one width.

    Attributes:
        pooled: those that are pooled; None if there are none.
        sequences: the others; None if there are none.
        dim: the width.
        rows: how many keys there are.
        runs: all keys, ascending.
        edges: the first key of each run.
    """

    pooled: PooledMembers | None
    sequences: SequenceMembers | None
    dim: int
    rows: int
    runs: tuple[Run, ...]
    edges: NDArray[np.int64]

    @property
    def members(self) -> tuple[Members, ...]:
        """Those that there are, in the order of their occurrences."""
        return tuple(members for members in (self.pooled, self.sequences) if members is not None)

    def find(self, ids: Jagged) -> "Found":
        """The group's distinct rows among the ids of all features.

        Raises:
            DataError: an id is not a row of its table.
        """
        occurrences = tuple(members.find(ids) for members in self.members)
        distinct = find_distinct(_joined([found.keys for found in occurrences]).numpy(), self.rows)
        cut = [*np.searchsorted(distinct.keys, self.edges).tolist(), len(distinct.keys)]
        return Found(occurrences, distinct, cut)

    def pool(self, rows: Tensor, found: "Found") -> Tensor | None:
        """Pooled vectors, float32 `[B, G * D]`, from the distinct rows `[K, D]`; None if no feature is pooled."""
        return None if self.pooled is None else self.pooled.pool(rows, found.inverses()[0], found.occurrences[0])

    def vectors(self, rows: Tensor, found: "Found") -> dict[str, JaggedVectors]:
        """The sequences, by feature."""
        if self.sequences is None:
            return {}
        return self.sequences.vectors(rows, found.inverses()[-1], found.occurrences[-1])

    def sum(self, gradient: VectorGradients, found: "Found") -> Tensor:
        """Each distinct row's gradient, float32 `[K, D]`, from that of the client's output."""
        pairs = zip(self.members, found.occurrences, strict=True)
        brought = [members.brought(gradient, occurrences) for members, occurrences in pairs]
        return found.distinct.sum(*(brought[0] if len(brought) == 1 else _together(brought)))


def _together(brought: Sequence[Brought]) -> Brought:
    starts = accumulate((len(part.vectors) for part in brought), initial=0)
    which = [
        start + (torch.arange(len(part.vectors)) if part.which is None else part.which)
        for start, part in zip(starts, brought, strict=False)
    ]
    weights = None
    if any(part.weights is not None for part in brought):
        pairs = zip(brought, which, strict=True)
        weights = torch.cat([torch.ones(len(i)) if part.weights is None else part.weights for part, i in pairs])
    return Brought(torch.cat([part.vectors for part in brought]), torch.cat(which), weights)


@dataclass(frozen=True)
class Found:
    """The distinct rows of a group in one batch.

    Attributes:
        occurrences: of the group's members.
        distinct: their keys.
        cut: run r's keys are `distinct.keys[cut[r]:cut[r + 1]]`.
    """

    occurrences: tuple[Occurrences, ...]
    distinct: Distinct
    cut: list[int]

    def counts(self) -> list[int]:
        """Distinct rows of each run."""
        return [stop - start for start, stop in pairwise(self.cut)]

    def inverses(self) -> tuple[Tensor, ...]:
        """Of each member's occurrences the position among the distinct rows, int64 `[L]`."""
        return self.distinct.inverse.split_with_sizes([len(found.keys) for found in self.occurrences])


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

    def put_together(self, answers: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], dict[str, JaggedVectors]]:
        """What becomes of the rows that the servers answered.

        Returns:
            for each group that has any, pooled vectors `[B, G * D]`; and all sequences, by feature.
        """
        pieces: dict[Place, Tensor] = {}
        counts = [found.counts() for found in self.found]
        for asked, answer in zip(self.plan.asked, answers, strict=True):
            for places, rows in zip(asked.places, answer, strict=True):
                sizes = [counts[place.group][place.run] for place in places]
                pieces |= zip(places, rows.split_with_sizes(sizes), strict=True)
        pooled: list[Tensor] = []
        sequences: dict[str, JaggedVectors] = {}
        for index, (group, found) in enumerate(zip(self.plan.groups, self.found, strict=True)):
            rows = _rows([pieces[Place(index, run)] for run in range(len(group.runs))], group.dim)
            vectors = group.pool(rows, found)
            pooled += [] if vectors is None else [vectors]
            sequences |= group.vectors(rows, found)
        return pooled, sequences

    def sums(self, gradient: VectorGradients) -> list[tuple[Tensor, ...]]:
        """For each of `plan.asked` the rows' gradients by width, from that of the client's output."""
        pieces: Mapping[int, Sequence[Tensor]] = {
            index: group.sum(gradient, found).split_with_sizes(found.counts())
            for index, (group, found) in enumerate(zip(self.plan.groups, self.found, strict=True))
        }
        return [
            tuple(_rows([pieces[place.group][place.run] for place in places], dim) for places, dim in by_width)
            for by_width in (zip(asked.places, asked.dims, strict=True) for asked in self.plan.asked)
        ]


def _rows(parts: Sequence[Tensor], dim: int) -> Tensor:
    return _joined(parts) if parts else torch.zeros(0, dim)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
