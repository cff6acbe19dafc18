"""Storage in plain torch: needs no extra, computes what `fbgemm` computes, slower.

`S` shards, `D` width of a row.
"""

import threading
from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowsync.data.batch import Jagged
from shadowsync.embedding.distinct import SlotGroup, SlotGroups, by_sample
from shadowsync.embedding.memory import ShardMemory
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.storage import Storage, copy_rows
from shadowsync.embedding.table import Shard
from shadowsync.memory.pages import zeros
from shadowsync.memory.room import Room


class TorchStorage(Storage):
    """`embedding_bag` without autograd for the pull; the push sums duplicates and steps the distinct rows.

    Requests are planned once for each sequence of features.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        shards: Sequence[Shard],
        features: Sequence[int],
        optimizer: RowOptimizer,
        seed: int | None,
        room: Room | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._memory = ShardMemory(shards, optimizer, seed, zeros if room is None else room.allocate)
        self._slots = SlotGroups(self._memory.shards, features, self._memory.numbers)
        self._count_lock = threading.Lock()

    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        if not features or not ids.samples:
            return torch.zeros(ids.samples, self._width(features))
        groups = self._slots.plan(features)
        if len(groups) == 1:
            return self._pool(ids, groups[0])
        pooled = torch.empty(ids.samples, self._width(features))
        for group in groups:
            pooled[:, group.columns] = self._pool(group.ids(ids), group)
        return pooled

    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        if not features or not ids.samples:
            return
        pushes = self._count({self._slots.features[feature] for feature in features})
        for group in self._slots.plan(features):
            rows, sums = self._slots.sum_by_row(ids, gradient, group)
            if len(rows):
                self._update(group.dim, rows, sums, pushes, lr)

    def read_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        numbers = self._memory.numbers
        pairs = zip(numbers.widths, numbers.split(rows), strict=True)
        return tuple(self._memory.blocks[width.dim]["weight"].index_select(0, found) for width, found in pairs)

    def step_rows(self, rows: Tensor, gradients: Sequence[Tensor], shards: Sequence[int], lr: float) -> None:
        pushes, numbers = self._count(set(shards)), self._memory.numbers
        for width, found, gradient in zip(numbers.widths, numbers.split(rows), gradients, strict=True):
            if len(found):
                self._update(width.dim, found, gradient, pushes, lr)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._memory.state()

    def copy(self, shard: int, rows: Tensor | range, out: Mapping[str, Tensor]) -> None:
        for name, target in out.items():
            copy_rows(self._memory.view(shard, name), rows, target)

    def reset(self, seed: int | None) -> None:
        self._memory.reset(seed)

    def _width(self, features: Sequence[int]) -> int:
        """Columns of `pull`'s output for these features."""
        return sum(self._slots.dim(feature) for feature in features)

    def _pool(self, ids: Jagged, group: SlotGroup) -> Tensor:
        weight = self._memory.blocks[group.dim]["weight"]
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
        self._step(dim, rows, self._optimizer.penalised(self._memory.blocks[dim], rows, gradient), pushes, lr)

    def _step(self, dim: int, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        per_row = None
        if pushes is not None:
            members = self._memory.numbers.members(dim)
            starts = torch.tensor([self._memory.start_in_block(index) for index in members])
            per_row = pushes[torch.tensor(members)[torch.searchsorted(starts, rows, right=True) - 1]]
        self._optimizer.apply(self._memory.blocks[dim], rows, gradient, per_row, lr)

    def _count(self, shards: Set[int]) -> Tensor | None:
        """One push more for each of these shards; the counts of all shards, `[S]`."""
        if "step" not in self._memory.flat:
            return None
        counted = torch.tensor(sorted(shards), dtype=torch.int64)
        with self._count_lock:
            self._memory.flat["step"][counted] += 1
            return self._memory.flat["step"].clone()
