"""Synchronisation in the workers' own loop, the yardstick of the background schedule."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from shadowsync.sync.rendezvous import Rendezvous
from shadowsync.sync.schedule import Schedule, Synchronisation
from shadowsync.training.worker import Driver


@dataclass(frozen=True)
class EveryK(Schedule):
    """Every k of a worker's own iterations (FR-EASGD-k, FR-MA and FR-BMUF of ShadowSync, arXiv 2003.03477).

    With a centralised method each worker exchanges by itself. With a collective one the workers of a trainer stop
    until all of them have come and the trainers have averaged.
    """

    name: ClassVar[str] = "every_k"
    foreground: ClassVar[bool] = True

    k: Annotated[
        int, Field(ge=1, description="iterations of a worker between synchronisations; more costs less time")
    ] = 30

    def _drive(self, synchronisation: Synchronisation) -> Driver:
        return Foreground(self, synchronisation)


class Foreground(Driver):
    """One trainer's part in synchronisation inside the loop.

    The trainer is a member of its group exactly as long as one of its workers has something to train; both change
    together, under one lock.
    """

    def __init__(self, schedule: EveryK, synchronisation: Synchronisation) -> None:
        self._k = schedule.k
        self._synchronisation = synchronisation
        self._membership = threading.Lock()
        self._present = set(range(synchronisation.workers))
        gate = synchronisation.gate
        self._workers: Rendezvous[None, None] = Rendezvous(
            range(synchronisation.workers), self._once_for_all, gate.waiting, gate.resting
        )

    def after_step(self, worker_index: int, iteration: int) -> None:
        if iteration % self._k:
            return
        if self._synchronisation.method.collective:
            self._workers.arrive(worker_index, None)
        else:
            self._synchronisation.once()

    def worker_idle(self, worker_index: int) -> None:
        # The workers' meeting is left outside the lock: whoever leaves last may average there for those who wait.
        with self._membership:
            self._present.discard(worker_index)
            if not self._present:
                self._synchronisation.group.leave()
        self._workers.leave(worker_index)

    def worker_back(self, worker_index: int) -> None:
        with self._membership:
            if not self._present:
                self._synchronisation.group.join()
            self._present.add(worker_index)
        self._workers.join(worker_index)

    def worker_left(self, worker_index: int) -> None:
        self.worker_idle(worker_index)

    def stop(self) -> None:
        with self._membership:
            self._synchronisation.group.leave()

    def _once_for_all(self, _: Mapping[int, None]) -> None:
        self._synchronisation.once()
