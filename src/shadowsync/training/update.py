"""The seam of a worker's last act in a step: what becomes of its gradients.

`B` samples of a batch, `D_f` width of feature f's vector.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shadowsync.data.reader import Feed, LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.training.replica import WorkerModule


class Update(Protocol):
    """What becomes of a worker's gradients; one for each worker."""

    def apply(self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: Tensor, factor: float) -> None:
        """Takes the gradients of one batch; the worker's next step starts when it returns.

        Whoever implements it also says `Feed.done`, once, as soon as the gradients are in the parameters.

        Args:
            leased: the batch; its `number` is its place in the order in which the reader handed batches out.
            pulled: the pooled vectors it was trained with.
            module: holds the gradients of the dense part.
            gradient: of the mean loss with respect to `pulled.pooled`, float32 `[B, Σ D_f]`.
            factor: on all learning rates, in [0, 1].
        """
        ...


@dataclass(frozen=True)
class LocalUpdate:
    """Replica methods: the worker steps its trainer's replica without a lock, and the servers step the rows at once.

    Attributes:
        embeddings: where the gradient of the pooled vectors goes.
        feed: the trainer's.
        dense_lr: learning rate of the dense part before warm-up and decay.
        embedding_lr: the same for the rows.
    """

    embeddings: EmbeddingClient
    feed: Feed
    dense_lr: float
    embedding_lr: float

    def apply(self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: Tensor, factor: float) -> None:
        """As `Update.apply`."""
        module.step(self.dense_lr * factor)
        self.embeddings.push(pulled, gradient, self.embedding_lr * factor)
        self.feed.done(leased)
