"""The desk behind the wire: the job's one authority over who trains which rows."""

from collections.abc import Callable
from dataclasses import dataclass

from shadowsync.data.desk import Claim, Desk, Rows
from shadowsync.data.leases import Lease
from shadowsync.errors import DataError
from shadowsync.rpc.served import Client, served

ANYBODY = Client("")


@dataclass(frozen=True)
class DeskStatus:
    """How things stand; comes with every answer of the desk.

    Attributes:
        version: as `Leasing.version`.
        finished: as `Leasing.finished`.
        trained: rows, all epochs.
    """

    version: int
    finished: bool
    trained: int


class DeskService:
    """What a `Desk` offers to trainers elsewhere. Every answer says how things stand, so that nobody has to ask.

    What a trainer holds goes back when the job gives the trainer up, not with its connection.

    Args:
        desk: what is served.
        give_back: has the desk give a trainer's rows to others; in place of `Desk.abandon`, where more than the desk
            has to know.
        leasing: is told over which connection a trainer asks for rows.
    """

    def __init__(
        self,
        desk: Desk,
        give_back: Callable[[int], None] | None = None,
        leasing: Callable[[int, Client], None] = lambda *_: None,
    ) -> None:
        self._desk = desk
        self._give_back = give_back or desk.abandon
        self._leasing = leasing

    @served(once=False, quick=True)
    def status(self) -> DeskStatus:
        """How things stand."""
        # the version first: what changes in between is then noticed by whoever waits for another version
        version = self._desk.version()
        return DeskStatus(version, self._desk.finished, self._desk.trained)

    @served(quick=True)
    def lease(self, trainer: int, idle: bool, client: Client = ANYBODY) -> tuple[DeskStatus, Lease | None]:
        """As `Leasing.lease`."""
        self._leasing(trainer, client)
        lease = self._desk.lease(trainer, idle)
        return self.status(), lease

    @served(quick=True)
    def opened(self, lease: Lease, rows: int) -> tuple[DeskStatus, bool]:
        """As `Leasing.opened`."""
        return self.status(), self._desk.opened(lease, rows)

    @served(quick=True)
    def claim(self, lease: Lease, start: int, stop: int, done: tuple[Rows, ...]) -> tuple[DeskStatus, Claim | None]:
        """As `Leasing.claim`, after `done`."""
        self._take_note(done)
        claim = self._desk.claim(lease, start, stop)
        return self.status(), claim

    @served(quick=True)
    def done(self, done: tuple[Rows, ...]) -> DeskStatus:
        """As `Leasing.done`, of several rows.

        Raises:
            DataError: they were not leased.
        """
        self._take_note(done)
        return self.status()

    @served(quick=True)
    def abandon(self, trainer: int) -> DeskStatus:
        """As `Leasing.abandon`."""
        self._give_back(trainer)
        return self.status()

    def _take_note(self, done: tuple[Rows, ...]) -> None:
        try:
            for rows in done:
                self._desk.done(*rows)
        except ValueError as error:
            raise DataError(str(error)) from error
