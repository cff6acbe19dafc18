"""Which shards of a job are tracked, and how: what `recovery.priority` and `recovery.min_rows` mean to a server."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shadowsync.embedding.table import Rows, Shard
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate
from shadowsync.recovery.decision import AUTO
from shadowsync.recovery.policy import policies
from shadowsync.recovery.priority import RowPriority, Tracker
from shadowsync.recovery.settings import EVERYTHING, RecoverySettings
from shadowsync.registry import choose


@dataclass(frozen=True)
class RowTracking:
    """Makes the trackers of an embedding server (`embedding.watching.Watching`).

    Attributes:
        priority: which rows come first.
        share: of a shard's rows in one save.
        min_rows: of a table that is tracked; smaller ones are saved as a whole.
        seed: of random choices.
    """

    priority: RowPriority
    share: float
    min_rows: int
    seed: int

    @property
    def sees(self) -> bool:
        """Pushes are of interest, not only the weights."""
        return bool(self.priority.seen_parts(1, self.share))

    def watch(self, own: Rows, allocate: Allocate = zeros) -> Tracker | None:
        """A tracker of a shard whose rows are saved as they are; None if its table is small."""
        if own.table.rows < self.min_rows:
            return None
        return self.priority.tracker(own.tensors["weight"], self.share, self.seed, allocate)

    def parts(self, shard: Shard) -> Sequence[tuple[int, torch.dtype]]:
        """Elements and type of what `watch` allocates."""
        return [] if shard.table.rows < self.min_rows else self.priority.seen_parts(shard.rows, self.share)

    def count(self, rows: int) -> int:
        """How many of a shard's rows one save holds."""
        return math.ceil(self.share * rows)


def row_tracking(settings: RecoverySettings, seed: int) -> RowTracking | None:
    """The tracking of a job; None where rows are never saved a share at a time, and nothing is to be paid for it.

    Under `all` every table is tracked.
    """
    policy = policies(settings.goal.target_pls).get(settings.goal.mode)
    if settings.goal.mode != AUTO and (policy is None or not policy.by_priority):
        return None
    priority = choose("recovery.priority", settings.priority, "shadowsync.recovery", RowPriority)()
    min_rows = 1 if settings.priority == EVERYTHING else settings.min_rows
    return RowTracking(priority, settings.share, min_rows, seed)
