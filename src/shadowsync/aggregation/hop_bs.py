"""Bounded staleness: asynchronous, but nobody runs away from the slowest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, Worker


@dataclass(frozen=True)
class HopBs(Aggregation):
    """Applies each gradient as it arrives; a worker whose next batch is more than `bound` ahead of that of the slowest
    waits (Hop, Luo et al., arXiv 1902.01064; a baseline of GBA, arXiv 2205.11048).

    A worker's clock is the number of batches that it has finished, as in the stale synchronous parallel parameter
    server (Ho et al. 2013): it begins only while its clock is at most `bound` above the lowest of the living. Ours has
    no graph of neighbours, as Hop has: all workers meet at the same servers. A worker that joins starts at the lowest
    clock. Whoever is out of data has to leave, or the others would wait for it.
    """

    name: ClassVar[str] = "hop_bs"

    bound: Annotated[
        int, Field(ge=0, description="batches that a worker may be ahead of the slowest; more waits less")
    ] = 2

    def start(self, size: int, step: int = 0) -> Aggregator:
        return _Clocks(self, step)


class _Clocks(Aggregator):
    """Knows how far each living worker is."""

    def __init__(self, options: HopBs, step: int) -> None:
        super().__init__(options.name, 1, step)
        self._bound = options.bound
        self._finished_by: dict[Worker, int] = {}

    def left(self, worker: Worker) -> None:
        super().left(worker)
        self._finished_by.pop(worker, None)

    def flush(self) -> Sequence[Commit]:
        busy = {batch.worker for batch in (*self.in_flight.values(), *self._waiting.values())}
        self._finished_by = {worker: count for worker, count in self._finished_by.items() if worker in busy}
        return super().flush()

    def _admits(self, batch: Begun) -> bool:
        self._finished_by.setdefault(batch.worker, self._slowest())
        computing = sum(other.worker == batch.worker for other in self.in_flight.values())
        return self._finished_by[batch.worker] + computing - self._slowest() <= self._bound

    def _finished(self, number: int) -> Begun | None:
        if (batch := super()._finished(number)) is not None:
            self._finished_by[batch.worker] += 1
        return batch

    def _slowest(self) -> int:
        return min(self._finished_by.values(), default=0)
