"""What gradient methods did so far, for results, reports and checkpoints."""

from collections import Counter
from collections.abc import Mapping

import msgspec


class AggregationState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that go on after a resume.

    Attributes:
        global_steps: k.
        received: gradients of which a global step has decided.
        dropped: those of them that were dropped.
        staleness: pairs, of a number of steps and how many of the applied ones were computed so many before theirs.
    """

    global_steps: int = 0
    received: int = 0
    dropped: int = 0
    staleness: tuple[tuple[int, int], ...] = ()

    @property
    def mean_staleness(self) -> float:
        """Of the applied gradients, in global steps; 0 where there is none."""
        applied = sum(count for _, count in self.staleness)
        return sum(steps * count for steps, count in self.staleness) / applied if applied else 0.0

    @property
    def max_staleness(self) -> int:
        """Of the applied gradients."""
        return max((steps for steps, _ in self.staleness), default=0)


class AggregationCounts:
    """Adds up what global steps decide."""

    def __init__(self, before: AggregationState) -> None:
        self._global_steps, self._received, self._dropped = before.global_steps, before.received, before.dropped
        self._staleness = Counter(dict(before.staleness))

    def add(self, step: int, weights: Mapping[int, float], versions: Mapping[int, int]) -> None:
        """A global step was made.

        Args:
            step: its number k.
            weights: factor of each batch, by its number.
            versions: of the parameters that each was computed with.
        """
        self._global_steps = step + 1
        self._received += len(weights)
        for number, weight in weights.items():
            if weight:
                self._staleness[step - versions[number]] += 1
            else:
                self._dropped += 1

    @property
    def state(self) -> AggregationState:
        """So far."""
        return AggregationState(
            global_steps=self._global_steps,
            received=self._received,
            dropped=self._dropped,
            staleness=tuple(sorted(self._staleness.items())),
        )
