"""The seam of the schedules: when a replica method runs, and in whose thread."""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod
from shadowsync.sync.rendezvous import Left
from shadowsync.training.gate import Gate
from shadowsync.training.worker import Driver


@dataclass
class Synchronisation:
    """One trainer's replica method with its moving parts.

    Attributes:
        method: with all defaults resolved.
        weights: the replica, `[P]`.
        workers: Hogwild workers of the trainer.
        gate: where threads stand still for a checkpoint.
        state: the method's. Workers that exchange by themselves (a centralised method in the foreground) all start
            from the last state; of those at the same time the last to end is kept.
        count: synchronisations so far.
    """

    method: SyncMethod
    weights: Tensor
    group: Group
    workers: int
    gate: Gate
    state: State = field(default_factory=dict)
    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def once(self) -> None:
        """Synchronises the replica; of a trainer that leaves meanwhile, nothing is changed or counted."""
        try:
            state = self.method.sync(self.weights, self.group, self.state)
        except Left:
            return
        with self._lock:  # not around the exchange: workers of one trainer do not wait for each other
            self.state = state
            self.count += 1

    def catch_up(self) -> None:
        """Synchronises once more, leaving nothing out, if a sparse codec has held something back; nobody trains."""
        if self.group.catch_up():
            self.once()


class Schedule(ABC):
    """When a replica method runs: hyper-parameters only.

    Attributes:
        foreground: workers wait for the synchronisation.
    """

    name: ClassVar[str]
    foreground: ClassVar[bool]

    def drive(self, synchronisation: Synchronisation) -> Driver:
        return self._drive(synchronisation) if synchronisation.method.active else Driver()

    @abstractmethod
    def _drive(self, synchronisation: Synchronisation) -> Driver: ...
