"""Pull and push in plain torch operations, vectorised over all tables of one width.

`B` samples, `K` distinct rows, `S` shards.
"""

import threading
from collections.abc import Sequence, Set

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import ShardMemory
from shadowsync.embedding.optimizers import RowRule, Touched
from shadowsync.embedding.slot_groups import Group, SlotGroups, by_sample


class RowwiseTables:
    """Look-ups in and updates of a `ShardMemory`; requests are planned once for each sequence of features."""

    def __init__(self, memory: ShardMemory, features: Sequence[int], rule: RowRule) -> None:
        self.memory = memory
        self.rule = rule
        self._slots = SlotGroups(memory.shards, features, memory.numbers)
        self._count_lock = threading.Lock()

    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        """As `Storage.pull`."""
        groups = self._slots.plan(features)
        if len(groups) == 1:
            return self._pool(ids, groups[0])
        pooled = torch.empty(ids.samples, self.width(features))
        for group in groups:
            pooled[:, group.columns] = self._pool(group.ids(ids), group)
        return pooled

    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        """As `Storage.push`."""
        pushes = self._count({self._slots.features[feature] for feature in features})
        for group in self._slots.plan(features):
            rows, sums = self._slots.sum_by_row(ids, gradient, group)
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
        return sum(self._slots.dim(feature) for feature in features)

    def _pool(self, ids: Jagged, group: Group) -> Tensor:
        weight = self.memory.blocks[group.dim]["weight"]
        rows = group.block_rows(ids)
        if ids.offsets is None:
            vectors = weight.index_select(0, by_sample(rows, ids))
            if ids.weights is not None:
                vectors *= by_sample(ids.weights, ids)[:, None]
            return vectors.view(ids.samples, -1)
        bags = F.embedding_bag(
            rows, weight, ids.offsets, mode="sum", per_sample_weights=ids.weights, include_last_offset=True
        )
        return bags.view(ids.feature_count, ids.samples, group.dim).transpose(0, 1).reshape(ids.samples, -1)

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
