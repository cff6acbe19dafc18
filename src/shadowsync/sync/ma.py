"""Model averaging: every trainer moves towards the average of all."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from pydantic import Field
from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod


@dataclass(frozen=True)
class ModelAveraging(SyncMethod):
    """Model averaging (ShadowSync, arXiv 2003.03477): `c = AllReduce(copy of w_i) / n;
    w_i ← (1−α) w_i + α c`.

    The all-reduce works on a copy while workers go on. In the background `α = 1` would throw away what they did
    meanwhile, hence the default of 0.5 there; in the foreground, where they stand still, it is 1. Both defaults are
    ours.
    """

    name: ClassVar[str] = "ma"
    collective: ClassVar[bool] = True

    alpha: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="step towards the common model; more pulls harder; None is 0.5 in the background, else 1",
        ),
    ] = None

    @property
    def takes_differences(self) -> bool:
        return True

    def resolved(self, trainers: int, foreground: bool) -> Self:
        return self if self.alpha is not None else replace(self, alpha=1.0 if foreground else 0.5)

    def init(self, weights: Tensor) -> State:
        return {}

    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        assert self.alpha is not None, "resolved() fills alpha in"
        group.approach(weights, group.mean(weights), self.alpha)
        return state
