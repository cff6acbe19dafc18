"""What a gradient method has done to a job so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GlobalSteps:
    """Counts of global steps and of the gradients in them; cumulative, resumes included.

    Attributes:
        mode: the method at work; another than the configured one where that changes it.
        count: steps, k.
        dropped: gradients that a step left out.
        applied: gradients that a step took.
        staleness_sum: of the applied ones, in steps.
        step_seconds: what each worker takes for a batch now, by `trainer.worker`.
        held_bytes: memory of the gradients that wait for their step, all servers; None where that is not known.
    """

    mode: str
    count: int
    dropped: int
    applied: int
    staleness_sum: int
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int | None = None

    def staleness_since(self, applied: int, staleness_sum: int) -> float | None:
        """Mean of the gradients applied since these counts; None if none was, or if the job went back since."""
        count, steps = self.applied - applied, self.staleness_sum - staleness_sum
        return steps / count if count > 0 and steps >= 0 else None
