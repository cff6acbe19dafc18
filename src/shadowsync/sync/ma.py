"""Model averaging: every trainer moves towards the average of all."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod


@dataclass(frozen=True)
class ModelAveraging(SyncMethod):
    """Model averaging (ShadowSync, arXiv 2003.03477): `u_i = copy of w_i; c = AllReduce(u_i) / n; w_i += α (c − u_i)`.

    The all-reduce works on copies while workers go on. The paper then has `w_i ← (1−α) w_i + α c`, which takes α of
    what workers did meanwhile, too: on a slow network that is all they do. Ours moves replicas by as much as the copies
    would move, so that nothing is lost, and α is 1. Where nobody works meanwhile, as in the foreground, the two are the
    same within rounding.
    """

    name: ClassVar[str] = "ma"
    collective: ClassVar[bool] = True

    alpha: Annotated[
        float,
        Field(gt=0, le=1, description="step towards the common model; more pulls harder"),
        BeforeValidator(lambda given: 1.0 if given is None else given),  # null was a default of before
    ] = 1.0

    @property
    def takes_differences(self) -> bool:
        return True

    def init(self, weights: Tensor) -> State:
        return {}

    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        group.approach(weights, group.mean(weights), self.alpha)
        return state
