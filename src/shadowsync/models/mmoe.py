"""MMoE: experts that several tasks share, mixed anew for each. `B` samples, `N` dense columns, `T` tasks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from shadowsync.models.layers import Widths, linear
from shadowsync.models.model import SequenceInput, TowerSpec, need_features, refuse_sequences
from shadowsync.models.vectors import NO_SEQUENCES, concatenate


@dataclass(frozen=True)
class Mmoe(TowerSpec):
    """Multi-gate mixture of experts (Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts, KDD 2018). With experts `f_i(x)` and gates `g_t(x) = softmax(W_t x)` the tower of task t
    sees `Σ_i g_t,i(x) f_i(x)`. Ours differs: gates have biases, and experts any number of layers.

    Attributes:
        experts: how many there are; more cost time, and let tasks share less.
        expert: hidden widths of each expert.
        top: hidden widths of each task's tower; a last layer to its logit is appended.
    """

    name: ClassVar[str] = "mmoe"
    several: ClassVar[bool] = True
    internal: ClassVar[tuple[str, ...]] = ("tasks",)
    experts: Annotated[int, Field(ge=1, le=1024)] = 8
    expert: Annotated[Widths, Field(min_length=1)] = (128,)
    top: Widths = (64,)
    tasks: int = 1

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        need_features(self.name, dims)
        return MmoeModule(self, dense_columns, dims)


class MmoeModule(nn.Module):
    """Logits `[B, T]`, of one task `[B]`."""

    def __init__(self, spec: Mmoe, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        inputs = dense_columns + sum(dims.values())
        self.features = tuple(dims)
        self.experts = nn.ModuleList(spec.mlp(inputs, spec.expert) for _ in range(spec.experts))
        self.gates = nn.ModuleList(linear(inputs, spec.experts) for _ in range(spec.tasks))
        self.towers = nn.ModuleList(spec.tower(spec.expert[-1], spec.top) for _ in range(spec.tasks))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        inputs = torch.cat([dense, concatenate(embeddings, self.features)], dim=1)
        answers = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        mixed = (torch.einsum("be,bed->bd", gate(inputs).softmax(dim=1), answers) for gate in self.gates)
        logits = torch.cat([tower(each) for tower, each in zip(self.towers, mixed, strict=True)], dim=1)
        return logits.squeeze(1) if len(self.towers) == 1 else logits
