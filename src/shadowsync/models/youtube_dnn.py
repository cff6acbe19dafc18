"""The network that ranks videos at YouTube: averaged histories and powers of the columns, and a tower over them.

`B` samples, `N` dense columns, `D_f` width of feature f's vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.layers import Widths
from shadowsync.models.model import SequenceInput, TowerSpec, refuse_sequences
from shadowsync.models.vectors import NO_SEQUENCES, concatenate


@dataclass(frozen=True)
class YoutubeDnn(TowerSpec):
    """The ranking network of "Deep Neural Networks for YouTube Recommendations" (Covington, Adams, Sargin, RecSys
    2016); widths of the features may differ.

    A feature with several ids per sample is averaged. Beside a dense column x stand its square and its root. Ours
    differs: columns come as the data gives them, where the paper has their quantiles in [0, 1), so that the root keeps
    the sign, `sign(x) √|x|`; labels are clicks that count alike, where the paper weights them by the time watched.

    Attributes:
        deep: hidden widths of the tower; a last layer to the logit is appended.
    """

    name: ClassVar[str] = "youtube_dnn"
    lists: ClassVar[Literal["sum", "mean"] | None] = "mean"
    deep: Widths = (1024, 512, 256)

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        if not dims and not dense_columns:
            raise ConfigError(f"model.name={self.name} needs at least one column; the data has none")
        return YoutubeDnnModule(self, dense_columns, dims)


class YoutubeDnnModule(nn.Module):
    """Logit = tower(vectors, columns, their squares and their roots)."""

    def __init__(self, spec: YoutubeDnn, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.features = tuple(dims)
        self.deep = spec.tower(3 * dense_columns + sum(dims.values()), spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        powers = [dense, dense.square(), dense.sign() * dense.abs().sqrt()]
        vectors = [concatenate(embeddings, self.features)] if self.features else []
        logits: Tensor = self.deep(torch.cat([*powers, *vectors], dim=1)).squeeze(1)
        return logits
