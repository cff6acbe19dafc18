"""The layers that models are made of.

`B` samples, `I` inputs and `O` outputs of a layer.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

Widths = tuple[Annotated[int, Field(gt=0, le=65_536)], ...]
"""Hidden widths of a tower of layers; more and larger ones cost time and memory and fit more."""


_STATISTICS_SHARE = 0.01
"""Of a batch in running statistics, at least."""


def draw(weights: Tensor, std: float) -> None:
    """Draws `weights ~ N(0, std²)`. Where only shapes are asked for (meta), torch would load its compiler for that."""
    if not weights.is_meta:
        nn.init.normal_(weights, std=std)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A layer `[B, I] → [B, O]` with weights ~ N(0, 2/(I+O)) and biases of zero.

    Source: the weights of the DLRM reference (arXiv 1906.00091, its authors' code). Ours differ in the biases, which
    are ~ N(0, 1/O) there: in a narrow layer some of them keep a ReLU at zero for every sample from the first step on.
    """
    layer = nn.Linear(inputs, outputs, bias)
    draw(layer.weight, (2 / (inputs + outputs)) ** 0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int], dropout: float = 0.0, norm: str = "none") -> nn.Sequential:
    """Layers `[B, I] → [B, hidden[-1]]`, each with a ReLU behind it; no layers at all pass their input on.

    `dropout` and `norm` are as in `TowerSpec`. The products have the same names with and without them, so that dropout
    may change when a job goes on.
    """
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise((inputs, *hidden)):
        behind = [*([NORMS[norm](right)] if norm in NORMS else []), nn.ReLU(), *([Dropout(dropout)] if dropout else [])]
        layers += [linear(left, right), behind[0] if len(behind) == 1 else nn.Sequential(*behind)]
    return nn.Sequential(*layers)


def tower(
    inputs: int, hidden: Sequence[int], outputs: int = 1, dropout: float = 0.0, norm: str = "none"
) -> nn.Sequential:
    """`mlp` with one more layer, of which nothing stands behind, `[B, I] → [B, O]`."""
    return mlp(inputs, hidden, dropout, norm).append(linear(hidden[-1] if hidden else inputs, outputs))


class Dropout(nn.Module):
    """Sets a share of its inputs to 0 in training and scales up what is left, as `nn.Dropout` does.

    Attributes:
        generator: of what is left out; each worker has its own, so that a job of one worker can be repeated bit by bit.
            None is torch's, which all threads share.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.generator: torch.Generator | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        kept = torch.empty_like(inputs).bernoulli_(1 - self.share, generator=self.generator)
        return inputs * kept.div_(1 - self.share)


class BatchNorm(nn.BatchNorm1d):
    """As torch's, but for two things.

    Running statistics are means over all batches so far, or about the last 100; torch's are over about the last ten,
    which come from rows that lie together in the data. A single sample has no variance: it is normalised by the running
    statistics, and they stay.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.BatchNorm1d's name for it
        trains, share = self.training and input.shape[0] > 1, 0.0
        if trains:
            self.num_batches_tracked.add_(1)
            share = max(_STATISTICS_SHARE, 1 / int(self.num_batches_tracked))
        running = self.running_mean, self.running_var
        return F.batch_norm(input, *running, self.weight, self.bias, trains, share, self.eps)


NORMS: Mapping[str, type[BatchNorm | nn.LayerNorm]] = {"batch": BatchNorm, "layer": nn.LayerNorm}
