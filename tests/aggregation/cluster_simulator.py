"""A cluster in virtual time: workers that are slow, die, join and run out of data, before any gradient method."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, TokenBook

StepTime = Callable[[int, int, float], float]
"""Seconds that a worker takes for a batch, given their numbers and when it begins."""


@dataclass
class Cluster:
    """Workers that take one batch after the other until all are dispatched, and what happened to each batch.

    Attributes:
        aggregation: the method.
        size: M.
        batches: so many are dispatched, those included that die with their worker.
        step_time: how fast the workers are.
        workers: so many are there from the start.
        until_s: nobody takes another batch from then on.
    """

    aggregation: Aggregation
    size: int
    batches: int
    step_time: StepTime
    workers: int = field(kw_only=True)
    until_s: float = float("inf")
    step: int = 0
    aggregator: Aggregator = field(init=False)
    book: TokenBook = field(init=False)
    now: float = 0.0
    commits: list[Commit] = field(default_factory=list)
    commit_times: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    began_at_step: dict[int, int] = field(default_factory=dict)
    dispatched: dict[int, Begun] = field(default_factory=dict)
    refusals: int = 0
    watch: Callable[["Cluster", Begun], None] = lambda cluster, batch: None
    _waiting: dict[int, Begun] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    _sequence: int = 0
    _changed: bool = False

    def __post_init__(self) -> None:
        self.aggregator = self.aggregation.start(self.size, self.step)
        self.book = TokenBook(self.aggregator.size, self.step)
        for worker in range(self.workers):
            self.join(worker)

    def join(self, worker: int, at: float = 0.0) -> None:
        self._at(at, lambda: self._joins(worker))

    def die(self, worker: int, at: float) -> None:
        self._at(at, lambda: self._leaves(worker))

    def lose(self, worker: int, at: float) -> None:
        """The batch that a worker computes or waits for gets lost, and the worker goes on with another one."""
        self._at(at, lambda: self._loses(worker))

    def look(self, every_s: float, until_s: float) -> None:
        """As a session does, from the start on."""
        for time in range(int(until_s / every_s)):
            self._at(time * every_s, self._look)

    def _look(self) -> None:
        self._changed = self.aggregator.look(self.now)

    def flush(self, at: float) -> None:
        """In the middle of everything, as before a checkpoint."""
        self._at(at, self._flush)

    def run(self) -> "Cluster":
        """Until every batch is accounted for."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            self._changed = False
            event()
            if self._changed:
                self._ask_again()
        assert not self._waiting, f"{self._waiting} wait for ever"
        assert not self.aggregator.in_flight
        self._flush()
        return self

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, self._sequence, event))
        self._sequence += 1

    def _joins(self, worker: int) -> None:
        if worker not in self.alive:
            self.alive.add(worker)
            self._next(worker)

    def _next(self, worker: int) -> None:
        if len(self.dispatched) >= self.batches or self.now >= self.until_s:
            self._leaves(worker)
            return
        batch = Begun(len(self.dispatched), self.book.dispatch(), worker)
        self.dispatched[batch.number] = batch
        self._ask(batch)

    def _ask(self, batch: Begun) -> None:
        if not self.aggregator.begin(batch, self.now):
            self.refusals += 1
            self._waiting[batch.number] = batch
            return
        self._waiting.pop(batch.number, None)
        self.began_at_step[batch.number] = self.aggregator.step
        self.watch(self, batch)
        seconds = self.step_time(worker_of(batch), batch.number, self.now)
        self._at(self.now + seconds, lambda: self._arrives(batch))

    def _ask_again(self) -> None:
        """Once, and the last dispatched first: the least fair order."""
        for number in sorted(self._waiting, reverse=True):
            self._ask(self._waiting[number])

    def _arrives(self, batch: Begun) -> None:
        if batch.number in self.lost:
            assert self.aggregator.arrived(batch.number, self.now) == [], "a retired gradient makes no step"
            return
        self.received.append(batch.number)
        self._take(self.aggregator.arrived(batch.number, self.now))
        assert self.aggregator.arrived(batch.number, self.now) == [], "a gradient arrives once"
        self._next(worker_of(batch))

    def _leaves(self, worker: int) -> None:
        if worker not in self.alive:
            return
        self.alive.discard(worker)
        self._lost([b for b in self.outstanding() if b.worker == worker])
        self.aggregator.left(worker)

    def _loses(self, worker: int) -> None:
        for batch in [b for b in self.outstanding() if b.worker == worker]:
            self._lost([batch])
            self.aggregator.retired(batch.number)
            self._next(worker)

    def _lost(self, batches: Sequence[Begun]) -> None:
        self._changed = True
        self.lost += [batch.number for batch in batches]
        self.book.retired(len(batches))
        for batch in batches:
            self._waiting.pop(batch.number, None)

    def _flush(self) -> None:
        self._changed = True
        self._take(self.aggregator.flush())
        self.book.realign(self.aggregator.step, len(self.outstanding()))
        assert not self.aggregator.held

    def outstanding(self) -> list[Begun]:
        """Dispatched batches that have neither arrived nor been lost."""
        settled = {*self.received, *self.lost}
        return [batch for batch in self.dispatched.values() if batch.number not in settled]

    def _take(self, commits: Sequence[Commit]) -> None:
        self._changed |= bool(commits)
        self.commits += commits
        self.commit_times += [self.now] * len(commits)

    @property
    def named(self) -> list[int]:
        """The batches of all commits, in order."""
        return [number for commit in self.commits for number in commit.weights]

    @property
    def dropped(self) -> int:
        return sum(not weight for commit in self.commits for weight in commit.weights.values())


def worker_of(batch: Begun) -> int:
    assert isinstance(batch.worker, int)
    return batch.worker
