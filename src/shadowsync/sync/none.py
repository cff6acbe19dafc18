"""No synchronisation: the lower bound that every other method is measured against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod


@dataclass(frozen=True)
class NoSync(SyncMethod):
    """Replicas never meet, apart from sharing the embeddings. The first replica is the one evaluated."""

    name: ClassVar[str] = "none"
    active: ClassVar[bool] = False

    def init(self, weights: Tensor) -> State:
        return {}

    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        return state

    def final(self, replicas: Sequence[Tensor], center: Tensor | None) -> Tensor:
        return replicas[0]
