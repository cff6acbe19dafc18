"""How workers compute: the precision, the library for each product of each layer, and layers that are run by them.

No library is the fastest everywhere. MKL leaves half of the vector unit of some AMD processors idle, where oneDNN does
not; on others both are equal, or MKL is ahead for narrow layers; and oneDNN's bf16 products are not there at all on a
processor without AVX-512. Nor is bf16: its instructions make twice the products of fp32 on Zen 4, and 0.6 of them on an
Intel Xeon without AMX. So both are timed on the machine, for the layers of the model (`benchmarks/machine.py` prints
the speeds). A tower of layers is one autograd node, with the ReLUs and the casts inside, which keeps Python out of the
way at small batches.

`B` samples, `I` inputs, `O` outputs of a layer.
"""

import functools
import itertools
import math
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shadowsync.errors import ConfigError

PRECISIONS: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""The dtype of the autocast in which workers compute; parameters and gradients are float32 either way."""
TIMED_S = 0.1
"""Seconds that timing takes at most, about, for each precision; as much again for a first turn that does not count."""
_TURNS = 10
"""That count, at most: enough for the shortest time of each."""
_MOST_PRODUCTS = 1 << 23
"""Multiply-adds of a timed product; wider layers are timed with fewer samples."""
_MOST_WIDTH = 512
"""Inputs and outputs of a timed layer; from there on a library is as fast as it gets."""
_LEAD = 0.95
"""A library takes the place of torch's own where it needs less than this share of its time."""
_BF16_LEAD = 0.8
"""And bf16 that of fp32, whose products need no casts: in half of the time where it is worth having."""

Forward = Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]
"""Input `[B, I]`, weight `[O, I]`, bias `[O]` and whether a ReLU follows; returns `[B, O]`."""
Product = Callable[[Tensor, Tensor], Tensor]
"""`[B, O], [O, I] → [B, I]` for the gradient of the input; `[B, O], [B, I] → [O, I]` for that of the weight."""


def _forward_by_torch(inputs: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    outputs = nn.functional.linear(inputs, weight, bias)
    return outputs.relu_() if relu else outputs


def _forward_by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "relu" if relu else "none", [], "")
    return outputs


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[1] == 0:  # the gradient of a weight for no rows, of which oneDNN has no product
        return torch.mm(left, right)
    return _forward_by_onednn(left, right.t(), None, False)


_FORWARD: Mapping[str, Forward] = {"t": _forward_by_torch, "o": _forward_by_onednn}
_BY_INPUT: Mapping[str, Product] = {"t": torch.mm, "o": _by_onednn}
_BY_WEIGHT: Mapping[str, Product] = {
    "t": lambda gradient, inputs: torch.mm(gradient.t(), inputs),
    "T": lambda gradient, inputs: torch.mm(inputs.t(), gradient).t().contiguous(),
    "o": lambda gradient, inputs: _by_onednn(gradient.t(), inputs),
    "O": lambda gradient, inputs: _by_onednn(inputs.t(), gradient).t().contiguous(),
}
_LAYER = re.compile(rf"(\d+x\d+)=([{''.join(_FORWARD)}][{''.join(_BY_INPUT)}][{''.join(_BY_WEIGHT)}])")


class LayerKernels(NamedTuple):
    """How the three products of a layer are computed."""

    forward: Forward
    by_input: Product
    by_weight: Product


