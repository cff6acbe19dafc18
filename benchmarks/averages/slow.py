"""Averages that take a while, as on a slow network, and what may become of the work that is done meanwhile."""

import time
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from shadowsync.sync.bmuf import Bmuf
from shadowsync.sync.ma import ModelAveraging
from shadowsync.sync.method import Group, State

Rule = Literal["published", "ours"]


class SlowGroup(Group):
    """As `group`; an average is there so many seconds after the replicas were copied for it."""

    def __init__(self, group: Group, seconds: float, rule: Rule) -> None:
        super().__init__(group.averaging, group.servers)
        self._seconds, self._rule = seconds, rule

    def mean(self, weights: Tensor) -> Tensor:
        average = super().mean(weights)
        time.sleep(self._seconds)
        return average

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """By the rule of ShadowSync (arXiv 2003.03477), `w_i ← (1−α) w_i + α target`, or by ours."""
        if self._rule == "published":
            weights.lerp_(target, alpha)
        else:
            super().approach(weights, target, alpha)


@dataclass(frozen=True)
class SlowMa(ModelAveraging):
    """Model averaging on a slow network."""

    name: ClassVar[str] = "slow_ma"

    seconds: Annotated[float, Field(ge=0)] = 0.1
    rule: Rule = "ours"

    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        return super().sync(weights, SlowGroup(group, self.seconds, self.rule), state)


@dataclass(frozen=True)
class SlowBmuf(SlowMa, Bmuf):
    """BMUF on a slow network."""

    name: ClassVar[str] = "slow_bmuf"
