"""A trainer's end of the conductor."""

import contextlib
from collections.abc import Callable

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.conductor import Admitted, Arrived
from shadowsync.aggregation.conductor_service import ConductorService
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import CallTimeout
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import ask, later


class ConductorRemote:
    """A `ConductorService` as the workers of one trainer see it (an `aggregation.update.Authority`).

    A worker is `(rank, index)`. What was trained, the service counts: `Arrived.done` is not called here.

    Args:
        connection: to the service.
        generation: of the parts that the trainer belongs to.
    """

    def __init__(self, connection: Connection, generation: int = 0) -> None:
        self._connection, self._generation = connection, generation

    def ask(self, worker: Worker, number: int) -> "_Patient":
        """As `Conductor.ask`."""
        place = _place(worker)
        return _Patient(lambda: later(self._connection, ConductorService.begin, place, number, self._generation))

    def arrived(self, number: int, arrived: Arrived) -> Pending[None]:
        """As `Conductor.arrived`; ends when the service knows."""
        return later(self._connection, ConductorService.arrived, number, arrived.version, self._generation)

    def idle(self, worker: Worker) -> None:
        """As `Conductor.idle`; returns when the service knows, so that a later `ask` comes after it."""
        ask(self._connection, ConductorService.idle, _place(worker), self._generation)

    def left(self, worker: Worker) -> None:
        """As `Conductor.left`; where the service cannot be reached, the job gives up the whole trainer."""
        with contextlib.suppress(ShadowSyncError):
            ask(self._connection, ConductorService.left, _place(worker), self._generation)


class _Patient:
    """An answer for which the question is asked again until it comes."""

    def __init__(self, ask: Callable[[], Pending[Admitted | None]]) -> None:
        self._ask = ask
        self._asked = ask()

    def result(self) -> Admitted | None:
        """Waits for it.

        Raises:
            PeerLost: the connection was closed.
            RunError: the trainer was given up, or a step could not be carried out.
        """
        while True:
            try:
                return self._asked.result()
            except CallTimeout:
                self._asked = self._ask()


def _place(worker: Worker) -> tuple[int, int]:
    assert isinstance(worker, tuple)
    rank, index = worker
    return rank, index
