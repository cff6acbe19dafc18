"""A trainer: one dense replica, its Hogwild workers, and a driver that synchronises it.

A worker's step is: next batch, pull, forward and backward, update.
`B` samples of a batch.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowsync.data.labels import column
from shadowsync.data.reader import Feed, LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.errors import NonFiniteLoss, ShadowSyncError
from shadowsync.models.vectors import JaggedVectors, LookedUp, VectorGradients
from shadowsync.rpc.pending import Pending
from shadowsync.training.gate import Gate
from shadowsync.training.optimizers import Rates
from shadowsync.training.replica import Replica, WorkerModule

_Ready = tuple[LeasedBatch, Pulled, LookedUp | None]
MOST_UNDER_WAY = 4


class TrainerLost(ShadowSyncError):
    """This trainer died, by script; the others go on with its leases."""


class Driver:
    """Synchronises the trainer's replica when its schedule says so (`sync.schedule`); this one never does."""

    def start(self) -> None:
        """The trainer's workers are about to start."""

    def after_step(self, worker_index: int, iteration: int) -> None:
        """Called in the worker's thread after each of its iterations, counted from 1."""

    def worker_idle(self, worker_index: int) -> None:
        """This worker has nothing to train now; nobody may wait for it."""

    def worker_back(self, worker_index: int) -> None:
        """This worker, idle before, has got something to train."""

    def worker_left(self, worker_index: int) -> None:
        """This worker will not call again."""

    def stop(self) -> None:
        """All workers have left: leaves the group and raises what went wrong, if anything did."""


@dataclass
class Update(ABC):
    """What becomes of a worker's gradients; one for each worker, and called by it alone.

    Of each batch `begin`, `ready` and `apply` are called in this order. With pulls ahead, later batches are begun, in a
    thread of the worker's own, before an earlier one is ready. What `apply` sends may be unacknowledged when it
    returns, as long as that is no more than `most_under_way`; an error is raised by a later `apply`, or by `settle`.
    """

    most_under_way: int = field(default=MOST_UNDER_WAY, kw_only=True)
    _under_way: deque[Pending[None]] = field(default_factory=deque, init=False, repr=False, compare=False)

    @abstractmethod
    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        """The worker has taken a batch, and asks to compute it.

        What is returned waits for the answer; True: the batch's rows are pulled next. False: there is nothing to train
        any more.
        """

    @abstractmethod
    def ready(self, leased: LeasedBatch) -> None:
        """The forward pass is next: the parameters of the worker's module are brought up to date if need be."""

    @abstractmethod
    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        """Takes the gradients of one batch; the worker's next step starts when it returns.

        Whoever implements it also says `Feed.done`, once, as soon as the gradients are in the parameters. The module
        holds the gradients of the dense part; `gradient` is that of the loss by the vectors in `pulled`, float32,
        and not written to again; `factor`, in [0, 1], is on all learning rates.
        """

    def _sent(self, sent: Pending[None]) -> None:
        """Something is on its way; while that is too much, the oldest is waited for."""
        self._under_way.append(sent)
        while self._under_way and (len(self._under_way) > self.most_under_way or self._under_way[0].done()):
            self._under_way.popleft().result()

    @property
    def quiet(self) -> bool:
        """Nothing that `apply` has sent is under way; may be asked from any thread while the worker stands still."""
        return all(sent.done() for sent in tuple(self._under_way))

    def settle(self) -> None:
        """Waits until everything that `apply` has sent is where it belongs; raises what failed.

        The worker calls it where nothing may be on its way: at a pause, while it has nothing to do, at its end.
        """
        while self._under_way:
            self._under_way.popleft().result()

    def idle(self) -> None:
        """The worker has nothing to do, and no batch that it has begun: nobody is to wait for it. Settles first."""
        self.settle()

    def left(self) -> None:  # noqa: B027 (matters where others wait for a worker)
        """The worker computes nothing any more, whatever the reason; may come again, and is not to raise."""


