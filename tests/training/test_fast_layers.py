"""Fast layers compute what torch's own do. `B` samples."""

import copy
import itertools
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shadowsync.training.kernels import FastLinear, FastTower, Kernels, accelerate, onednn_runs, parse_kernels

BY_TORCH = Kernels()
ALL_KERNELS = ("ttt", "ttT", "ooo", "ooO", "otT", "toO")


def usable(letters: str, dtype: torch.dtype) -> str:
    """The same kernels, or torch's where oneDNN has no products of this dtype on this processor."""
    return letters if onednn_runs(dtype) else letters.replace("o", "t").replace("O", "T")


def tower(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), nn.ReLU()]
    return nn.Sequential(*layers)


def fast_copy(module: nn.Module, kernels: Kernels = BY_TORCH) -> nn.Module:
    twin = copy.deepcopy(module)
    accelerate(twin, kernels)
    return twin


def outputs_and_gradients(module: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
    leaf = inputs.clone().requires_grad_()
    output = module(leaf)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return output, *torch.autograd.grad(output.float().square().sum(), [leaf, *trained])


@pytest.mark.parametrize("letters", ["ttt", "ooo"])
def test_what_follows_a_layer_may_work_in_place(letters: str) -> None:
    module = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2), nn.LeakyReLU(inplace=True)
    )
    fast, inputs = fast_copy(module, Kernels(otherwise=usable(letters, torch.float32))), torch.randn(7, 3)
    for ours, theirs in zip(outputs_and_gradients(fast, inputs), outputs_and_gradients(module, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@given(
    samples=st.integers(0, 70),
    widths=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    letters=st.sampled_from(ALL_KERNELS),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_equal_in_fp32(samples: int, widths: list[int], letters: str, seed: int) -> None:
    torch.manual_seed(seed)
    plain = tower(*widths)
    fast = fast_copy(plain, Kernels(otherwise=usable(letters, torch.float32)))
    inputs = torch.randn(samples, widths[0])
    assert type(fast) is FastTower
    torch.testing.assert_close(
        outputs_and_gradients(fast, inputs), outputs_and_gradients(plain, inputs), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("letters", ALL_KERNELS)
def test_large_products_are_equal_too(letters: str) -> None:
    plain = tower(13, 512, 64)
    inputs = torch.randn(128, 13)
    fast = fast_copy(plain, Kernels(otherwise=usable(letters, torch.float32)))
    torch.testing.assert_close(
        outputs_and_gradients(fast, inputs), outputs_and_gradients(plain, inputs), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("letters", ALL_KERNELS)
def test_bf16_is_what_autocast_gives(letters: str) -> None:
    plain = tower(16, 64, 32)
    inputs = torch.randn(64, 16)
    kernels = Kernels(otherwise=usable(letters, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        fast, expected = outputs_and_gradients(fast_copy(plain, kernels), inputs), outputs_and_gradients(plain, inputs)
    assert fast[0].dtype == expected[0].dtype == torch.bfloat16
    assert {gradient.dtype for gradient in fast[1:]} == {torch.float32}
    for one, other in zip(fast, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02 * other.abs().max().item())


def test_frozen_layers_and_layers_without_bias() -> None:
    plain = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 7), nn.Linear(7, 1))
    plain[2].requires_grad_(False)
    inputs = torch.randn(9, 5)
    torch.testing.assert_close(outputs_and_gradients(fast_copy(plain), inputs), outputs_and_gradients(plain, inputs))


def test_single_layers_are_replaced_and_others_left_alone() -> None:
    class MyLinear(nn.Linear):
        pass

    module = nn.ModuleDict(
        {
            "single": nn.Linear(4, 4),
            "mixed": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU()),
            "mine": MyLinear(4, 4),
            "hooked": nn.Linear(4, 4),
            "relu_twice": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU()),
            "empty": nn.Sequential(),
        }
    )
    module["hooked"].register_forward_hook(lambda layer, inputs, output: output + 1)
    kinds = {name: type(child) for name, child in fast_copy(module).items()}
    assert kinds["single"] is FastLinear
    assert kinds["mine"] is MyLinear
    assert kinds["hooked"] is nn.Linear
    assert {kinds[name] for name in ("mixed", "relu_twice", "empty")} == {nn.Sequential}
    inputs = torch.randn(3, 4)
    for name, child in fast_copy(module).items():
        torch.testing.assert_close(child(inputs), module[name](inputs))


def test_a_hook_on_a_layer_inside_a_sequence_still_runs() -> None:
    module = tower(4, 4, 4)
    module[0].register_forward_hook(lambda layer, inputs, output: output + 1)
    inputs = torch.randn(3, 4)
    torch.testing.assert_close(fast_copy(module)(inputs), module(inputs))


@pytest.mark.parametrize("inputs", [torch.randn(4), torch.randn(2, 3, 4)], ids=["1-d", "3-d"])
def test_inputs_of_other_shapes_take_the_plain_way(inputs: Tensor) -> None:
    for module in (tower(4, 5), nn.Linear(4, 5)):
        torch.testing.assert_close(fast_copy(module)(inputs), module(inputs))


def test_names_of_parameters_stay() -> None:
    module = nn.ModuleDict({"tower": tower(4, 5, 6), "single": nn.Linear(2, 3)})
    assert fast_copy(module).state_dict().keys() == module.state_dict().keys()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="run on Linux to count the threads of this process")
def test_a_new_thread_keeps_to_torchs_number_of_threads() -> None:
    """oneDNN asked first in a new thread would start one thread per core beside every worker."""
    library = parse_kernels("onednn" if onednn_runs(torch.float32) else "torch")
    layer, inputs = fast_copy(nn.Linear(256, 256), library), torch.randn(256, 256)
    counts: list[int] = []

    def work() -> None:
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        with torch.no_grad():
            layer(inputs)
        counts.append(len(list(Path("/proc/self/task").iterdir())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts[0] == counts[1]
