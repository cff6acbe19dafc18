"""Towers of fully connected layers by oneDNN, in fp32 and bf16, with the ReLUs and the casts inside.

torch sends fp32 products on a CPU to MKL, which on AMD processors leaves half of the vector unit idle: 105 GFLOP/s a
core against 240 by oneDNN on the same EPYC (`benchmarks/machine.py` prints both). oneDNN takes the ReLU along, and
one autograd node for a whole tower keeps Python out of the way at small batches.
`B` samples, `I` inputs, `O` outputs of a layer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_SMALL_PRODUCT = 1 << 18
"""Multiply-adds below which MKL is done before oneDNN has looked up its primitive."""


class FastLinear(nn.Linear):
    """An `nn.Linear` that computes by oneDNN, in the dtype of the autocast where one is on."""

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
        layers = [layer for layer in self if isinstance(layer, nn.Linear)]
        behind = [*list(self)[1:], None]
        relus = [isinstance(b, nn.ReLU) for a, b in zip(self, behind, strict=True) if isinstance(a, nn.Linear)]
        return _run_tower(input, layers, relus)


def accelerate(module: nn.Module) -> None:
    """Makes every plain `nn.Linear` inside `module`, and every sequence of such layers and ReLUs, a fast one in place.

    Parameters, names and places stay. Subclasses and modules with hooks are left alone: they may do more than a
    product. Where this torch is built without oneDNN nothing changes. Results differ from MKL's in rounding only.
    """
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (built and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    modules = list(module.modules())
    for child in modules:
        if _is_plain(child, nn.Sequential) and _is_tower(list(child.children())):
            child.__class__ = FastTower
    for child in modules:
        if _is_plain(child, nn.Linear):
            child.__class__ = FastLinear


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


def _run_tower(inputs: Tensor, layers: Sequence[nn.Linear], relus: Sequence[bool]) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layers[0].weight.dtype
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    result: Tensor = _Tower.apply(inputs.to(dtype), relus, *weights, *biases)  # type: ignore[no-untyped-call]
    return result


class _Tower(torch.autograd.Function):
    """`x ← relu(x Wᵀ + b)` layer after layer; casts weights to the dtype of the input, autograd casts back."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, relus: Sequence[bool], *parameters: Tensor | None) -> Tensor:
        torch.get_num_threads()  # a new thread takes over torch's setting when asked; oneDNN alone takes every core
        cast = [None if parameter is None else parameter.to(inputs.dtype) for parameter in parameters]
        weights, biases = cast[: len(relus)], cast[len(relus) :]
        values = [inputs]
        for weight, bias, relu in zip(weights, biases, relus, strict=True):
            activation = "relu" if relu else "none"
            values.append(torch.ops.mkldnn._linear_pointwise(values[-1], weight, bias, activation, [], ""))
        ctx.relus = relus
        ctx.save_for_backward(*values, *weights)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.relus)
        values, weights = ctx.saved_tensors[: depth + 1], ctx.saved_tensors[depth + 1 :]
        needs_inputs, _, *needs = ctx.needs_input_grad
        found: list[Tensor | None] = [None] * (2 * depth)
        for layer in reversed(range(depth)):
            if ctx.relus[layer]:
                gradient = torch.ops.aten.threshold_backward(gradient, values[layer + 1], 0)
            if needs[layer]:
                found[layer] = _outer_product(gradient, values[layer])
            if needs[depth + layer]:
                found[depth + layer] = gradient.sum(dim=0)
            if layer > 0 or needs_inputs:
                gradient = _product(gradient, weights[layer])
        return gradient if needs_inputs else None, None, *found


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`; torch itself sends bf16 to oneDNN."""
    if left.dtype != torch.float32 or left.numel() * right.shape[1] < _SMALL_PRODUCT:
        return left @ right
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    return product


def _outer_product(gradient: Tensor, inputs: Tensor) -> Tensor:
    """`gradientᵀ @ inputs`, `[O, I]`; oneDNN is up to three times faster with the longer side last."""
    if gradient.dtype == torch.float32 and gradient.shape[1] > inputs.shape[1]:
        return _product(inputs.t(), gradient).t().contiguous()
    return _product(gradient.t(), inputs)
