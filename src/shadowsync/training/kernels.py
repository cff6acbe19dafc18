"""Which precision workers compute in, and which library multiplies the matrices of which layer.

No library is the fastest everywhere. MKL leaves half of the vector unit of some AMD processors idle, where oneDNN does
not; on others both are equal, or MKL is ahead for narrow layers; and oneDNN's bf16 products are not there at all on a
processor without AVX-512. Nor is bf16: its instructions make twice the products of fp32 on Zen 4, and 0.6 of them on an
Intel Xeon without AMX. So both are timed on the machine, for the layers of the model (`benchmarks/machine.py` prints
the speeds).

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

import torch
from torch import Tensor, nn

from shadowsync.errors import ConfigError

PRECISIONS: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""The dtype of the autocast in which workers compute; parameters and gradients are float32 either way."""
TIMED_S = 0.05
"""Seconds that timing takes at most, about, for each precision."""
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
_LETTERS = ("".join(_FORWARD), "".join(_BY_INPUT), "".join(_BY_WEIGHT))


@dataclass(frozen=True)
class LayerKernels:
    """How the three products of a layer are computed."""

    forward: Forward
    by_input: Product
    by_weight: Product


@dataclass(frozen=True)
class Kernels:
    """The library for each product of each layer, as a run records it and `train.kernels` takes it.

    A layer is known by its `IxO` and has a letter for each of its products (forward, gradient of the input, gradient of
    the weight): `t` for torch's own, which is MKL for fp32 on x86, `o` for oneDNN; a capital computes the transposed
    product.

    Attributes:
        layers: the letters by `IxO`.
        otherwise: those of layers that are not named.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "ttt"

    def of(self, layer: nn.Linear) -> LayerKernels:
        """How this layer is computed."""
        letters = self.layers.get(_name(layer), self.otherwise)
        return LayerKernels(_FORWARD[letters[0]], _BY_INPUT[letters[1]], _BY_WEIGHT[letters[2]])

    def __str__(self) -> str:
        if self.layers:
            return ",".join(f"{name}={letters}" for name, letters in self.layers.items())
        return next(name for name, kernels in _WHOLE.items() if kernels == self)


_WHOLE: Mapping[str, Kernels] = {"torch": Kernels(), "onednn": Kernels(otherwise="ooo")}
_LAYER = re.compile(rf"(\d+x\d+)=([{_LETTERS[0]}][{_LETTERS[1]}][{_LETTERS[2]}])")


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
    """How workers compute.

    Attributes:
        precision: a key of `PRECISIONS`.
        kernels: of the layers on a CPU, as `parse_kernels` reads them.
        why: what decided about that, for the user; empty if the user did.
    """

    precision: str = "fp32"
    kernels: str = "torch"
    why: str = ""

    @property
    def sentence(self) -> str:
        """For the user."""
        letters = "".join(letters for letters in parse_kernels(self.kernels).layers.values()).lower()
        counted = f"oneDNN for {letters.count('o')} and torch for {letters.count('t')} of the layers' products"
        libraries = counted if letters else self.kernels
        return f"computing in {self.precision}{f' ({self.why})' if self.why else ''}, matrices by {libraries}"


IN_FP32 = Computing()


def choose_computing(precision: str, kernels: str, device: str, module: nn.Module, batch_size: int) -> Computing:
    """How workers on this machine compute.

    Args:
        precision: as in `train.precision`; `auto` is bf16 where the device multiplies it natively and, on a CPU, in
            clearly less time than fp32; else fp32.
        kernels: as in `train.kernels`; `auto` times the libraries.
        device: as in `train.device`.
        module: whose linear layers are timed.
        batch_size: `B`.

    Raises:
        ConfigError: `kernels` cannot be read.
    """
    kind = torch.device(device).type
    native = multiplies_bf16(kind)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    why = []
    chosen = precision if precision != "auto" else ("bf16" if native else "fp32")
    if precision == "auto" and native and kind == "cpu" and not bf16_leads(layers, batch_size):
        chosen = "fp32"
        why.append("products of bf16 bring too little on this processor")
    if not native and precision != "fp32":
        slow = "" if precision == "auto" else ": slow, train.precision=auto takes fp32"
        why.append(f"this {'processor' if kind == 'cpu' else 'device'} does not multiply bf16{slow}")
    dtype = PRECISIONS[chosen] or torch.float32
    runs = kind == "cpu" and onednn_runs(dtype)
    if kernels != "auto":
        asked = parse_kernels(kernels)
        if not runs and "o" in "".join((asked.otherwise, *asked.layers.values())).lower():
            kernels = "torch"
            why.append(f"oneDNN has no {chosen} products here")
    elif runs and layers:
        kernels = str(fastest_kernels(layers, batch_size, dtype))
    else:
        kernels = "torch"
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
def multiplies_bf16(device: str) -> bool:
    """The device has instructions for products of bf16, and the libraries may use them."""
    if device != "cpu":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    if platform.machine().lower() in ("x86_64", "amd64"):
        return any(found() for found in asked if found is not None) and onednn_runs(torch.bfloat16)
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported()) and onednn_runs(torch.bfloat16)


def fastest_kernels(
    layers: Iterable[nn.Linear],
    batch_size: int,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.thread_time,
) -> Kernels:
    """The fastest library for each product of each layer, timed in turn within about `TIMED_S` seconds.

    Layers of about the same shape are timed as one. What the time does not suffice for is left to torch.

    Args:
        layers: of the model.
        batch_size: `B`.
        dtype: of all factors.
        clock: seconds from any start; of this thread only, so that others on the machine do not count.
    """
    by_name = {_name(layer): _timed_shape(layer) for layer in layers}
    (races,) = _timed(by_name.values(), batch_size, [dtype], clock)
    return Kernels(
        {name: "".join(race.fastest for race in races[shape]) for name, shape in by_name.items() if shape in races}
    )


def bf16_leads(layers: Iterable[nn.Linear], batch_size: int, clock: Callable[[], float] = time.thread_time) -> bool:
    """Whether all products of these layers take clearly less time in bf16 than in fp32; arguments as above.

    Both are timed in turn: what else the machine does while roles start slows caches and clock of both alike.
    """
    shapes = [_timed_shape(layer) for layer in layers]
    fp32, bf16 = _timed(shapes, batch_size, [torch.float32, torch.bfloat16], clock)
    both = [shape for shape in shapes if all(races.get(shape) and _all_ran(races[shape]) for races in (fp32, bf16))]

    def seconds(races: Mapping[_Shape, Sequence[_Race]]) -> float:
        return sum(race.seconds * batch_size / _samples(shape, batch_size) for shape in both for race in races[shape])

    return seconds(bf16) < _BF16_LEAD * seconds(fp32)


def _timed(
    shapes: Iterable["_Shape"], batch_size: int, dtypes: Sequence[torch.dtype], clock: Callable[[], float]
) -> list[dict["_Shape", list["_Race"]]]:
    """By type the three products of layers of these shapes, as far as there is time; some may not have been run."""
    until = clock() + TIMED_S * len(dtypes)
    timed: list[dict[_Shape, list[_Race]]] = [{} for _ in dtypes]
    for shape in dict.fromkeys(shapes):
        for races, dtype in zip(timed, dtypes, strict=True):
            if clock() < until:
                races[shape] = [_Race(libraries) for libraries in _libraries(shape, batch_size, dtype)]
    with torch.no_grad():
        for race in itertools.cycle([race for races in timed for triple in races.values() for race in triple]):
            if clock() >= until:
                break
            race.run(clock)
    return timed


_Shape = tuple[int, int, bool]
"""Inputs, outputs, and whether there is a bias."""


def _timed_shape(layer: nn.Linear) -> _Shape:
    return _rounded(layer.in_features), _rounded(layer.out_features), layer.bias is not None


def _rounded(width: int) -> int:
    """A power of two not below it, as far as they are timed; narrow ones as they are."""
    return width if width <= 16 else min(_MOST_WIDTH, 1 << (width - 1).bit_length())


def _all_ran(races: Sequence["_Race"]) -> bool:
    return all(math.isfinite(race.seconds) for race in races)


class _Race:
    """One product by all libraries, and the shortest time of each."""

    def __init__(self, libraries: Mapping[str, Callable[[], Tensor]]) -> None:
        self._libraries = libraries
        self._best = dict.fromkeys(libraries, math.inf)

    def run(self, clock: Callable[[], float]) -> None:
        """All of them once. The first time oneDNN also makes its kernel, and does not lead yet."""
        for letter, product in self._libraries.items():
            began = clock()
            product()
            self._best[letter] = min(self._best[letter], clock() - began)

    @property
    def seconds(self) -> float:
        """Of the fastest library."""
        return min(self._best.values())

    @property
    def fastest(self) -> str:
        """Its letter; torch's where it leads by too little, or nothing is known."""
        found = min(self._best, key=self._best.__getitem__)
        return found if self._best[found] < _LEAD * self._best["t"] else "t"


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
    width, outputs, _ = shape
    return max(1, min(batch_size, _MOST_PRODUCTS // max(1, width * outputs)))


def _name(layer: nn.Linear) -> str:
    return f"{layer.in_features}x{layer.out_features}"