@dataclass(frozen=True)
class Kernels:
    """The library for each product of each layer, as a run records it and `train.kernels` takes it.

    A layer is known by its `IxO` and has a letter for each of its products (forward, gradient of the input, gradient of
    the weight): `t` for torch's own, which is MKL for fp32 on x86, `o` for oneDNN; a capital computes the transposed
    product. Layers that are not named have the letters `otherwise`.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "ttt"

    def of(self, layer: nn.Linear) -> LayerKernels:
        letters = self.layers.get(_name(layer), self.otherwise)
        return LayerKernels(_FORWARD[letters[0]], _BY_INPUT[letters[1]], _BY_WEIGHT[letters[2]])

    def __str__(self) -> str:
        if self.layers:
            return ",".join(f"{name}={letters}" for name, letters in self.layers.items())
        return next(name for name, kernels in _WHOLE.items() if kernels == self)


_WHOLE: Mapping[str, Kernels] = {"torch": Kernels(), "onednn": Kernels(otherwise="ooo")}


def parse_kernels(text: str) -> Kernels:
    """The inverse of `str(Kernels)`.

    Raises:
        ConfigError: it is neither the name of a library nor what a run records.
    """
    if text in _WHOLE:
        return _WHOLE[text]
    found = [_LAYER.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise ConfigError(
            f"train.kernels={text[:60]}: allowed are auto, {', '.join(_WHOLE)}, and what the result.json of an earlier "
            "run has under computing.kernels"
        )
    return Kernels({match[1]: match[2] for match in found if match is not None})


@dataclass(frozen=True)
class Computing:
    """How workers compute: `kernels` are those of the layers on a CPU, and `why` is empty if the user decided."""

    precision: str = "fp32"
    kernels: str = "torch"
    why: str = ""

    @property
    def sentence(self) -> str:
        """For the user."""
        letters = "".join(parse_kernels(self.kernels).layers.values()).lower()
        counted = f"oneDNN for {letters.count('o')} and torch for {letters.count('t')} of the layers' products"
        libraries = counted if letters else self.kernels
        return f"computing in {self.precision}{f' ({self.why})' if self.why else ''}, matrices by {libraries}"


IN_FP32 = Computing()


def choose_computing(precision: str, kernels: str, device: str, module: nn.Module, batch_size: int) -> Computing:
    """How workers on this machine compute, with batches of `B` samples.

    `precision`, `kernels` and `device` are as in `train`. Precision `auto` is bf16 where the device multiplies it
    natively and, on a CPU, the linear layers of `module` in clearly less time than fp32; kernels `auto` times the
    libraries.

    Raises:
        ConfigError: `kernels` cannot be read.
    """
    kind = torch.device(device).type
    native = multiplies_bf16(kind)
    asked = None if kernels == "auto" else parse_kernels(kernels)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    chosen = precision if precision != "auto" else ("bf16" if native else "fp32")
    runs = kind == "cpu" and onednn_runs(_dtype(chosen))
    compared = precision == "auto" and native and runs
    timed = {}
    if compared or (runs and asked is None):
        timed = timed_products(layers, batch_size, PRECISIONS if compared else [chosen])
    why = []
    if compared and not bf16_leads(layers, batch_size, timed):
        chosen = "fp32"
        why.append("products of bf16 bring too little on this processor")
    if not native and precision != "fp32":
        slow = "" if precision == "auto" else ": slow, train.precision=auto takes fp32"
        why.append(f"this {'processor' if kind == 'cpu' else 'device'} does not multiply bf16{slow}")
    if asked is None:
        kernels = str(fastest_kernels(layers, timed[chosen])) if runs and layers else "torch"
    elif not runs and "o" in "".join((asked.otherwise, *asked.layers.values())).lower():
        kernels = "torch"
        why.append(f"oneDNN has no {chosen} products here")
    return Computing(chosen, kernels, "; ".join(why))


@functools.cache
def onednn_runs(dtype: torch.dtype) -> bool:
    """oneDNN's products are in this torch, and run on this processor: they are tried, not only asked for."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (built and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    inputs, weight, bias = (torch.ones(shape, dtype=dtype) for shape in ((32, 16), (24, 16), (24,)))
    try:
        with torch.no_grad():
            outputs = _forward_by_onednn(inputs, weight, bias, True)
            back = _by_onednn(outputs, weight)
            product = _by_onednn(outputs.t(), inputs)
    except RuntimeError:
        return False
    return all(bool(torch.isfinite(tensor).all()) for tensor in (outputs, back, product))


