"""Towers of fully connected layers as one autograd node, in fp32 and bf16, with the ReLUs and the casts inside.

One node for a whole tower keeps Python out of the way at small batches, and lets each product be computed by the
library that is faster at it on this machine (`training.kernels`).
`B` samples, `I` inputs, `O` outputs of a layer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shadowsync.training.kernels import Kernels, LayerKernels


class FastLinear(nn.Linear):
    """An `nn.Linear` that computes by its kernels, in the dtype of the autocast where one is on."""

    kernels: LayerKernels

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        if _fits(input):
            return _run_tower(input, [self], [False])
        return super().forward(input)


class FastTower(nn.Sequential):
    """An `nn.Sequential` of linear layers, some with a ReLU behind them, computed as one node of the graph."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Sequential's name for it
        if not _fits(input):
            output: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return output
        layers = [layer for layer in self if isinstance(layer, FastLinear)]
        behind = [*list(self)[1:], None]
        relus = [isinstance(b, nn.ReLU) for a, b in zip(self, behind, strict=True) if isinstance(a, FastLinear)]
        return _run_tower(input, layers, relus)


def accelerate(module: nn.Module, kernels: Kernels) -> None:
    """Makes every plain `nn.Linear` inside `module`, and every sequence of such layers and ReLUs, a fast one in place.

    Parameters, names and places stay. Subclasses and modules with hooks are left alone: they may do more than a
    product. Results differ from torch's in rounding only.
    """
    modules = list(module.modules())
    for child in modules:
        if _is_plain(child, nn.Sequential) and _is_tower(list(child.children())):
            child.__class__ = FastTower
    for child in modules:
        if isinstance(child, nn.Linear) and _is_plain(child, nn.Linear):
            own = kernels.of(child)
            child.__class__ = FastLinear
            vars(child)["kernels"] = own


def _is_tower(layers: Sequence[nn.Module]) -> bool:
    """Plain linear layers, each with at most one ReLU behind it."""
    linear = [_is_plain(layer, nn.Linear) for layer in layers]
    relu = [_is_plain(layer, nn.ReLU) for layer in layers]
    known = all(a or b for a, b in zip(linear, relu, strict=True))
    return bool(layers) and linear[0] and known and not any(a and b for a, b in itertools.pairwise(relu))


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is kind and not any(hooks) and "forward" not in vars(layer)


def _fits(inputs: Tensor) -> bool:
    return inputs.dim() == 2 and inputs.device.type == "cpu" and inputs.dtype in (torch.float32, torch.bfloat16)


def _run_tower(inputs: Tensor, layers: Sequence[FastLinear], relus: Sequence[bool]) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layers[0].weight.dtype
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    kernels = [layer.kernels for layer in layers]
    result: Tensor = _Tower.apply(inputs.to(dtype), kernels, relus, *weights, *biases)  # type: ignore[no-untyped-call]
    return result


class _Tower(torch.autograd.Function):
    """`x ← relu(x Wᵀ + b)` layer after layer; casts weights to the dtype of the input, autograd casts back."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, kernels: Sequence[LayerKernels], relus: Sequence[bool], *parameters: Tensor | None
    ) -> Tensor:
        torch.get_num_threads()  # a new thread takes over torch's setting when asked; oneDNN alone takes every core
        cast: list[Any] = [None if parameter is None else parameter.to(inputs.dtype) for parameter in parameters]
        weights, biases = cast[: len(relus)], cast[len(relus) :]
        values = [inputs]
        for kernel, weight, bias, relu in zip(kernels, weights, biases, relus, strict=True):
            values.append(kernel.forward(values[-1], weight, bias, relu))
        ctx.kernels, ctx.relus = kernels, relus
        ctx.save_for_backward(*values, *weights)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.relus)
        values, weights = ctx.saved_tensors[: depth + 1], ctx.saved_tensors[depth + 1 :]
        needs_inputs, _, _, *needs = ctx.needs_input_grad
        found: list[Tensor | None] = [None] * (2 * depth)
        for layer in reversed(range(depth)):
            if ctx.relus[layer]:
                gradient = torch.ops.aten.threshold_backward(gradient, values[layer + 1], 0)
            if needs[layer]:
                found[layer] = ctx.kernels[layer].by_weight(gradient, values[layer])
            if needs[depth + layer]:
                found[depth + layer] = gradient.sum(dim=0)
            if layer > 0 or needs_inputs:
                gradient = ctx.kernels[layer].by_input(gradient, weights[layer])
        return gradient if needs_inputs else None, None, None, *found
