"""A barrier whose members may leave at any time, with a result that all who stay get."""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Generic, TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


class Left(Exception):
    """This member left, so that there is no result for it; nobody waited for it, and its value was not used."""


class Rendezvous(Generic[Given, Result]):
    """Members arrive with a value; when all present ones have, one of them combines the values for everybody.

    Args:
        members: who takes part.
        combine: called with the values by member, in the members' order, in the thread of whoever came or left last.
        waiting: entered while a member waits for others, left as soon as the last of them is there.
    """

    def __init__(
        self,
        members: Iterable[int],
        combine: Callable[[Mapping[int, Given]], Result],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._members = set(members)
        self._combine = combine
        self._waiting = waiting
        self._waits: dict[int, ExitStack] = {}
        self._given: dict[int, Given] = {}
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
            self._complete_if_all_here()
            if member not in self._outcomes:
                self._waits[member] = ExitStack()
                self._waits[member].enter_context(self._waiting())
                self._condition.wait_for(lambda: member in self._outcomes)
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
                self._release(member, Left())
            self._complete_if_all_here()

    def _complete_if_all_here(self) -> None:
        if not self._given or not self._members <= self._given.keys():
            return
        given = dict(sorted(self._given.items()))
        self._given.clear()
        outcome: Result | BaseException
        try:
            outcome = self._combine(given)
        except BaseException as error:
            outcome = error
        for member in given:
            self._release(member, outcome)

    def _release(self, member: int, outcome: Result | BaseException) -> None:
        self._outcomes[member] = outcome
        if member in self._waits:
            # Here and not where it wakes up: until then others could arrive again, and so for ever.
            self._waits.pop(member).close()
        self._condition.notify_all()
