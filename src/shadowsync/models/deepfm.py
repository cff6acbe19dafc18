"""DeepFM: a factorisation machine beside a deep tower. `B` samples, `N` dense columns, `F` features of width `D`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from shadowsync.models.first_order import FirstOrder, column_vectors, pairs_of_fields, split_rows, vector_dims
from shadowsync.models.layers import Widths, linear
from shadowsync.models.model import SequenceInput, TowerSpec, common_dim, refuse_sequences
from shadowsync.models.vectors import NO_SEQUENCES, concatenate


@dataclass(frozen=True)
class DeepFm(TowerSpec):
    """DeepFM (arXiv 1703.04247).

    Ours differs: every dense column is a field of the factorisation machine, its value times a learned vector; the deep
    tower sees the dense columns too; ids of one list are one field, their pooled vector.

    Attributes:
        deep: hidden widths of the deep tower; a last layer to the logit is appended.
        first_order: an id's first-order weight is a scalar of its own in front of its vector (`scalar`), or a learned
            projection of the vector that all ids of its feature share (`projection`), as in checkpoints written before
            there was this option, which go on so unless it is given.
    """

    name: ClassVar[str] = "deepfm"
    deep: Widths = (400, 400, 400)
    first_order: Literal["scalar", "projection"] = "scalar"

    @property
    def extra_columns(self) -> int:
        return int(self.first_order == "scalar")

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        common_dim(self.name, dims)
        if self.first_order == "projection":
            return ProjectedModule(self, dense_columns, dims)
        return DeepFmModule(self, dense_columns, vector_dims(self.name, dims))

    def as_trained(self, parameters: Collection[str], given: Collection[str]) -> Self:
        projected = "first_order.weight" in parameters and "first_order" not in given
        return replace(self, first_order="projection") if projected else self


class DeepFmModule(nn.Module):
    """Logit = first order + all pairs of fields + deep tower, with vectors of these widths."""

    def __init__(self, spec: DeepFm, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = dict(dims)
        self.first_order = FirstOrder(dense_columns)
        self.dense_vectors = column_vectors(dense_columns, next(iter(dims.values())))
        self.deep = spec.tower(dense_columns + sum(dims.values()), spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        weights, vectors = split_rows(embeddings, self.dims)
        logits: Tensor = self.first_order(dense, weights) + self.deep(torch.cat([dense, vectors], dim=1)).squeeze(1)
        return logits + pairs_of_fields(dense, vectors, tuple(self.dims), self.dense_vectors)


class ProjectedModule(nn.Module):
    """As `DeepFmModule`, with first-order weights that are projections of vectors and columns."""

    def __init__(self, spec: DeepFm, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        inputs = dense_columns + sum(dims.values())
        self.features = tuple(dims)
        self.first_order = linear(inputs, 1)
        self.dense_vectors = column_vectors(dense_columns, next(iter(dims.values())))
        self.deep = spec.tower(inputs, spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        vectors = concatenate(embeddings, self.features)
        fields = torch.cat([dense, vectors], dim=1)
        logits: Tensor = (self.first_order(fields) + self.deep(fields)).squeeze(1)
        return logits + pairs_of_fields(dense, vectors, self.features, self.dense_vectors)
