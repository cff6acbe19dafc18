"""The optimizers of embedding rows: each touches only the rows that have a gradient.

`K` distinct rows with a gradient, `R` rows of a block (all tables of one width), `D` width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor


class Extent(Enum):
    """What one number of an optimizer's state belongs to."""

    ROW = "row"
    ELEMENT = "element"
    SHARD = "shard"


Block = Mapping[str, Tensor]
"""The live tensors of all tables of one width: `weight` `[R, D]` and the state, `[R]` or `[R, D]`."""


@dataclass(frozen=True)
class RowOptimizer(ABC):
    """An optimizer of rows; holds its options only, among `eps` (added to the denominator) and the decays of moments.

    Attributes:
        state: the tensors kept beside the weights, and what each of their numbers belongs to.
        l2: each time a row is stepped, so many times the row is added to its gradient.
    """

    name: ClassVar[str]
    state: ClassVar[Mapping[str, Extent]]
    l2: float = field(default=0.0, kw_only=True)

    def penalised(self, block: Block, rows: Tensor, gradient: Tensor) -> Tensor:
        """The gradients `[K, D]` of these rows of a block with that of `l2 / 2 · ‖row‖²`, once for each row however
        often it occurs in a batch.
        """
        return torch.add(gradient, block["weight"].index_select(0, rows), alpha=self.l2) if self.l2 else gradient

    @abstractmethod
    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        """Changes weights and state of the rows at these distinct positions of a block, int64 `[K]`, in place.

        `gradient` is each row's, summed over its occurrences, float32 `[K, D]`; `pushes`, how many each row's shard has
        had, this one included, `[K]`, is None unless the state has a step.
        """

    @classmethod
    def row_bytes(cls, dim: int) -> int:
        """Bytes that one row of `dim` floats takes with its state."""
        per_extent = {Extent.ROW: 1, Extent.ELEMENT: dim, Extent.SHARD: 0}
        return 4 * (dim + sum(per_extent[extent] for extent in cls.state.values()))


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one sum of squares per row: `s += mean_d(g²); w −= lr · g / (sqrt(s) + eps)`.

    As FBGEMM computes it; Duchi et al. 2011 keep a sum for every element.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    state: ClassVar[Mapping[str, Extent]] = {"momentum": Extent.ROW}
    eps: float

    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        squares = block["momentum"]
        sums = squares.index_select(0, rows) + gradient.square().mean(1)
        squares.index_copy_(0, rows, sums)
        scale = lr / (sums.sqrt() + self.eps)
        block["weight"].index_add_(0, rows, gradient * scale[:, None], alpha=-1)


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Lazy Adam (Kingma and Ba 2015): rows without a gradient keep weights and moments as they are.

    The bias correction uses the number of pushes to the row's table, not to the row; where every row has a gradient in
    every push this is `torch.optim.Adam`, with eps at the same place.
    """

    name: ClassVar[str] = "adam"
    state: ClassVar[Mapping[str, Extent]] = {
        "exp_avg": Extent.ELEMENT,
        "exp_avg_sq": Extent.ELEMENT,
        "step": Extent.SHARD,
    }
    eps: float
    beta1: float
    beta2: float

    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        assert pushes is not None, "an optimizer with a step is given the pushes"
        mean = block["exp_avg"].index_select(0, rows).lerp_(gradient, 1 - self.beta1)
        square = (
            block["exp_avg_sq"]
            .index_select(0, rows)
            .mul_(self.beta2)
            .addcmul_(gradient, gradient, value=1 - self.beta2)
        )
        block["exp_avg"].index_copy_(0, rows, mean)
        block["exp_avg_sq"].index_copy_(0, rows, square)
        age = pushes.to(torch.float64)[:, None]
        step_size = (lr / (1 - self.beta1**age)).float()
        root = (1 - self.beta2**age).sqrt().float()
        block["weight"].index_add_(0, rows, step_size * mean / (square.sqrt_() / root + self.eps), alpha=-1)


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """`w −= lr · g`."""

    name: ClassVar[str] = "sgd"
    state: ClassVar[Mapping[str, Extent]] = {}

    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        block["weight"].index_add_(0, rows, gradient, alpha=-lr)
