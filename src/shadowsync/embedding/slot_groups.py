"""The features of a request, grouped by the width of their tables, and the sums of their gradients by row.

`B` samples, `G` features of a request whose tables are `D` wide, `L` ids, `K` distinct rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.distinct import find_distinct
from shadowsync.embedding.numbering import RowNumbers
from shadowsync.embedding.requests import KNOWN_REQUESTS
from shadowsync.embedding.table import Shard


@dataclass(frozen=True)
class Group:
    """The features of a request whose tables have one width.

    Attributes:
        dim: the width.
        positions: the features' positions in the request; None for all of them in order.
        columns: their columns in the request's output, int64 `[G * D]`; None for all of them in order.
        starts: where each one's rows start in the block of their width, int64 `[G]`.
    """

    dim: int
    positions: tuple[int, ...] | None
    columns: Tensor | None
    starts: Tensor

    def ids(self, ids: Jagged) -> Jagged:
        """The group's of a request's ids."""
        return ids if self.positions is None else ids.select(self.positions)

    def block_rows(self, ids: Jagged) -> Tensor:
        """The group's ids as positions in the block, int64 `[L]`."""
        if ids.offsets is None:
            return (ids.values.view(ids.feature_count, ids.samples) + self.starts[:, None]).flatten()
        per_feature = ids.offsets[:: ids.samples].diff()
        return ids.values + torch.repeat_interleave(self.starts, per_feature)


class SlotGroups:
    """Plans requests to a server, once for each sequence of its features.

    Args:
        shards: what the server holds.
        features: the shard of each feature that may be asked for, by its position.
        numbers: of the shards' rows.
    """

    def __init__(self, shards: Sequence[Shard], features: Sequence[int], numbers: RowNumbers) -> None:
        self._shards = tuple(shards)
        self.features = tuple(features)
        self.numbers = numbers
        self._plan = lru_cache(KNOWN_REQUESTS)(self._groups)

    def plan(self, features: Sequence[int]) -> tuple[Group, ...]:
        """The groups of a request for these features, by ascending width."""
        return self._plan(tuple(features))

    def dim(self, feature: int) -> int:
        """Width of a feature's table."""
        return self._shards[self.features[feature]].table.dim

    def sum_by_row(self, ids: Jagged, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The distinct rows of a block that a request looked up, `[K]`, ascending, with their gradients, `[K, D]`.

        Args:
            ids: of the whole request.
            gradient: of the loss with respect to the request's output.
            group: of the plan.
        """
        mine = gradient if group.columns is None else gradient.index_select(1, group.columns)
        chosen = group.ids(ids)
        found = find_distinct(group.block_rows(chosen).numpy(), self.numbers.total)
        return torch.from_numpy(found.keys), found.sum(mine.reshape(-1, group.dim), bags_of(chosen), chosen.weights)

    def _groups(self, features: tuple[int, ...]) -> tuple[Group, ...]:
        dims = [self.dim(feature) for feature in features]
        offsets = np.cumsum([0, *dims])
        return tuple(self._group(dim, features, dims, offsets) for dim in sorted(set(dims)))

    def _group(self, dim: int, features: Sequence[int], dims: list[int], offsets: np.ndarray) -> Group:
        positions = tuple(position for position, width in enumerate(dims) if width == dim)
        first = self.numbers.width(dim).start
        starts = torch.tensor([self.numbers.starts[self.features[features[p]]] - first for p in positions])
        if len(positions) == len(features):
            return Group(dim, None, None, starts)
        columns = [column for p in positions for column in range(offsets[p], offsets[p + 1])]
        return Group(dim, positions, torch.tensor(columns), starts)


def by_sample(values: Tensor, ids: Jagged) -> Tensor:
    """From feature-major to sample-major, for bags of one id each."""
    return values.view(ids.feature_count, ids.samples).t().flatten()


def bags_of(ids: Jagged) -> Tensor:
    """The bag of each id, int64 `[L]`, counted sample by sample as pooled vectors lie in memory."""
    sample_major = torch.arange(ids.samples * ids.feature_count).view(ids.samples, ids.feature_count).t().flatten()
    return sample_major if ids.offsets is None else sample_major.repeat_interleave(ids.lengths())
