"""Averages of small groups, so that a trainer behind a slow link holds up those who meet it, and not all."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from pydantic import Field

from shadowsync.errors import ConfigError
from shadowsync.sync.ma import ModelAveraging
from shadowsync.sync.meeting import Meeting


@dataclass(frozen=True)
class DivideAndShuffle(ModelAveraging):
    """Divide-and-shuffle synchronisation (DS-Sync, arXiv 2007.03298): `u_i = copy of w_i; c = mean of u_j over a small
    group; w_i += α (c − u_i)`, in another group each time.

    The paper draws all groups anew before each iteration, and so waits for the slowest one each time; ours take those
    who have come, as in Moshpit and other gossip methods: whoever waits longest, with those whom it has not met for the
    longest time. So trainers of other groups go on, and as long as nobody is slow all mix; where there is but one other
    group, it waits after its second meeting. α is ours, as in `ma`. Vectors cross whole, in a ring that is built for
    each meeting, also among trainers of one machine.
    """

    name: ClassVar[str] = "ds_sync"

    group: Annotated[
        int | None,
        Field(ge=2, description="trainers that average together; more mix faster and wait longer; null: √trainers"),
    ] = None

    @property
    def takes_differences(self) -> bool:
        return False

    def resolved(self, trainers: int) -> Self:
        if self.group is not None and self.group > trainers > 1:
            raise ConfigError(
                f"sync.group={self.group} is more than there are trainers ({trainers}): lower it, or set "
                "sync.method=ma, where all average together"
            )
        size = self.group or max(2, round(math.sqrt(trainers)))
        return replace(self, group=size)

    def meeting(self) -> Meeting:
        assert self.group is not None, "resolved() fills group in"
        return Groups(self.group)


class Groups(Meeting):
    """So many at a time: the one that has waited longest, with those whom it has not met for the longest time.

    The same ones meet no more than twice in a row, as long as another one may still come: ever again would part those
    who come at the same time from all others, never again would have them wait. A meeting that fails counts, too, so
    that those who cannot reach each other try others. Where fewer are left than a group, all of them meet.
    """

    def __init__(self, size: int) -> None:
        self._size, self._meetings = size, 0
        self._met: dict[frozenset[int], int] = {}  # number of the last meeting of two
        self._last: dict[int, list[frozenset[int]]] = {}  # the last two of each

    def choose(self, waiting: Sequence[int], members: Collection[int]) -> Collection[int]:
        for first in waiting if len(waiting) >= min(self._size, len(members)) else ():
            others = sorted((rank for rank in waiting if rank != first), key=lambda rank: self._since(first, rank))
            group = frozenset((first, *others[: self._size - 1]))
            if self._last.get(first) != [group, group] or set(members) <= set(waiting):
                self._note(group)
                return group
        return ()

    def _since(self, first: int, second: int) -> int:
        return self._met.get(frozenset((first, second)), -1)

    def _note(self, group: frozenset[int]) -> None:
        self._meetings += 1
        self._last.update({rank: [*self._last.get(rank, ())[-1:], group] for rank in group})
        self._met.update({frozenset((one, other)): self._meetings for one in group for other in group if one < other})
