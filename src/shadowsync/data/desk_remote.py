"""A trainer's end of the desk."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from shadowsync.data.desk import Claim
from shadowsync.data.leases import Lease
from shadowsync.data.reading_messages import (
    ClaimAsked,
    ClaimGiven,
    DeskStatus,
    DoneTold,
    Held,
    LeaseAsked,
    LeaseGiven,
    OpenedAsked,
    Rows,
)
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.service import Meta

LOOK_AGAIN_S = 0.025

S = TypeVar("S", LeaseGiven, Held)


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
        self._told: deque[Future[Answer]] = deque()
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
            self._heard(self._connection.call("status").result().read(DeskStatus))

    def lease(self, trainer: int, idle: bool) -> Lease | None:
        """As `Leasing.lease`."""
        given = self._ask("lease", LeaseAsked(trainer, idle), LeaseGiven)
        return None if given.lease is None else given.lease.lease()

    def opened(self, lease: Lease, rows: int) -> bool:
        """As `Leasing.opened`."""
        return self._ask("opened", OpenedAsked(lease.number, rows), Held).held

    def claim(self, lease: Lease, start: int, stop: int) -> Claim | None:
        """As `Leasing.claim`."""
        rows = Rows(lease.number, start, stop)
        given = self._tell("claim", lambda done: ClaimAsked(rows, done)).result().read(ClaimGiven)
        self._heard(given.status)
        return None if given.number < 0 else Claim(given.number, given.stop)

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """Notes it for the desk: always True, since it cannot be known here yet."""
        with self._lock:
            self._done.append(Rows(lease.number, start, stop))
        return True

    def tell(self) -> None:
        """Tells the desk what was done and not told yet, without waiting for it."""
        if self._done:
            self._tell("done", DoneTold).add_done_callback(self._acknowledged)

    def _tell(self, method: str, message: Callable[[tuple[Rows, ...]], Meta]) -> Future[Answer]:
        with self._lock:  # so that `settle` sees each piece of news either here or under way
            done, self._done = tuple(self._done), []
            told = self._connection.call(method, message(done))
            while self._told and self._told[0].done():
                self._told.popleft()
            if done:
                self._told.append(told)
        return told

    def settle(self, timeout_s: float) -> bool:
        """Waits until the desk knows of everything that was done; false if it does not after that time."""
        self.tell()
        with self._lock:
            told = list(self._told)
        return not wait(told, timeout_s).not_done

    def abandon(self, trainer: int) -> None:
        """As `Leasing.abandon`."""
        self.tell()
        self._heard(self._connection.call("abandon", LeaseAsked(trainer, False)).result().read(DeskStatus))

    def close(self) -> None:
        """Lets go of whoever waits."""
        self._closed.set()

    def _ask(self, method: str, meta: Meta, kind: type[S]) -> S:
        answer = self._connection.call(method, meta).result().read(kind)
        self._heard(answer.status)
        return answer

    def _acknowledged(self, told: Future[Answer]) -> None:
        if told.exception() is None:
            self._heard(told.result().read(DeskStatus))

    def _heard(self, said: DeskStatus) -> None:
        with self._lock:  # replies may overtake each other
            if (said.version, said.trained) >= (self._said.version, self._said.trained):
                self._said = said
