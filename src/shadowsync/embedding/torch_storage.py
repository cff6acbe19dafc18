"""Storage in plain torch: needs no extra, computes what `fbgemm` computes, slower."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import ShardMemory
from shadowsync.embedding.optimizers import rule_class
from shadowsync.embedding.rowwise import RowwiseTables
from shadowsync.embedding.storage import RowOptimizer, Storage
from shadowsync.embedding.table import Shard
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate


class TorchStorage(Storage):
    """`embedding_bag` without autograd for the pull; the push sums duplicates and steps the distinct rows."""

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        shards: Sequence[Shard],
        features: Sequence[int],
        optimizer: RowOptimizer,
        seed: int | None,
        allocate: Allocate = zeros,
    ) -> None:
        rule = rule_class(optimizer.name)
        self._memory = ShardMemory(shards, rule, seed, allocate)
        self._tables = RowwiseTables(self._memory, features, rule(optimizer))

    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        if not features or not ids.samples:
            return torch.zeros(ids.samples, self._tables.width(features))
        return self._tables.pull(ids, features)

    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        if features and ids.samples:
            self._tables.push(ids, features, gradient, lr)

    def read_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self._tables.read_rows(rows)

    def step_rows(self, rows: Tensor, gradients: Sequence[Tensor], shards: Sequence[int], lr: float) -> None:
        self._tables.step_rows(rows, gradients, shards, lr)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._memory.state()
