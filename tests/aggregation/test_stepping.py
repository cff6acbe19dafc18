"""The dense part under global steps: one optimizer state, versions nobody writes to, gradients held and forgotten."""

import pytest
import torch
from step_models import TwoParameters

from shadowsync.aggregation.stepping import DenseGradient, DenseStep, DenseStepper
from shadowsync.errors import DataError
from shadowsync.rpc.served import Client
from shadowsync.training.optimizers import Adagrad, Adam, DenseOptimizer, Sgd
from shadowsync.training.replica import Replica


def stepper(optimizer: DenseOptimizer | None = None, clip_norm: float | None = None, version: int = 0) -> DenseStepper:
    return DenseStepper(Replica(TwoParameters(), optimizer or Sgd(), {}), clip_norm, version)


def gradient(made: DenseStepper, value: float, used: tuple[bool, bool] = (True, True)) -> DenseGradient:
    flat = torch.zeros_like(made.replica.flat)
    for slot, there in zip(made.replica.slots, used, strict=True):
        slot.view(flat).fill_(value if there else 0.0)
    return DenseGradient(flat, used)


def step(weights: dict[int, float], number: int = 0, divisor: float = 1.0, below: int = 0) -> DenseStep:
    return DenseStep(number, weights, divisor, 0.1, below)


def values(made: DenseStepper) -> list[float]:
    """The first element of each parameter."""
    return [round(float(slot.view(made.replica.flat)[0]), 6) for slot in made.replica.slots]


@pytest.mark.parametrize("optimizer", [Sgd(), Adagrad(), Adam()], ids=lambda optimizer: optimizer.name)
def test_a_step_is_the_optimizers_with_the_weighted_sum(optimizer: DenseOptimizer) -> None:
    made, plain = stepper(optimizer), Replica(TwoParameters(), optimizer, {}).worker_module()
    for number, value in enumerate((1.0, 5.0, 3.0)):
        made.hold(number, gradient(made, value))
    made.commit(step({2: 1.0, 0: 1.0, 1: 0.0}, divisor=4.0))
    plain.gradients = (torch.ones(3), torch.ones(2))
    plain.step(0.1)
    assert torch.equal(made.replica.flat, plain._replica.flat)
    assert made.held_bytes == 0


def test_the_large_batch_is_clipped_not_its_parts() -> None:
    made = stepper(clip_norm=1.0)
    made.hold(0, gradient(made, 100.0))
    made.hold(1, gradient(made, -100.0))
    made.commit(step({0: 1.0, 1: 1.0}, divisor=2.0))
    assert values(made) == [1.0, 1.0]
    made.hold(2, gradient(made, 100.0))
    made.commit(step({2: 1.0}, number=1))
    assert values(made)[0] == pytest.approx(1 - 0.1 / 5**0.5, abs=1e-5)


def test_a_parameter_that_no_batch_used_stays_as_it_is() -> None:
    made = stepper(Adam())
    made.hold(0, gradient(made, 1.0))
    made.commit(step({0: 1.0}))
    before = values(made)
    made.hold(1, gradient(made, 1.0, (True, False)))
    made.hold(2, gradient(made, 1.0, (False, False)))
    made.commit(step({1: 1.0, 2: 1.0}, number=1, divisor=2.0))
    assert values(made)[0] != before[0]
    assert values(made)[1] == before[1]


def test_versions_are_of_their_step_for_ever() -> None:
    made = stepper(version=4)
    first = made.newest
    assert (first.number, made.newer(Client(""), 0, 4, "", 0)) == (4, None)
    made.hold(0, gradient(made, 1.0))
    made.commit(step({0: 1.0}, number=4))
    second = made.newest
    assert made.newer(Client(""), 0, 4, "", 0) is not None
    assert (second.number, round(float(second.flat[0]), 4), float(first.flat[0])) == (5, 0.9, 1.0)


@pytest.mark.parametrize("dropped", [{0: 0.0}, {}, {9: 1.0}], ids=str)
def test_a_step_that_brings_nothing_moves_nothing(dropped: dict[int, float]) -> None:
    made = stepper(Adam())
    made.hold(0, gradient(made, 1.0))
    made.commit(step({0: 1.0}))
    before, state = made.replica.flat.clone(), made.replica.state["exp_avg"].clone()
    made.commit(step(dropped, number=1))
    assert torch.equal(made.replica.flat, before)
    assert torch.equal(made.replica.state["exp_avg"], state)
    assert made.newest.number == 2


def test_a_step_that_came_before_changes_nothing() -> None:
    made = stepper()
    made.hold(0, gradient(made, 1.0))
    made.commit(step({0: 1.0}, number=3))
    made.hold(1, gradient(made, 1.0))
    for number in (3, 2):
        made.commit(step({1: 1.0}, number=number))
    assert values(made) == [0.9, 0.9]
    made.commit(step({1: 1.0}, number=4))
    assert values(made) == [0.8, 0.8]


def test_what_will_not_be_named_is_forgotten() -> None:
    made = stepper()
    for number in range(3):
        made.hold(number, gradient(made, 1.0))
    made.commit(step({2: 1.0}, below=2))
    assert made.held_bytes == 0
    made.hold(1, gradient(made, 1.0))
    assert made.held_bytes == 0


def test_after_a_restart_nothing_waits() -> None:
    made = stepper()
    made.hold(0, gradient(made, 1.0))
    made.replica.flat.fill_(7.0)
    made.restart(2)
    assert made.held_bytes == 0
    assert (made.newest.number, float(made.newest.flat[0])) == (2, 7.0)


@pytest.mark.parametrize(
    "wrong",
    [
        DenseGradient(torch.zeros(3), (True, True)),
        DenseGradient(torch.zeros(32, dtype=torch.float64), (True, True)),
        DenseGradient(torch.zeros(32), (True,)),
    ],
    ids=["short", "double", "one parameter"],
)
def test_a_gradient_of_another_model_is_refused(wrong: DenseGradient) -> None:
    made = stepper()
    assert made.replica.flat.shape == (32,)
    with pytest.raises(DataError, match="does not fit a dense part"):
        made.hold(0, wrong)
    assert made.held_bytes == 0
