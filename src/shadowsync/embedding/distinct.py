"""Duplicates among keys: found once for a pull and used again by its push.

`B` samples, `G` features of a request whose tables are `D` wide, `L` occurrences or ids, `K` distinct keys or rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shadowsync.data.batch import Jagged
from shadowsync.embedding.requests import KNOWN_REQUESTS
from shadowsync.embedding.table import RowNumbers, Shard

_BITS = 63
"""Of a positive int64."""


@dataclass(frozen=True, eq=False)
class Distinct:
    """The distinct keys of a sequence, and where each occurs.

    Attributes:
        keys: ascending, int64 `[K]`.
        order: positions of all occurrences, by key and then as they stood, int64 `[L]`.
        starts: key k occurs at `order[starts[k]:starts[k + 1]]`, int64 `[K + 1]`.
        inverse: the position in `keys` of each occurrence, int64 `[L]`.
    """

    keys: NDArray[np.int64]
    order: Tensor
    starts: Tensor
    inverse: Tensor

    def sum(self, vectors: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """For each key the sum of its occurrences' vectors, float32 `[K, D]`, each times its weight, float32 `[L]`.

        An occurrence brings the vector `[N, D]` of its `index`, int64 `[L]`; None if there is one for each, in their
        order.
        """
        order = self.order
        weights = None if weights is None else weights[order]
        order = order if index is None else index[order]
        return sum_bags(vectors, order, self.starts, weights)


def find_distinct(keys: NDArray[np.int64], limit: int) -> Distinct:
    """The duplicates among `keys`, each in `[0, limit)`.

    A key and its position are sorted as one integer: numpy sorts those with vector instructions, and the position
    comes along for nothing. With 26,624 keys on one core: 0.2 ms, `np.unique` 0.36 ms, `torch.unique` 1.1 ms.
    """
    count = len(keys)
    shift = count.bit_length()
    if (limit - 1).bit_length() + shift > _BITS:
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
    else:
        packed = (keys << shift) | np.arange(count)
        packed.sort()
        ordered, order = packed >> shift, packed & ((1 << shift) - 1)
    first = np.ones(count, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    inverse = np.empty(count, np.int64)
    inverse[order] = np.cumsum(first) - 1
    return Distinct(
        ordered[starts],
        torch.from_numpy(order),
        torch.from_numpy(np.append(starts, count)),
        torch.from_numpy(inverse),
    )


def sum_bags(vectors: Tensor, index: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """Row n is the weighted sum of `vectors[index[starts[n]:starts[n + 1]]]`, float32 `[N, D]`."""
    if not len(index):  # `embedding_bag` refuses to look up in nothing
        return vectors.new_zeros(len(starts) - 1, vectors.shape[1])
    return F.embedding_bag(index, vectors, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)


@dataclass(frozen=True)
class SlotGroup:
    """The features of a request whose tables have one width.

    Attributes:
        positions: in the request; None for all of them in order.
        columns: in the request's output, int64 `[G * D]`; None for all of them in order.
        starts: where each one's rows start in the block of their width, int64 `[G]`.
    """

    dim: int
    positions: tuple[int, ...] | None
    columns: Tensor | None
    starts: Tensor

    def ids(self, ids: Jagged) -> Jagged:
        return ids if self.positions is None else ids.select(self.positions)

    def block_rows(self, ids: Jagged) -> Tensor:
        """The group's ids as positions in the block, int64 `[L]`."""
        if ids.offsets is None:
            return (ids.values.view(ids.feature_count, ids.samples) + self.starts[:, None]).flatten()
        per_feature = ids.offsets[:: ids.samples].diff()
        return ids.values + torch.repeat_interleave(self.starts, per_feature)


class SlotGroups:
    """Plans requests to a server that holds `shards`, once for each sequence of its features; `features` are the
    positions of their shards."""

    def __init__(self, shards: Sequence[Shard], features: Sequence[int], numbers: RowNumbers) -> None:
        self._shards = tuple(shards)
        self.features = tuple(features)
        self.numbers = numbers
        self._plan = lru_cache(KNOWN_REQUESTS)(self._groups)

    def plan(self, features: Sequence[int]) -> tuple[SlotGroup, ...]:
        """By ascending width."""
        return self._plan(tuple(features))

    def dim(self, feature: int) -> int:
        return self._shards[self.features[feature]].table.dim

    def sum_by_row(self, ids: Jagged, gradient: Tensor, group: SlotGroup) -> tuple[Tensor, Tensor]:
        """The distinct rows of a block that a request looked up, `[K]`, ascending, with their gradients, `[K, D]`, from
        those of its output."""
        mine = gradient if group.columns is None else gradient.index_select(1, group.columns)
        chosen = group.ids(ids)
        found = find_distinct(group.block_rows(chosen).numpy(), self.numbers.total)
        return torch.from_numpy(found.keys), found.sum(mine.reshape(-1, group.dim), bags_of(chosen), chosen.weights)

    def _groups(self, features: tuple[int, ...]) -> tuple[SlotGroup, ...]:
        dims = [self.dim(feature) for feature in features]
        offsets = np.cumsum([0, *dims])
        groups = []
        for dim in sorted(set(dims)):
            positions = tuple(position for position, width in enumerate(dims) if width == dim)
            first = self.numbers.width(dim).start
            starts = torch.tensor([self.numbers.starts[self.features[features[p]]] - first for p in positions])
            if len(positions) == len(features):
                groups.append(SlotGroup(dim, None, None, starts))
            else:
                columns = [column for p in positions for column in range(offsets[p], offsets[p + 1])]
                groups.append(SlotGroup(dim, positions, torch.tensor(columns), starts))
        return tuple(groups)


def by_sample(values: Tensor, ids: Jagged) -> Tensor:
    """From feature-major to sample-major, for bags of one id each."""
    return values.view(ids.feature_count, ids.samples).t().flatten()


def bags_of(ids: Jagged) -> Tensor:
    """The bag of each id, int64 `[L]`, counted sample by sample as pooled vectors lie in memory."""
    sample_major = torch.arange(ids.samples * ids.feature_count).view(ids.samples, ids.feature_count).t().flatten()
    return sample_major if ids.offsets is None else sample_major.repeat_interleave(ids.lengths())
