"""Asynchronous training in bulk: the global batch is kept, staleness is not looked at."""

from dataclasses import dataclass
from typing import ClassVar

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Buffer


@dataclass(frozen=True)
class Bsp(Aggregation):
    """A step is the mean of the next M gradients that arrive, whoever computed them and however old they are (BSP in
    GBA, arXiv 2205.11048).

    Not to be confused with bulk synchronous parallel, which is `sync` here: nobody waits at a barrier.
    """

    name: ClassVar[str] = "bsp"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return Buffer(self.name, size, step)
