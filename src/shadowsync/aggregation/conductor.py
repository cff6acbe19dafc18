"""The one authority over global steps: gives out tokens, asks the aggregator, and has its commits carried out."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, Worker
from shadowsync.aggregation.counts import AggregationCounts, AggregationState
from shadowsync.aggregation.step_times import Paces
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.aggregation.tokens import TokenBook
from shadowsync.aggregation.work_clock import WorkClock
from shadowsync.embedding.holding import RowStep
from shadowsync.rpc.pending import DONE, Pending
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


class Carrier(Protocol):
    """Has global steps carried out."""

    @property
    def trained(self) -> Callable[[], int]:
        """Samples of the job so far."""

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        """Returns when the step is made everywhere."""


@dataclass(frozen=True)
class StepParts:
    """Carries global steps out on parts of this process (a `Carrier`).

    Attributes:
        dense: the dense part.
        rows: the embedding servers.
        trained: samples of the job so far.
    """

    dense: DensePart
    rows: Sequence[RowsPart]
    trained: Callable[[], int]

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        """As `Carrier.carry_out`, one part after the other."""
        self.dense.commit(dense)
        for part in self.rows:
            part.commit(rows)


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
    done: Callable[[], object]


class Admitted(NamedTuple):
    """Leave to compute a batch.

    Attributes:
        version: of the dense parameters, at least, that it is to be computed with.
    """

    version: int


class _Begun(NamedTuple):
    worker: Worker
    trainer: int
    admitted: Admitted


class _Asked(NamedTuple):
    batch: Begun
    answer: "Future[Admitted | None]"


_Answer = tuple["Future[Admitted | None]", Admitted | BaseException | None]

MOST_BEHIND = 2
"""Global batches that are decided and not carried out while batches are still begun; more rides out longer pauses of
the servers, and takes more memory there."""


def _at_once(carry_out: Callable[[], None]) -> None:
    carry_out()


class Conductor:
    """Drives an `Aggregator` from many threads.

    Decisions are made under a lock that is held for microseconds. Commits are carried out in their order, by one thread
    at a time, so that nobody waits for a step but those whom the method makes wait. Where steps are decided faster than
    they are carried out, all wait once `MOST_BEHIND` global batches are: otherwise gradients would pile up at the
    servers, and grow older than any method knows of.

    Args:
        method: says what goes into which step.
        rule: how steps are made.
        parts: who makes them.
        clock: seconds from any start.
        run: has what it is given run, once; commits are carried out there. By default in the thread that brought a
            commit about. What goes wrong is raised there, and by everybody who wants to begin a batch afterwards.
        paces: step times of the same workers so far, which go on.
    """

    def __init__(
        self,
        method: Aggregation,
        rule: StepRule,
        parts: Carrier,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], None]], object] = _at_once,
        paces: Paces | None = None,
    ) -> None:
        self._method, self._rule, self._parts, self._run = method, rule, parts, run
        self._clock = WorkClock(clock)
        self._most_behind = MOST_BEHIND * rule.size // method.batches_per_step(rule.size)
        self._changed = threading.Condition()
        self._carrying = threading.Lock()
        self._working: dict[Worker, int] = {}
        self._asked: dict[int, _Asked] = {}
        self._answers: deque[_Answer] = deque()
        self._stopped = False
        self._next = 0
        self._paces = Paces() if paces is None else paces
        self._restart(AggregationState())

    def _restart(self, before: AggregationState) -> None:
        self.aggregator: Aggregator = self._method.start(self._rule.size, before.global_steps)
        self.counts = AggregationCounts(before, self.aggregator.mode)
        self._paces.restarted()
        self._tokens = TokenBook(self._method.batches_per_step(self._rule.size), before.global_steps)
        self._carried = self._settled = before.global_steps
        self._dispatched: dict[int, tuple[int, int]] = {}
        self._begun: dict[int, _Begun] = {}
        self._arrived: dict[int, Arrived] = {}
        self._undone: dict[int, Arrived] = {}
        self._commits: deque[tuple[Commit, int, Mapping[int, Arrived]]] = deque()
        self._error: BaseException | None = None

    def restart(self, before: AggregationState) -> None:
        """Everything that waits is forgotten, and steps go on from these counts; nobody may be at work."""
        with self._changed:
            for number in list(self._asked):
                self._refuse(number)
            self._restart(before)
        self._tell()

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

    def ask(self, worker: Worker, number: int) -> "Future[Admitted | None]":
        """A worker is about to compute a batch that was dispatched.

        Who asks once more for the same batch is answered as before, or instead of the first time.

        Returns:
            None if it is not to be trained any more. With a method that makes workers wait the answer comes when the
            batch may be computed, with parameters as they are then, in whatever thread brings it about.
        """
        answer: Future[Admitted | None] = Future()
        with self._changed:
            begun = self._begun.get(number)
            if begun is not None and begun.worker == worker:
                self._answers.append((answer, begun.admitted))
            elif self._stopped or number not in self._dispatched:
                self._answers.append((answer, None))
            else:
                self._refuse(number)
                trainer, token = self._dispatched[number]
                self._working[worker] = trainer
                self._asked[number] = _Asked(Begun(number, token, worker), answer)
                self._admit()
        self._tell()
        return answer

    def _admit(self) -> None:
        """Under the lock: answers whoever need not wait any longer, batches that were dispatched first before others.

        Whoever has to wait for a step waits until it is carried out, and for the batches before.
        """
        if self._error is not None or self._stopped:
            self._answers.extend((asked.answer, self._error) for asked in self._asked.values())
            self._asked.clear()
        for number in sorted(self._asked):
            batch, answer = self._asked[number]
            if self._admits(batch):
                del self._asked[number]
                trainer, _ = self._dispatched.pop(number)
                admitted = Admitted(self._carried if self.aggregator.waits else 0)
                self._begun[number] = _Begun(batch.worker, trainer, admitted)
                self._paces.began(number, batch.worker, self._clock())
                self._answers.append((answer, admitted))
            elif self.aggregator.waits:
                return  # and so do all that were dispatched after it

    def _admits(self, batch: Begun) -> bool:
        behind = self.aggregator.step - self._carried
        if behind > self._most_behind:
            return False
        if self.aggregator.waits and (behind or next(iter(self._dispatched)) < batch.number):
            return False
        return self.aggregator.begin(batch, self._clock())

    def _refuse(self, number: int) -> None:
        """Under the lock: whoever waits to begin that batch need not any more."""
        if (asked := self._asked.pop(number, None)) is not None:
            self._answers.append((asked.answer, None))

    def _tell(self) -> None:
        """Gives the answers, without the lock."""
        while self._answers:
            try:
                answer, given = self._answers.popleft()
            except IndexError:  # another thread gave the last one
                return
            if isinstance(given, BaseException):
                answer.set_exception(given)
            else:
                answer.set_result(given)

    def abandoned(self, trainer: int) -> None:
        """A trainer is gone, and its rows are about to be given to others.

        Batches that it had not begun, or that had not arrived, never will be. Those whose gradients wait for their step
        count as trained from now on, so that nobody trains them again. Nobody waits for its workers.
        """
        with self._changed:
            waiting = [number for number, one in self._undone.items() if one.trainer == trainer]
            counted = [self._undone.pop(number) for number in waiting]
            lost = [number for number, (owner, _) in self._dispatched.items() if owner == trainer]
            for number in lost:
                del self._dispatched[number]
                self._refuse(number)
                self._decided(self.aggregator.retired(number, self._clock()))
            self._tokens.retired(len(lost))
            for worker in [worker for worker, owner in self._working.items() if owner == trainer]:
                self._leave(worker)
            self._flush()
            self._admit()
        for arrived in counted:
            arrived.done()
        self._go_on()

    def arrived(self, number: int, arrived: Arrived) -> Pending[None]:
        """All servers hold the gradients of a batch; of one that was given up meanwhile nothing is taken note of."""
        with self._changed:
            if self._begun.pop(number, None) is None:
                return DONE
            self._arrived[number] = self._undone[number] = arrived
            now = self._clock()
            self._paces.arrived(number, now)
            self._decided(self.aggregator.arrived(number, now))
            self._admit()
        self._go_on()
        return DONE

    def idle(self, worker: Worker) -> None:
        """A worker has nothing to do now; nobody waits for it. If nobody has, what is held is committed."""
        with self._changed:
            self._leave(worker)
            self._flush()
            self._admit()
        self._go_on()

    def left(self, worker: Worker) -> None:
        """A worker has ended or died: what it had begun will not come, and what it waits for it need not begin."""
        self.idle(worker)

    def _leave(self, worker: Worker) -> None:
        lost = [number for number, begun in self._begun.items() if begun.worker == worker]
        for number in lost:
            del self._begun[number]
        self._paces.left(worker)
        waiting = [number for number, asked in self._asked.items() if asked.batch.worker == worker]
        for number in waiting:
            del self._dispatched[number]
            self._refuse(number)
        self._tokens.retired(len(lost) + len(waiting))
        self._working.pop(worker, None)
        self._decided(self.aggregator.left(worker, self._clock()))

    def _flush(self) -> None:
        """Under the lock: nobody is at work, so nothing will complete the step. A job that was stopped goes on later,
        and makes whole steps of these rows then."""
        if not self._working and not self._stopped and self.aggregator.held:
            self._commit_held()

    def _commit_held(self) -> None:
        self._decided(self.aggregator.flush(self._clock()))
        self._tokens.realign(self.aggregator.step, len(self._dispatched) + len(self._begun))

    # --- called by the session ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """To be called several times a second: a method may have to act though no gradient arrives."""
        with self._changed:
            if self.aggregator.look(self._clock()):
                self._admit()
        self._tell()

    def stop(self) -> None:
        """Lets everybody go who waits; nobody begins anything any more."""
        with self._changed:
            self._stopped = True
            self._admit()
            self._changed.notify_all()
        self._tell()

    def paused(self) -> AbstractContextManager[None]:
        """While inside everybody stands still, and that time is nobody's step time."""
        return self._clock.stopped()

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

    @property
    def paces(self) -> Paces:
        """A copy of the step times so far, for a conductor that goes on in place of this one."""
        with self._changed:
            return self._paces.so_far()

    @property
    def error(self) -> BaseException | None:
        """What went wrong while a step was carried out; no step is made after that."""
        return self._error

    def settle(self, timeout_s: float) -> bool:
        """Waits until every step that was decided is carried out, and what is in it counts as trained.

        Gradients that count as trained already, because their trainer is gone, become a step first, with all that are
        held: an image is about to be taken, and holds no gradients.

        Returns:
            False if that is not so after that time.
        """
        with self._changed:
            if self._arrived.keys() - self._undone.keys():
                self._commit_held()
        self._go_on()
        with self._changed:
            return self._changed.wait_for(lambda: self._settled >= self.aggregator.step, timeout_s)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _decided(self, commits: Sequence[Commit]) -> None:
        """Under the lock."""
        for commit in commits:
            below = min((*self._dispatched, *self._begun, *self._held_after(commit)), default=self._next)
            named = {number: self._arrived.pop(number) for number in commit.weights}
            self._commits.append((commit, below, named))

    def _held_after(self, commit: Commit) -> set[int]:
        return self._arrived.keys() - commit.weights.keys()

    def _go_on(self) -> None:
        """After every change, without the lock."""
        self._tell()
        if self._commits:
            self._run(self._carry_out)

    def _carry_out(self) -> None:
        while self._commits and self._error is None and self._carrying.acquire(blocking=False):
            try:
                while self._commits:
                    self._carry_out_one(*self._commits.popleft())
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._admit()
                self._tell()
                raise
            finally:
                self._carrying.release()

    def _carry_out_one(self, commit: Commit, below: int, named: Mapping[int, Arrived]) -> None:
        rule = self._rule
        with self._changed:  # those of a trainer that is gone count as trained already
            new = sum(arrived.samples for number, arrived in named.items() if number in self._undone)
        samples = self._parts.trained() + new
        factor = rule.rates.factor(samples)
        divisor = commit.divisor if rule.rows_by_buffer else None
        self._parts.carry_out(
            DenseStep(commit.step, commit.weights, commit.divisor, rule.dense_lr * factor, below),
            RowStep(commit.step, commit.weights, divisor, rule.row_lr * factor, below),
        )
        with self._changed:
            self.counts.add(commit.step, commit.weights, {number: one.version for number, one in named.items()})
            self._carried = commit.step + 1
            counted = [self._undone.pop(number) for number in named if number in self._undone]
        for arrived in counted:
            arrived.done()
        with self._changed:
            self._settled = commit.step + 1
            self._admit()
            self._changed.notify_all()
        self._tell()
