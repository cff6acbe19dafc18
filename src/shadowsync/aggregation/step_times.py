"""How long each worker takes for a batch, and what the slowest of them cost rounds that wait for everybody.

Pure: the time is handed in.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from shadowsync.aggregation.aggregator import Begun, Worker

RECENT = 5
_INSTANT_S = 1e-9


@dataclass
class StepTimes:
    """The step time of each living worker: the median of its last `RECENT`, from `begin` to arrival.

    The median lets a single hiccup pass. A batch under way counts as soon as it takes longer than that, so that a
    worker that hangs is seen before it is done; whoever has not finished any is believed to be as fast as most.
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

    def seconds(self, now: float) -> list[float]:
        """The step times of the workers, as they look now."""
        found = {worker: median(recent) for worker, recent in self._recent.items()}
        usual = median(found.values()) if found else 0.0
        for worker, began in self._began.values():
            found[worker] = max(found.get(worker, usual), now - began)
        return [seconds for seconds in found.values() if seconds > 0]


def round_s(step_s: Sequence[float], size: int) -> float:
    """The time of a synchronous round of `size` batches among workers with these step times.

    Up to `size` workers: each takes the next batch when it has finished one, until all are taken. More: the mean of
    the slowest over who takes part, everybody equally likely: `Σ_i t_(i) C(i−1, M−1) / C(N, M)`, in ascending order.
    """
    if len(step_s) <= size:
        return _shared_out_s(step_s, size)
    ways = math.comb(len(step_s), size)
    return sum(t * (math.comb(i, size - 1) / ways) for i, t in enumerate(sorted(step_s)))


def lost_share(step_s: Sequence[float], size: int) -> float:
    """The share of their throughput that synchronous rounds lose because these workers are not equally fast.

    `1 − T_even / T`, with T the time of a round and `T_even = ceil(M/N) N / Σ 1/t_i` that of a round of as many equal
    workers with the same sum of rates. With one batch for each worker that is the rate of the rounds, `M / max t`, over
    the sum of the rates. What rounds lose among equal workers (M no multiple of N, or more workers than batches) is not
    laid at the door of stragglers. Nor is what a worker's times vary by from batch to batch, for a step time is
    smoothed; so where that is much, the estimate is too low.
    """
    if len(step_s) < 2:
        return 0.0
    even_s = math.ceil(size / len(step_s)) * len(step_s) / sum(1 / t for t in step_s)
    return max(0.0, 1 - even_s / round_s(step_s, size))


def _shared_out_s(step_s: Iterable[float], size: int) -> float:
    ends = [(t, t) for t in step_s]
    heapq.heapify(ends)
    last = max(ends)[0]
    for _ in range(size - len(ends)):
        end, t = ends[0]
        heapq.heapreplace(ends, (end + t, t))
        last = max(last, end + t)
    return last
