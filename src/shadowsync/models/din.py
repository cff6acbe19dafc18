"""DIN: attention of the candidate over the behaviour sequence.

`B` samples, `N` dense columns, `L` behaviours of all samples, `D` width of a sequence's vectors, `H` hidden units.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shadowsync.models.model import ModelSpec, SequenceInput, Widths, find_targets, tower
from shadowsync.models.vectors import NO_SEQUENCES, JaggedVectors, concatenate, sequence_of


@dataclass(frozen=True)
class Din(ModelSpec):
    """Deep Interest Network (arXiv 1706.06978, section 4.3); widths of the features may differ.

    Ours differs: hidden layers have ReLUs where the paper has PReLU or Dice, whose statistics of the batch would make
    samples depend on each other; the activation unit sees difference and product of the two vectors, as in the authors'
    code, instead of their outer product; dense columns go into the tower; there is no mini-batch aware regularisation
    (section 5.1). As there, attention weights are not normalised, so that their sum says how strong an interest is.

    Attributes:
        targets: by sequence (pooling=none), the feature it is attended with. Left out: the feature with one id per
            sample that shares its table; and where nothing has pooling=none, each that shares a table so is a sequence.
        attention: hidden widths of the activation unit; a last layer to the weight is appended.
        deep: hidden widths of the tower; a last layer to the logit is appended.
    """

    name: ClassVar[str] = "din"
    targets: dict[str, str] = field(default_factory=dict)
    attention: Widths = (80, 40)
    deep: Widths = (200, 80)

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        return DinModule(self, dense_columns, dims, sequences)

    def wanted_sequences(self, histories: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(self.targets or histories)


class DinModule(nn.Module):
    """The model as `Din` describes it: logit = tower(dense columns, pooled vectors, the interest of each sequence)."""

    def __init__(
        self, spec: Din, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput]
    ) -> None:
        super().__init__()
        self.targets = find_targets(spec.name, spec.targets, dims, sequences)
        self.features = tuple(dims)
        self.units = nn.ModuleList(ActivationUnit(sequences[name].dim, spec.attention) for name in self.targets)
        inputs = dense_columns + sum(dims.values()) + sum(sequences[name].dim for name in self.targets)
        self.deep = tower(inputs, spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Any]) -> Tensor:
        pairs = zip(self.units, self.targets.items(), strict=True)
        interests = [unit(sequence_of(embeddings, name), embeddings[target]) for unit, (name, target) in pairs]
        columns = torch.cat([dense, concatenate(embeddings, self.features), *interests], dim=1)
        logits: Tensor = self.deep(columns).squeeze(1)
        return logits


class ActivationUnit(nn.Module):
    """The sum of a sample's behaviours, each times a learned function of itself and the target, `[B, D]`.

    Source: arXiv 1706.06978, equation 3 and figure 2. Computed on the behaviours that there are, without padding: on a
    CPU up to twice as fast as with padded sequences of 0 to 10 behaviours, and as fast where all have 10.
    """

    def __init__(self, dim: int, hidden: Widths) -> None:
        super().__init__()
        self.weight = tower(4 * dim, hidden)

    def forward(self, sequence: JaggedVectors, target: Tensor) -> Tensor:
        vectors = sequence.values
        asked = target.index_select(0, sequence.owners)
        weights = self.weight(torch.cat([asked, vectors, asked - vectors, asked * vectors], dim=1)).squeeze(1)
        return sequence.weighted_sum(weights.to(vectors.dtype))
