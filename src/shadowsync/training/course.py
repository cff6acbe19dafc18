"""How a training goes by its validations: which state was the best, when it ends early, when learning rates fall.

Pure: measures are handed in, and what follows from them is given back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What a job knows of its validations, and keeps in its checkpoints.

    Attributes:
        validations: how many there were.
        passed: training rows, bad ones counted, that had been passed at the last one.
        samples: that had been trained by then.
        measures: of the last one; what was not defined is not there.
        rows: by what the rows are known again that the best one was measured on; empty where that cannot be said.
        best: the value of the best one; None before there was any.
        best_samples: that had been trained by then.
        checkpoint: that holds the best state; empty: the one of `best_samples` in which this stands.
        stale: validations since the best one.
        waited: of these, since the learning rates fell.
        scale: what both learning rates have come down to so far, as a share.
    """

    validations: int = 0
    passed: int = 0
    samples: int = 0
    measures: dict[str, float] = {}
    rows: str = ""
    best: float | None = None
    best_samples: int = 0
    checkpoint: str = ""
    stale: int = 0
    waited: int = 0
    scale: float = 1.0

    def best_of(self, name: str, samples: int) -> str | None:
        """The checkpoint with the best state, as the checkpoint called `name`, of so many samples, tells; None if it
        knows of none."""
        if self.best is None:
            return None
        return self.checkpoint or (name if self.best_samples == samples else None)

    def on_rows(self, rows: str) -> "Course":
        """The same to be gone on with on these rows: on others than before nothing was the best yet."""
        if rows == self.rows or not rows:
            return self
        if not self.rows:
            return msgspec.structs.replace(self, rows=rows)
        anew = {"best": None, "best_samples": 0, "checkpoint": "", "stale": 0, "waited": 0}
        return msgspec.structs.replace(self, rows=rows, **anew)


@dataclass(frozen=True)
class Judge:
    """What follows from a validation, by the keys of `train`.

    Attributes:
        best_by: the measure that is compared.
        min_delta: a validation is better by more than this.
        patience: validations that are not better, after which training ends; None for never.
        plateau_patience: likewise, after which learning rates fall.
        plateau_factor: what they are multiplied with then.
        higher: more of the measure is better.
    """

    best_by: str = "auc"
    min_delta: float = 0.0
    patience: int | None = None
    plateau_patience: int | None = None
    plateau_factor: float = 0.5
    higher: bool = True

    def after(self, course: Course, measures: Mapping[str, float | None], samples: int, passed: int) -> Course:
        """The course after one more validation, at so many samples and rows; where the measure is not defined it
        says nothing."""
        known = {name: value for name, value in measures.items() if value is not None}
        now = msgspec.structs.replace(
            course, validations=course.validations + 1, passed=passed, samples=samples, measures=known
        )
        if (value := known.get(self.best_by)) is None:
            return now
        if self._is_better(value, course.best):
            return msgspec.structs.replace(now, best=value, best_samples=samples, checkpoint="", stale=0, waited=0)
        stale, waited = course.stale + 1, course.waited + 1
        if self.plateau_patience is None or waited < self.plateau_patience:
            return msgspec.structs.replace(now, stale=stale, waited=waited)
        return msgspec.structs.replace(now, stale=stale, waited=0, scale=course.scale * self.plateau_factor)

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None:
            return True
        gain = value - best if self.higher else best - value
        return gain > self.min_delta

    def is_over(self, course: Course) -> bool:
        return self.patience is not None and course.stale >= self.patience

    def why_over(self, course: Course) -> str:
        """The reason, as a sentence."""
        return (
            f"validation {self.best_by} was not better than {course.best:.6g} ({course.best_samples:,} samples) "
            f"the last {course.stale} time(s) (train.patience)"
        )
