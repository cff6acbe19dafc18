"""The loss of a batch: a number, whatever a model is asked.

`B` samples, `T` tasks.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from shadowsync.data.labels import FAMILIES, Loss, Task, column
from shadowsync.errors import ConfigError, NonFiniteLoss
from shadowsync.registry import imported, nearest

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of logits and labels, `[B]` or `[B, T]`, and weights of the samples, `[B]` or None, the loss, 0-d."""


def objective(tasks: Sequence[Task], losses: Mapping[str, Loss]) -> Objective:
    """What is minimised: `Σ_t weight_t · 1/B Σ_i w_i loss_t(logit_it, label_it)`, with functions in place of the losses
    of some tasks, by their names.

    Weights are divided by the number of samples, not by their sum: so the mean over several batches of one size, as
    workers, accumulation and gradient methods make it, is that of one large batch.
    """
    own = {task.name: losses.get(task.name) or _configured(task) for task in tasks}
    if len(tasks) == 1 and tasks[0].weight == 1 and own[tasks[0].name] is FAMILIES["logloss"].loss:
        return binary_cross_entropy_with_logits
    return _Sum([(task.name, own[task.name], task.weight) for task in tasks], {*losses})


def own_losses(tasks: Sequence[Task], given: Loss | Mapping[str, Loss] | None) -> dict[str, Loss]:
    """Functions in place of the losses of some tasks, by their names; `ConfigError` if they are none."""
    if given is None:
        return {}
    names = [task.name for task in tasks]
    if not isinstance(given, Mapping):
        if len(tasks) > 1:
            raise ConfigError(
                f"loss is one function for {len(tasks)} labels: give a map of them, as {{{names[0]!r}: …}}"
            )
        given = {names[0]: given}
    for name, loss in given.items():
        if name not in names:
            raise ConfigError(f"loss names {name!r}, which is no label{nearest(name, names)}: allowed are {names}")
        if not callable(loss) or inspect.isclass(loss):
            raise ConfigError(f"loss of {name} is {loss!r}, which is no function of logits and labels")
    return dict(given)


def _configured(task: Task) -> Loss:
    if task.loss in FAMILIES:
        return task.family.loss
    (found,) = own_losses([task], imported(f"data.labels.{task.name}.loss", task.loss)).values()
    return found


class _Sum:
    """The weighted sum of several losses; those by functions of the user's own are looked at."""

    def __init__(self, terms: Sequence[tuple[str, Loss, float]], own: set[str]) -> None:
        self._terms = terms
        known = [family.loss for family in FAMILIES.values()]
        self._own = own | {name for name, loss, _ in terms if loss not in known}

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        total = logits.new_zeros(())
        for number, (name, loss, weight) in enumerate(self._terms):
            of_logits, of_labels = column(logits, number), column(labels, number)
            each = loss(of_logits, of_labels)
            if name in self._own:
                _check(name, each, of_logits)
            total = total + weight * (each if weights is None else each * weights).mean()
        return total


def _check(name: str, each: Tensor, logits: Tensor) -> None:
    """Raises for what a loss of the user's own must not return."""
    if not isinstance(each, Tensor) or each.shape != logits.shape:
        what = f"a tensor of shape {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        raise ConfigError(
            f"the loss of {name} returns {what} for {len(logits)} samples: return the loss of each sample, for "
            'instance with reduction="none", and no mean'
        )
    if not each.requires_grad or not each.is_floating_point():
        raise ConfigError(f"the loss of {name} does not depend on the logits, so nothing can be learnt from it")
    if not torch.isfinite(each).all() and torch.isfinite(logits).all():
        raise NonFiniteLoss(
            f"the loss of {name} is not finite for logits from {logits.min():.3g} to {logits.max():.3g}: mend the "
            "function, for instance with binary_cross_entropy_with_logits in place of a log of probabilities"
        )
