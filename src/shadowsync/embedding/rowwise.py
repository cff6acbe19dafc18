"""Pull and push in plain torch operations, vectorised over all tables of one width.

`B` samples, `G` features of a request whose tables are `D` wide, `L` ids, `K` distinct rows, `S` shards.
"""

import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shadowsync.data.batch import Jagged
from shadowsync.embedding.distinct import find_distinct
from shadowsync.embedding.memory import ShardMemory
from shadowsync.embedding.optimizers import RowRule, Touched


@dataclass(frozen=True)
class Group:
    """The features of a request whose tables have one width.

    Attributes:
        dim: the width.
        positions: the features' positions in the request; None for all of them in order.
        columns: their columns in the request's output, int64 `[G * D]`; None for all of them in order.
        starts: where each one's rows start in the block, int64 `[G]`.
    """

    dim: int
    positions: tuple[int, ...] | None
    columns: Tensor | None
    starts: Tensor


class RowwiseTables:
    """Look-ups in and updates of a `ShardMemory`; requests are planned once for each sequence of features."""

    def __init__(self, memory: ShardMemory, features: Sequence[int], rule: RowRule) -> None:
        self.memory = memory
        self.features = tuple(features)
        self.rule = rule
        self._plans: dict[tuple[int, ...], tuple[Group, ...]] = {}
        self._count_lock = threading.Lock()

    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        """As `Storage.pull`."""
        groups = self._plan(tuple(features))
        if len(groups) == 1:
            return self._pool(ids, groups[0])
        pooled = torch.empty(ids.samples, self.width(features))
        for group in groups:
            pooled[:, group.columns] = self._pool(_of(ids, group), group)
        return pooled

    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        """As `Storage.push`."""
        pushes = self._count({self.features[feature] for feature in features})
        for group in self._plan(tuple(features)):
            mine = gradient if group.columns is None else gradient.index_select(1, group.columns)
            rows, sums = self._sum_by_row(_of(ids, group), mine, group)
            if len(rows):
                self._update(group.dim, rows, sums, pushes, lr)

    def read_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As `Storage.read_rows`."""
        numbers = self.memory.numbers
        pairs = zip(numbers.widths, numbers.split(rows), strict=True)
        return tuple(self.memory.blocks[width.dim]["weight"].index_select(0, found) for width, found in pairs)

    def step_rows(self, rows: Tensor, gradients: Sequence[Tensor], shards: Sequence[int], lr: float) -> None:
        """As `Storage.step_rows`."""
        pushes, numbers = self._count(set(shards)), self.memory.numbers
        for width, found, gradient in zip(numbers.widths, numbers.split(rows), gradients, strict=True):
            if len(found):
                self._update(width.dim, found, gradient, pushes, lr)

    def width(self, features: Sequence[int]) -> int:
        """Columns of `pull`'s output for these features."""
        return sum(self._dim(feature) for feature in features)

    def _dim(self, feature: int) -> int:
        return self.memory.shards[self.features[feature]].table.dim

    def _pool(self, ids: Jagged, group: Group) -> Tensor:
        weight = self.memory.blocks[group.dim]["weight"]
        rows = block_rows(ids, group)
        if ids.offsets is None:
            vectors = weight.index_select(0, by_sample(rows, ids))
            if ids.weights is not None:
                vectors *= by_sample(ids.weights, ids)[:, None]
            return vectors.view(ids.samples, -1)
        bags = F.embedding_bag(
            rows, weight, ids.offsets, mode="sum", per_sample_weights=ids.weights, include_last_offset=True
        )
        return bags.view(ids.feature_count, ids.samples, group.dim).transpose(0, 1).reshape(ids.samples, -1)

    def _sum_by_row(self, ids: Jagged, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The distinct rows of a block in `ids`, `[K]`, ascending, and the sums of their gradients, `[K, D]`."""
        keys = block_rows(ids, group)
        found = find_distinct(keys.numpy(), self.memory.numbers.total)
        bags = gradient.reshape(-1, group.dim)
        return torch.from_numpy(found.keys), found.sum(bags, bags_of(ids), ids.weights)

    def _update(self, dim: int, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        per_row = None if pushes is None else pushes[self._shard_of(dim, rows)]
        self.rule.apply(Touched(self.memory.blocks[dim], rows, gradient, per_row), lr)

    def _shard_of(self, dim: int, rows: Tensor) -> Tensor:
        """The shard of each row of a block."""
        members = self.memory.numbers.members(dim)
        starts = torch.tensor([self.memory.start_in_block(index) for index in members])
        return torch.tensor(members)[torch.searchsorted(starts, rows, right=True) - 1]

    def _count(self, shards: Set[int]) -> Tensor | None:
        """One push more for each of these shards; the counts of all shards, `[S]`."""
        if "step" not in self.memory.flat:
            return None
        counted = torch.tensor(sorted(shards), dtype=torch.int64)
        with self._count_lock:
            self.memory.flat["step"][counted] += 1
            return self.memory.flat["step"].clone()

    def _plan(self, features: tuple[int, ...]) -> tuple[Group, ...]:
        groups = self._plans.get(features)
        if groups is None:
            groups = self._plans[features] = self._groups(features)
        return groups

    def _groups(self, features: tuple[int, ...]) -> tuple[Group, ...]:
        dims = [self._dim(feature) for feature in features]
        offsets = np.cumsum([0, *dims])
        return tuple(self._group(dim, features, dims, offsets) for dim in sorted(set(dims)))

    def _group(self, dim: int, features: Sequence[int], dims: list[int], offsets: np.ndarray) -> Group:
        positions = tuple(position for position, width in enumerate(dims) if width == dim)
        shards = [self.features[features[position]] for position in positions]
        starts = torch.tensor([self.memory.start_in_block(shard) for shard in shards])
        if len(positions) == len(features):
            return Group(dim, None, None, starts)
        columns = [column for p in positions for column in range(offsets[p], offsets[p + 1])]
        return Group(dim, positions, torch.tensor(columns), starts)


def block_rows(ids: Jagged, group: Group) -> Tensor:
    """Ids as positions in the block, int64 `[L]`."""
    if ids.offsets is None:
        return (ids.values.view(ids.feature_count, ids.samples) + group.starts[:, None]).flatten()
    per_feature = ids.offsets[:: ids.samples].diff()
    return ids.values + torch.repeat_interleave(group.starts, per_feature)


def by_sample(values: Tensor, ids: Jagged) -> Tensor:
    """From feature-major to sample-major, for bags of one id each."""
    return values.view(ids.feature_count, ids.samples).t().flatten()


def bags_of(ids: Jagged) -> Tensor:
    """The bag of each id, int64 `[L]`, counted sample by sample as pooled vectors lie in memory."""
    sample_major = torch.arange(ids.samples * ids.feature_count).view(ids.samples, ids.feature_count).t().flatten()
    return sample_major if ids.offsets is None else sample_major.repeat_interleave(ids.lengths())


def _of(ids: Jagged, group: Group) -> Jagged:
    return ids if group.positions is None else ids.select(group.positions)
