"""Validations in the midst of a run: everybody stands still, and what is measured is what is saved if it is the best.

The rows before a validation are all trained, and none after it, so that the measures of a job with one worker are the
same in every run, and what follows from them, too, however often it was interrupted.
"""

import time
from collections.abc import Callable

import torch

from shadowsync.cluster.session import Session
from shadowsync.data.source import OpenSource, summary
from shadowsync.errors import NonFiniteLoss
from shadowsync.inference import predictions, predictor
from shadowsync.measuring import Measuring
from shadowsync.metrics.quality import Scored, TestMetrics
from shadowsync.recovery_controller import RecoveryController
from shadowsync.report.result import ValidationSection
from shadowsync.training.course import Judge


class Validation:
    """Measures a session on rows that it does not train on, and judges about the course of the training.

    Args:
        keeping: saves what is the best so far.
        rows: to measure on.
        tell: is given what was decided, in sentences.

    Attributes:
        seconds: for which training stood still.
    """

    def __init__(
        self, session: Session, keeping: RecoveryController, rows: OpenSource, tell: Callable[[str], object]
    ) -> None:
        train = session.config.train
        self._measuring = Measuring(session.config, session.choices.source.tasks, rows)
        by = self._measuring.wanted
        self._judge = Judge(
            by.best_by, train.min_delta, train.patience, train.plateau_patience, train.plateau_factor, by.higher
        )
        self._session, self._keeping, self._rows, self._tell = session, keeping, rows, tell
        self._told_of_labels = False
        self.seconds = 0.0
        self._take_up_course()

    def _take_up_course(self) -> None:
        """At the start, and after going back: of the checkpoint, which may know of other rows."""
        before, marks = self._session.course, self._rows.marks()
        course = before.on_rows(summary(marks) if marks else "")
        if course is not before:  # else a save may be about to say where the best one is
            self._session.course = course
        if before.best is not None and course.best is None:
            best = f"{self._judge.best_by} {before.best:.6g}"
            self._tell(f"the best validation so far, {best}, was on other rows (data.valid) and counts no more")

    @property
    def is_due(self) -> bool:
        """All rows up to the next validation are trained, and nobody trains now."""
        leases = self._session.reader.leases
        return leases.at_barrier and not leases.finished and self.why_over is None

    @property
    def is_done(self) -> bool:
        """The state as it is now was measured."""
        course = self._session.course
        return course.validations > 0 and course.passed == self._session.reader.leases.passed

    @property
    def why_over(self) -> str | None:
        """Why training is to end now, as a sentence; None if it is not."""
        course = self._session.course
        return self._judge.why_over(course) if self._judge.is_over(course) else None

    def validate(self, broken_off: Callable[[], bool] = lambda: False) -> bool:
        """Measures, judges, and has the best state saved.

        Returns:
            false if somebody died, or if it was `broken_off`: then it is still to be done.
        """
        self._take_up_course()
        session, before, began = self._session, self._session.course, time.monotonic()
        if not self._keeping.save_best(lambda: self._is_best(broken_off)):
            session.course = before
        self.seconds += time.monotonic() - began
        if (course := session.course).validations == before.validations:
            return False
        if course.scale < before.scale:
            times = before.stale + 1
            self._tell(
                f"validation {self._judge.best_by} was not better than {course.best:.6g} the last {times} time(s): "
                f"both learning rates fall to {course.scale:.3g} of what is configured (train.plateau_patience)"
            )
        return True

    def _is_best(self, broken_off: Callable[[], bool]) -> bool:
        session = self._session
        measured = self._measured(broken_off)
        if measured is None:
            return False
        samples = session.reader.trained
        session.course = self._judge.after(session.course, measured.by_name(), samples, session.reader.leases.passed)
        if (undefined := measured.undefined("the validation rows")) is not None and not self._told_of_labels:
            self._told_of_labels = True
            self._tell(undefined)
        return session.course.best_samples == samples and session.course.stale == 0

    def _measured(self, broken_off: Callable[[], bool]) -> TestMetrics | None:
        """Of the state as it is now; None if it was broken off."""
        predict = predictor(self._session.evaluation_replica(), self._session.predicting_client())
        found = []
        for part in predictions(predict, self._rows):
            if broken_off():
                return None
            found.append(part)
        scored = Scored.join(found)
        if not torch.isfinite(scored.logits).all():
            raise NonFiniteLoss(
                "a prediction on the validation rows is not finite: lower train.lr or embedding.lr, or set "
                "train.clip_norm=1"
            )
        return self._measuring.of(scored)

    def section(self) -> ValidationSection:
        """For result.json."""
        session, course = self._session, self._session.course
        stopped = None if session.reader.finished else self.why_over
        return ValidationSection(
            best_by=self._judge.best_by,
            rows=self._rows.rows,
            validations=course.validations,
            best=course.best,
            best_samples=course.best_samples,
            checkpoint=course.checkpoint or None,
            last=course.measures,
            seconds=self.seconds,
            lr_scale=course.scale,
            stopped=stopped,
            stopped_samples=None if stopped is None else session.reader.trained,
        )
