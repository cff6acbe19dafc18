"""The embedding vectors a model is called with.

`B` samples, `F` features, `D_f` width of feature f's vector, `D` where all widths are equal.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shadowsync.models.sequences import JaggedVectors

NO_SEQUENCES: Mapping[str, Any] = MappingProxyType({})


class Pooled(Mapping[str, Any]):
    """Feature → `[B, D_f]`: views of one tensor, made when the first of them is asked for; or its sequences.

    A model that wants all vectors side by side takes `flat`, which saves a copy in the forward and one in the
    backward pass, and at small batches the time to make the views; any other sees an ordinary read-only mapping.

    Attributes:
        flat: `[B, Σ D_f]`, the pooled features in the order of the keys.
        dims: the pooled features with their widths, in that order.
        sequences: the other features, whose keys come last.
    """

    def __init__(
        self, flat: Tensor, dims: Mapping[str, int], sequences: Mapping[str, JaggedVectors] = NO_SEQUENCES
    ) -> None:
        self.flat = flat
        self.dims = dims
        self.sequences = sequences
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, feature: str) -> Tensor | JaggedVectors:
        if feature in self.sequences:
            return self.sequences[feature]
        if not self._views:
            self._views = dict(
                zip(self.dims, torch.split_with_sizes(self.flat, list(self.dims.values()), dim=1), strict=True)
            )
        return self._views[feature]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.dims, self.sequences)

    def __len__(self) -> int:
        return len(self.dims) + len(self.sequences)


def concatenate(embeddings: Mapping[str, Tensor], features: Sequence[str]) -> Tensor:
    """The vectors of `features` side by side, `[B, Σ D_f]`; no copy is made of a `Pooled` in the same order."""
    if isinstance(embeddings, Pooled) and list(embeddings.dims) == list(features):
        return embeddings.flat
    return torch.cat([embeddings[feature] for feature in features], dim=1)


def stack(embeddings: Mapping[str, Tensor], features: Sequence[str]) -> Tensor:
    """The vectors of `features`, all of width `D`, as `[B, F, D]`; a view of a `Pooled` in the same order."""
    flat = concatenate(embeddings, features)
    return flat.reshape(flat.shape[0], len(features), flat.shape[1] // len(features))
