"""The client's book of one connection's calls that have no answer yet; knows no sockets and no clock."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from shadowsync.rpc.connection import Answer
from shadowsync.rpc.ledger import Frames
from shadowsync.rpc.messages import Call, encode
from shadowsync.rpc.packing import Cargo


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """One call that waits for its answer, and all that it takes to send it again.

    Attributes:
        method: the name that is called.
        cargo: its typed part and its tensors.
        limit_s: how long it may take.
        deadline_s: when it is given up.
        future: where the answer goes.
    """

    method: str
    cargo: Cargo
    limit_s: float
    deadline_s: float
    future: Future[Answer]

    @property
    def since_s(self) -> float:
        """When it was made."""
        return self.deadline_s - self.limit_s


@dataclass
class Calls:
    """Calls by number, oldest first; the caller's lock guards it."""

    _open: dict[int, Pending] = field(default_factory=dict)
    _last: int = 0
    _sent: int = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def oldest(self) -> Pending | None:
        """The one that has waited longest."""
        return next(iter(self._open.values()), None)

    @property
    def low(self) -> int:
        """The lowest number that waits for an answer, or the next one."""
        return next(iter(self._open), self._last + 1)

    def add(self, pending: Pending) -> int:
        """Enters a call and returns its number."""
        self._last += 1
        self._open[self._last] = pending
        return self._last

    def drop(self, number: int) -> Pending | None:
        """Takes out a call, if it still waits."""
        return self._open.pop(number, None)

    def message(self, number: int, session: int) -> Frames:
        """The call as it is sent in that session."""
        self._sent = max(self._sent, number)
        pending = self._open[number]
        cargo = pending.cargo
        header = Call(session, number, self.low, pending.method, cargo.meta, cargo.specs)
        return [encode(header), *cargo.frames]

    def numbers(self) -> list[int]:
        """All that wait, in order."""
        return list(self._open)

    def take_sent(self) -> list[Pending]:
        """Takes out all that were sent at least once."""
        return self._take(number for number in self.numbers() if number <= self._sent)

    def take_all(self) -> list[Pending]:
        """Takes out all."""
        return self._take(self.numbers())

    def take_late(self, now_s: float) -> list[Pending]:
        """Takes out those whose deadline has passed."""
        return self._take([number for number, pending in self._open.items() if pending.deadline_s <= now_s])

    def _take(self, numbers: Iterable[int]) -> list[Pending]:
        return [self._open.pop(number) for number in numbers]
