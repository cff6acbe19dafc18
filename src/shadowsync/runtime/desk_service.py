"""The desk behind the wire: the job's one authority over who trains which rows."""

from collections.abc import Mapping

from shadowsync.data.desk import Desk
from shadowsync.data.leases import Lease
from shadowsync.errors import DataError
from shadowsync.runtime.reading_messages import (
    ClaimGiven,
    DeskStatus,
    Held,
    LeaseAsked,
    LeaseGiven,
    LeaseInfo,
    RowsAsked,
)
from shadowsync.runtime.wire.service import Method, Reply, Request


class DeskService:
    """What a `Desk` offers to trainers elsewhere. Every reply says how things stand, so that nobody has to ask."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.methods: Mapping[str, Method] = {
            "lease": Method(self._lease),
            "opened": Method(self._opened),
            "claim": Method(self._claim),
            "done": Method(self._done),
            "abandon": Method(self._abandon),
            "status": Method(self._say_status, once=False),
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
        asked = request.read(RowsAsked)
        return Reply(Held(self._status(), self._desk.opened(_lease(asked), asked.stop)))

    def _claim(self, request: Request) -> Reply:
        asked = request.read(RowsAsked)
        claim = self._desk.claim(_lease(asked), asked.start, asked.stop)
        number, stop = (-1, asked.start) if claim is None else (claim.number, claim.stop)
        return Reply(ClaimGiven(self._status(), number, stop))

    def _done(self, request: Request) -> Reply:
        asked = request.read(RowsAsked)
        try:
            held = self._desk.done(_lease(asked), asked.start, asked.stop)
        except ValueError as error:
            raise DataError(str(error)) from error
        return Reply(Held(self._status(), held))

    def _abandon(self, request: Request) -> Reply:
        self._desk.abandon(request.read(LeaseAsked).trainer)
        return Reply(self._status())

    def _say_status(self, request: Request) -> Reply:
        return Reply(self._status())


def _lease(asked: RowsAsked) -> Lease:
    """The book knows a lease by its number."""
    return Lease(asked.lease, -1, 0, 0, ())
