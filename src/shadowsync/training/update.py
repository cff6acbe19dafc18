"""The seam of a worker's last act in a step: what becomes of its gradients."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shadowsync.data.reader import Feed, LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.models.sequences import VectorGradients
from shadowsync.rpc.pending import Pending
from shadowsync.training.replica import WorkerModule

MOST_UNDER_WAY = 4


class Update(Protocol):
    """What becomes of a worker's gradients; one for each worker, and called by it alone.

    Of each batch `begin`, `ready` and `apply` are called in this order. With pulls ahead, later batches are begun, in a
    thread of the worker's own, before an earlier one is ready.
    """

    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        """The worker has taken a batch, and asks to compute it.

        Returns:
            waits for the answer; when it returns the batch's rows are pulled, or nothing is to be trained any more if
            it says False.
        """
        ...

    def ready(self, leased: LeasedBatch) -> None:
        """The forward pass is next: the parameters of the worker's module are brought up to date if need be."""
        ...

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        """Takes the gradients of one batch; the worker's next step starts when it returns.

        Whoever implements it also says `Feed.done`, once, as soon as the gradients are in the parameters.

        Args:
            leased: the batch; its `number` is its place in the order in which the reader handed batches out.
            pulled: the vectors it was trained with.
            module: holds the gradients of the dense part.
            gradient: of the mean loss with respect to these vectors, float32; not written to again.
            factor: on all learning rates, in [0, 1].
        """
        ...

    @property
    def quiet(self) -> bool:
        """Nothing that `apply` was given is under way; may be asked from any thread while the worker stands still."""
        ...

    def settle(self) -> None:
        """Waits until everything that `apply` was given is in the parameters, and `Feed.done` said; raises what failed.

        The worker calls it where nothing may be on its way: at a pause, while it has nothing to do, at its end.
        """
        ...

    def idle(self) -> None:
        """The worker has nothing to do, and no batch that it has begun: nobody is to wait for it. Settles first."""
        ...

    def left(self) -> None:
        """The worker computes nothing any more, whatever the reason; may come again, and is not to raise."""
        ...


@dataclass(frozen=True)
class LocalUpdate:
    """Replica methods: the worker steps its trainer's replica without a lock, and the servers step the rows at once.

    A batch is done when all embedding servers have acknowledged its gradients; meanwhile the worker goes on. An error
    of a push is raised by a later `apply`, or by `settle`.

    Attributes:
        embeddings: where the gradient of the vectors goes.
        feed: the trainer's.
        dense_lr: learning rate of the dense part before warm-up and decay.
        embedding_lr: the same for the rows.
        most_under_way: pushes that may be unacknowledged when `apply` returns; more ride out a longer delay.
    """

    embeddings: EmbeddingClient
    feed: Feed
    dense_lr: float
    embedding_lr: float
    most_under_way: int = MOST_UNDER_WAY
    _under_way: deque[Pending[None]] = field(default_factory=deque, init=False, repr=False, compare=False)

    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        """As `Update.begin`: nobody has to be asked."""
        return lambda: True

    def ready(self, leased: LeasedBatch) -> None:
        """As `Update.ready`: the worker's module shares the replica's parameters."""

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        """As `Update.apply`."""
        module.step(self.dense_lr * factor)
        pushed = self.embeddings.push(pulled, gradient, self.embedding_lr * factor)
        pushed.then(lambda error: self._ended(leased, error))
        self._under_way.append(pushed)
        while self._under_way and (len(self._under_way) > self.most_under_way or self._under_way[0].done()):
            self._under_way.popleft().result()

    @property
    def quiet(self) -> bool:
        """As `Update.quiet`."""
        return all(pushed.done() for pushed in tuple(self._under_way))

    def settle(self) -> None:
        """As `Update.settle`."""
        while self._under_way:
            self._under_way.popleft().result()

    def idle(self) -> None:
        """As `Update.idle`."""
        self.settle()

    def left(self) -> None:
        """As `Update.left`: nobody waits for a worker."""

    def _ended(self, leased: LeasedBatch, error: BaseException | None) -> None:
        if error is None:
            self.feed.done(leased)
