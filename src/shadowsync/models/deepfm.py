"""DeepFM: a factorisation machine beside a deep tower. `B` samples, `N` dense columns, `F` features of width `D`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shadowsync.models.model import ModelSpec, SequenceInput, Widths, common_dim, draw, linear, refuse_sequences, tower
from shadowsync.models.vectors import NO_SEQUENCES, concatenate


@dataclass(frozen=True)
class DeepFm(ModelSpec):
    """DeepFM (arXiv 1703.04247).

    Ours differs: tables hold vectors only, so a feature's first-order weight is a learned projection of its vector
    instead of a scalar of its own; every dense column is a field of the factorisation machine, its value times a
    learned vector; the deep tower sees the dense columns too; there is no dropout.

    Attributes:
        deep: hidden widths of the deep tower; a last layer to the logit is appended.
    """

    name: ClassVar[str] = "deepfm"
    deep: Widths = (400, 400, 400)

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        return DeepFmModule(self, dense_columns, dims)


class DeepFmModule(nn.Module):
    """The model as `DeepFm` describes it: logit = first order + all pairs of fields + deep tower."""

    def __init__(self, spec: DeepFm, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        dim = common_dim(spec.name, dims)
        inputs = dense_columns + dim * len(dims)
        self.features = tuple(dims)
        self.first_order = linear(inputs, 1)
        self.dense_vectors = nn.Linear(dense_columns, dim, bias=False) if dense_columns else None
        if self.dense_vectors is not None:  # small at first: pairs grow with the square of what may be a large value
            draw(self.dense_vectors.weight, 0.01)
        self.deep = tower(inputs, spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        flat = concatenate(embeddings, self.features)
        fields = torch.cat([dense, flat], dim=1)
        logits: Tensor = (self.first_order(fields) + self.deep(fields)).squeeze(1)
        # all pairs: `Σ_{i<j} ⟨v_i, v_j⟩ = ½ (‖Σ v_i‖² − Σ ‖v_i‖²)` over the fields
        vectors = flat.view(flat.shape[0], len(self.features), -1)
        total, squares = vectors.sum(dim=1), vectors.square().sum(dim=(1, 2))
        if self.dense_vectors is not None:
            total = total + self.dense_vectors(dense)
            squares = squares + dense.square() @ self.dense_vectors.weight.square().sum(dim=0)
        return logits + 0.5 * (total.square().sum(dim=1) - squares)