@dataclass
class LocalUpdate(Update):
    """Replica methods: the worker steps its trainer's replica without a lock, and the servers step the rows at once.

    A batch is done when all embedding servers have acknowledged its gradients; meanwhile the worker goes on.
    """

    embeddings: EmbeddingClient
    feed: Feed
    dense_lr: float
    embedding_lr: float

    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        return lambda: True

    def ready(self, leased: LeasedBatch) -> None:
        """The worker's module shares the replica's parameters."""

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        module.step(self.dense_lr * factor)
        pushed = self.embeddings.push(pulled, gradient, self.embedding_lr * factor)
        pushed.then(lambda error: self._ended(leased, error))
        self._sent(pushed)

    def _ended(self, leased: LeasedBatch, error: BaseException | None) -> None:
        if error is None:
            self.feed.done(leased)


@dataclass(frozen=True)
class TrainerContext:
    """What the workers of a trainer step with. Whatever is called from the hot path must return at once.

    Attributes:
        prefetch: pulls under way per worker.
        record: trainer rank, logits `[B]` and labels `[B]` of the first task after each step.
        trained: samples trained by the whole job so far.
        stopping: true when workers should end at the next boundary.
        before_step: trainer rank and iteration; raises `TrainerLost` to script a death.
        place: where a leased batch comes from, for messages.
        ended: a worker has ended.
        stepped: after each step, the seconds that it computed forward and backward, and those that the worker waited
            for it: for its vectors and parameters, and until gradients and replica were handed over.
        emulate_step_s: forward and backward are made to last at least this long; None leaves them as they are.
        compute: do the forward and the backward pass; False sends gradients of zeros and moves no parameter, for
            studies of servers and networks alone.
        scale: a further factor on the learning rates.
        slowness: factor of `emulate_step_s`, from 1 on, by the worker's number over all trainers and seconds since it
            began.
    """

    rank: int
    feed: Feed
    driver: Driver
    gate: Gate
    rates: Rates
    prefetch: int
    record: Callable[[int, Tensor, Tensor], None]
    trained: Callable[[], int]
    stopping: Callable[[], bool]
    before_step: Callable[[int, int], None]
    place: Callable[[LeasedBatch], str]
    ended: Callable[[], None]
    stepped: Callable[[float, float], None] = lambda *_: None
    emulate_step_s: float | None = None
    compute: bool = True
    slowness: Callable[[int, float], float] = lambda *_: 1.0
    scale: Callable[[], float] = lambda: 1.0


