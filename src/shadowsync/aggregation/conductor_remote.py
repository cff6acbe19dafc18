"""A trainer's end of the conductor."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.conductor import Admitted, Arrived
from shadowsync.aggregation.step_messages import ArrivedTold, BeginAsked, BeginGiven, WorkerTold
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.errors import CallTimeout
from shadowsync.rpc.fetched import Fetched, nothing
from shadowsync.rpc.pending import Pending

PATIENCE_S = 30.0
"""A worker that waits asks again after this time: a call that stays open for ever would stop its connection."""


class ConductorRemote:
    """A `ConductorService` as the workers of one trainer see it (an `aggregation.update.Authority`).

    A worker is `(rank, index)`. What was trained, the service counts: `Arrived.done` is not called here.

    Args:
        connection: to the service.
        generation: of the parts that the trainer belongs to.
        patience_s: see `PATIENCE_S`.
    """

    def __init__(self, connection: Connection, generation: int = 0, patience_s: float = PATIENCE_S) -> None:
        self._connection, self._generation, self._patience_s = connection, generation, patience_s

    def ask(self, worker: Worker, number: int) -> "_Patient":
        """As `Conductor.ask`."""
        asked = BeginAsked(*_split(worker), number, self._generation)
        return _Patient(lambda: self._connection.call("begin", asked, timeout_s=self._patience_s))

    def arrived(self, number: int, arrived: Arrived) -> Pending[None]:
        """As `Conductor.arrived`; ends when the service knows."""
        told = ArrivedTold(number, arrived.version, self._generation)
        return Fetched(self._connection.call("arrived", told), nothing)

    def idle(self, worker: Worker) -> None:
        """As `Conductor.idle`; returns when the service knows, so that a later `ask` comes after it."""
        self._connection.call("idle", WorkerTold(*_split(worker), self._generation)).result()

    def left(self, worker: Worker) -> None:
        """As `Conductor.left`; where the service cannot be reached, the job gives up the whole trainer."""
        with contextlib.suppress(ShadowSyncError):
            told = WorkerTold(*_split(worker), self._generation)
            self._connection.call("left", told, timeout_s=self._patience_s).result()


class _Patient:
    """An answer for which the question is asked again until it comes."""

    def __init__(self, ask: Callable[[], Future[Answer]]) -> None:
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
                version = self._asked.result().read(BeginGiven).version
            except CallTimeout:
                self._asked = self._ask()
            else:
                return Admitted(version) if version >= 0 else None


def _split(worker: Worker) -> tuple[int, int]:
    assert isinstance(worker, tuple)
    rank, index = worker
    return rank, index
