"""Asynchronous training: every gradient is a step."""

from dataclasses import dataclass
from typing import ClassVar

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Buffer


@dataclass(frozen=True)
class Async(Aggregation):
    """Applies each gradient as it arrives, however old: asynchronous SGD with a parameter server (Dean et al. 2012;
    a baseline of GBA, arXiv 2205.11048).

    A step is made of one local batch instead of M, which is why the hyper-parameters of synchronous training do not
    fit it.
    """

    name: ClassVar[str] = "async"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return Buffer(self.name, 1, step)

    def batches_per_step(self, size: int) -> int:
        return 1
