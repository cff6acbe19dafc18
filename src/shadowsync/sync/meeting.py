"""Which of the trainers that wait for an average meet in it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar


class Meeting(ABC):
    """A rule for one job; it may remember who has met whom.

    Attributes:
        together: all members meet, so that there is one average at a time.
    """

    together: ClassVar[bool] = False

    @abstractmethod
    def choose(self, waiting: Sequence[int], members: Collection[int]) -> Collection[int]:
        """Those who meet now.

        Args:
            waiting: ranks, in the order in which they came.
            members: all ranks that take part; some of them may be in an average that is under way.

        Returns:
            Some of `waiting`; none where others have to come first.
        """


class Everybody(Meeting):
    """All members meet each time."""

    together: ClassVar[bool] = True

    def choose(self, waiting: Sequence[int], members: Collection[int]) -> Collection[int]:
        return waiting if set(members) <= set(waiting) else ()


EVERYBODY = Everybody()
"""It remembers nothing, so one serves all."""
