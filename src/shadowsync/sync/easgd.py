"""Elastic averaging SGD: each trainer and the central copy pull each other, two at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod


@dataclass(frozen=True)
class Easgd(SyncMethod):
    """Elastic averaging (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651), as ShadowSync uses it (arXiv
    2003.03477): centralised, and without a barrier between trainers.

    `elastic`, the classical form, applies one difference to both sides: `d = α (w_i − w_PS); w_i −= d; w_PS += d`, so
    that `w_PS + Σ w_i` is conserved. `sequential` lets the replica see the new central copy:
    `w_PS ← (1−α) w_PS + α u_i; w_i ← w_i + α (w_PS − u_i)`, with `u_i` the replica as it was sent; what workers do
    during an exchange stays in both forms. Which of them ShadowSync runs is not known to us.

    Unlike in the EASGD paper, where the exchange is part of an SGD step, it happens beside the workers' steps. The
    default `α = 0.9 / trainers` is the start value of that paper's authors, but at most 0.5: with a single trainer
    the pair would otherwise swap more than it averages.
    """

    name: ClassVar[str] = "easgd"
    centralised: ClassVar[bool] = True
    codec_options: ClassVar[Mapping[str, Any]] = {"keep": 0.1}

    alpha: Annotated[
        float | None, Field(gt=0, le=1, description="elastic parameter; more pulls harder; None is 0.9 / trainers")
    ] = None
    form: Annotated[
        Literal["elastic", "sequential"],
        Field(description="one difference for both sides, or the replica sees the new copy"),
    ] = "elastic"

    @property
    def takes_differences(self) -> bool:
        return self.form == "elastic"

    def resolved(self, trainers: int) -> Self:
        return self if self.alpha is not None else replace(self, alpha=min(0.5, 0.9 / trainers))

    def init(self, weights: Tensor) -> State:
        return {}

    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        assert self.alpha is not None, "resolved() fills alpha in"
        if self.form == "elastic":
            weights.sub_(group.elastic(weights, self.alpha))
        else:
            sent = weights.clone()
            weights.add_((group.sequential(sent, self.alpha) - sent).mul_(self.alpha))
        return state

    def final(self, replicas: Sequence[Tensor], center: Tensor | None) -> Tensor:
        assert center is not None, "a centralised method has a central copy"
        return center
