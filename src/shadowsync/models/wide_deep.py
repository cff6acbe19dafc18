"""Wide & Deep: a linear model over all ids beside a deep tower over their vectors. `N` dense columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shadowsync.models.first_order import FirstOrder, split_rows, vector_dims
from shadowsync.models.layers import Widths
from shadowsync.models.model import SequenceInput, TowerSpec, need_features, refuse_sequences
from shadowsync.models.vectors import NO_SEQUENCES


@dataclass(frozen=True)
class WideDeep(TowerSpec):
    """Wide & Deep (arXiv 1606.07792); widths of the features may differ.

    Ours differs: every feature is part of both sides, and so are the dense columns; one optimizer trains both, where
    the paper has FTRL with L1 for the wide one and AdaGrad for the deep one. Its crosses are columns of the data.

    Attributes:
        deep: hidden widths of the deep tower; a last layer to the logit is appended.
    """

    name: ClassVar[str] = "wide_deep"
    deep: Widths = (1024, 512, 256)

    @property
    def extra_columns(self) -> int:
        return 1

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        need_features(self.name, dims)
        return WideDeepModule(self, dense_columns, vector_dims(self.name, dims))


class WideDeepModule(nn.Module):
    """Logit = first order + deep tower."""

    def __init__(self, spec: WideDeep, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = dict(dims)
        self.wide = FirstOrder(dense_columns)
        self.deep = spec.tower(dense_columns + sum(dims.values()), spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        weights, vectors = split_rows(embeddings, self.dims)
        logits: Tensor = self.wide(dense, weights) + self.deep(torch.cat([dense, vectors], dim=1)).squeeze(1)
        return logits
