"""A trainer's end of the desk."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from shadowsync.data.desk import Claim, Rows
from shadowsync.data.desk_service import DeskService, DeskStatus
from shadowsync.data.leases import Lease
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending, all_of
from shadowsync.rpc.served import ask, later

LOOK_AGAIN_S = 0.025

T = TypeVar("T")


class DeskRemote:
    """The desk as a feed sees it (a `data.desk.Leasing`).

    What the desk said last is remembered, so that nobody asks how things stand while there is something to train;
    `wait` asks again every 25 ms, at the end of a job only. What was done goes along with the next claim, which a
    trainer makes at once; where none follows, somebody has to call `tell`.

    Attributes:
        trained: rows of the whole job, as of the last reply.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._said = DeskStatus(0, False, 0)
        self._lock = threading.Lock()
        self._done: list[Rows] = []
        self._told: deque[Pending[Any]] = deque()
        self._closed = threading.Event()

    @property
    def finished(self) -> bool:
        """As `Leasing.finished`, as of the last reply."""
        return self._said.finished

    @property
    def trained(self) -> int:
        """Rows trained by the whole job, as of the last reply."""
        return self._said.trained

    def version(self) -> int:
        """As `Leasing.version`, as of the last reply."""
        return self._said.version

    def wait(self, version: int) -> None:
        """As `Leasing.wait`."""
        self.tell()
        if self._said.version == version and not self._closed.wait(LOOK_AGAIN_S):
            self._heard(ask(self._connection, DeskService.status))

    def lease(self, trainer: int, idle: bool) -> Lease | None:
        """As `Leasing.lease`."""
        return self._answer(ask(self._connection, DeskService.lease, trainer, idle))

    def opened(self, lease: Lease, rows: int) -> bool:
        """As `Leasing.opened`."""
        return self._answer(ask(self._connection, DeskService.opened, lease, rows))

    def claim(self, lease: Lease, start: int, stop: int) -> Claim | None:
        """As `Leasing.claim`."""
        claimed = self._tell(lambda done: later(self._connection, DeskService.claim, lease, start, stop, done))
        return self._answer(claimed.result())

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """Notes it for the desk: always True, since it cannot be known here yet."""
        with self._lock:
            self._done.append(Rows(lease, start, stop))
        return True

    def tell(self) -> None:
        """Tells the desk what was done and not told yet, without waiting for it."""
        if self._done:
            told = self._tell(lambda done: later(self._connection, DeskService.done, done))
            told.then(lambda error: self._heard(told.result()) if error is None else None)

    def _tell(self, call: Callable[[tuple[Rows, ...]], Pending[T]]) -> Pending[T]:
        with self._lock:  # so that `settle` sees each piece of news either here or under way
            done, self._done = tuple(self._done), []
            told = call(done)
            while self._told and self._told[0].done():
                self._told.popleft()
            if done:
                self._told.append(told)
        return told

    def settle(self, timeout_s: float) -> bool:
        """Waits until the desk knows of everything that was done; false if it does not after that time."""
        self.tell()
        with self._lock:
            told = tuple(self._told)
        known = threading.Event()
        all_of(told).then(lambda _: known.set())
        return known.wait(timeout_s)

    def abandon(self, trainer: int) -> None:
        """As `Leasing.abandon`."""
        self.tell()
        self._heard(ask(self._connection, DeskService.abandon, trainer))

    def close(self) -> None:
        """Lets go of whoever waits."""
        self._closed.set()

    def _answer(self, given: tuple[DeskStatus, T]) -> T:
        said, answer = given
        self._heard(said)
        return answer

    def _heard(self, said: DeskStatus) -> None:
        with self._lock:  # replies may overtake each other
            if (said.version, said.trained) >= (self._said.version, self._said.trained):
                self._said = said
