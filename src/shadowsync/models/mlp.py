"""Towers of fully connected layers. `B` samples, `I` inputs, `O` outputs."""

import itertools
from collections.abc import Sequence

from torch import nn


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A layer `[B, I] → [B, O]` with weights ~ N(0, 2/(I+O)) and biases of zero.

    Source: the weights of the DLRM reference (arXiv 1906.00091, its authors' code). Ours differ in the biases, which
    are ~ N(0, 1/O) there: in a narrow layer some of them keep a ReLU at zero for every sample from the first step on.
    """
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.normal_(layer.weight, std=(2 / (inputs + outputs)) ** 0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Layers `[B, I] → [B, hidden[-1]]`, each with a ReLU behind it; no layers at all pass their input on."""
    layers = []
    for left, right in itertools.pairwise((inputs, *hidden)):
        layers += [linear(left, right), nn.ReLU()]
    return nn.Sequential(*layers)


def width(inputs: int, hidden: Sequence[int]) -> int:
    """How many columns `mlp(inputs, hidden)` returns."""
    return hidden[-1] if hidden else inputs
