"""The desk behind the wire: the job's one authority over who trains which rows."""

from collections.abc import Callable, Mapping, Sequence

from shadowsync.data.desk import Desk
from shadowsync.data.leases import Lease
from shadowsync.data.reading_messages import (
    ClaimAsked,
    ClaimGiven,
    DeskStatus,
    DoneTold,
    Held,
    LeaseAsked,
    LeaseGiven,
    LeaseInfo,
    OpenedAsked,
    Rows,
)
from shadowsync.errors import DataError
from shadowsync.rpc.service import Method, Reply, Request


class DeskService:
    """What a `Desk` offers to trainers elsewhere. Every reply says how things stand, so that nobody has to ask.

    Args:
        desk: what is served.
        give_back: has the desk give a trainer's rows to others; in place of `Desk.abandon`, where more than the desk
            has to know.
    """

    def __init__(self, desk: Desk, give_back: Callable[[int], None] | None = None) -> None:
        self._desk = desk
        self._give_back = give_back or desk.abandon
        self.methods: Mapping[str, Method] = {
            "lease": Method(self._lease, quick=True),
            "opened": Method(self._opened, quick=True),
            "claim": Method(self._claim, quick=True),
            "done": Method(self._done, quick=True),
            "abandon": Method(self._abandon, quick=True),
            "status": Method(self._say_status, once=False, quick=True),
        }

    def client_gone(self, client: str) -> None:
        """What a trainer holds goes back when the job gives the trainer up, not with its connection."""

    def close(self) -> None:
        """Nothing to end."""

    def _status(self) -> DeskStatus:
        # the version first: what changes in between is then noticed by whoever waits for another version
        version = self._desk.version()
        return DeskStatus(version, self._desk.finished, self._desk.trained)

    def _lease(self, request: Request) -> Reply:
        asked = request.read(LeaseAsked)
        lease = self._desk.lease(asked.trainer, asked.idle)
        return Reply(LeaseGiven(self._status(), None if lease is None else LeaseInfo.of(lease)))

    def _opened(self, request: Request) -> Reply:
        asked = request.read(OpenedAsked)
        return Reply(Held(self._status(), self._desk.opened(_lease(asked.lease), asked.rows)))

    def _claim(self, request: Request) -> Reply:
        asked = request.read(ClaimAsked)
        self._take_note(asked.done)
        rows = asked.rows
        claim = self._desk.claim(_lease(rows.lease), rows.start, rows.stop)
        number, stop = (-1, rows.start) if claim is None else (claim.number, claim.stop)
        return Reply(ClaimGiven(self._status(), number, stop))

    def _done(self, request: Request) -> Reply:
        self._take_note(request.read(DoneTold).done)
        return Reply(self._status())

    def _take_note(self, done: Sequence[Rows]) -> None:
        try:
            for rows in done:
                self._desk.done(_lease(rows.lease), rows.start, rows.stop)
        except ValueError as error:
            raise DataError(str(error)) from error

    def _abandon(self, request: Request) -> Reply:
        self._give_back(request.read(LeaseAsked).trainer)
        return Reply(self._status())

    def _say_status(self, request: Request) -> Reply:
        return Reply(self._status())


def _lease(number: int) -> Lease:
    """The book knows a lease by its number."""
    return Lease(number, -1, 0, 0, ())
