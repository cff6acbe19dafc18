"""Synchronous training: rounds that everybody waits for."""

from dataclasses import dataclass
from typing import ClassVar

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Buffer


@dataclass(frozen=True)
class Sync(Aggregation):
    """A step is the mean of M gradients of the same version of the parameters: large-batch training.

    A round admits M batches, counted, whoever computes them: of fewer workers than M each computes several, of more
    some wait for the next round. The place of a batch that is lost goes to another one, so the global batch is what it
    was and no round needs a worker that died.
    """

    name: ClassVar[str] = "sync"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return Rounds(self.name, size, step)


class Rounds(Buffer):
    """A buffer that admits as many batches as a round has; the rest wait, first those dispatched first."""

    @property
    def waits(self) -> bool:
        return True

    def _admits(self, batch: Begun) -> bool:
        before = sum(number < batch.number for number in self._waiting)
        return self._taken() + before < self.size

    def _taken(self) -> int:
        return len(self._in_flight) + len(self._held)
