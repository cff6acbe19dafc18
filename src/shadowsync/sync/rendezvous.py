"""A barrier whose members may come and go."""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Generic, TypeVar

from shadowsync.sync.meeting import EVERYBODY, Meeting

Given = TypeVar("Given")
Result = TypeVar("Result")


class Left(Exception):
    """This member left, so that there is no result for it; nobody waited for it, and its value was not used."""


class Rendezvous(Generic[Given, Result]):
    """Members arrive with a value; when all present ones have, or those that are to meet, one of them combines the
    values for them.

    Args:
        members: who takes part.
        combine: called with the values by member, in the members' order, in the thread of whoever came or left last.
            Members may come, go and wait meanwhile; two calls never overlap.
        waiting: entered while a member waits for others to come, left as soon as the last of them is there.
        resting: entered while a member waits, for others or for the result. Not for values that change until they are
            combined, nor where the result is applied by each member: whoever rests counts as standing still.
        meeting: who of those that have arrived meet.
    """

    def __init__(
        self,
        members: Iterable[int],
        combine: Callable[[Mapping[int, Given]], Result],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
        meeting: Meeting = EVERYBODY,
    ) -> None:
        self._members, self._combine = set(members), combine
        self._waiting, self._resting, self._meeting = waiting, resting, meeting
        self._waits: dict[int, ExitStack] = {}
        self._given: dict[int, Given] = {}
        self._combining = False
        self._outcomes: dict[int, Result | BaseException] = {}
        self._condition = threading.Condition()

    def arrive(self, member: int, value: Given) -> Result:
        """Waits for those it meets and returns the combined result; what `combine` raises, all of them raise.

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
            with (
                self._resting(),
                self._condition,
            ):  # so ordered: who comes back into a pause holds nothing
                self._condition.wait_for(lambda: member in self._outcomes)
        with self._condition:
            outcome = self._outcomes.pop(member)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def join(self, member: int) -> None:
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

    def _take_if_all_here(self) -> Mapping[int, Given] | None:
        """The values of those that meet, if nobody is missing; they then depend on nobody but the caller, who combines
        them."""
        if self._combining or not (chosen := self._meeting.choose(tuple(self._given), self._members)):
            return None
        given = {member: self._given.pop(member) for member in sorted(chosen)}
        self._combining = True
        # Here and not where they wake up: until then others could arrive again, and so for ever.
        for member in given:
            self._waits.pop(member, ExitStack()).close()
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
