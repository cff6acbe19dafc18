"""Optimizers of the dense part: torch's fused kernels on parameters whose state lives in shared flat tensors.

`P` elements of a replica's flat tensor, `Q` parameters in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

State = Mapping[str, list[Tensor]]
"""For each name of the state, the parts that belong to the parameters being stepped, in their order."""


class DenseOptimizer(ABC):
    """An update rule with its options. Holds no state: it is handed in, and workers share it without locks.

    Equal to the optimizer of the same name in `torch.optim`, bit by bit where that is given `fused=True`.
    """

    name: ClassVar[str]
    per_element: ClassVar[tuple[str, ...]] = ()
    per_parameter: ClassVar[tuple[str, ...]] = ()

    def init(self, elements: int, parameters: int, device: torch.device) -> dict[str, Tensor]:
        """Zeros by name: `[P]` for what is kept per element, `[Q]` for what is kept per parameter (Adam's step)."""
        wide = {name: torch.zeros(elements, device=device) for name in self.per_element}
        return wide | {name: torch.zeros(parameters, device=device) for name in self.per_parameter}

    @abstractmethod
    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        """Updates parameters and state in place. All tensors are contiguous float32 of one device.

        Args:
            parameters: those that have a gradient; the others and their state stay as they are, as in torch.
            gradients: of the same shapes.
            state: views of the state of these parameters, of the same shapes (0-d for what is kept per parameter).
            lr: the learning rate of this step.
        """


@dataclass(frozen=True)
class Sgd(DenseOptimizer):
    """Stochastic gradient descent without momentum."""

    name: ClassVar[str] = "sgd"

    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        torch._foreach_add_(parameters, gradients, alpha=-lr)


@dataclass(frozen=True)
class Adagrad(DenseOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), without decay of the learning rate.

    Attributes:
        eps: added to the denominator; more damps the first steps.
    """

    name: ClassVar[str] = "adagrad"
    per_element: ClassVar[tuple[str, ...]] = ("sum",)
    eps: Annotated[float, Field(gt=0)] = 1e-8

    def step(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        on_cpu = parameters[0].device.type == "cpu"
        (self._step_fused if on_cpu else self._step_plain)(parameters, gradients, state, lr)

    def _step_plain(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        torch._foreach_addcmul_(state["sum"], gradients, gradients, value=1)
        roots = list(torch._foreach_sqrt(state["sum"]))
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(parameters, gradients, roots, value=-lr)

    def _step_fused(self, parameters: list[Tensor], gradients: list[Tensor], state: State, lr: float) -> None:
        torch._fused_adagrad_(
            parameters,
            gradients,
            state["sum"],
            [torch.ones(())] * len(parameters),  # the step matters to a decay of the learning rate only
            lr=lr,
            lr_decay=0.0,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class Adam(DenseOptimizer):
    """Adam (arXiv 1412.6980).

    Ours differs from the paper in that Hogwild workers share the counter of steps, which may lose a count when two
    of them step at the same moment; that touches the bias correction of the first steps only.

    Attributes:
        eps: added to the denominator; more damps small gradients.
        beta1: decay of the mean of the gradients; more smooths over more steps.
        beta2: decay of the mean of their squares; more smooths over more steps.
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
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
