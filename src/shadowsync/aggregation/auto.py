"""Synchronous while the workers are even, GBA while stragglers would hold up the rounds."""

import heapq
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Annotated, ClassVar

from pydantic import Field

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, Switch, Sync, Worker, kept
from shadowsync.aggregation.gba import DivideBy, Gba, TokenAggregator, Tolerance
from shadowsync.config import LONGEST_S
from shadowsync.errors import ConfigError

BACK = 10
"""How many times longer the workers have to be even than they have to be uneven."""
HANGING = 3
"""Usual batches in the time of one that does not end, from which on its round is not waited for."""
RECENT = 16
"""Step times of a worker that say what rounds cost."""
INSTANT_S = 1e-9
Round = Sequence[float]
"""A step time of each worker."""


@dataclass(frozen=True)
class Auto(Aggregation):
    """Switches between `sync` and `gba` while the job runs, which GBA makes possible without re-tuning (arXiv
    2205.11048). The rule of when to switch is ours.

    What synchronous rounds lose to stragglers is estimated after every commit, in either mode, from the last step times
    of the living workers (`lost_share`). Above `share` it goes to GBA, once the estimate has been there for
    `steady_commits` commits and `steady_s` seconds in a row; below `even` back, for which it takes `BACK` times as
    much of both: rounds are no faster among even workers, so nothing is lost by staying. It starts synchronously.

    A round need not end for that: a batch that takes as long as `HANGING` usual ones, and `steady_s`, says as much, so
    that a worker that hangs holds nobody up for longer. What has arrived of that round is the beginning of the
    first global batch of GBA. The way back is taken right after a commit, and gradients in flight are kept: the first
    round waits for them instead of admitting as many new ones.
    """

    name: ClassVar[str] = "auto"

    share: Annotated[
        float, Field(gt=0, lt=1, description="loss of synchronous throughput to leave it at; more stays longer")
    ] = 0.2
    even: Annotated[
        float, Field(gt=0, lt=1, description="loss of synchronous throughput to return at; more returns sooner")
    ] = 0.1
    steady_commits: Annotated[
        int, Field(ge=1, description="commits in a row to go to GBA, ten times as many to return; more flaps less")
    ] = 2
    steady_s: Annotated[
        float,
        Field(
            ge=0,
            le=LONGEST_S,
            allow_inf_nan=False,
            description="seconds in a row to go to GBA, ten times that to return",
        ),
    ] = 1.0
    tolerance: Tolerance = Gba.tolerance
    divide_by: DivideBy = Gba.divide_by

    def __post_init__(self) -> None:
        if self.even >= self.share:
            raise ConfigError(
                f"aggregation.even={self.even} has to be below aggregation.share={self.share}, or the modes would "
                "alternate: lower even, or raise share"
            )

    def start(self, size: int, step: int = 0) -> Aggregator:
        return _Switching(self, size, step)


class _Switching(TokenAggregator):
    """Has rounds, as `sync`, or none, as `gba`."""

    def __init__(self, options: Auto, size: int, step: int) -> None:
        super().__init__(Sync.name, size, step, options.tolerance, options.divide_by, waits=True)
        self._options, self._times = options, StepTimes()
        self._streak, self._since = 0, math.inf  # commits in a row that called for a switch, and when the first did

    def begin(self, batch: Begun, now: float) -> bool:
        if not super().begin(batch, now):
            return False
        self._times.began(batch, now)
        return True

    def arrived(self, number: int, now: float) -> Sequence[Commit]:
        self._times.arrived(number, now)
        if commits := super().arrived(number, now):
            self._judge(now)
        return commits

    def retired(self, number: int) -> None:
        self._times.retired(number)
        super().retired(number)

    def left(self, worker: Worker) -> None:
        self._times.left(worker)
        super().left(worker)

    def look(self, now: float) -> bool:
        if not self.waits:
            return False
        options, longest = self._options, self._times.longest_s(now)
        if longest < options.steady_s or not (usual := self._times.usual_s):
            return False
        times = longest / usual
        if times < HANGING:
            return False
        lost = lost_share(self._times.rounds(now), self.size)  # last: this is called often and seldom gets here
        if lost <= options.share:
            return False
        why = f"stragglers cost synchronous rounds {lost:.0%}, above share={options.share:.0%}"
        self._switch(f"{why}, and a batch has taken {longest:.3g} s so far, {times:.0f} times the usual")
        return True

    def _weight(self, batch: Begun) -> float:
        return 1.0 if self.waits else super()._weight(batch)

    def _divisor(self, weights: Collection[float]) -> float:
        return kept(weights) if self.waits else super()._divisor(weights)

    def _judge(self, now: float) -> None:
        """Looks at the step times, and switches if they have called for it long enough.

        Only when gradients complete a step: workers that end say nothing about those that stay.
        """
        if not (rounds := self._times.rounds(now)):
            return
        lost = lost_share(rounds, self.size)
        options = self._options
        if not (lost > options.share if self.waits else lost < options.even):
            self._streak, self._since = 0, math.inf
            return
        self._streak, self._since = self._streak + 1, min(self._since, now)
        times = 1 if self.waits else BACK
        if self._streak >= times * options.steady_commits and now - self._since >= times * options.steady_s:
            bound = f"above share={options.share:.0%}" if self.waits else f"below even={options.even:.0%}"
            means = [fmean(step_s) for step_s in zip(*rounds, strict=True)]
            self._switch(
                f"stragglers cost synchronous rounds {lost:.0%}, {bound} for {self._streak} commits; of {len(means)} "
                f"workers the slowest takes {max(means):.3g} s a batch on average, the median {median(means):.3g} s"
            )

    def _switch(self, why: str) -> None:
        self.waits = not self.waits
        self.mode = Sync.name if self.waits else Gba.name
        self._streak, self._since = 0, math.inf
        self.switches.append(Switch(self.step, self.mode, why))


