"""The seam of the schedules: when a replica method runs, and in whose thread."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod
from shadowsync.sync.rendezvous import Left


class Rest(Protocol):
    """The part of a job's gate that synchronisation needs (`training.gate.Gate`)."""

    def join(self) -> None:
        """One more thread that a pause has to wait for."""
        ...

    def leave(self) -> None:
        """One thread less."""
        ...

    def step(self) -> None:
        """Stands still here while the job is paused."""
        ...

    def rest(self, seconds: float, until: Callable[[], bool]) -> None:
        """Sleeps; a pause need not wait for the sleeper. `until` is asked again after `wake` only."""
        ...

    def resting(self) -> AbstractContextManager[None]:
        """While inside, this thread changes nothing: a pause need not wait for it. Leaving waits for its end."""
        ...

    def wake(self) -> None:
        """Lets every sleeper ask its `until` again."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """While inside, this thread depends on others, so that a pause lets them go on."""
        ...


@dataclass
class Synchronisation:
    """One trainer's replica method with its moving parts.

    Attributes:
        method: with all defaults resolved.
        weights: the replica, `[P]`.
        group: the way to the others.
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
    gate: Rest
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


class Driver(ABC):
    """Runs a `Synchronisation` when its schedule says so. One for each trainer."""

    @abstractmethod
    def start(self) -> None:
        """The trainer's workers are about to start."""

    @abstractmethod
    def after_step(self, worker_index: int, iteration: int) -> None:
        """Called in the worker's thread after each of its iterations, counted from 1."""

    def worker_idle(self, worker_index: int) -> None:  # noqa: B027 (matters only to drivers that wait for workers)
        """This worker has nothing to train now; nobody may wait for it."""

    def worker_back(self, worker_index: int) -> None:  # noqa: B027
        """This worker, idle before, has got something to train."""

    @abstractmethod
    def worker_left(self, worker_index: int) -> None:
        """This worker will not call again."""

    @abstractmethod
    def stop(self) -> None:
        """All workers have left: leaves the group and raises what went wrong, if anything did."""


class Unsynchronised(Driver):
    """The driver of a method that has nothing to do: no thread, no calls."""

    def start(self) -> None:
        """Nothing to start."""

    def after_step(self, worker_index: int, iteration: int) -> None:
        """Nothing to do."""

    def worker_left(self, worker_index: int) -> None:
        """Nobody waits."""

    def stop(self) -> None:
        """Nothing to stop."""


class Schedule(ABC):
    """When a replica method runs: hyper-parameters only.

    Attributes:
        foreground: workers wait for the synchronisation.
    """

    name: ClassVar[str]
    foreground: ClassVar[bool]

    def drive(self, synchronisation: Synchronisation) -> Driver:
        """A driver for one trainer."""
        return self._drive(synchronisation) if synchronisation.method.active else Unsynchronised()

    @abstractmethod
    def _drive(self, synchronisation: Synchronisation) -> Driver:
        """The schedule's own driver, for a method that is active."""
