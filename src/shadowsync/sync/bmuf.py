"""Blockwise model update filtering: model averaging with a momentum over the averages."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from shadowsync.sync.ma import ModelAveraging
from shadowsync.sync.method import Group, State


@dataclass(frozen=True)
class Bmuf(ModelAveraging):
    """Blockwise model-update filtering (Chen and Huo, ICASSP 2016; in the background: ShadowSync, arXiv 2003.03477):
    `u_i = copy of w_i; c = AllReduce(u_i) / n; Δ ← μ Δ + η (c − w_g); w_g += Δ; w_i += α (w_g − u_i)`, the last as in
    `ma`.

    With Nesterov momentum the replicas move towards `w_g + μ Δ`, where the next block starts, and what a block has
    brought, `c` less `w_g` above, is measured from there. `η = 1, μ = 0` is model averaging exactly.

    Every trainer keeps `w_g` and `Δ`; they agree because all see the same averages. A trainer that missed some (in the
    foreground, while it had nothing to train) starts anew from the first average it sees again, `w_g = c, Δ = 0`. It
    then differs from the others by their `μ Δ`; as all go on with the same averages, the difference shrinks by about
    `√μ` with each of them. Under a threshold all start anew together instead, as they have to move towards one point.

    The BMUF paper ties `μ` to the number of trainers (1 − 1/n) for blocks of many steps; our default of 0.5 is milder,
    for the frequent synchronisation of the background. With α below 1 the momentum is αμ. Where an average takes as
    long as a block, a momentum above 0.7 or an η above 1.5 may diverge at large learning rates; a smaller α damps that.
    """

    name: ClassVar[str] = "bmuf"

    momentum: Annotated[float, Field(ge=0, lt=1, description="block momentum μ; more remembers longer")] = 0.5
    eta: Annotated[float, Field(gt=0, le=2, description="block learning rate η; more follows the average faster")] = 1.0
    nesterov: Annotated[bool, Field(description="replicas look ahead by μ Δ")] = False

    def init(self, weights: Tensor) -> State:
        return {"global": weights.clone(), "delta": weights.new_zeros(weights.shape)}

    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        average = group.mean(weights)
        if group.missed():
            state = self.init(average)
        before, momentum = state["global"], self.momentum * state["delta"]
        start = before + momentum if self.nesterov else before
        delta = momentum + self.eta * (average - start)
        model = before + delta
        target = model + self.momentum * delta if self.nesterov else model
        group.approach(weights, target, self.alpha)
        return {"global": model, "delta": delta}
