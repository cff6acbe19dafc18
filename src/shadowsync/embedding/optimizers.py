"""The optimizers of embedding rows: each touches only the rows that have a gradient.

`K` distinct rows with a gradient, `R` rows of a block (all tables of one width), `D` width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.embedding.storage import RowOptimizer
from shadowsync.registry import choose


class Extent(Enum):
    """What one number of an optimizer's state belongs to."""

    ROW = "row"
    ELEMENT = "element"
    SHARD = "shard"


Block = Mapping[str, Tensor]
"""The live tensors of all tables of one width: `weight` `[R, D]` and those of the rule's state, `[R]` or `[R, D]`."""


class RowRule(ABC):
    """An optimizer of rows; holds hyper-parameters only.

    Attributes:
        state: the tensors kept beside the weights, and what each of their numbers belongs to.
        options: the fields of `RowOptimizer` that it uses.
    """

    name: ClassVar[str]
    state: ClassVar[Mapping[str, Extent]]
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: RowOptimizer) -> None:
        self.settings = settings

    @abstractmethod
    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        """Changes weights and state of rows in place.

        Args:
            block: of the rows.
            rows: distinct positions in it, int64 `[K]`.
            gradient: each row's, summed over its occurrences, float32 `[K, D]`.
            pushes: how many each row's shard has had, this one included, `[K]`; None unless the rule counts them.
            lr: learning rate.
        """

    @classmethod
    def row_bytes(cls, dim: int) -> int:
        """Bytes that one row of `dim` floats takes with its state."""
        per_extent = {Extent.ROW: 1, Extent.ELEMENT: dim, Extent.SHARD: 0}
        return 4 * (dim + sum(per_extent[extent] for extent in cls.state.values()))


class RowwiseAdagrad(RowRule):
    """Adagrad with one sum of squares per row: `s += mean_d(g²); w −= lr · g / (sqrt(s) + eps)`.

    As FBGEMM computes it; Duchi et al. 2011 keep a sum for every element.
    """

    name = "rowwise_adagrad"
    options = ("eps",)
    state: ClassVar[Mapping[str, Extent]] = {"momentum": Extent.ROW}

    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        squares = block["momentum"]
        sums = squares.index_select(0, rows) + gradient.square().mean(1)
        squares.index_copy_(0, rows, sums)
        scale = lr / (sums.sqrt() + self.settings.eps)
        block["weight"].index_add_(0, rows, gradient * scale[:, None], alpha=-1)


class Adam(RowRule):
    """Lazy Adam (Kingma and Ba 2015): rows without a gradient keep weights and moments as they are.

    The bias correction uses the number of pushes to the row's table, not to the row; where every row has a gradient in
    every push this is `torch.optim.Adam`, with eps at the same place.
    """

    name = "adam"
    options = ("eps", "beta1", "beta2")
    state: ClassVar[Mapping[str, Extent]] = {
        "exp_avg": Extent.ELEMENT,
        "exp_avg_sq": Extent.ELEMENT,
        "step": Extent.SHARD,
    }

    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        assert pushes is not None, "a rule with a step is given the pushes"
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        mean = block["exp_avg"].index_select(0, rows).lerp_(gradient, 1 - beta1)
        square = block["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        block["exp_avg"].index_copy_(0, rows, mean)
        block["exp_avg_sq"].index_copy_(0, rows, square)
        age = pushes.to(torch.float64)[:, None]
        step_size = (lr / (1 - beta1**age)).float()
        root = (1 - beta2**age).sqrt().float()
        block["weight"].index_add_(0, rows, step_size * mean / (square.sqrt_() / root + self.settings.eps), alpha=-1)


class SGD(RowRule):
    """`w −= lr · g`."""

    name = "sgd"
    state: ClassVar[Mapping[str, Extent]] = {}

    def apply(self, block: Block, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        block["weight"].index_add_(0, rows, gradient, alpha=-lr)


def rule_class(optimizer: str) -> type[RowRule]:
    """The rule called `optimizer`; raises `ConfigError` if there is none."""
    return choose("embedding.optimizer", optimizer, "shadowsync.embedding", RowRule)
