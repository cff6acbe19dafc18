"""One Hogwild worker: next batch, pull, forward and backward, lock-free step, push.

`B` samples of a batch, `D` total width of the pooled embeddings.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shadowsync.data.reader import Feed, LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.errors import NonFiniteLoss, ShadowSyncError
from shadowsync.training.gate import Gate
from shadowsync.training.rates import Rates
from shadowsync.training.replica import WorkerModule


class TrainerLost(ShadowSyncError):
    """This trainer died, by script; the others go on with its leases."""


class StepListener(Protocol):
    """What a worker tells of its steps (a `sync.schedule.Driver`)."""

    def start(self) -> None: ...
    def after_step(self, worker_index: int, iteration: int) -> None: ...
    def worker_left(self, worker_index: int) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class StepSettings:
    """What a step needs besides the data.

    Attributes:
        dense_lr: learning rate of the dense part before warm-up and decay.
        embedding_lr: the same for the rows.
        rates: the factor for both, from the samples trained so far.
        prefetch: pulls under way per worker.
    """

    dense_lr: float
    embedding_lr: float
    rates: Rates
    prefetch: int


@dataclass(frozen=True)
class Hooks:
    """Calls out of the hot path; each must return at once.

    Attributes:
        record: trainer rank, logits `[B]` and labels `[B]` after each step.
        trained: samples trained by the whole job so far.
        stopping: true when workers should end at the next boundary.
        before_step: trainer rank and iteration; raises `TrainerLost` to script a death.
        place: where a leased batch comes from, for messages.
    """

    record: Callable[[int, Tensor, Tensor], None]
    trained: Callable[[], int]
    stopping: Callable[[], bool]
    before_step: Callable[[int, int], None]
    place: Callable[[LeasedBatch], str]


@dataclass(frozen=True)
class WorkerParts:
    """What a worker works with: the trainer's, but for `module`, which is its own."""

    rank: int
    index: int
    module: WorkerModule
    feed: Feed
    embeddings: EmbeddingClient
    listener: StepListener
    gate: Gate
    settings: StepSettings
    hooks: Hooks


class Worker:
    """A Hogwild worker (Recht et al. 2011, arXiv 1106.5730): steps its trainer's replica without locks."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self.iterations = 0

    def run(self) -> None:
        """Trains until the feed ends or the job stops."""
        for leased, pulled in self._pulled():
            self._parts.hooks.before_step(self._parts.rank, self.iterations + 1)
            self._step(leased, pulled)
            self._parts.listener.after_step(self._parts.index, self.iterations)
            self._parts.gate.step()
            if self._parts.hooks.stopping():
                return

    def _step(self, leased: LeasedBatch, pulled: Pulled) -> None:
        parts, batch = self._parts, leased.batch
        factor = parts.settings.rates.factor(parts.hooks.trained())
        loss, logits, gradient = parts.module.loss_and_gradients(batch.dense, pulled.pooled, batch.labels)
        if not torch.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss became {loss.item()} at {parts.hooks.place(leased)} after {parts.hooks.trained()} samples: "
                "lower train.lr or embedding.lr, set train.clip_norm=1, or check these rows for extreme values"
            )
        parts.module.step(parts.settings.dense_lr * factor)
        parts.embeddings.push(pulled, gradient, parts.settings.embedding_lr * factor)
        parts.feed.done(leased)
        self.iterations += 1
        parts.hooks.record(parts.rank, logits, batch.labels)

    def _pulled(self) -> Iterator[tuple[LeasedBatch, Pulled]]:
        if self._parts.settings.prefetch == 0:
            while (ready := self._fetch_resting()) is not None:
                yield ready
            return
        with ThreadPoolExecutor(1, f"pull-{self._parts.rank}.{self._parts.index}") as pool:
            under_way: deque[Future[tuple[LeasedBatch, Pulled] | None]] = deque()
            try:
                while (ready := self._next_prefetched(pool, under_way)) is not None:
                    yield ready
            finally:
                for future in under_way:
                    future.cancel()

    def _next_prefetched(
        self, pool: ThreadPoolExecutor, under_way: deque[Future[tuple[LeasedBatch, Pulled] | None]]
    ) -> tuple[LeasedBatch, Pulled] | None:
        while len(under_way) <= self._parts.settings.prefetch:
            under_way.append(pool.submit(self._fetch))
        with self._parts.gate.resting():
            return under_way.popleft().result()

    def _fetch_resting(self) -> tuple[LeasedBatch, Pulled] | None:
        with self._parts.gate.resting():
            leased = self._parts.feed.next()
        return None if leased is None else (leased, self._parts.embeddings.pull(leased.batch.ids))

    def _fetch(self) -> tuple[LeasedBatch, Pulled] | None:
        leased = self._parts.feed.next()
        return None if leased is None else (leased, self._parts.embeddings.pull(leased.batch.ids))
