"""The one authority over global steps: gives out tokens, asks the aggregator, and has its commits carried out."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, Worker
from shadowsync.aggregation.counts import AggregationCounts, AggregationState
from shadowsync.aggregation.step_times import Paces
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.aggregation.tokens import TokenBook
from shadowsync.embedding.holding import RowStep
from shadowsync.training.rates import Rates


class DensePart(Protocol):
    """Carries out the dense part of global steps (`DenseStepper`, near or behind a wire)."""

    def commit(self, step: DenseStep) -> None:
        """Returns when the step is made."""


class RowsPart(Protocol):
    """Carries out global steps on embedding rows (`EmbeddingServer`, near or behind a wire)."""

    def commit(self, step: RowStep) -> None:
        """Returns when the step is made."""


@dataclass(frozen=True)
class StepRule:
    """How a global step is made of gradients; the same for every method, so that one may switch between them.

    Attributes:
        size: gradients in a global batch, M.
        dense_lr: learning rate of the dense part before warm-up and decay.
        row_lr: the same for the rows.
        rates: the factor on both, from the samples trained.
        rows_by_buffer: rows' gradients are divided as the dense ones; else each row's by the batches that contain it
            (GBA, arXiv 2205.11048, algorithm 2).
    """

    size: int
    dense_lr: float
    row_lr: float
    rates: Rates
    rows_by_buffer: bool


@dataclass(frozen=True)
class StepParts:
    """Who carries global steps out.

    Attributes:
        dense: the dense part.
        rows: the embedding servers.
        trained: samples of the job so far.
    """

    dense: DensePart
    rows: Sequence[RowsPart]
    trained: Callable[[], int]


@dataclass(frozen=True)
class Arrived:
    """A gradient that all servers hold.

    Attributes:
        trainer: who held the batch's rows.
        samples: of its batch.
        version: of the dense parameters that it was computed with.
        done: says that the batch was trained; called when a global step has taken or dropped it.
    """

    trainer: int
    samples: int
    version: int
    done: Callable[[], None]


class Conductor:
    """Drives an `Aggregator` from many threads.

    Decisions are made under a lock that is held for microseconds. Commits are carried out in their order by whichever
    thread brought one about while nobody else was at it, so that nobody waits for a step but those whom the method
    makes wait.

    Args:
        method: says what goes into which step.
        rule: how steps are made.
        parts: who makes them.
        clock: seconds from any start.
    """

    def __init__(
        self, method: Aggregation, rule: StepRule, parts: StepParts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._method, self._rule, self._parts, self._clock = method, rule, parts, clock
        self._changed = threading.Condition()
        self._carrying = threading.Lock()
        self._working: set[Worker] = set()
        self._stopped = False
        self._next = 0
        self._paces = Paces()
        self._restart(AggregationState())

    def _restart(self, before: AggregationState) -> None:
        self.aggregator: Aggregator = self._method.start(self._rule.size, before.global_steps)
        self.counts = AggregationCounts(before, self.aggregator.mode)
        self._paces.restarted()
        self._tokens = TokenBook(self._method.batches_per_step(self._rule.size), before.global_steps)
        self._carried = before.global_steps
        self._dispatched: dict[int, tuple[int, int]] = {}
        self._begun: dict[int, Worker] = {}
        self._arrived: dict[int, Arrived] = {}
        self._undone: dict[int, Arrived] = {}
        self._commits: deque[tuple[Commit, int, Mapping[int, Arrived]]] = deque()
        self._error: BaseException | None = None

    def restart(self, before: AggregationState) -> None:
        """Everything that waits is forgotten, and steps go on from these counts; nobody may be at work."""
        with self._changed:
            self._restart(before)
            self._changed.notify_all()

    # --- called by workers -------------------------------------------------------------------------------------------

    def dispatch(self, trainer: int) -> int:
        """A batch is being handed out to a trainer; called in the order in which that is done.

        Returns:
            the number under which its gradients are held.
        """
        with self._changed:
            number = self._next
            self._next += 1
            self._dispatched[number] = (trainer, self._tokens.dispatch())
            return number

    def begin(self, worker: Worker, number: int) -> bool:
        """A worker is about to compute a batch that was dispatched.

        Returns:
            False if nothing will be trained any more. A method that makes workers wait returns when the batch may be
            computed, with parameters as they are then.
        """
        with self._changed:
            if number not in self._dispatched:
                return False
            self._working.add(worker)
            batch = Begun(number, self._dispatched[number][1], worker)
            while not self._stopped and not self._admits(batch):
                self._changed.wait()
            del self._dispatched[number]
            self._begun[number] = worker
            self._paces.began(number, worker, self._clock())
            self._changed.notify_all()
            return not self._stopped

    def _admits(self, batch: Begun) -> bool:
        """Whoever has to wait for a step waits until it is carried out, and for the batches before."""
        self._raise_error()
        if self.aggregator.waits and (self._carried < self.aggregator.step or min(self._dispatched) < batch.number):
            return False
        return self.aggregator.begin(batch, self._clock())

    def abandoned(self, trainer: int) -> None:
        """A trainer is gone, and its rows are about to be given to others.

        Batches that it had not begun never will be. Those whose gradients wait for their step count as trained from
        now on, so that nobody trains them again.
        """
        with self._changed:
            waiting = [number for number, one in self._undone.items() if one.trainer == trainer]
            counted = [self._undone.pop(number) for number in waiting]
            lost = [number for number, (owner, _) in self._dispatched.items() if owner == trainer]
            for number in lost:
                del self._dispatched[number]
            self._tokens.retired(len(lost))
            self._changed.notify_all()
        for arrived in counted:
            arrived.done()

    def arrived(self, number: int, arrived: Arrived) -> None:
        """All servers hold the gradients of a batch; of one that was given up meanwhile nothing is taken note of."""
        with self._changed:
            if self._begun.pop(number, None) is None:
                return
            self._arrived[number] = self._undone[number] = arrived
            now = self._clock()
            self._paces.arrived(number, now)
            self._decided(self.aggregator.arrived(number, now))
        self._carry_out()

    def idle(self, worker: Worker) -> None:
        """A worker has nothing to do now; nobody waits for it. If nobody has, what is held is committed."""
        with self._changed:
            self._leave(worker)
            if not self._working and self.aggregator.held:
                self._decided(self.aggregator.flush(self._clock()))
                self._tokens.realign(self.aggregator.step, len(self._dispatched))
        self._carry_out()

    def left(self, worker: Worker) -> None:
        """A worker has ended or died: what it had begun will not come."""
        self.idle(worker)

    def _leave(self, worker: Worker) -> None:
        lost = [number for number, owner in self._begun.items() if owner == worker]
        for number in lost:
            del self._begun[number]
        self._paces.left(worker)
        self._tokens.retired(len(lost))
        self._working.discard(worker)
        self._decided(self.aggregator.left(worker, self._clock()))

    # --- called by the session ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Lets everybody go who waits; what is held will not be committed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def state(self) -> AggregationState:
        """Counts so far, and the method at work."""
        with self._changed:
            return self.counts.state(self.aggregator.mode, self.aggregator.switches)

    def recent_step_s(self) -> Mapping[Worker, float]:
        """How long each worker that is at work takes for a batch now."""
        with self._changed:
            return self._paces.recent_s(self._working, self._clock())

    def mean_step_s(self) -> Mapping[Worker, float]:
        """How long each worker took for a batch, on average since the start, those that left included."""
        with self._changed:
            return self._paces.mean_s()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _decided(self, commits: Sequence[Commit]) -> None:
        """Under the lock."""
        for commit in commits:
            below = min((*self._dispatched, *self._begun, *self._held_after(commit)), default=self._next)
            named = {number: self._arrived.pop(number) for number in commit.weights}
            self._commits.append((commit, below, named))
        self._changed.notify_all()

    def _held_after(self, commit: Commit) -> set[int]:
        return self._arrived.keys() - commit.weights.keys()

    def _carry_out(self) -> None:
        while self._commits and self._carrying.acquire(blocking=False):
            try:
                while self._commits:
                    self._carry_out_one(*self._commits.popleft())
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                raise
            finally:
                self._carrying.release()

    def _carry_out_one(self, commit: Commit, below: int, named: Mapping[int, Arrived]) -> None:
        rule = self._rule
        samples = self._parts.trained() + sum(arrived.samples for arrived in named.values())
        factor = rule.rates.factor(samples)
        self._parts.dense.commit(DenseStep(commit.step, commit.weights, commit.divisor, rule.dense_lr * factor, below))
        divisor = commit.divisor if rule.rows_by_buffer else None
        for part in self._parts.rows:
            part.commit(RowStep(commit.step, commit.weights, divisor, rule.row_lr * factor, below))
        with self._changed:
            self.counts.add(commit.step, commit.weights, {number: one.version for number, one in named.items()})
            self._carried = commit.step + 1
            counted = [self._undone.pop(number) for number in named if number in self._undone]
            self._changed.notify_all()
        for arrived in counted:
            arrived.done()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
