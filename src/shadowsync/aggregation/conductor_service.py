"""The conductor behind the wire, beside the desk: tokens and leases have one authority."""

from concurrent.futures import Future
from functools import partial

from shadowsync.aggregation.conductor import Admitted, Arrived, Conductor
from shadowsync.data.desk import Desk, Rows
from shadowsync.data.leases import Lease
from shadowsync.errors import DataError
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.served import served

PATIENCE_S = 30.0
"""A worker that waits asks again after this time: a call that stays open for ever would stop its connection."""


class ConductorService:
    """What a `Conductor` offers to workers elsewhere; from now on it numbers the batches of the desk.

    The rows of a batch are remembered from its claim to its end, so that they count as done when the conductor says so:
    trainers need not tell, and cannot tell twice. No method holds a thread, however long a worker has to wait. What a
    trainer was at is given up when the job gives the trainer up, not with its connection.

    A worker is `(rank of its trainer, index there)`; everybody says of which generation of the parts it is.
    """

    def __init__(self, conductor: Conductor, desk: Desk, generation: Generation = FIRST) -> None:
        self._conductor, self._desk, self._generation = conductor, desk, generation
        self._claimed: dict[int, Rows] = {}
        desk.number_by(self._dispatch)

    def abandoned(self, trainer: int) -> None:
        """As `Conductor.abandoned`; to be called before the desk gives the trainer's rows away.

        Its process is at its end, or not listened to any more (`FrontDesk.ban`), before another one has its rank.
        """
        self._conductor.abandoned(trainer)
        for number in [number for number, one in self._claimed.copy().items() if one.lease.trainer == trainer]:
            self._claimed.pop(number, None)

    def _dispatch(self, lease: Lease, start: int, stop: int) -> int:
        number = self._conductor.dispatch(lease.trainer)
        self._claimed[number] = Rows(lease, start, stop)
        return number

    @served(quick=True, timeout_s=PATIENCE_S)
    def begin(self, worker: tuple[int, int], number: int, generation: int) -> "Future[Admitted | None]":
        """As `Conductor.ask`."""
        self._generation.check(generation)
        claimed = self._claimed.get(number)
        if claimed is None:
            never: Future[Admitted | None] = Future()
            never.set_result(None)
            return never
        trainer, _ = worker
        if claimed.lease.trainer != trainer:
            raise DataError(f"batch {number} is trainer {claimed.lease.trainer}'s, not trainer {trainer}'s")
        return self._conductor.ask(worker, number)

    @served(quick=True)
    def arrived(self, number: int, version: int, generation: int) -> None:
        """As `Conductor.arrived`, of a batch that was computed with this version of the dense parameters."""
        self._generation.check(generation)
        newest = self._conductor.aggregator.step
        if not 0 <= version <= newest:
            raise DataError(
                f"batch {number} was computed with version {version} of the parameters, and {newest} is the newest"
            )
        claimed = self._claimed.pop(number, None)
        if claimed is not None:
            lease, start, stop = claimed
            done = partial(self._desk.done, lease, start, stop)
            self._conductor.arrived(number, Arrived(lease.trainer, stop - start, version, done))

    @served(quick=True)
    def idle(self, worker: tuple[int, int], generation: int) -> None:
        """As `Conductor.idle`."""
        self._generation.check(generation)
        self._conductor.idle(worker)

    @served(quick=True, timeout_s=PATIENCE_S)
    def left(self, worker: tuple[int, int], generation: int) -> None:
        """As `Conductor.left`."""
        self._generation.check(generation)
        self._conductor.left(worker)