@functools.cache
def processor() -> str:
    """Its name, and family and model, since virtual machines name several generations alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    about = [f"{word} {found[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if found.get(key)]
    return f"{name} ({', '.join(about)})" if about else name


@functools.cache
def multiplies_bf16(device: str) -> bool:
    """The device has instructions for products of bf16, and the libraries may use them."""
    if device != "cpu":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    if platform.machine().lower() in ("x86_64", "amd64"):
        return any(found() for found in asked if found is not None) and onednn_runs(torch.bfloat16)
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported()) and onednn_runs(torch.bfloat16)


_Shape = tuple[int, int, bool]
"""Inputs, outputs, and whether there is a bias."""
Timed = dict[_Shape, list[dict[str, float]]]
"""By shape, for each of the three products of a layer the shortest seconds of each library."""


def timed_products(
    layers: Iterable[nn.Linear],
    batch_size: int,
    precisions: Iterable[str],
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, Timed]:
    """What the products of these layers take with `B` samples in each precision.

    Layers of about the same shape are timed as one, and all precisions and libraries in turn: what else the machine
    does while roles start slows caches and clock of all alike. The first turn does not count: the libraries make their
    kernels there and come by their memory. The clock is that of this thread, so that others on the machine do not count
    either. What the time does not suffice for is missing, or has taken infinitely long.
    """
    timed: dict[str, Timed] = {precision: {} for precision in precisions}
    took, until = TIMED_S * len(timed), clock() + TIMED_S * len(timed)
    turns: list[tuple[dict[str, float], dict[str, Callable[[], Tensor]]]] = []
    for shape in dict.fromkeys(map(_timed_shape, layers)):
        for precision, seconds in timed.items():
            if clock() < until:
                products = _libraries(shape, batch_size, _dtype(precision))
                seconds[shape] = [dict.fromkeys(libraries, math.inf) for libraries in products]
                turns += zip(seconds[shape], products, strict=True)
    with torch.no_grad():
        for _, libraries in itertools.takewhile(lambda _: clock() < until, turns):
            for product in libraries.values():
                product()
        until = clock() + took
        for best, libraries in itertools.takewhile(lambda _: clock() < until, turns * _TURNS):
            for letter, product in libraries.items():
                began = clock()
                product()
                best[letter] = min(best[letter], clock() - began)
    return timed


def fastest_kernels(layers: Iterable[nn.Linear], timed: Timed) -> Kernels:
    """The fastest library for each product of each layer; torch's own where there was no time for it."""

    def letter(seconds: Mapping[str, float]) -> str:
        found = min(seconds, key=seconds.__getitem__)
        return found if seconds[found] < _LEAD * seconds["t"] else "t"

    by_name = {_name(layer): _timed_shape(layer) for layer in layers}
    return Kernels({name: "".join(map(letter, timed[shape])) for name, shape in by_name.items() if shape in timed})


def bf16_leads(layers: Iterable[nn.Linear], batch_size: int, timed: Mapping[str, Timed]) -> bool:
    """Whether all products of these layers take clearly less time in bf16 than in fp32; arguments as above."""
    fp32_s, bf16_s = 0.0, 0.0
    for shape in map(_timed_shape, layers):
        slow, fast = (
            sum(min(product.values()) for product in timed[precision].get(shape, [{"": math.inf}]))
            for precision in ("fp32", "bf16")
        )
        if math.isfinite(slow + fast):  # else there was no time for it
            share = batch_size / _samples(shape, batch_size)
            fp32_s, bf16_s = fp32_s + slow * share, bf16_s + fast * share
    return bf16_s < _BF16_LEAD * fp32_s


def _dtype(precision: str) -> torch.dtype:
    return PRECISIONS[precision] or torch.float32


def _timed_shape(layer: nn.Linear) -> _Shape:
    """Widths as powers of two not below them, as far as they are timed; narrow ones as they are."""
    inputs, outputs = (
        width if width <= 16 else min(_MOST_WIDTH, 1 << (width - 1).bit_length())
        for width in (layer.in_features, layer.out_features)
    )
    return inputs, outputs, layer.bias is not None


def _libraries(shape: _Shape, batch_size: int, dtype: torch.dtype) -> list[dict[str, Callable[[], Tensor]]]:
    """The three products of a layer, each by all libraries."""
    width, outputs, has_bias = shape
    samples = _samples(shape, batch_size)
    inputs = torch.full((samples, width), 0.5, dtype=dtype)
    gradient = torch.full((samples, outputs), 0.5, dtype=dtype)
    weight = torch.full((outputs, width), 0.5, dtype=dtype)
    bias = torch.zeros(outputs, dtype=dtype) if has_bias else None
    return [
        {letter: functools.partial(run, inputs, weight, bias, True) for letter, run in _FORWARD.items()},
        {letter: functools.partial(run, gradient, weight) for letter, run in _BY_INPUT.items()},
        {letter: functools.partial(run, gradient, inputs) for letter, run in _BY_WEIGHT.items()},
    ]


def _samples(shape: _Shape, batch_size: int) -> int:
    return max(1, min(batch_size, _MOST_PRODUCTS // max(1, shape[0] * shape[1])))


def _name(layer: nn.Linear) -> str:
    return f"{layer.in_features}x{layer.out_features}"


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
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]
    kernels = [layer.kernels for layer in layers]
    result: Tensor = _Tower.apply(inputs.to(dtype), kernels, relus, *parameters)  # type: ignore[no-untyped-call]
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
        # as torch's own layers, which may be followed by what works in place: an output is kept for its ReLU only
        ctx.save_for_backward(*(values if relus[-1] else values[:-1]), *weights)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.relus)
        kept = depth + bool(ctx.relus[-1])
        values, weights = ctx.saved_tensors[:kept], ctx.saved_tensors[kept:]
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
