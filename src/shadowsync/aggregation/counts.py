"""What gradient methods did so far, for results, reports and checkpoints."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from shadowsync.aggregation.aggregator import Switch


class AggregationState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes on after a resume: counts, and which method was at work.

    Attributes:
        global_steps: k.
        received: gradients of which a global step has decided.
        dropped: those of them that were dropped.
        staleness: pairs, of a number of steps and how many of the applied ones were computed so many before theirs.
        mode: the method at work; empty before any was.
        switches: from one method to another, in order.
    """

    global_steps: int = 0
    received: int = 0
    dropped: int = 0
    staleness: tuple[tuple[int, int], ...] = ()
    mode: str = ""
    switches: tuple[Switch, ...] = ()

    @property
    def applied(self) -> int:
        """Gradients that a global step took."""
        return sum(count for _, count in self.staleness)

    @property
    def staleness_sum(self) -> int:
        """Of the applied gradients, in global steps."""
        return sum(steps * count for steps, count in self.staleness)

    @property
    def mean_staleness(self) -> float:
        """Of the applied gradients, in global steps; 0 where there is none."""
        return self.staleness_sum / self.applied if self.applied else 0.0

    @property
    def max_staleness(self) -> int:
        """Of the applied gradients."""
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
        """So far, with the method that is at work now and the switches since the start."""
        return AggregationState(
            global_steps=self._global_steps,
            received=self._received,
            dropped=self._dropped,
            staleness=tuple(sorted(self._staleness.items())),
            mode=mode,
            switches=(*self._switches, *switches),
        )
