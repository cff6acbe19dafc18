"""DCN-V2: explicit crosses of bounded degree beside or below a deep tower.

`B` samples, `N` dense columns, `I = N + Σ D_f` columns of all inputs side by side, `R` rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.layers import Widths, linear
from shadowsync.models.model import SequenceInput, TowerSpec, refuse_sequences
from shadowsync.models.vectors import NO_SEQUENCES, concatenate


@dataclass(frozen=True)
class Dcn(TowerSpec):
    """DCN-V2 (arXiv 2008.13535); widths of the features may differ.

    Ours differs: no mixture of low-rank experts.

    Attributes:
        cross: cross layers; each raises the degree of the crosses by one.
        low_rank: rank `R` of each layer's matrix as a product of two; larger costs more, None keeps it whole.
        deep: hidden widths of the deep tower.
        structure: `stacked` runs the tower on the crosses' output, `parallel` beside them on the input.
    """

    name: ClassVar[str] = "dcn"
    cross: Annotated[int, Field(ge=1, le=64)] = 3
    low_rank: Annotated[int, Field(ge=1)] | None = None
    deep: Widths = (512, 256)
    structure: Literal["stacked", "parallel"] = "stacked"

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        inputs = dense_columns + sum(dims.values())
        if inputs == 0:
            raise ConfigError("model.name=dcn needs at least one column; the data has none")
        if self.low_rank is not None and self.low_rank >= inputs:
            raise ConfigError(
                f"model.low_rank={self.low_rank} must be below the {inputs} input columns; leave it out for full rank"
            )
        return DcnModule(self, inputs, tuple(dims))


class CrossLayer(nn.Module):
    """`x_{l+1} = x_0 ⊙ (W x_l + b) + x_l`, with `W = U V` of rank `R` where one is given."""

    def __init__(self, inputs: int, low_rank: int | None) -> None:
        super().__init__()
        self.weight = (
            linear(inputs, inputs)
            if low_rank is None
            else nn.Sequential(linear(inputs, low_rank, bias=False), linear(low_rank, inputs))
        )

    def forward(self, first: Tensor, crossed: Tensor) -> Tensor:
        """`x_0` and `x_l`, both `[B, I]`, to `x_{l+1}` `[B, I]`."""
        return torch.addcmul(crossed, first, self.weight(crossed))


class DcnModule(nn.Module):
    """The model as `Dcn` describes it."""

    def __init__(self, spec: Dcn, inputs: int, features: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features
        self.stacked = spec.structure == "stacked"
        self.cross = nn.ModuleList(CrossLayer(inputs, spec.low_rank) for _ in range(spec.cross))
        self.deep = spec.mlp(inputs, spec.deep)
        deep_width = spec.deep[-1] if spec.deep else inputs
        self.logit = linear(deep_width if self.stacked else inputs + deep_width, 1)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        first = torch.cat([dense, concatenate(embeddings, self.features)], dim=1) if self.features else dense
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        last = self.deep(crossed) if self.stacked else torch.cat([crossed, self.deep(first)], dim=1)
        logits: Tensor = self.logit(last).squeeze(1)
        return logits
