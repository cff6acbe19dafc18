"""What a model is asked: tasks, each with a column of labels, a loss, and the way from a logit to a prediction.

`B` samples, `T` tasks. Labels and logits of one task are `[B]`, of several `[B, T]`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from shadowsync.errors import ConfigError
from shadowsync.registry import build, names_code, nearest

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits `[B]` and labels `[B]`, the loss of each sample `[B]`."""


@dataclass(frozen=True)
class Family:
    """Labels of one distribution, as of generalised linear models.

    Attributes:
        labels: that it has, in words; `fits` says which of float32 `[B]` are such.
        loss: never below 0, and 0 where the prediction is the label.
        predict: the mean label that a logit stands for.
        link: the inverse of it.
    """

    labels: str
    fits: Callable[[NDArray[np.float32]], NDArray[np.bool_]]
    loss: Loss
    predict: Callable[[Tensor], Tensor]
    link: Callable[[Tensor], Tensor]


def _log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def _half_deviance(logits: Tensor, labels: Tensor) -> Tensor:
    """`exp(z) − y z + y log y − y`: torch's `PoissonNLLLoss`, less its value where the prediction is the label."""
    return logits.exp() - labels * logits + torch.xlogy(labels, labels) - labels


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).square()


def _itself(values: Tensor) -> Tensor:
    return values


FAMILIES: Mapping[str, Family] = {
    "logloss": Family("0 or 1", lambda y: (y == 0) | (y == 1), _log_loss, torch.sigmoid, torch.logit),
    "mse": Family("a finite number", np.isfinite, _squared_error, _itself, _itself),
    "poisson": Family("a number from 0 on", lambda y: (y >= 0) & (y < np.inf), _half_deviance, torch.exp, torch.log),
}


@dataclass(frozen=True)
class Task:
    """A label that is learnt.

    Attributes:
        name: of its column.
        loss: `logloss` for clicks, `mse` for numbers, `poisson` for counts, or a function of one's own as
            `package.module:function`, of logits `[B]` and labels `[B]` to the loss of each sample `[B]`.
        like: for a function of one's own, the loss that has such labels: it says which are allowed, how a logit becomes
            a prediction, and what is measured.
        weight: of its loss in the sum over all tasks; more has the others learn less.
    """

    name: str
    loss: str = "logloss"
    like: Literal["logloss", "mse", "poisson"] | None = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @property
    def kind(self) -> str:
        """The key of its family."""
        return self.loss if self.loss in FAMILIES else self.like or "logloss"

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def clicks(self) -> bool:
        return self.kind == "logloss"

    def told(self) -> dict[str, Any]:
        """Its options but for the name, those at their defaults left out."""
        return {k: v for k, v in vars(self).items() if k != "name" and v != type(self).__dataclass_fields__[k].default}


ONE_CLICK = (Task("label"),)
"""The tasks of data that says nothing of them."""


def task_of(name: str, given: str | Mapping[str, Any]) -> Task:
    """As `data.labels` declares it, by its loss or by a map of options; `ConfigError` if that is none."""
    key, options = f"data.labels.{name}", {"loss": given} if isinstance(given, str) else given
    if unknown := options.keys() - {"loss", "like", "weight"}:
        near = nearest(min(unknown), ("loss", "like", "weight"))
        raise ConfigError(f"{key}.{min(unknown)}: there is no such option{near}; a label has loss, like, weight")
    task = build(Task, {"name": name, **options}, key)
    if task.loss not in FAMILIES and not names_code(task.loss):
        raise ConfigError(
            f"{key}.loss={task.loss} is not known{nearest(task.loss, FAMILIES)}; allowed: {', '.join(FAMILIES)}, or a "
            "function as package.module:function"
        )
    if task.loss in FAMILIES and task.like is not None:
        raise ConfigError(f"{key}.like has no effect beside loss={task.loss}: leave it out")
    return task


def column(values: Tensor, task: int) -> Tensor:
    """Labels or logits of one task, `[B]`."""
    return values if values.dim() == 1 else values[:, task]


def predicted(tasks: Sequence[Task], logits: Tensor) -> Tensor:
    """The mean labels that logits stand for, `[B]` or `[B, T]` as they are."""
    found = [task.family.predict(column(logits, number)) for number, task in enumerate(tasks)]
    return found[0] if logits.dim() == 1 else torch.stack(found, dim=1)


def answers(tasks: Sequence[Task], logits: Tensor) -> dict[str, Tensor]:
    """Predictions and logits of each task, `[B]` each, as files of predictions and exports call them."""
    found = {}
    for number, task in enumerate(tasks):
        before, own = "" if len(tasks) == 1 else f"{task.name}_", column(logits, number)
        found[f"{before}{'probability' if task.clicks else 'prediction'}"] = task.family.predict(own)
        found[f"{before}logit"] = own
    return found