@dataclass
class StepTimes:
    """The last `RECENT` step times of each living worker, from `begin` to arrival.

    A batch under way counts as soon as it takes longer than all of them, so that a worker that hangs is seen before it
    is done; whoever has not finished any is believed to be as fast as most.
    """

    _began: dict[int, tuple[Worker, float]] = field(default_factory=dict)
    _recent: dict[Worker, deque[float]] = field(default_factory=dict)

    def began(self, batch: Begun, now: float) -> None:
        """Asked twice, the first time counts."""
        self._began.setdefault(batch.number, (batch.worker, now))

    def arrived(self, number: int, now: float) -> None:
        if (found := self._began.pop(number, None)) is not None:
            worker, began = found
            self._recent.setdefault(worker, deque(maxlen=RECENT)).append(max(now - began, INSTANT_S))

    def retired(self, number: int) -> None:
        self._began.pop(number, None)

    def left(self, worker: Worker) -> None:
        self._recent.pop(worker, None)
        self._began = {number: begun for number, begun in self._began.items() if begun[0] != worker}

    @property
    def usual_s(self) -> float:
        """What a batch takes the worker in the middle on average; 0 before the first was finished."""
        return median(fmean(recent) for recent in self._recent.values()) if self._recent else 0.0

    def longest_s(self, now: float) -> float:
        """How long the oldest batch under way has taken so far; 0 if there is none."""
        return max((now - began for _, began in self._began.values()), default=0.0)

    def rounds(self, now: float) -> list[Round]:
        """What the last rounds would have been: the newest step time of every worker, the newest but one, and so on.

        Of a worker with fewer of them some count again.
        """
        found = {worker: list(recent)[::-1] for worker, recent in self._recent.items()}
        usual = self.usual_s
        for worker, began in self._began.values():
            known = found.setdefault(worker, [usual])
            if now - began > max(known):
                found[worker] = [now - began]
        times = [recent for recent in found.values() if min(recent) > 0]
        depth = max(map(len, times), default=0)
        return [[recent[i % len(recent)] for recent in times] for i in range(depth)]


def round_s(step_s: Round, size: int) -> float:
    """The time of a synchronous round of `size` batches among workers with these step times.

    Up to `size` workers: each takes the next batch when it has finished one, until all are taken. More: the mean of
    the slowest over who takes part, everybody equally likely: `Σ_i t_(i) C(i−1, M−1) / C(N, M)`, in ascending order.
    """
    if len(step_s) > size:
        ways = math.comb(len(step_s), size)
        return sum(t * (math.comb(i, size - 1) / ways) for i, t in enumerate(sorted(step_s)))
    ends = [(t, t) for t in step_s]
    heapq.heapify(ends)
    last = max(ends)[0]
    for _ in range(size - len(ends)):
        end, t = ends[0]
        heapq.heapreplace(ends, (end + t, t))
        last = max(last, end + t)
    return last


def lost_share(rounds: Sequence[Round], size: int) -> float:
    """The share of their throughput that synchronous rounds lose because batches do not take equally long.

    `1 − T_even / T`, with T the mean time of these rounds and `T_even = ceil(M/N) N / Σ 1/t_i` that of a round of as
    many equal workers with the same sum of rates; `t_i` is a worker's mean. With one batch for each worker that is the
    rate of the rounds, `M / mean of max t`, over the sum of the rates. The slowest round is left out of T, so that a
    single hiccup among them passes. What rounds lose among equal workers (M no multiple of N, or more workers than
    batches) is not laid at the door of stragglers. What a worker's times vary by from batch to batch is: rounds wait
    for that too.
    """
    means = [fmean(times) for times in zip(*rounds, strict=True)]
    if len(means) < 2:
        return 0.0
    even_s = math.ceil(size / len(means)) * len(means) / sum(1 / t for t in means)
    lengths = sorted(round_s(times, size) for times in rounds)
    return max(0.0, 1 - even_s / fmean(lengths[:-1] or lengths))
