"""FM: a factorisation machine alone. `N` dense columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from shadowsync.models.first_order import FirstOrder, column_vectors, pairs_of_fields, split_rows, vector_dims
from shadowsync.models.model import ModelSpec, SequenceInput, common_dim, refuse_sequences
from shadowsync.models.vectors import NO_SEQUENCES


@dataclass(frozen=True)
class Fm(ModelSpec):
    """Factorization Machine of second order (Rendle, ICDM 2010).

    Ours differs: ids of one list are one field, their pooled vector, so that they make no pairs among themselves.
    """

    name: ClassVar[str] = "fm"
    not_options: ClassVar[Mapping[str, str]] = {
        **ModelSpec.not_options,
        **dict.fromkeys(
            ("deep", "dropout", "norm"),
            "a factorisation machine has no layers: set model.name=deepfm, or embedding.l2 against overfitting",
        ),
    }

    @property
    def extra_columns(self) -> int:
        return 1

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        refuse_sequences(self.name, sequences)
        common_dim(self.name, dims)
        return FmModule(dense_columns, vector_dims(self.name, dims))


class FmModule(nn.Module):
    """Logit = first order + all pairs of fields."""

    def __init__(self, dense_columns: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = dict(dims)
        self.first_order = FirstOrder(dense_columns)
        self.dense_vectors = column_vectors(dense_columns, next(iter(dims.values())))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        weights, vectors = split_rows(embeddings, self.dims)
        logits: Tensor = self.first_order(dense, weights)
        return logits + pairs_of_fields(dense, vectors, tuple(self.dims), self.dense_vectors)
