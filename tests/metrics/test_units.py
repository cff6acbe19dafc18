"""Dead units are counted exactly: in any arrangement of modules, over any cut of the rows into batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shadowsync.metrics.units import UnitActivity, Units
from shadowsync.models.dlrm import Dlrm
from shadowsync.training.kernels import FastTower, accelerate, parse_kernels


def layer(biases: list[float]) -> nn.Linear:
    """Passes on the sum of its inputs, plus a bias by which units die or live."""
    made = nn.Linear(2, len(biases))
    with torch.no_grad():
        made.weight.fill_(0.01)
        made.bias.copy_(torch.tensor(biases))
    return made


def units_of(module: nn.Module, *batches: Any) -> Units | None:
    activity = UnitActivity(module)
    with torch.inference_mode():
        for batch in batches:
            with activity.watching(len(batch)):
                module(batch)
    return activity.units()


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)


@pytest.mark.parametrize(
    ("biases", "share"), [([-1.0] * 4, 1.0), ([1.0] * 4, 0.0), ([1.0, -1.0, -1.0, 1.0, -1.0], 0.6)]
)
def test_all_none_and_some_are_dead(biases: list[float], share: float) -> None:
    found = units_of(nn.Sequential(layer(biases), nn.ReLU()), rows(), rows(3))
    assert found == Units(rows=11, sizes={"1": len(biases)}, dead={"1": pytest.approx(share)})


def test_layers_have_the_names_that_the_user_gave_them() -> None:
    module = nn.Sequential()
    module.add_module("bottom", nn.Sequential(layer([1.0, -1.0]), nn.ReLU(), nn.PReLU()))
    module.add_module(
        "deep", nn.ModuleDict({"tower": nn.Sequential(layer([-1.0, -1.0]), nn.ReLU(inplace=True))})["tower"]
    )
    assert units_of(module, rows()) == Units(
        rows=8, sizes={"bottom.1": 2, "deep.1": 2}, dead={"bottom.1": 0.5, "deep.1": 1.0}
    )


def test_fast_towers_are_seen_into_and_say_the_same() -> None:
    module = Dlrm(bottom=(16, 8), top=(16,)).build(3, {"a": 4, "b": 4})
    torch.manual_seed(1)
    dense, vectors = torch.randn(64, 3), {"a": torch.randn(64, 4), "b": torch.randn(64, 4)}
    with torch.no_grad():
        module.bottom[0].bias[:5] = -100.0
        module.bottom[4].bias.fill_(-100.0)

    def measure() -> tuple[Units | None, Tensor]:
        activity = UnitActivity(module)
        with torch.inference_mode(), activity.watching(64):
            logits = module(dense, vectors)
        return activity.units(), logits

    plain, expected = measure()
    assert plain is not None
    assert list(plain.dead) == ["bottom.1", "bottom.3", "bottom.5", "top.1"]
    assert plain.sizes["bottom.1"] == 16
    assert plain.dead["bottom.1"] >= 5 / 16
    assert plain.dead["bottom.5"] == 1.0
    accelerate(module, parse_kernels("torch"))
    assert isinstance(module.bottom, FastTower)
    fast, logits = measure()
    assert fast == plain
    torch.testing.assert_close(logits, expected)


class Shared(nn.Module):
    """One ReLU behind two layers of one width, the second of which is a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.relu = layer([1.0, -1.0]), layer([-1.0, -1.0]), nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.relu(self.first(inputs))
        for _ in range(3):
            found = self.relu(self.again(found))
        return found


def test_a_relu_that_layers_share_is_told_apart_by_what_is_in_front_of_it() -> None:
    assert units_of(Shared(), rows()) == Units(
        rows=8,
        sizes={"relu after first (2)": 2, "relu after again (2)": 2},
        dead={"relu after first (2)": 0.5, "relu after again (2)": 1.0},
    )


class Shapes(nn.Module):
    """ReLUs on `[B]`, on `[B, T, U]` and on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.steps, self.empty, self.uncalled = nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        self.empty(inputs[:0])
        steps = torch.zeros(len(inputs), 3, 4)
        steps[-1, -1, 2] = 1.0
        self.steps(steps)
        return self.one(-inputs[:, 0].abs())


def test_a_unit_is_the_last_dimension() -> None:
    assert units_of(Shapes(), rows()) == Units(rows=8, sizes={"steps": 4, "one": 1}, dead={"steps": 0.75, "one": 1.0})


def test_what_has_no_relu_has_no_units_and_no_hook_stays() -> None:
    assert units_of(nn.Sequential(layer([1.0]), nn.PReLU(), nn.Sigmoid()), rows()) is None
    module = nn.Sequential(layer([1.0]), nn.ReLU())
    activity = UnitActivity(module)
    assert activity.units() is None
    with pytest.raises(RuntimeError), activity.watching(1):
        module(torch.ones(1, 5))
    assert activity.units() is None
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.lists(st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3), min_size=1, max_size=12),
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
def test_any_cut_into_batches_counts_the_same(values: list[list[float]], cuts: list[int]) -> None:
    inputs = torch.tensor(values)
    sizes = [*cuts, len(inputs)]
    batches, start = [], 0
    while start < len(inputs):
        batches.append(inputs[start : start + (size := sizes.pop(0))])
        start += size
    expected = int((inputs <= 0).all(dim=0).sum()) / 3
    assert units_of(nn.Sequential(nn.ReLU()), *batches) == Units(
        rows=len(inputs), sizes={"0": 3}, dead={"0": pytest.approx(expected)}
    )
