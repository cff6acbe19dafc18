"""What a worker of a gradient method does with its gradients: it sends them to all servers, and does not wait.

`B` samples of a batch, `D_f` width of feature f's vector, `P` elements of the dense part.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shadowsync.aggregation.stepping import DenseGradient, Version
from shadowsync.data.reader import LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.models.vectors import VectorGradients
from shadowsync.rpc.pending import DONE, Pending, Promise, all_of
from shadowsync.training.replica import Replica, WorkerModule
from shadowsync.training.worker import Update


class Authority(Protocol):
    """What a worker needs of the `StepCoordinator`, near or behind a wire."""

    def ask(self, worker: tuple[int, int], number: int) -> "Asked":
        """As `StepCoordinator.ask`."""

    def arrived(self, number: int, version: int) -> Pending[None] | None:
        """As `StepCoordinator.arrived`; ends when it is known there, None if it is."""

    def idle(self, worker: tuple[int, int]) -> None:
        """As `StepCoordinator.idle`."""

    def left(self, worker: tuple[int, int]) -> None:
        """As `StepCoordinator.left`."""


class Asked(Protocol):
    """A worker has asked to compute a batch."""

    def result(self) -> int | None:
        """Waits for the answer."""


class DenseParameters(Protocol):
    """What a worker needs of the `DenseStepper`, near or behind a wire."""

    def newer(self, than: int) -> Pending[Version | None]:
        """The newest parameters as the request arrives, or None if their version is not above `than`."""

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """Sends the gradient of a batch; ends when it is held."""


@dataclass
class GradientUpdate(Update):
    """Gradient methods: dense parameters are pulled when there are newer ones, gradients are sent under
    the batch's number, and the batch is done when a global step has taken or dropped it.

    Parameters are asked for as soon as a batch is begun, so that they cross beside its rows. With pulls `ahead` they
    cross while the batch before is computed: they are then older by that, as the rows are. Where a method makes workers
    wait, nothing that is older than its step is computed with. While this is quiet, what has arrived may still wait for
    its step, and is trained anew after a resume.

    Attributes:
        worker: who it is: rank of its trainer, index there.
        authority: over global steps.
        dense: the dense part.
        embeddings: where the gradient of the pooled vectors goes.
        replica: the worker's own copy of the dense part.
        ahead: batches are begun, in another thread, before the one before is computed.
    """

    worker: tuple[int, int]
    authority: Authority
    dense: DenseParameters
    embeddings: EmbeddingClient
    replica: Replica
    ahead: bool = False
    _version: int = field(default=-1, init=False)
    _asked: Pending[Version | None] | None = field(default=None, init=False, repr=False)
    _admitted: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        answer = self.authority.ask(self.worker, leased.number)
        return lambda: self._begun(leased, answer.result())

    def _begun(self, leased: LeasedBatch, version: int | None) -> bool:
        if version is None:
            return False
        self._admitted[leased.number] = version
        if not self.ahead:
            self._asked = self.dense.newer(self._version)
        return True

    def ready(self, leased: LeasedBatch) -> None:
        self._take(self._asked)
        if self._version < self._admitted.pop(leased.number):
            self._take(self.dense.newer(self._version))
        self._asked = self.dense.newer(self._version) if self.ahead else None

    def _take(self, asked: Pending[Version | None] | None) -> None:
        newer = None if asked is None else asked.result()
        if newer is not None and newer.number > self._version:
            self.replica.flat.copy_(newer.flat)
            self._version = newer.number

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        """As `Update.apply`; the learning rates are those of the global step."""
        dense = DenseGradient(module.flat_gradient(), tuple(found is not None for found in module.gradients))
        sent = [self.dense.hold(leased.number, dense), self.embeddings.hold(pulled, gradient, leased.number)]
        self._sent(self._told(all_of(sent), leased.number, self._version))

    def _told(self, sent: Pending[None], number: int, version: int) -> Pending[None]:
        """Ends when all servers hold the gradients and the authority knows."""
        told: Promise[None] = Promise()

        def end(error: BaseException | None) -> None:
            if error is None:
                told.keep(None)
            else:
                told.fail(error)

        def tell(error: BaseException | None) -> None:
            if error is not None:
                told.fail(error)
                return
            try:
                (self.authority.arrived(number, version) or DONE).then(end)
            except BaseException as wrong:  # of the step that it completed: the worker's, not the connection's
                told.fail(wrong)

        sent.then(tell)
        return told

    def idle(self) -> None:
        self.settle()
        self.authority.idle(self.worker)

    def left(self) -> None:
        self.authority.left(self.worker)
