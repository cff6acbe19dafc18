"""Dense optimizers equal torch's own, step by step."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.errors import ConfigError
from shadowsync.registry import build, members
from shadowsync.training.optimizers import Adagrad, Adam, DenseOptimizer, Sgd

TorchOptimizer = Callable[[list[Tensor], bool], torch.optim.Optimizer]

PAIRS: dict[str, tuple[DenseOptimizer, TorchOptimizer]] = {
    "sgd": (Sgd(), lambda p, fused: torch.optim.SGD(p, lr=0.1, fused=fused)),
    "adagrad": (Adagrad(eps=1e-6), lambda p, fused: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, fused=fused)),
    "adam": (
        Adam(eps=1e-6, beta1=0.8, beta2=0.95),
        lambda p, fused: torch.optim.Adam(p, lr=0.1, eps=1e-6, betas=(0.8, 0.95), fused=fused),
    ),
}

every_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)


class Stepped:
    """Parameters under one of our optimizers, with its state."""

    def __init__(self, optimizer: DenseOptimizer, parameters: list[Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter.clone() for parameter in parameters]
        wide = {name: [torch.zeros_like(p) for p in parameters] for name in optimizer.per_element}
        self.state = wide | {name: [torch.zeros(()) for _ in parameters] for name in optimizer.per_parameter}

    def step(self, gradients: list[Tensor | None], lr: float) -> None:
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        self.optimizer.step(
            [self.parameters[index] for index in used],
            [gradient for gradient in gradients if gradient is not None],
            {name: [parts[index] for index in used] for name, parts in self.state.items()},
            lr,
        )


def step_torch(optimizer: torch.optim.Optimizer, parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_every_member_is_tested_here() -> None:
    assert PAIRS.keys() == members("shadowsync.training", DenseOptimizer).keys()


@every_pair
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 5),
    skipped=st.integers(0, 3),
    seed=st.integers(0, 1000),
    l2=st.sampled_from([0.0, 0.1]),
)
@settings(deadline=None, max_examples=30, derandomize=True)
def test_equal_to_torch(
    ours: DenseOptimizer,
    theirs: TorchOptimizer,
    shapes: list[list[int]],
    steps: int,
    skipped: int,
    seed: int,
    l2: float,
) -> None:
    """Bit by bit to the fused form, within rounding to the plain one; parameters may lack a gradient at times."""
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    stepped = Stepped(replace(ours, l2=l2), start)
    fused, plain = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    optimizers = {True: theirs(fused, True), False: theirs(plain, False)}
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["weight_decay"] = l2
    for step in range(steps):
        gradients: list[Tensor | None] = [torch.randn(shape, generator=generator) for shape in shapes]
        if len(shapes) > 1 and step % 2:
            gradients[skipped % len(shapes)] = None
        stepped.step(gradients, lr=0.1)
        step_torch(optimizers[True], fused, gradients)
        step_torch(optimizers[False], plain, gradients)
    for own, exact, close in zip(stepped.parameters, fused, plain, strict=True):
        assert torch.equal(own, exact)
        torch.testing.assert_close(own, close.detach())
    for name, parts in stepped.state.items():
        for part, parameter in zip(parts, fused, strict=True):
            assert torch.equal(part, optimizers[True].state[parameter][name])


@every_pair
def test_initial_state_has_the_right_sizes(ours: DenseOptimizer, theirs: TorchOptimizer) -> None:
    state = ours.init(elements=48, parameters=2, device=torch.device("cpu"))
    assert {name: len(tensor) for name, tensor in state.items()} == {
        **dict.fromkeys(ours.per_element, 48),
        **dict.fromkeys(ours.per_parameter, 2),
    }
    assert all(not tensor.any() for tensor in state.values())


def test_adagrad_without_the_fused_kernel_is_the_same() -> None:
    start, gradient = [torch.randn(5)], [torch.randn(5)]
    fused, plain = Stepped(Adagrad(l2=0.2), start), Stepped(Adagrad(l2=0.2), start)
    for _ in range(3):
        fused.step(list(gradient), lr=0.1)
        plain.optimizer._step_plain(plain.parameters, gradient, plain.state, 0.1)
    torch.testing.assert_close(fused.parameters, plain.parameters)
    torch.testing.assert_close(fused.state["sum"], plain.state["sum"])


@pytest.mark.parametrize(
    ("member", "options"), [(Adagrad, {"eps": 0}), (Adam, {"beta1": 1}), (Adam, {"beta2": -0.1}), (Sgd, {"l2": -1})]
)
def test_options_out_of_range_are_refused(member: type[DenseOptimizer], options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"train.{next(iter(options))}="):
        build(member, options, "train")
