"""Duplicates among keys: found once for a pull and used again by its push.

`L` occurrences, `K` distinct keys, `D` width of a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

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
        """For each key the weighted sum of its occurrences' vectors, float32 `[K, D]`.

        Args:
            vectors: what occurrences bring, float32 `[N, D]`.
            index: the vector of each occurrence, int64 `[L]`; None if `vectors` has one for each, in their order.
            weights: one for each occurrence, float32 `[L]`, or None for ones.
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
