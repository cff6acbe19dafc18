"""One Hogwild worker: next batch, pull, forward and backward, update.

`B` samples of a batch, `D` total width of the pooled embeddings.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shadowsync.data.reader import Feed, LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.errors import NonFiniteLoss, ShadowSyncError
from shadowsync.models.sequences import JaggedVectors, VectorGradients
from shadowsync.training.gate import Gate
from shadowsync.training.rates import Rates
from shadowsync.training.replica import WorkerModule
from shadowsync.training.update import Update

_Ready = tuple[LeasedBatch, Pulled]


class TrainerLost(ShadowSyncError):
    """This trainer died, by script; the others go on with its leases."""


class StepListener(Protocol):
    """What a worker tells of its steps (a `sync.schedule.Driver`)."""

    def start(self) -> None: ...
    def after_step(self, worker_index: int, iteration: int) -> None: ...
    def worker_idle(self, worker_index: int) -> None: ...
    def worker_back(self, worker_index: int) -> None: ...
    def worker_left(self, worker_index: int) -> None: ...
    def stop(self) -> None: ...


def _untold(computed_s: float, waited_s: float) -> None:
    """Nobody wants to know."""


def _even(worker: int, seconds: float) -> float:  # noqa: ARG001 - the signature of a slowness
    return 1.0


@dataclass(frozen=True)
class StepSettings:
    """What a step needs besides the data.

    Attributes:
        rates: the factor on all learning rates, from the samples trained so far.
        prefetch: pulls under way per worker.
        emulate_step_s: forward and backward are made to last at least this long; None leaves them as they are.
        slowness: factor of `emulate_step_s`, from 1 on, by the worker's number over all trainers and seconds since it
            began.
        compute: do the forward and the backward pass; False sends gradients of zeros and moves no parameter, for
            studies of servers and networks alone.
    """

    rates: Rates
    prefetch: int
    emulate_step_s: float | None = None
    compute: bool = True
    slowness: Callable[[int, float], float] = _even


@dataclass(frozen=True)
class Hooks:
    """Calls out of the hot path; each must return at once.

    Attributes:
        record: trainer rank, logits `[B]` and labels `[B]` after each step.
        trained: samples trained by the whole job so far.
        stopping: true when workers should end at the next boundary.
        before_step: trainer rank and iteration; raises `TrainerLost` to script a death.
        place: where a leased batch comes from, for messages.
        ended: a worker has ended.
        stepped: after each step, the seconds that it computed forward and backward, and those that the worker waited
            for it: for its vectors and parameters, and until gradients and replica were handed over.
    """

    record: Callable[[int, Tensor, Tensor], None]
    trained: Callable[[], int]
    stopping: Callable[[], bool]
    before_step: Callable[[int, int], None]
    place: Callable[[LeasedBatch], str]
    ended: Callable[[], None]
    stepped: Callable[[float, float], None] = _untold


@dataclass(frozen=True)
class WorkerParts:
    """What a worker works with: the trainer's, but for `module`, which is its own.

    Attributes:
        rank: of the trainer.
        index: in the trainer.
        number: over all trainers.
    """

    rank: int
    index: int
    number: int
    module: WorkerModule
    feed: Feed
    embeddings: EmbeddingClient
    listener: StepListener
    gate: Gate
    settings: StepSettings
    hooks: Hooks


class Worker:
    """A Hogwild worker (Recht et al. 2011, arXiv 1106.5730): shares its trainer's replica with others without locks.

    Attributes:
        iterations: steps so far.
        idle: it waits for what others may give back and holds nothing itself.
    """

    def __init__(self, parts: WorkerParts, update: Update) -> None:
        self._parts = parts
        self._update = update
        self._settled_factor: float | None = None
        self.iterations = 0
        self.idle = False
        self._began = time.monotonic()
        self._computed_s = self._waited_s = 0.0

    def run(self) -> None:
        """Trains until the feed ends or the job stops."""
        self._began = time.monotonic()
        with contextlib.closing(self._pulled()) as batches:
            for leased, pulled in batches:
                if not self._train(leased, pulled):
                    self._update.settle()
                    break
        self._update.settle()

    def _train(self, leased: LeasedBatch, pulled: Pulled) -> bool:
        """One step; whether there is to be another."""
        self._parts.hooks.before_step(self._parts.rank, self.iterations + 1)
        began = time.monotonic()
        self._step(leased, pulled)
        self._parts.listener.after_step(self._parts.index, self.iterations)
        waited_s = self._waited_s + time.monotonic() - began - self._computed_s
        self._parts.hooks.stepped(self._computed_s, waited_s)
        if self._parts.gate.pausing:
            self._update.settle()
        self._parts.gate.step()
        return not self._parts.hooks.stopping()

    @property
    def quiet(self) -> bool:
        """All gradients of its steps are where they belong; to be asked while it stands still."""
        return self._update.quiet

    def ended(self) -> None:
        """Tells the job that this worker is done."""
        self._update.left()
        self._parts.hooks.ended()

    def _step(self, leased: LeasedBatch, pulled: Pulled) -> None:
        parts, batch = self._parts, leased.batch
        self._update.ready(leased)
        factor, started = self._factor(len(batch)), time.monotonic()
        forward_and_backward = parts.module.loss_and_gradients if parts.settings.compute else _nothing_computed
        loss, logits, gradient = forward_and_backward(batch.dense, pulled.pooled, batch.labels, pulled.sequences)
        if not torch.isfinite(loss):
            raise self._not_finite(loss.item(), batch.dense, parts.hooks.place(leased))
        self._emulate(started)
        self._computed_s = time.monotonic() - started
        self._update.apply(leased, pulled, parts.module, gradient, factor)
        self.iterations += 1
        parts.hooks.record(parts.rank, logits, batch.labels)

    def _not_finite(self, loss: float, dense: Tensor, place: str) -> NonFiniteLoss:
        """What is to blame: of a job that has trained nothing yet, the model or the rows themselves."""
        if trained := self._parts.hooks.trained():
            return NonFiniteLoss(
                f"the loss is no longer finite ({loss}) at {place} after {trained} samples: {_extremes(dense)}lower "
                "train.lr or embedding.lr, or set train.clip_norm=1"
            )
        if name := self._parts.module.non_finite():
            return NonFiniteLoss(
                f"{name} of the model holds NaN or infinite numbers before the first step: give the module other "
                "initial values"
            )
        return NonFiniteLoss(
            f"the model gives a loss of {loss} at {place} before the first step: check its forward for what makes "
            "numbers that are not finite, and these rows for extreme values"
        )

    def _emulate(self, started: float) -> None:
        """Waits as long as a slower machine would still compute; a pause need not wait for it."""
        parts = self._parts
        if parts.settings.emulate_step_s is None:
            return
        least = parts.settings.emulate_step_s * parts.settings.slowness(parts.number, started - self._began)
        if (left := started + least - time.monotonic()) > 0:
            self._parts.gate.rest(left, self._parts.hooks.stopping)

    def _factor(self, batch_size: int) -> float:
        """On the learning rates; the samples of the job, behind the reader's lock, are asked for only as it moves."""
        if self._settled_factor is not None:
            return self._settled_factor
        rates, samples = self._parts.settings.rates, self._parts.hooks.trained() + batch_size
        factor = rates.factor(samples)
        if rates.settled(samples):
            self._settled_factor = factor
        return factor

    def _pulled(self) -> Generator[_Ready, None, None]:
        """Batches with their pooled embeddings; when there is none now, waits for what others may give back."""
        with _Prefetcher(self._fetch, self._update.left, self._parts) as ahead:
            while (ready := self._next(ahead) or self._wait_for_more()) is not None:
                yield ready

    def _next(self, ahead: "_Prefetcher") -> _Ready | None:
        began = time.monotonic()
        ready = ahead.next()
        self._waited_s = time.monotonic() - began
        return ready

    def _fetch(self, wait: bool) -> _Ready | None:
        leased = self._parts.feed.next(wait)
        if leased is None:
            return None
        admitted = self._update.begin(leased)
        prepared = self._parts.embeddings.prepare(leased.batch.ids)
        return (leased, self._parts.embeddings.fetch(prepared)) if admitted() else None

    def _wait_for_more(self) -> _Ready | None:
        self._update.idle()
        self._parts.listener.worker_idle(self._parts.index)
        self.idle = True
        with self._parts.gate.resting():
            ready = self._fetch(wait=True)
        self.idle = False  # before the question below: whoever saw it idle after asking it to stop relies on it
        if ready is None or self._parts.hooks.stopping():
            return None
        self._parts.listener.worker_back(self._parts.index)
        return ready


