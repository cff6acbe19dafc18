"""The conductor behind the wire, beside the desk: tokens and leases have one authority."""

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from shadowsync.aggregation.conductor import Admitted, Arrived, Conductor
from shadowsync.aggregation.step_messages import NEVER, ArrivedTold, BeginAsked, BeginGiven, WorkerTold
from shadowsync.data.desk import Desk
from shadowsync.data.leases import Lease
from shadowsync.errors import DataError
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.service import Method, Outcome, Reply, Request


class _Claimed(NamedTuple):
    lease: Lease
    start: int
    stop: int


class ConductorService:
    """What a `Conductor` offers to workers elsewhere; from now on it numbers the batches of the desk.

    The rows of a batch are remembered from its claim to its end, so that they count as done when the conductor says so:
    trainers need not tell, and cannot tell twice. No method holds a thread, however long a worker has to wait.
    """

    def __init__(self, conductor: Conductor, desk: Desk, generation: Generation = FIRST) -> None:
        self._conductor, self._desk, self._generation = conductor, desk, generation
        self._claimed: dict[int, _Claimed] = {}
        self.methods: Mapping[str, Method] = {
            "begin": Method(self._begin, quick=True),
            "arrived": Method(self._arrived, quick=True),
            "idle": Method(self._idle, quick=True),
            "left": Method(self._left, quick=True),
        }
        desk.number_by(self._dispatch)

    def client_gone(self, client: str) -> None:
        """What a trainer was at is given up when the job gives the trainer up, not with its connection."""

    def close(self) -> None:
        """Nothing to end."""

    def abandoned(self, trainer: int) -> None:
        """As `Conductor.abandoned`; to be called before the desk gives the trainer's rows away.

        Its process is at its end, or not listened to any more (`FrontDesk.ban`), before another one has its rank.
        """
        self._conductor.abandoned(trainer)
        for number in [number for number, one in self._claimed.copy().items() if one.lease.trainer == trainer]:
            self._claimed.pop(number, None)

    def _dispatch(self, lease: Lease, start: int, stop: int) -> int:
        number = self._conductor.dispatch(lease.trainer)
        self._claimed[number] = _Claimed(lease, start, stop)
        return number

    def _begin(self, request: Request) -> Outcome:
        asked = request.read(BeginAsked)
        self._generation.check(asked.generation)
        claimed = self._claimed.get(asked.number)
        if claimed is None:
            return Reply(BeginGiven(NEVER))
        if claimed.lease.trainer != asked.trainer:
            raise DataError(f"batch {asked.number} is trainer {claimed.lease.trainer}'s, not trainer {asked.trainer}'s")
        reply: Future[Reply] = Future()
        answer = self._conductor.ask((asked.trainer, asked.worker), asked.number)
        answer.add_done_callback(partial(_pass_on, reply))
        return reply

    def _arrived(self, request: Request) -> Reply:
        told = request.read(ArrivedTold)
        self._generation.check(told.generation)
        if not 0 <= told.version <= self._conductor.aggregator.step:
            raise DataError(
                f"batch {told.number} was computed with version {told.version} of the parameters, and "
                f"{self._conductor.aggregator.step} is the newest"
            )
        claimed = self._claimed.pop(told.number, None)
        if claimed is not None:
            lease, start, stop = claimed
            done = partial(self._desk.done, lease, start, stop)
            self._conductor.arrived(told.number, Arrived(lease.trainer, stop - start, told.version, done))
        return Reply()

    def _idle(self, request: Request) -> Reply:
        self._conductor.idle(self._worker(request))
        return Reply()

    def _left(self, request: Request) -> Reply:
        self._conductor.left(self._worker(request))
        return Reply()

    def _worker(self, request: Request) -> tuple[int, int]:
        told = request.read(WorkerTold)
        self._generation.check(told.generation)
        return told.trainer, told.worker


def _pass_on(reply: "Future[Reply]", answer: "Future[Admitted | None]") -> None:
    if (error := answer.exception()) is not None:
        reply.set_exception(error)
        return
    admitted = answer.result()
    reply.set_result(Reply(BeginGiven(NEVER if admitted is None else admitted.version)))
