"""How long each worker takes for a batch, and what waiting for the slowest costs synchronous rounds.

Pure: the time is handed in.
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean as mean
from statistics import median
from typing import NamedTuple

from shadowsync.aggregation.aggregator import Begun, Worker

RECENT = 16
_SMOOTHING = 0.2
_KNOWN_WORKERS = 4096
_INSTANT_S = 1e-9
Round = Sequence[float]
"""A step time of each worker."""


@dataclass
class StepTimes:
    """The last `RECENT` step times of each living worker, from `begin` to arrival.

    A batch under way counts as soon as it takes longer than all of them, so that a worker that hangs is seen before it
    is done; whoever has not finished any is believed to be as fast as most.
    """

    _began: dict[int, tuple[Worker, float]] = field(default_factory=dict)
    _recent: dict[Worker, deque[float]] = field(default_factory=dict)

    def began(self, batch: Begun, now: float) -> None:
        """A worker has begun a batch. Asked twice, the first time counts."""
        self._began.setdefault(batch.number, (batch.worker, now))

    def arrived(self, number: int, now: float) -> None:
        """Its gradient is there."""
        if (found := self._began.pop(number, None)) is not None:
            worker, began = found
            self._recent.setdefault(worker, deque(maxlen=RECENT)).append(max(now - began, _INSTANT_S))

    def retired(self, number: int) -> None:
        """It will not arrive: this says nothing about its worker's speed."""
        self._began.pop(number, None)

    def left(self, worker: Worker) -> None:
        """Forgets a worker."""
        self._recent.pop(worker, None)
        self._began = {number: begun for number, begun in self._began.items() if begun[0] != worker}

    @property
    def usual_s(self) -> float:
        """What a batch takes the worker in the middle on average; 0 before the first was finished."""
        return median(mean(recent) for recent in self._recent.values()) if self._recent else 0.0

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


class _Pace(NamedTuple):
    """A worker's step times: how many, their sum, and their mean with weights that fall by a fifth for each."""

    batches: int = 0
    seconds: float = 0.0
    smoothed_s: float = 0.0


class Paces:
    """How long every worker takes for a batch, from `begin` to arrival, for people to look at.

    A few numbers for each worker; of more than 4,096 the one that was heard of least recently is forgotten.
    """

    def __init__(self, paces: Mapping[Worker, _Pace] | None = None) -> None:
        self._paces = dict(paces or {})

    def add(self, worker: Worker, step_s: float) -> None:
        """A worker has finished a batch."""
        count, seconds, smoothed_s = self._paces.pop(worker, _Pace())
        step_s = max(0.0, step_s)
        smoothed_s += (_SMOOTHING if count else 1.0) * (step_s - smoothed_s)
        self._paces[worker] = _Pace(count + 1, seconds + step_s, smoothed_s)
        if len(self._paces) > _KNOWN_WORKERS:
            del self._paces[next(iter(self._paces))]

    def so_far(self) -> "Paces":
        """A copy."""
        return Paces(self._paces)

    def recent_s(self) -> Mapping[Worker, float]:
        """Of every worker that has finished a batch, smoothed."""
        return {worker: pace.smoothed_s for worker, pace in self._paces.items()}

    def mean_s(self) -> Mapping[Worker, float]:
        """Of every worker that has finished a batch."""
        return {worker: pace.seconds / pace.batches for worker, pace in self._paces.items()}


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
    means = [mean(times) for times in zip(*rounds, strict=True)]
    if len(means) < 2:
        return 0.0
    even_s = math.ceil(size / len(means)) * len(means) / sum(1 / t for t in means)
    lengths = sorted(round_s(times, size) for times in rounds)
    return max(0.0, 1 - even_s / mean(lengths[:-1] or lengths))
