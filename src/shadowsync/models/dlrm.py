"""DLRM: dot products between feature vectors. `B` samples, `N` dense columns, `F` features of width `D`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.interaction import DotInteraction
from shadowsync.models.mlp import linear, mlp, width
from shadowsync.models.model import ModelSpec, SequenceInput, Widths, common_dim, refuse_sequences
from shadowsync.models.pooled import NO_SEQUENCES, concatenate


@dataclass(frozen=True)
class Dlrm(ModelSpec):
    """DLRM (arXiv 1906.00091); the defaults are its Criteo Kaggle model.

    Attributes:
        bottom: hidden widths of the tower over the dense columns; a last layer to `D` is appended.
        top: hidden widths of the tower over the interaction; a last layer to the logit is appended.
    """

    name: ClassVar[str] = "dlrm"
    bottom: Widths = (512, 256, 64)
    top: Widths = (512, 256)

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        common_dim(self.name, dims)
        if dense_columns == 0 and len(dims) < 2:
            raise ConfigError(
                "model.name=dlrm needs two vectors to interact, but there is one categorical feature and no dense "
                "column: add a column, or set model.name=dcn"
            )
        return DlrmModule(self, dense_columns, dims)


class DlrmModule(nn.Module):
    """The model as `Dlrm` describes it. Without dense columns there is no bottom tower and the features interact alone.

    As in the reference, the bottom tower ends in a ReLU and no vector interacts with itself.
    """

    def __init__(self, spec: Dlrm, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        dim = common_dim(spec.name, dims)
        self.features = tuple(dims)
        self.bottom = mlp(dense_columns, (*spec.bottom, dim)) if dense_columns else None
        self.interaction = DotInteraction(len(dims) + bool(dense_columns))
        inputs = self.interaction.pairs + (dim if dense_columns else 0)
        self.top = mlp(inputs, spec.top).append(linear(width(inputs, spec.top), 1))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        vectors = concatenate(embeddings, self.features)
        if self.bottom is None:
            interacted = self.interaction(vectors)
        else:
            projected = self.bottom(dense)
            products = self.interaction(torch.cat([projected, vectors.to(projected.dtype)], dim=1))
            interacted = torch.cat([projected, products], dim=1)
        logits: Tensor = self.top(interacted).squeeze(1)
        return logits
