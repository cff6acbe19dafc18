"""What stands behind the products of a tower: dropout, batch norm and layer norm, in training and afterwards."""

import copy

import pytest
import torch
from torch import nn

from shadowsync.models.layers import BatchNorm, Dropout, mlp, tower
from shadowsync.training.kernels import FastLinear, FastTower, accelerate, onednn_runs, parse_kernels


def test_without_options_a_tower_is_what_it_was() -> None:
    kinds = [type(layer) for layer in tower(5, (4, 3))]
    assert kinds == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]


def test_the_products_have_the_same_names_with_and_without_dropout() -> None:
    assert tower(5, (4, 3)).state_dict().keys() == tower(5, (4, 3), dropout=0.5).state_dict().keys()


@pytest.mark.parametrize(
    ("norm", "theirs"), [("batch", nn.BatchNorm1d), ("layer", nn.LayerNorm)], ids=["batch", "layer"]
)
def test_a_norm_is_torchs_in_training_and_afterwards(norm: str, theirs: type[nn.Module]) -> None:
    torch.manual_seed(1)
    ours = mlp(5, (4, 3), norm=norm)
    plain = nn.Sequential(nn.Linear(5, 4), theirs(4), nn.ReLU(), nn.Linear(4, 3), theirs(3), nn.ReLU())
    for layer in plain:
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = None  # statistics of all batches
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        other.data.copy_(own.data)
    for step in range(3):
        inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        found, expected = ours(inputs), plain(inputs)
        torch.testing.assert_close(found, expected)
        gradients = [
            torch.autograd.grad(output.square().sum(), list(module.parameters()))
            for output, module in ((found, ours), (expected, plain))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    for own, other in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other)
    torch.testing.assert_close(ours.eval()(inputs), plain.eval()(inputs))


@pytest.mark.parametrize("samples", [0, 1])
def test_a_batch_without_variance_is_normalised_by_what_is_known(samples: int) -> None:
    layer = BatchNorm(3)
    layer(torch.randn(64, 3) * 2 + 5)
    before = copy.deepcopy(layer.state_dict())
    inputs = torch.randn(samples, 3) * 2 + 5
    found = layer(inputs)
    assert found.isfinite().all()
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    torch.testing.assert_close(found, layer.eval()(inputs))


def test_dropout_leaves_out_its_share_and_keeps_the_sum() -> None:
    layer, inputs = Dropout(0.25), torch.ones(400, 50, requires_grad=True)
    layer.generator = torch.Generator().manual_seed(1)
    found = layer(inputs)
    left_out = (found == 0).float().mean().item()
    assert abs(left_out - 0.25) < 0.02
    assert found.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    (gradient,) = torch.autograd.grad(found.sum(), inputs)
    assert torch.equal(gradient, found.detach())
    assert not torch.equal(layer(inputs), found)
    layer.generator = torch.Generator().manual_seed(1)
    assert torch.equal(layer(inputs), found)
    assert layer.eval()(inputs) is inputs


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("library", ["torch", "onednn"])
def test_products_between_them_are_computed_by_the_kernels(norm: str, precision: torch.dtype, library: str) -> None:
    if library == "onednn" and not onednn_runs(precision):
        pytest.skip("oneDNN has no such products on this processor: run it on another")
    torch.manual_seed(2)
    plain = tower(16, (32, 24), norm=norm, dropout=0.5)
    for layer in plain.modules():
        if isinstance(layer, Dropout):
            layer.share = 1e-9  # so that both leave out the same: nothing
    fast = copy.deepcopy(plain)
    accelerate(fast, parse_kernels(library))
    assert [type(layer) for layer in fast if isinstance(layer, nn.Linear)] == [FastLinear] * 3
    assert not any(isinstance(layer, FastTower) for layer in fast.modules())
    inputs = torch.randn(64, 16)
    answers = []
    for module in (plain, fast):
        leaf = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
            output = module(leaf)
        loss = output.float().square().sum()
        answers.append((output.float(), *torch.autograd.grad(loss, [leaf, *module.parameters()])))
    close = {"rtol": 1e-4, "atol": 1e-4} if precision is torch.float32 else {"rtol": 0.1, "atol": 0.1 * 64}
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, **close)