class Worker:
    """A Hogwild worker (Recht et al. 2011, arXiv 1106.5730): shares its trainer's replica with others without locks.

    Args:
        context: of its trainer.
        index: in the trainer.
        number: over all trainers.
        module: its own, over the replica's parameters.
        embeddings: its own way to the embedding servers.
        update: what becomes of its gradients.

    Attributes:
        iterations: steps so far.
        idle: it waits for what others may give back and holds nothing itself.
    """

    def __init__(
        self,
        context: TrainerContext,
        index: int,
        number: int,
        module: WorkerModule,
        embeddings: EmbeddingClient,
        update: Update,
    ) -> None:
        self._context, self._index, self._number = context, index, number
        self._module, self._embeddings, self.update = module, embeddings, update
        self._settled_factor: float | None = None
        self.iterations = 0
        self.idle = False
        self._began = time.monotonic()
        self._waited_s = 0.0

    def run(self) -> None:
        """Trains until the feed ends or the job stops."""
        self._began = time.monotonic()
        with contextlib.closing(self._pulled()) as batches:
            for leased, pulled, looked_up in batches:
                if not self._train(leased, pulled, looked_up):
                    self.update.settle()
                    break
        self.update.settle()

    def _train(self, leased: LeasedBatch, pulled: Pulled, looked_up: LookedUp | None) -> bool:
        """One step; whether there is to be another."""
        context, batch = self._context, leased.batch
        context.before_step(context.rank, self.iterations + 1)
        began = time.monotonic()
        self.update.ready(leased)
        factor, started = self._factor(len(batch)) * context.scale(), time.monotonic()
        forward_and_backward = self._module.loss_and_gradients if context.compute else _nothing_computed
        loss, logits, gradient = forward_and_backward(
            batch.dense, pulled.pooled, batch.labels, pulled.sequences, looked_up, batch.weights
        )
        if not torch.isfinite(loss):
            raise self._not_finite(loss.item(), leased)
        if context.emulate_step_s is not None:  # waits as a slower machine would compute; a pause need not wait for it
            least = context.emulate_step_s * context.slowness(self._number, started - self._began)
            if (left := started + least - time.monotonic()) > 0:
                context.gate.rest(left, context.stopping)
        computed_s = time.monotonic() - started
        self.update.apply(leased, pulled, self._module, gradient, factor)
        self.iterations += 1
        context.record(context.rank, column(logits, 0), column(batch.labels, 0))
        context.driver.after_step(self._index, self.iterations)
        context.stepped(computed_s, self._waited_s + time.monotonic() - began - computed_s)
        if context.gate.pausing:
            self.update.settle()
        context.gate.step()
        return not context.stopping()

    def _not_finite(self, loss: float, leased: LeasedBatch) -> NonFiniteLoss:
        """What is to blame: of a job that has trained nothing yet, the model or the rows themselves."""
        place, dense = self._context.place(leased), leased.batch.dense
        # of what others trained a trainer hears later
        if trained := max(self._context.trained(), self.iterations * len(leased.batch)):
            look = ""
            if dense.numel():
                most = float(dense.abs().max())
                look = f"look for extreme values in the dense columns of these rows (up to {most:.3g}), "
            return NonFiniteLoss(
                f"the loss is no longer finite ({loss}) at {place} after {trained} samples: {look}lower "
                "train.lr or embedding.lr, or set train.clip_norm=1"
            )
        if name := self._module.non_finite():
            return NonFiniteLoss(
                f"{name} of the model holds NaN or infinite numbers before the first step: give the module other "
                "initial values"
            )
        return NonFiniteLoss(
            f"the model gives a loss of {loss} at {place} before the first step: check its forward for what makes "
            "numbers that are not finite, and these rows for extreme values"
        )

    def _factor(self, batch_size: int) -> float:
        """On the learning rates; the samples of the job, behind the reader's lock, are asked for only as it moves."""
        if self._settled_factor is not None:
            return self._settled_factor
        rates, samples = self._context.rates, self._context.trained() + batch_size
        factor = rates.factor(samples)
        if rates.settled(samples):
            self._settled_factor = factor
        return factor

    def _pulled(self) -> Generator[_Ready, None, None]:
        """Batches with their pooled embeddings; when there is none now, waits for what others may give back."""
        context = self._context
        ahead: deque[Future[_Ready | None]] = deque()
        with ThreadPoolExecutor(1, f"pull-{context.rank}.{self._index}") as pool:  # starts no thread without prefetch
            try:
                while True:
                    began = time.monotonic()
                    ready = self._next(pool, ahead) if context.prefetch else self._take(wait=False)
                    self._waited_s = time.monotonic() - began
                    ready = ready or self._wait_for_more()
                    if ready is None:
                        return
                    yield ready
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                # before it is waited for: a pull may wait for a batch that was begun and will not be computed
                self.update.left()

    def _next(self, pool: ThreadPoolExecutor, ahead: deque[Future[_Ready | None]]) -> _Ready | None:
        """The next batch while others are pulled in the pool's thread, or None when there is none now."""
        while len(ahead) <= self._context.prefetch:
            ahead.append(pool.submit(self._fetch, False))
        with self._context.gate.resting():
            while ahead:
                if (ready := ahead.popleft().result()) is not None:
                    return ready
        return None

    def _take(self, wait: bool) -> _Ready | None:
        """The next batch where none is pulled ahead.

        Look-ups that admit keys change what is saved: then no pause comes between them and their step, so that a job
        that goes on from there does not count them twice.
        """
        with self._context.gate.resting():
            if not self._embeddings.admits:
                return self._fetch(wait)
            leased = self._context.feed.next(wait)
            if leased is None or not self.update.begin(leased)():
                return None
        return self._look_up(leased, lambda: True)

    def _fetch(self, wait: bool) -> _Ready | None:
        """A batch that is pulled ahead, by a thread of its own; what it admits is there before or after a pause."""
        leased = self._context.feed.next(wait)
        if leased is None:
            return None
        changing = self._context.gate.changing if self._embeddings.admits else contextlib.nullcontext
        return self._look_up(leased, self.update.begin(leased), changing)

    def _look_up(
        self,
        leased: LeasedBatch,
        admitted: Callable[[], bool],
        changing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> _Ready | None:
        ids, looked_up = self._module.ask(leased.batch)
        with changing():
            prepared = self._embeddings.prepare(ids, leased.batch.minute)
        return (leased, self._embeddings.fetch(prepared), looked_up) if admitted() else None

    def _wait_for_more(self) -> _Ready | None:
        self.update.idle()
        self._context.driver.worker_idle(self._index)
        self.idle = True
        ready = self._take(wait=True)
        self.idle = False  # before the question below: whoever saw it idle after asking it to stop relies on it
        if ready is None or self._context.stopping():
            return None
        self._context.driver.worker_back(self._index)
        return ready

    def ended(self) -> None:
        """Tells the job that this worker is done."""
        self.update.left()
        self._context.ended()


def _nothing_computed(
    _: Tensor,
    pooled: Tensor,
    labels: Tensor,
    sequences: Mapping[str, JaggedVectors],
    *__: LookedUp | Tensor | None,
) -> tuple[Tensor, Tensor, VectorGradients]:
    """What a step gives that computes nothing: no loss, even odds, and gradients of zeros."""
    return torch.zeros(()), torch.zeros_like(labels), VectorGradients.zeros(pooled, sequences)


class Trainer:
    """Trains one replica, which the modules of its workers alias, with these in threads.

    The driver synchronises the replica; at the gate threads stand still for a checkpoint.
    """

    def __init__(self, rank: int, replica: Replica, driver: Driver, gate: Gate) -> None:
        self.rank = rank
        self.replica = replica
        self.gate = gate
        self.error: BaseException | None = None
        self.finished = False
        self._driver = driver
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._left: list[int] = []

    def add(self, worker: Worker) -> None:
        """Adds a Hogwild worker, before the start."""
        index = len(self._workers)
        self._workers.append(worker)
        name = f"worker-{self.rank}.{index}"
        self._threads.append(threading.Thread(target=self._run, args=(index, worker), name=name, daemon=True))

    @property
    def lost(self) -> bool:
        """This trainer died by script, so that its leases go to the others."""
        return isinstance(self.error, TrainerLost)

    @property
    def failed(self) -> bool:
        """Something went wrong that ends the job."""
        return self.error is not None and not self.lost

    def start(self) -> None:
        """Starts the shadow and the workers."""
        self._driver.start()
        for thread in self._threads:
            self.gate.join()
            thread.start()

    def alive(self) -> bool:
        """Workers are still at work, or wait for something to do."""
        return len(self._left) < len(self._threads)

    def stepping(self) -> bool:
        """Some worker is at a step, or about to be: what the trainer holds cannot be given to others yet."""
        return any(not worker.idle for index, worker in enumerate(self._workers) if index not in self._left)

    @property
    def quiet(self) -> bool:
        """All gradients are where they belong; to be asked while everybody stands still."""
        return all(worker.update.quiet for worker in self._workers)

    def finish(self) -> None:
        """Waits for the workers and stops the shadow; what went wrong is kept in `error`."""
        if self.finished:
            return
        for thread in self._threads:
            thread.join()
        self.finished = True
        try:
            self._driver.stop()
        except BaseException as error:
            self.error = self.error or error

    def _run(self, index: int, worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._driver.worker_left(index)
            self.gate.leave()
            self._left.append(index)
            worker.ended()
