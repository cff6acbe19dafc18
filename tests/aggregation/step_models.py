"""A model for the tests of global steps, near and far."""

import torch
from torch import Tensor, nn


class TwoParameters(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, dense: Tensor, _: object) -> Tensor:
        return dense.sum(1) * self.first.sum() * self.second.sum()