def _extremes(dense: Tensor) -> str:
    """What to look for first in dense columns `[B, N]`, if there are any."""
    if not dense.numel():
        return ""
    return f"look for extreme values in the dense columns of these rows (up to {float(dense.abs().max()):.3g}), "


def _nothing_computed(
    _: Tensor, pooled: Tensor, labels: Tensor, sequences: Mapping[str, JaggedVectors]
) -> tuple[Tensor, Tensor, VectorGradients]:
    """What a step gives that computes nothing: no loss, even odds, and gradients of zeros."""
    return torch.zeros(()), torch.zeros_like(labels), VectorGradients.zeros(pooled, sequences)


class _Prefetcher:
    """Pulls the next batches of a worker in a thread of its own while the worker trains; with 0, in the worker's.

    At the end it leaves: a pull under way may wait for a batch that was begun and will not be computed.
    """

    def __init__(self, fetch: Callable[[bool], _Ready | None], leave: Callable[[], None], parts: WorkerParts) -> None:
        self._fetch = fetch
        self._leave = leave
        self._depth = parts.settings.prefetch
        self._resting = parts.gate.resting
        self._pool = ThreadPoolExecutor(1, f"pull-{parts.rank}.{parts.index}") if self._depth else None
        self._under_way: deque[Future[_Ready | None]] = deque()

    def next(self) -> _Ready | None:
        """The next batch, or None when there is none now."""
        with self._resting():
            if self._pool is None:
                return self._fetch(False)
            while len(self._under_way) <= self._depth:
                self._under_way.append(self._pool.submit(self._fetch, False))
            while self._under_way:
                ready = self._under_way.popleft().result()
                if ready is not None:
                    return ready
        return None

    def __enter__(self) -> "_Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self._leave()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)
