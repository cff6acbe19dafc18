"""First-order weights, one scalar for each id beside its vector, and the pairs of a factorisation machine.

A row of a table holds an id's weight in its first column and its vector in the others, so that both come with one
look-up.

`B` samples, `N` dense columns, `F` features, `D_f` width of feature f's vector, `D` where all are equal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shadowsync.errors import ConfigError
from shadowsync.models.layers import draw, linear
from shadowsync.models.vectors import concatenate


def vector_dims(model: str, dims: Mapping[str, int]) -> dict[str, int]:
    """The widths `D_f` of the vectors in rows of these widths; raises `ConfigError` for a row that has none."""
    for feature, width in dims.items():
        if width < 2:
            raise ConfigError(
                f"model.name={model} takes the first column of a row as the id's weight and the others as its vector, "
                f"but rows of feature {feature} have {width}: set the dim of its table to 2 or more"
            )
    return {feature: width - 1 for feature, width in dims.items()}


def split_rows(embeddings: Mapping[str, Tensor], dims: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """The weights, `[B, F]`, and the vectors side by side, `[B, Σ D_f]`, of features with vectors of these widths."""
    if len(set(dims.values())) == 1:
        flat = concatenate(embeddings, tuple(dims))
        rows = flat.view(flat.shape[0], len(dims), -1)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return rows[:, :, 0], rows[:, :, 1:].flatten(1)
        weights, vectors = _SplitRows.apply(rows)  # type: ignore[no-untyped-call]
        return weights, vectors
    rows_of = [embeddings[feature] for feature in dims]
    return torch.cat([rows[:, :1] for rows in rows_of], dim=1), torch.cat([rows[:, 1:] for rows in rows_of], dim=1)


class _SplitRows(torch.autograd.Function):
    """Of rows `[B, F, 1 + D]`. Autograd would write the gradients of both parts into zeros and add them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.shape = rows.shape
        return rows[:, :, 0].contiguous(), rows[:, :, 1:].flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_weights: Tensor, by_vectors: Tensor) -> Tensor:
        gradient = by_vectors.new_empty(ctx.shape)
        gradient[:, :, 0] = by_weights
        gradient[:, :, 1:] = by_vectors.reshape(*ctx.shape[:2], -1)
        return gradient


class FirstOrder(nn.Module):
    """`w₀ + Σ_i w_i x_i` over the ids of a sample and its dense columns, `[B]`."""

    def __init__(self, dense_columns: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense = linear(dense_columns, 1, bias=False) if dense_columns else None

    def forward(self, dense: Tensor, weights: Tensor) -> Tensor:
        total = weights.sum(dim=1) + self.bias
        return total if self.dense is None else total + self.dense(dense).squeeze(1)


def column_vectors(dense_columns: int, dim: int) -> nn.Linear | None:
    """A vector for each dense column, which makes it a field; small at first, as pairs grow with the square of what may
    be a large value. None where there are no such columns."""
    if not dense_columns:
        return None
    vectors = nn.Linear(dense_columns, dim, bias=False)
    draw(vectors.weight, 0.01)
    return vectors


def pairs_of_fields(dense: Tensor, flat: Tensor, features: Sequence[str], of_columns: nn.Linear | None) -> Tensor:
    """`Σ_{i<j} ⟨v_i, v_j⟩ = ½ (‖Σ v_i‖² − Σ ‖v_i‖²)` over the fields, `[B]`.

    `flat` are the features' vectors, `[B, F · D]`; a dense column's is its value times its vector.
    """
    vectors = flat.view(flat.shape[0], len(features), -1)
    total, squares = vectors.sum(dim=1), vectors.square().sum(dim=(1, 2))
    if of_columns is not None:
        total = total + of_columns(dense)
        squares = squares + dense.square() @ of_columns.weight.square().sum(dim=0)
    pairs: Tensor = 0.5 * (total.square().sum(dim=1) - squares)
    return pairs
