"""The one authority over who trains which rows, for the threads of its process and, behind a wire, for other processes.

Every answer says how things stand, so that nobody has to ask.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from shadowsync.data.leases import EpochCount, Lease, LeaseBook
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending, ended
from shadowsync.rpc.served import ask, later, served

LOOK_AGAIN_S = 0.025

T = TypeVar("T")


class LeaseStatus(NamedTuple):
    """How things stand.

    Attributes:
        version: grows whenever rows come back or everything is finished.
        finished: every row of every epoch was trained or skipped.
        trained: rows, all epochs.
    """

    version: int
    finished: bool
    trained: int


class Claim(NamedTuple):
    """Leave to train rows now.

    Attributes:
        number: place in the order in which batches are begun, over all trainers, from 0.
        stop: the row before which to stop.
    """

    number: int
    stop: int


class Rows(NamedTuple):
    """Rows `start … stop − 1` of a lease."""

    lease: Lease
    start: int
    stop: int


class LeaseService:
    """A `LeaseBook` behind a lock, which tells when it has changed.

    What a trainer holds goes back when the job gives the trainer up, not with its connection.

    Args:
        book: not to be used by anybody else from now on.
        grain: rows of a batch.
    """

    def __init__(self, book: LeaseBook, grain: int) -> None:
        self._book, self._grain = book, grain
        numbers = itertools.count()
        self._number: Callable[[Lease, int, int], int] = lambda *_: next(numbers)
        self._version = 0
        self._changed = threading.Condition()
        self._alarm: tuple[int, Callable[[], None]] | None = None

    @served(quick=True)
    def lease(self, trainer: int, idle: bool) -> tuple[LeaseStatus, Lease | None]:
        """As `LeaseBook.lease`; for a trainer that is idle, else as `LeaseBook.take_over`."""
        with self._changed:
            found = self._book.lease(trainer)
            if found is None and idle:
                found = self._book.take_over(trainer, self._grain)
            return self._status(), found

    @served(quick=True)
    def opened(self, lease: Lease, rows: int) -> tuple[LeaseStatus, bool]:
        """As `LeaseBook.opened`."""
        with self._changed:
            held = self._book.opened(lease, rows)
            self._wake_at_the_end()
            return self._status(), held

    @served(quick=True)
    def claim(
        self, lease: Lease, start: int, stop: int, done: tuple[Rows, ...] = ()
    ) -> tuple[LeaseStatus, Claim | None]:
        """As `LeaseBook.claim`, after `done` of those rows; None where the rows are not the holder's any more."""
        for rows in done:
            self.done(*rows)
        with self._changed:
            granted = self._book.claim(lease, start, stop)
            claim = Claim(self._number(lease, start, granted), granted) if granted > start else None
            return self._status(), claim

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """As `LeaseBook.done`."""
        with self._changed:
            held = self._book.done(lease, start, stop)
            self._wake_at_the_end()
            if self._alarm is None or self._book.trained < self._alarm[0]:
                return held
            _, ring = self._alarm
            self._alarm = None
        ring()
        return held

    @served(quick=True)
    def tell(self, done: tuple[Rows, ...]) -> LeaseStatus:
        """As `done`, of several rows.

        Raises:
            DataError: they were not leased.
        """
        for rows in done:
            self.done(*rows)
        with self._changed:
            return self._status()

    @served(quick=True)
    def abandon(self, trainer: int) -> None:
        """As `LeaseBook.abandon`."""
        with self._changed:
            self._book.abandon(trainer)
        self.wake()

    def wait(self, version: int) -> None:
        """Returns when the version is another one; of a `LeaseClient` perhaps earlier: ask again then."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version)

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def number_by(self, give: Callable[[Lease, int, int], int]) -> None:
        """Has somebody else number the batches: called for each claim, in their order, and not to call back.

        Args:
            give: numbers a batch, given the lease and the first row and the one after the last.
        """
        with self._changed:
            self._number = give

    def alarm(self, trained: int, call: Callable[[], None]) -> None:
        """Has `call` called once, as soon as so many rows are trained, in the thread that tells of the last of them.

        There is one alarm, the one that was set last; where so many are trained already it never rings.
        """
        with self._changed:
            self._alarm = (trained, call) if self._book.trained < trained else None

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""
        with self._changed:
            return self._book.finished

    @property
    def trained(self) -> int:
        """Rows trained so far, all epochs."""
        return self._book.trained

    def epochs(self) -> Sequence[EpochCount]:
        """Rows trained and skipped in each epoch so far."""
        with self._changed:
            return [replace(count) for count in self._book.epochs]

    def state(self) -> Mapping[str, Any]:
        """As `LeaseBook.state`."""
        with self._changed:
            return self._book.state()

    def _status(self) -> LeaseStatus:
        return LeaseStatus(self._version, self._book.finished, self._book.trained)

    def _wake_at_the_end(self) -> None:
        if self._book.finished:
            self._version += 1
            self._changed.notify_all()


class LeaseClient:
    """A trainer's end of a `LeaseService`, to be used as that is.

    What was done goes along with the next claim, which a trainer makes at once; where none follows, somebody has to
    call `tell`. Who waits asks again every 25 ms, at the end of a job only.

    Attributes:
        trained: rows of the whole job, as of the last reply.
    """

    def __init__(self, connection: Connection) -> None:
        self.trained = 0
        self._connection = connection
        self._lock = threading.Lock()
        self._done: list[Rows] = []
        self._told: deque[Pending[Any]] = deque()
        self._closed = threading.Event()

    def lease(self, trainer: int, idle: bool) -> tuple[LeaseStatus, Lease | None]:
        return self._heard(ask(self._connection, LeaseService.lease, trainer, idle))

    def opened(self, lease: Lease, rows: int) -> tuple[LeaseStatus, bool]:
        return self._heard(ask(self._connection, LeaseService.opened, lease, rows))

    def claim(self, lease: Lease, start: int, stop: int) -> tuple[LeaseStatus, Claim | None]:
        claimed = self._send(lambda done: later(self._connection, LeaseService.claim, lease, start, stop, done))
        return self._heard(claimed.result())

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """Notes it: always True, since it cannot be known here yet."""
        with self._lock:
            self._done.append(Rows(lease, start, stop))
        return True

    def tell(self) -> None:
        """Tells what was done and not told yet, without waiting for it."""
        if self._done:
            told = self._send(lambda done: later(self._connection, LeaseService.tell, done))
            told.then(lambda error: None if error else self._note(told.result()))

    def settle(self, timeout_s: float) -> bool:
        """Waits until everything that was done is known; false if it is not after that time."""
        self.tell()
        with self._lock:
            told = tuple(self._told)
        return ended(told, timeout_s)

    def abandon(self, trainer: int) -> None:
        self.tell()
        ask(self._connection, LeaseService.abandon, trainer)

    def wait(self, version: int) -> None:
        self.tell()
        self._closed.wait(LOOK_AGAIN_S)

    def close(self) -> None:
        """Lets go of whoever waits."""
        self._closed.set()

    def _send(self, call: Callable[[tuple[Rows, ...]], Pending[T]]) -> Pending[T]:
        with self._lock:  # so that `settle` sees each piece of news either here or under way
            done, self._done = tuple(self._done), []
            told = call(done)
            while self._told and self._told[0].done():
                self._told.popleft()
            if done:
                self._told.append(told)
        return told

    def _heard(self, answer: tuple[LeaseStatus, T]) -> tuple[LeaseStatus, T]:
        self._note(answer[0])
        return answer

    def _note(self, status: LeaseStatus) -> None:
        with self._lock:  # replies may overtake each other
            self.trained = max(self.trained, status.trained)


Leases = LeaseService | LeaseClient
"""What a trainer's feed asks, near or behind a wire."""
