"""The one authority over global steps: gives out tokens, asks the aggregator, and has its commits carried out."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, TokenBook, Worker
from shadowsync.aggregation.counts import AggregationCounts, AggregationState, Paces
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.data.leases import Lease, LeaseService
from shadowsync.embedding.server import RowStep
from shadowsync.rpc.kept import check_generation
from shadowsync.rpc.pending import Pending, Promise
from shadowsync.rpc.served import served
from shadowsync.training.optimizers import Rates

MOST_BEHIND = 2
"""Global batches that are decided and not carried out while batches are still begun; more rides out longer pauses of
the servers, and takes more memory there."""
PATIENCE_S = 30.0
"""A worker that waits asks again after this time: a call that stays open for ever would stop its connection."""


@dataclass(frozen=True)
class StepRule:
    """How a global step is made of gradients; the same for every method, so that one may switch between them.

    Attributes:
        size: gradients in a global batch, M.
        dense_lr: learning rate of the dense part before warm-up and decay.
        row_lr: the same for the rows.
        rates: the factor on both, from the samples trained.
        rows_by_buffer: rows' gradients are divided as the dense ones; else each row's by the batches that contain it
            (GBA, arXiv 2205.11048).
    """

    size: int
    dense_lr: float
    row_lr: float
    rates: Rates
    rows_by_buffer: bool


@dataclass(eq=False, slots=True)
class _Batch:
    """Is dispatched, asked for (its `answer` waits), begun, arrives, and is taken or dropped by a step.

    Attributes:
        version: of the dense parameters: at least that it is to be computed with, then that it was.
        began_s: time of work at which it was begun.
    """

    number: int
    token: int
    lease: Lease
    start: int
    stop: int
    worker: tuple[int, int] = (-1, -1)
    version: int = 0
    answer: Promise[int | None] | None = None
    began_s: float = 0.0


class StepCoordinator:
    """Drives an `Aggregator` from many threads (a role), for the whole job.

    Decisions are made under a lock that is held for microseconds. Commits are carried out in their order, by one thread
    at a time, so that nobody waits for a step but those whom the method makes wait. Where steps are decided faster than
    they are carried out, all wait once `MOST_BEHIND` global batches are: otherwise gradients would pile up at the
    servers, and grow older than any method knows of.

    It numbers the batches of the job, and says that their rows are done: trainers need not tell, and cannot tell twice.
    A worker is `(rank of its trainer, index there)`.

    Args:
        method: says what goes into which step.
        rows: whose batches are numbered.
        carry_out: makes a step everywhere, and returns when it is made.
        clock: seconds from any start.
        run: has what it is given run, once; commits are carried out there. By default in the thread that brought a
            commit about. What goes wrong is raised there, and by everybody who wants to begin a batch afterwards.
        paces: step times of the same workers so far, which go on.
        generation: whose workers are heard.

    Attributes:
        error: what went wrong while a step was carried out; no step is made after that.
    """

    def __init__(
        self,
        method: Aggregation,
        rule: StepRule,
        rows: LeaseService,
        carry_out: Callable[[DenseStep, RowStep], object],
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], None]], object] | None = None,
        paces: Paces | None = None,
        generation: int = 0,
    ) -> None:
        self._method, self._rule, self._rows, self._carry_out_step = method, rule, rows, carry_out
        self._run = run or (lambda carry_out: carry_out())
        self._clock, self._generation = clock, generation
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._changed = threading.Condition()
        self._carrying = threading.Lock()
        self._working: set[tuple[int, int]] = set()
        self._asked: dict[int, _Batch] = {}
        self._answers: deque[tuple[Promise[int | None], int | BaseException | None]] = deque()
        self._stopped = False
        self._next = 0
        self._paces = Paces() if paces is None else paces
        self._restart(AggregationState())
        self._most_behind = MOST_BEHIND * rule.size // self.aggregator.size
        rows.number_by(self.dispatch)

    def _restart(self, before: AggregationState) -> None:
        self.aggregator: Aggregator = self._method.start(self._rule.size, before.global_steps)
        self.counts = AggregationCounts(before, self.aggregator.mode)
        self._tokens = TokenBook(self.aggregator.size, before.global_steps)
        self._carried = self._settled = before.global_steps
        self._dispatched: dict[int, _Batch] = {}
        self._begun: dict[int, _Batch] = {}
        self._arrived: dict[int, _Batch] = {}
        self._undone: dict[int, _Batch] = {}
        self._commits: deque[tuple[Commit, int, Mapping[int, _Batch]]] = deque()
        self.error: BaseException | None = None

    def restart(self, before: AggregationState) -> None:
        """Everything that waits is forgotten, and steps go on from these counts; nobody may be at work."""
        with self._changed:
            for number in list(self._asked):
                self._reply(number)
            self._restart(before)
        self._tell()

    # --- called by workers -------------------------------------------------------------------------------------------

    def dispatch(self, lease: Lease, start: int, stop: int) -> int:
        """A batch of these rows is being handed out to the trainer of the lease; called in the order in which that is
        done. Gives the number under which its gradients are held.
        """
        with self._changed:
            number = self._next
            self._next += 1
            self._dispatched[number] = _Batch(number, self._tokens.dispatch(), lease, start, stop)
            return number

    @served(quick=True, timeout_s=PATIENCE_S)
    def ask(self, worker: tuple[int, int], number: int, generation: int = 0) -> Pending[int | None]:
        """A worker is about to compute a batch that was dispatched.

        Who asks once more for the same batch is answered as before, or instead of the first time. The answer is the
        version of the dense parameters, at least, that it is to be computed with; None if it is not to be trained any
        more. With a method that makes workers wait it comes when the batch may be computed, with parameters as they
        are then, in whatever thread brings it about.
        """
        check_generation(self._generation, generation)
        answer: Promise[int | None] = Promise()
        with self._changed:
            begun, batch = self._begun.get(number), self._dispatched.get(number)
            if begun is not None and begun.worker == worker:
                self._answers.append((answer, begun.version))
            elif self._stopped or batch is None:
                self._answers.append((answer, None))
            else:
                self._reply(number)
                self._working.add(worker)
                batch.worker, batch.answer = worker, answer
                self._asked[number] = batch
                self._admit()
        self._tell()
        return answer

    @served(quick=True)
    def arrived(self, number: int, version: int, generation: int = 0) -> None:
        """All servers hold the gradients of a batch that was computed with this version of the dense parameters; of one
        that was given up meanwhile nothing is taken note of."""
        check_generation(self._generation, generation)
        with self._changed:
            if (batch := self._begun.pop(number, None)) is None:
                return
            batch.version = version
            self._arrived[number] = self._undone[number] = batch
            now = self._now()
            self._paces.add(batch.worker, now - batch.began_s)
            self._decided(self.aggregator.arrived(number, now))
            self._flush()
            self._admit()
        self._go_on()

    @served(quick=True)
    def idle(self, worker: tuple[int, int], generation: int = 0) -> None:
        """A worker has nothing to do now; nobody waits for it."""
        check_generation(self._generation, generation)
        with self._changed:
            self._leave(worker)
            self._admit()
        self._go_on()

    @served(quick=True, timeout_s=PATIENCE_S)
    def left(self, worker: tuple[int, int], generation: int = 0) -> None:
        """A worker has ended or died: what it had begun will not come, and what it waits for it need not begin."""
        self.idle(worker, generation)

    def abandoned(self, trainer: int) -> None:
        """A trainer is gone, and its rows are about to be given to others.

        Batches that it had not begun, or that had not arrived, never will be. Those whose gradients wait for their step
        count as trained from now on, so that nobody trains them again. Nobody waits for its workers. Its process is at
        its end, or not listened to any more, before another one has its rank.
        """
        with self._changed:
            waiting = [number for number, batch in self._undone.items() if batch.lease.trainer == trainer]
            counted = [self._undone.pop(number) for number in waiting]
            lost = [number for number, batch in self._dispatched.items() if batch.lease.trainer == trainer]
            for number in lost:
                del self._dispatched[number]
                self._reply(number)
                self.aggregator.retired(number)
            self._tokens.retired(len(lost))
            for worker in [worker for worker in self._working if worker[0] == trainer]:
                self._leave(worker)
            self._admit()
        self._count(counted)
        self._go_on()

    def _admit(self) -> None:
        """Under the lock: answers whoever need not wait any longer, batches that were dispatched first before others.

        Whoever has to wait for a step waits until it is carried out, and for the batches before.
        """
        if self.error is not None or self._stopped:
            for number in list(self._asked):
                self._reply(number, self.error)
        for number in sorted(self._asked):
            batch, now, waits = self._asked[number], self._now(), self.aggregator.waits
            behind = self.aggregator.step - self._carried
            if (
                behind <= self._most_behind
                and not (waits and (behind or next(iter(self._dispatched)) < number))
                and self.aggregator.begin(Begun(number, batch.token, batch.worker), now)
            ):
                batch.version, batch.began_s = self._carried if self.aggregator.waits else 0, now
                self._begun[number] = self._dispatched.pop(number)
                self._reply(number, batch.version)
            elif waits:
                return  # and so do all that were dispatched after it

    def _reply(self, number: int, answer: int | BaseException | None = None) -> None:
        """Under the lock: whoever waits to begin that batch is answered; None says that it need not any more."""
        batch = self._asked.pop(number, None)
        if batch is not None and batch.answer is not None:
            self._answers.append((batch.answer, answer))

    def _tell(self) -> None:
        """Gives the answers, without the lock."""
        while self._answers:
            try:
                answer, given = self._answers.popleft()
            except IndexError:  # another thread gave the last one
                return
            if isinstance(given, BaseException):
                answer.fail(given)
            else:
                answer.keep(given)

    def _leave(self, worker: tuple[int, int]) -> None:
        lost = [number for number, batch in self._begun.items() if batch.worker == worker]
        for number in lost:
            del self._begun[number]
        waiting = [number for number, batch in self._asked.items() if batch.worker == worker]
        for number in waiting:
            del self._dispatched[number]
            self._reply(number)
        self._tokens.retired(len(lost) + len(waiting))
        self._working.discard(worker)
        self.aggregator.left(worker)

    def _flush(self) -> None:
        """Under the lock: commits what is held where no other rows are left before the next barrier or the end, so that
        nothing will complete the step. A job that was stopped goes on later, and makes whole steps of these rows then.
        """
        if not self._stopped and self.aggregator.held:
            waiting = sum(batch.stop - batch.start for batch in self._undone.values())
            if self._rows.remaining <= waiting:
                self._commit_held()

    def _commit_held(self) -> None:
        self._decided(self.aggregator.flush())
        self._tokens.realign(self.aggregator.step, len(self._dispatched) + len(self._begun))

    # --- called by the session ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """To be called several times a second: a method may have to act though no gradient arrives, and the last rows
        may be trained or turn out bad without one."""
        with self._changed:
            if self.aggregator.look(self._now()):
                self._admit()
            self._flush()
        self._go_on()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._admit()
            self._changed.notify_all()
        self._tell()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While inside everybody stands still, and that time is nobody's step time, so that a checkpoint makes nobody a
        straggler; one thread at a time."""
        with self._changed:
            self._paused_at = began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._paused_at = None
                self._paused_s += self._clock() - began

    def _now(self) -> float:
        """Under the lock: the time in which workers may work, in seconds."""
        return (self._clock() if self._paused_at is None else self._paused_at) - self._paused_s

    @property
    def state(self) -> AggregationState:
        with self._changed:
            return self.counts.state(self.aggregator.mode, self.aggregator.switches)

    def recent_step_s(self) -> Mapping[Worker, float]:
        """How long each worker that is at work takes for a batch now, smoothed; a batch under way counts as soon as it
        takes longer than that."""
        with self._changed:
            now, recent_s = self._now(), self._paces.recent_s()
            found: dict[Worker, float] = {worker: s for worker, s in recent_s.items() if worker in self._working}
            for batch in self._begun.values():
                found[batch.worker] = max(found.get(batch.worker, 0.0), now - batch.began_s)
            return found

    def mean_step_s(self) -> Mapping[Worker, float]:
        """How long each worker took for a batch, on average since the start, those that left included."""
        with self._changed:
            return self._paces.mean_s()

    @property
    def paces(self) -> Paces:
        """A copy of the step times so far, for a coordinator that goes on in place of this one."""
        with self._changed:
            return Paces(self._paces)

    def settle(self, timeout_s: float) -> bool:
        """Waits until every step that was decided is carried out, and what is in it counts as trained; False if that
        is not so after that time.

        Gradients that count as trained already, because their trainer is gone, become a step first, with all that are
        held: an image is about to be taken, and holds no gradients.
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
            held = self._arrived.keys() - commit.weights.keys()
            below = min((*self._dispatched, *self._begun, *held), default=self._next)
            named = {number: self._arrived.pop(number) for number in commit.weights}
            self._commits.append((commit, below, named))

    def _go_on(self) -> None:
        self._tell()
        if self._commits:
            self._run(self._carry_out)

    def _carry_out(self) -> None:
        while self._commits and self.error is None and self._carrying.acquire(blocking=False):
            try:
                while self._commits:
                    self._carry_out_one(*self._commits.popleft())
            except BaseException as error:
                with self._changed:
                    self.error = self.error or error
                    self._admit()
                self._tell()
                raise
            finally:
                self._carrying.release()

    def _carry_out_one(self, commit: Commit, below: int, named: Mapping[int, _Batch]) -> None:
        rule = self._rule
        with self._changed:  # those of a trainer that is gone count as trained already
            new = sum(batch.stop - batch.start for number, batch in named.items() if number in self._undone)
        factor = rule.rates.factor(self._rows.trained + new) * self._rows.scale
        divisor = commit.divisor if rule.rows_by_buffer else None
        self._carry_out_step(
            DenseStep(commit.step, commit.weights, commit.divisor, rule.dense_lr * factor, below),
            RowStep(commit.step, commit.weights, divisor, rule.row_lr * factor, below),
        )
        with self._changed:
            self.counts.add(commit.step, commit.weights, {number: batch.version for number, batch in named.items()})
            self._carried = commit.step + 1
            counted = [self._undone.pop(number) for number in named if number in self._undone]
        self._count(counted)
        with self._changed:
            self._settled = commit.step + 1
            self._flush()
            self._admit()
            self._changed.notify_all()
        self._tell()

    def _count(self, batches: Sequence[_Batch]) -> None:
        """Without the lock: their rows were trained."""
        for batch in batches:
            self._rows.done(batch.lease, batch.start, batch.stop)
