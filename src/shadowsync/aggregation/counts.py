"""What gradient methods did so far, for results, reports and checkpoints: counts, and how long workers took."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from shadowsync.aggregation.aggregator import Switch, Worker

SMOOTHING = 0.2
KNOWN_WORKERS = 4096


class AggregationState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes on after a resume: counts, and which method was at work.

    Attributes:
        received, dropped: gradients of which a global step has decided, and those of them that were dropped.
        staleness: pairs, of a number of steps and how many of the applied ones were computed so many before theirs.
        mode: the method at work; empty before any was.
    """

    global_steps: int = 0
    received: int = 0
    dropped: int = 0
    staleness: tuple[tuple[int, int], ...] = ()
    mode: str = ""
    switches: tuple[Switch, ...] = ()

    @property
    def applied(self) -> int:
        return sum(count for _, count in self.staleness)

    @property
    def staleness_sum(self) -> int:
        return sum(steps * count for steps, count in self.staleness)

    @property
    def mean_staleness(self) -> float:
        """0 where none was applied."""
        return self.staleness_sum / self.applied if self.applied else 0.0

    @property
    def max_staleness(self) -> int:
        return max((steps for steps, _ in self.staleness), default=0)


def untold(told: Sequence[Switch], made: Sequence[Switch]) -> Sequence[Switch]:
    """The switches that were made beyond those told of; a job that went back to a checkpoint makes others."""
    same = next((i for i, pair in enumerate(zip(told, made, strict=False)) if pair[0] != pair[1]), len(told))
    return made[same:]


class AggregationCounts:
    """Adds up what global steps decide, from what was counted before; `mode` is the method at work now."""

    def __init__(self, before: AggregationState, mode: str) -> None:
        self._switches = before.switches
        if before.mode not in ("", mode):
            why = f"the job goes on from a checkpoint at which {before.mode} was at work"
            self._switches += (Switch(before.global_steps, mode, why),)
        self._global_steps, self._received, self._dropped = before.global_steps, before.received, before.dropped
        self._staleness = Counter(dict(before.staleness))

    def add(self, step: int, weights: Mapping[int, float], versions: Mapping[int, int]) -> None:
        """Global step k was made, with these factors of its batches, computed with these versions of the parameters."""
        self._global_steps = step + 1
        self._received += len(weights)
        for number, weight in weights.items():
            if weight:
                self._staleness[step - versions[number]] += 1
            else:
                self._dropped += 1

    def state(self, mode: str, switches: Sequence[Switch]) -> AggregationState:
        return AggregationState(
            global_steps=self._global_steps,
            received=self._received,
            dropped=self._dropped,
            staleness=tuple(sorted(self._staleness.items())),
            mode=mode,
            switches=(*self._switches, *switches),
        )


class Paces:
    """How long every worker takes for a batch, from `begin` to arrival, for people to look at.

    Of each worker: how many step times, their sum, and their mean with weights that fall by a fifth for each. Of more
    than 4,096 the one that was heard of least recently is forgotten. They go on from those `before`.
    """

    def __init__(self, before: "Paces | None" = None) -> None:
        self._paces: dict[Worker, tuple[int, float, float]] = {} if before is None else dict(before._paces)

    def add(self, worker: Worker, step_s: float) -> None:
        count, seconds, smoothed_s = self._paces.pop(worker, (0, 0.0, 0.0))
        step_s = max(0.0, step_s)
        smoothed_s += (SMOOTHING if count else 1.0) * (step_s - smoothed_s)
        self._paces[worker] = count + 1, seconds + step_s, smoothed_s
        if len(self._paces) > KNOWN_WORKERS:
            del self._paces[next(iter(self._paces))]

    def recent_s(self) -> Mapping[Worker, float]:
        return {worker: smoothed_s for worker, (_, _, smoothed_s) in self._paces.items()}

    def mean_s(self) -> Mapping[Worker, float]:
        return {worker: seconds / count for worker, (count, seconds, _) in self._paces.items()}
