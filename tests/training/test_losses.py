"""The loss of a batch: the formula, weights, several tasks, functions of a user's own."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from shadowsync.data.labels import FAMILIES, ONE_CLICK, Task, answers
from shadowsync.errors import ConfigError, ShadowSyncError
from shadowsync.training.losses import objective, own_losses

TASKS = (Task("click", weight=2.0), Task("watched", "mse", weight=0.5), Task("visits", "poisson"))


def made(samples: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and labels of the three tasks, and weights."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, 3, generator=draw).requires_grad_()
    labels = torch.stack(
        [
            (torch.rand(samples, generator=draw) < 0.3).float(),
            3 * torch.randn(samples, generator=draw),
            torch.poisson(torch.full((samples,), 1.5), generator=draw),
        ],
        dim=1,
    )
    return logits, labels, 2 * torch.rand(samples, generator=draw)


def test_one_click_is_what_torch_calls_so_and_costs_no_more() -> None:
    assert objective(ONE_CLICK, {}) is F.binary_cross_entropy_with_logits


def test_the_sum_over_tasks_is_the_formula() -> None:
    logits, labels, weights = made(50)
    click = F.binary_cross_entropy_with_logits(logits[:, 0], labels[:, 0], weights)
    watched = (weights * (logits[:, 1] - labels[:, 1]) ** 2).mean()
    visits = (weights * F.poisson_nll_loss(logits[:, 2], labels[:, 2], reduction="none")).mean()
    expected = torch.autograd.grad(2 * click + 0.5 * watched + visits, logits)[0]
    loss = objective(TASKS, {})(logits, labels, weights)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)
    for task, own in zip(TASKS, labels.unbind(1), strict=True):
        least, most = {"logloss": (1e-6, 1 - 1e-6), "mse": (-99, 99), "poisson": (1e-9, 99)}[task.kind]
        right = task.family.link(own.clamp(least, most))
        assert float(task.family.loss(right, own).abs().max()) < 1e-4, "the loss of the right answer is 0"


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_the_mean_over_batches_of_one_size_is_that_of_one_large_batch(count: int, size: int, seed: int) -> None:
    """Whatever the weights in each: so accumulation, gradient methods and large batches agree."""
    logits, labels, weights = made(count * size, seed)
    for tasks, columns in ((TASKS, slice(None)), (ONE_CLICK, 0)):
        loss = objective(tasks, {})
        parts = [
            loss(*pieces)
            for pieces in zip(
                logits[:, columns].split(size), labels[:, columns].split(size), weights.split(size), strict=True
            )
        ]
        whole = loss(logits[:, columns], labels[:, columns], weights)
        torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-5, atol=1e-6)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    return (1 - torch.exp(-F.binary_cross_entropy_with_logits(logits, labels, reduction="none"))) ** 2


def test_a_function_of_ones_own_takes_the_place_of_a_loss() -> None:
    logits, labels, weights = made(20)
    own, label = logits[:, 0], labels[:, 0]
    for given_loss in (focal, {"label": focal}):
        loss = objective(ONE_CLICK, own_losses(ONE_CLICK, given_loss))
        assert loss(own, label, weights).item() == pytest.approx((weights * focal(own, label)).mean().item())
    named = objective([Task("click", f"{__name__}:focal", weight=3.0)], {})
    assert named(own, label, None).item() == pytest.approx(3 * focal(own, label).mean().item())


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (F.binary_cross_entropy_with_logits, "of shape [] for 20 samples"),
        (lambda logits, labels: 1.0, "returns float for 20 samples"),
        (lambda logits, labels: labels * 2, "does not depend on the logits"),
        (lambda logits, labels: -torch.log(logits), "is not finite for logits from"),
    ],
)
def test_what_a_loss_must_not_return_is_one_sentence(loss: Callable[[Tensor, Tensor], Tensor], told: str) -> None:
    logits, labels, _ = made(20)
    with pytest.raises(ShadowSyncError) as caught:
        objective(ONE_CLICK, {"label": loss})(logits[:, 0], labels[:, 0], None)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (focal, "loss is one function for 3 labels"),
        ({"clicks": focal}, "'clicks', which is no label, did you mean click?"),
        ({"click": 3}, "which is no function"),
        ({"click": torch.nn.BCELoss}, "which is no function"),
    ],
)
def test_what_is_no_loss_is_one_sentence(loss: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_losses(TASKS, loss)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_answers_are_named_after_their_tasks() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    found = {name: float(value) for name, value in answers(TASKS, logits).items()}
    assert found == {
        "click_probability": 0.5,
        "click_logit": 0.0,
        "watched_prediction": 5.0,
        "watched_logit": 5.0,
        "visits_prediction": pytest.approx(2.71828, rel=1e-5),
        "visits_logit": 1.0,
    }
    assert list(answers(ONE_CLICK, logits[:, 0])) == ["probability", "logit"]
    assert set(FAMILIES) == {"logloss", "mse", "poisson"}
