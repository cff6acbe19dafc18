"""A further loss of a model's own beside the log loss of its logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_loss(logits: Tensor, loss: Tensor) -> Tensor:
    """The logits as they are; whatever is differentiated through them, the gradient of `loss` (0-d) is added to it.

    So a module that returns logits only can have a loss of its own, as mixture-of-experts models do for their balance
    (arXiv 2401.06066, its authors' code). It is exact where the final loss is not scaled afterwards.
    """
    added: Tensor = _WithLoss.apply(logits, loss)  # type: ignore[no-untyped-call]
    return added


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = torch.ones_like(loss)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.loss_like
