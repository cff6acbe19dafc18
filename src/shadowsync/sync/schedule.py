"""The seam of the schedules: when a replica method runs, in whose thread, and how those meet that do it together."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from shadowsync.sync.method import Group, State, SyncMethod
from shadowsync.training.gate import Gate
from shadowsync.training.worker import Driver

Given = TypeVar("Given")
Result = TypeVar("Result")


class Left(Exception):
    """This member left, so that there is no result for it; nobody waited for it, and its value was not used."""


class Rendezvous(Generic[Given, Result]):
    """Members arrive with a value; when all present ones have, one of them combines the values for everybody.

    Args:
        members: who takes part.
        combine: called with the values by member, in the members' order, in the thread of whoever came or left last.
            Members may come, go and wait meanwhile; two calls never overlap.
        waiting: entered while a member waits for others to come, left as soon as the last of them is there.
        resting: entered while a member waits, for others or for the result. Not for values that change until they are
            combined, nor where the result is applied by each member: whoever rests counts as standing still.
    """

    def __init__(
        self,
        members: Iterable[int],
        combine: Callable[[Mapping[int, Given]], Result],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._members = set(members)
        self._combine = combine
        self._waiting = waiting
        self._resting = resting
        self._waits: dict[int, ExitStack] = {}
        self._given: dict[int, Given] = {}
        self._combining = False
        self._outcomes: dict[int, Result | BaseException] = {}
        self._condition = threading.Condition()

    @property
    def size(self) -> int:
        """Members still present."""
        return len(self._members)

    def arrive(self, member: int, value: Given) -> Result:
        """Waits for all present members and returns the combined result; what `combine` raises, all of them raise.

        Raises:
            Left: the member is not present, or left (called by another thread) before all were there.
        """
        with self._condition:
            if member not in self._members:
                raise Left
            self._given[member] = value
            complete = self._take_if_all_here()
            self._depend()
        if complete is not None:
            self._meet(complete)
        else:
            self._wait_for_outcome(member)
        with self._condition:
            outcome = self._outcomes.pop(member)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def join(self, member: int) -> None:
        """`member` is waited for from now on."""
        with self._condition:
            self._members.add(member)

    def leave(self, member: int) -> None:
        """`member` is no longer waited for; if it waits itself, it is released and its value withdrawn."""
        with self._condition:
            self._members.discard(member)
            if member in self._given:
                del self._given[member]
                self._waits.pop(member, ExitStack()).close()
                self._publish([member], Left())
            complete = self._take_if_all_here()
        if complete is not None:
            self._meet(complete)

    def _wait_for_outcome(self, member: int) -> None:
        with self._resting(), self._condition:  # in this order: who comes back into a pause must not hold the condition
            self._condition.wait_for(lambda: member in self._outcomes)

    def _take_if_all_here(self) -> Mapping[int, Given] | None:
        """The values, if nobody is missing; their members then depend on nobody but the caller, who combines them."""
        if self._combining or not self._given or not self._members <= self._given.keys():
            return None
        given = dict(sorted(self._given.items()))
        self._given.clear()
        self._combining = True
        # Here and not where they wake up: until then others could arrive again, and so for ever.
        for wait in self._waits.values():
            wait.close()
        self._waits.clear()
        return given

    def _meet(self, given: Mapping[int, Given]) -> None:
        complete: Mapping[int, Given] | None = given
        while complete is not None:
            outcome: Result | BaseException
            try:
                outcome = self._combine(complete)
            except BaseException as error:
                outcome = error
            with self._condition:
                self._combining = False
                self._publish(complete, outcome)
                complete = self._take_if_all_here()  # those who came meanwhile
                self._depend()

    def _depend(self) -> None:
        # Not on a meeting under way, which may depend on other processes: a pause cannot let anybody here go on for it.
        for member in () if self._combining else self._given.keys() - self._waits.keys():
            self._waits[member] = ExitStack()
            self._waits[member].enter_context(self._waiting())

    def _publish(self, members: Iterable[int], outcome: Result | BaseException) -> None:
        self._outcomes.update(dict.fromkeys(members, outcome))
        self._condition.notify_all()


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
        """A driver for one trainer."""
        return self._drive(synchronisation) if synchronisation.method.active else Driver()

    @abstractmethod
    def _drive(self, synchronisation: Synchronisation) -> Driver:
        """The schedule's own driver, for a method that is active."""
