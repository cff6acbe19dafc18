"""The dense part over several servers: every parameter is one server's, and together they step as one does."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_models import TwoParameters
from torch import Tensor, nn

from shadowsync.aggregation.stepping import DenseGradient, DenseShare, DenseStep, DenseStepper, divide
from shadowsync.checkpoint.job_state import TrainerImage, dense_tensors
from shadowsync.cluster.dense_side import join_images, split_image
from shadowsync.errors import DataError
from shadowsync.training.optimizers import Adagrad, Adam, DenseOptimizer, Sgd
from shadowsync.training.replica import Replica, flat_length, laid_out

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=9)


class Nested(nn.Module):
    """Parameters at several depths, some of them tied, one frozen, and buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.twin = nn.Module()
        self.twin.weight = self.tower[0].weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("constant", torch.ones(2), persistent=False)

    def forward(self, dense: Tensor, _: object) -> Tensor:
        return self.tower(dense).sum(1) * self.scale


def steppers(
    model: nn.Module, optimizer: DenseOptimizer, servers: int, clip_norm: float | None = None
) -> tuple[DenseStepper, tuple[DenseShare, ...], list[DenseStepper]]:
    whole = Replica(model, optimizer, {})
    parts = divide(whole.slots, servers)
    modules = [part.module(model, buffers=part is parts[0]) for part in parts]
    own = [DenseStepper(Replica(module, optimizer, {}), clip_norm) for module in modules]
    return DenseStepper(whole, clip_norm), parts, own


def joined(parts: Sequence[DenseShare], own: Sequence[DenseStepper], length: int) -> Tensor:
    flat = torch.zeros(length)
    for part, stepper in zip(parts, own, strict=True):
        part.put(stepper.newest.flat, flat)
    return flat


@given(SHAPES, st.integers(1, 12))
def test_every_parameter_is_one_servers_and_no_server_is_idle(shapes: list[list[int]], servers: int) -> None:
    slots = laid_out((f"p{index}", torch.Size(shape)) for index, shape in enumerate(shapes))
    parts = divide(slots, servers)
    assert sorted(index for part in parts for index in part.indices) == list(range(len(slots)))
    assert len(parts) == max(1, min(servers, len(slots)))
    assert all(part.indices for part in parts) == bool(slots)
    loads = sorted(sum(slot.numel for slot in part.slots) for part in parts)
    assert loads[-1] - loads[0] <= max((slot.numel for slot in slots), default=0)
    flat = torch.zeros(flat_length(slots))
    for slot in slots:
        slot.view(flat).normal_()
    again = torch.zeros_like(flat)
    for part in parts:
        part.put(part.cut(flat), again)
    assert torch.equal(again, flat)


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("optimizer", [Sgd(), Adagrad(), Adam()], ids=lambda optimizer: optimizer.name)
def test_parts_step_as_the_whole_bit_by_bit(optimizer: DenseOptimizer, servers: int) -> None:
    whole, parts, own = steppers(Nested(), optimizer, servers)
    length, count = len(whole.replica.flat), len(whole.replica.slots)
    for number in range(4):
        flat = torch.zeros(length)
        used = tuple(index != number for index in range(count))
        for slot, there in zip(whole.replica.slots, used, strict=True):
            slot.view(flat).normal_(0, 1 if there else 0)
        gradient = DenseGradient(flat, used)
        step = DenseStep(number, {number: 1.0}, 2.0, 0.1, number + 1)
        for part, stepper in zip(parts, own, strict=True):
            stepper.hold(number, part.gradient(gradient))
            stepper.commit(step)
        whole.hold(number, gradient)
        whole.commit(step)
    assert torch.equal(joined(parts, own, length), whole.newest.flat)


def test_parts_are_clipped_by_the_norm_of_the_whole() -> None:
    whole, parts, own = steppers(TwoParameters(), Sgd(), 2, clip_norm=1.0)
    flat = torch.full_like(whole.replica.flat, 100.0)
    gradient, step = DenseGradient(flat, (True, True)), DenseStep(0, {0: 1.0}, 1.0, 0.1, 1)
    for part, stepper in zip(parts, own, strict=True):
        stepper.hold(0, part.gradient(gradient))
    norms = [stepper.norm(step) for stepper in own]
    assert sorted(norms) == pytest.approx([100 * 2**0.5, 100 * 3**0.5])
    assert [stepper.norm(DenseStep(0, {7: 1.0}, 1.0, 0.1, 1)) for stepper in own] == [0.0, 0.0]
    whole.hold(0, gradient)
    whole.commit(step)
    for stepper in own:
        stepper.commit(DenseStep(0, {0: 1.0}, 1.0, 0.1, 1, norm=sum(norm**2 for norm in norms) ** 0.5))
    torch.testing.assert_close(joined(parts, own, len(flat)), whole.newest.flat)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [Adagrad(), Adam()], ids=lambda optimizer: optimizer.name)
def test_an_image_of_any_number_of_servers_is_that_of_the_whole(optimizer: DenseOptimizer, servers: int) -> None:
    model = Nested()
    whole, parts, own = steppers(model, optimizer, servers)
    kept = torch.zeros(len(whole.replica.flat), dtype=torch.bool)
    for slot in whole.replica.slots:
        slot.view(kept).fill_(True)
    for tensor in dense_tensors(whole.replica).values():
        tensor.copy_(torch.rand(tensor.shape) * 9)
        if tensor.shape == kept.shape:
            tensor.mul_(kept)
    image = TrainerImage.of(whole.replica, {})
    for stepper, split in zip(own, split_image(parts, whole.replica, image), strict=True):
        assert split.replica.keys() == dense_tensors(stepper.replica).keys()
        split.put_into(stepper.replica)
    again = join_images(parts, whole.replica, [TrainerImage.of(stepper.replica, {}) for stepper in own])
    assert again.replica.keys() == image.replica.keys()
    assert "buffer.tower.1.running_mean" in again.replica
    restored = Replica(model, optimizer, {})
    again.put_into(restored)
    for name, tensor in dense_tensors(restored).items():
        assert torch.equal(tensor, dense_tensors(whole.replica)[name]), name


def test_elements_of_another_model_are_refused() -> None:
    (part,) = divide(Replica(TwoParameters(), Sgd(), {}).slots, 1)
    with pytest.raises(DataError, match="elements of the dense part"):
        part.put(torch.zeros(5), torch.zeros(32))
