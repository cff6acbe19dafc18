"""What a worker of a gradient method does with its gradients: it sends them to all servers, and does not wait.

`B` samples of a batch, `D_f` width of feature f's vector, `P` elements of the dense part.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.conductor import Arrived
from shadowsync.aggregation.stepping import DenseGradient, Version
from shadowsync.data.reader import Feed, LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.embedding.pending import Pending, all_of
from shadowsync.models.sequences import VectorGradients
from shadowsync.training.replica import Replica, WorkerModule
from shadowsync.training.update import MOST_UNDER_WAY


class Authority(Protocol):
    """What a worker needs of the `Conductor`, near or behind a wire."""

    def begin(self, worker: Worker, number: int) -> bool:
        """As `Conductor.begin`."""

    def arrived(self, number: int, arrived: Arrived) -> None:
        """As `Conductor.arrived`."""

    def idle(self, worker: Worker) -> None:
        """As `Conductor.idle`."""

    def left(self, worker: Worker) -> None:
        """As `Conductor.left`."""


class DenseParameters(Protocol):
    """What a worker needs of the `DenseStepper`, near or behind a wire."""

    def newer(self, than: int) -> Version | None:
        """As `DenseStepper.newer`."""

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseStepper.hold`; ends when the gradient is held."""


@dataclass
class GradientUpdate:
    """Gradient methods (an `Update`): dense parameters are pulled when there are newer ones, gradients are sent under
    the batch's number, and the batch is done when a global step has taken or dropped it.

    Attributes:
        worker: who it is.
        authority: over global steps.
        dense: the dense part.
        embeddings: where the gradient of the pooled vectors goes.
        feed: the trainer's.
        replica: the worker's own copy of the dense part.
        most_under_way: gradients that may not have arrived everywhere when `apply` returns; more ride out a longer
            delay.
    """

    worker: Worker
    authority: Authority
    dense: DenseParameters
    embeddings: EmbeddingClient
    feed: Feed
    replica: Replica
    most_under_way: int = MOST_UNDER_WAY
    _version: int = field(default=-1, init=False)
    _under_way: deque[Pending[None]] = field(default_factory=deque, init=False, repr=False)

    def begin(self, leased: LeasedBatch) -> bool:
        """As `Update.begin`."""
        return self.authority.begin(self.worker, leased.number)

    def ready(self, leased: LeasedBatch) -> None:
        """As `Update.ready`."""
        newer = self.dense.newer(self._version)
        if newer is not None:
            self.replica.flat.copy_(newer.flat)
            self._version = newer.number

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        """As `Update.apply`; the learning rates are those of the global step."""
        number = leased.number
        dense = DenseGradient(module.flat_gradient(), tuple(found is not None for found in module.gradients))
        sent = all_of([self.dense.hold(number, dense), self.embeddings.hold(pulled, gradient, number)])
        sent.then(
            self._telling(Arrived(self.feed.trainer, len(leased.batch), self._version, self._done(leased)), number)
        )
        self._under_way.append(sent)
        while self._under_way and (len(self._under_way) > self.most_under_way or self._under_way[0].done()):
            self._under_way.popleft().result()

    def _done(self, leased: LeasedBatch) -> Callable[[], None]:
        feed, rows = self.feed, replace(leased, batch=leased.batch.narrow(0, 0))  # lets go of the samples

        def done() -> None:
            feed.done(rows)

        return done

    def _telling(self, arrived: Arrived, number: int) -> Callable[[BaseException | None], None]:
        def tell(error: BaseException | None) -> None:
            if error is None:
                self.authority.arrived(number, arrived)

        return tell

    @property
    def quiet(self) -> bool:
        """As `Update.quiet`: what has arrived may still wait for its step, and is trained anew after a resume."""
        return all(sent.done() for sent in tuple(self._under_way))

    def settle(self) -> None:
        """As `Update.settle`."""
        while self._under_way:
            self._under_way.popleft().result()

    def idle(self) -> None:
        """As `Update.idle`."""
        self.settle()
        self.authority.idle(self.worker)

    def left(self) -> None:
        """As `Update.left`."""
        self.authority.left(self.worker)
