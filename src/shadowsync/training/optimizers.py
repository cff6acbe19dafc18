"""Optimizers of the dense part, torch's fused kernels on state in shared flat tensors, and how learning rates move.

`P` elements of a replica's flat tensor, `Q` parameters in it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from shadowsync.errors import ConfigError

State = Mapping[str, list[Tensor]]
"""For each name of the state, the parts that belong to the parameters being stepped, in their order."""
DECAYS: Mapping[str, Callable[[float], float]] = {
    "none": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    # half a period, without restarts (arXiv 1608.03983)
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Share of the way from the final to the full learning rate, from progress 0 (end of the warm-up) to 1 (end)."""


@dataclass(frozen=True)
class Rates:
    """The factor on both learning rates, the dense part's and the rows', as a pure function of progress.

    It rises linearly from 0 to 1 over the first `warmup_samples` of the job, then falls as `decay` says to `final_lr`
    at `total_samples`, all epochs, and stays there.
    """

    warmup_samples: int = 0
    decay: str = "none"
    final_lr: float = 0.0
    total_samples: int = 0

    def __post_init__(self) -> None:
        if self.decay != "none" and self.warmup_samples >= self.total_samples:
            raise ConfigError(
                f"train.warmup_samples={self.warmup_samples} leaves nothing of the {self.total_samples} samples of the "
                f"run for train.decay={self.decay}: shorten the warm-up, or set train.decay=none"
            )

    def factor(self, samples: int) -> float:
        """The factor for a step that brings the job to `samples` trained samples, its own included, in [0, 1]."""
        if samples < self.warmup_samples:
            return samples / self.warmup_samples
        span = max(self.total_samples - self.warmup_samples, 1)
        progress = min((samples - self.warmup_samples) / span, 1.0)
        return self.final_lr + (1.0 - self.final_lr) * DECAYS[self.decay](progress)

    def settled(self, samples: int) -> bool:
        """The factor is the same for all numbers of samples from here on."""
        return samples >= (self.warmup_samples if self.decay == "none" else self.total_samples)


@dataclass(frozen=True)
class DenseOptimizer(ABC):
    """An update rule with its options. Holds no state: it is handed in, and workers share it without locks.

    Equal to the optimizer of the same name in `torch.optim`, bit by bit where that is given `fused=True`.

    Attributes:
        l2: so many times the parameter is added to its gradient, as by `weight_decay` in torch.
    """

    name: ClassVar[str]
    per_element: ClassVar[tuple[str, ...]] = ()
    per_parameter: ClassVar[tuple[str, ...]] = ()
    l2: Annotated[float, Field(ge=0)] = field(default=0.0, kw_only=True)

    def init(self, elements: int, parameters: int, device: torch.device) -> dict[str, Tensor]:
        """Zeros by name: `[P]` for what is kept per element, `[Q]` for what is kept per parameter (Adam's step)."""
        wide = {name: torch.zeros(elements, device=device) for name in self.per_element}
        return wide | {name: torch.zeros(parameters, device=device) for name in self.per_parameter}

    @abstractmethod
    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        """Updates parameters and state in place.

        All tensors are contiguous float32 of one device, and of the same shapes (0-d for what is kept per parameter).
        Parameters without a gradient, and their state, are not among them: they stay as they are, as in torch.
        """

    def _penalised(self, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_add(gradients, parameters, alpha=self.l2)) if self.l2 else gradients


@dataclass(frozen=True)
class Sgd(DenseOptimizer):
    """Stochastic gradient descent without momentum."""

    name: ClassVar[str] = "sgd"

    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        torch._foreach_add_(parameters, self._penalised(parameters, gradients), alpha=-lr)


@dataclass(frozen=True)
class Adagrad(DenseOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), without decay of the learning rate; more `eps` damps the first steps."""

    name: ClassVar[str] = "adagrad"
    per_element: ClassVar[tuple[str, ...]] = ("sum",)
    eps: Annotated[float, Field(gt=0)] = 1e-8

    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        if parameters[0].device.type != "cpu":
            self._step_plain(parameters, gradients, state, lr)
            return
        torch._fused_adagrad_(
            parameters,
            gradients,
            state["sum"],
            [torch.ones(())] * len(parameters),  # the step matters to a decay of the learning rate only
            lr=lr,
            lr_decay=0.0,
            weight_decay=self.l2,
            eps=self.eps,
            maximize=False,
        )

    def _step_plain(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        gradients = self._penalised(parameters, gradients)
        torch._foreach_addcmul_(state["sum"], gradients, gradients, value=1)
        roots = list(torch._foreach_sqrt(state["sum"]))
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(parameters, gradients, roots, value=-lr)


@dataclass(frozen=True)
class Adam(DenseOptimizer):
    """Adam (arXiv 1412.6980): more `eps` damps small gradients, more `beta1` and `beta2` smooth over more steps.

    Ours differs from the paper in that Hogwild workers share the counter of steps, which may lose a count when two
    of them step at the same moment; that touches the bias correction of the first steps only.
    """

    name: ClassVar[str] = "adam"
    per_element: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    per_parameter: ClassVar[tuple[str, ...]] = ("step",)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999

    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        torch._foreach_add_(state["step"], 1)
        torch._fused_adam_(
            parameters,
            gradients,
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            state["step"],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.l2,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
