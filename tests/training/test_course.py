"""What follows from validations, without any training."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowsync.metrics.named import PLAIN
from shadowsync.training.course import Course, Judge


def course_of(judge: Judge, values: list[float | None]) -> list[Course]:
    """After each validation, ten samples apart."""
    found, course = [], Course()
    for number, value in enumerate(values, start=1):
        course = judge.after(course, {judge.best_by: value, "calibration": None}, 10 * number, 11 * number)
        found.append(course)
    return found


@pytest.mark.parametrize(("measure", "sign"), [("auc", 1), ("ne", -1), ("logloss", -1)])
def test_each_measure_has_its_direction(measure: str, sign: int) -> None:
    course = course_of(Judge(measure, higher=PLAIN[measure]), [sign * value for value in (1.0, 3.0, 2.0)])[-1]
    assert (course.best, course.best_samples, course.stale) == (sign * 3.0, 20, 1)
    assert (course.samples, course.passed, course.measures) == (30, 33, {measure: sign * 2.0})


def test_patience_counts_validations_that_are_not_better_by_more_than_the_delta() -> None:
    judge = Judge("auc", min_delta=0.1, patience=3)
    courses = course_of(judge, [0.5, 0.7, 0.75, 0.79, 0.71])
    assert [judge.is_over(course) for course in courses] == [False] * 4 + [True]
    assert judge.why_over(courses[-1]) == (
        "validation auc was not better than 0.7 (20 samples) the last 3 time(s) (train.patience)"
    )
    assert not Judge("auc").is_over(courses[-1])


def test_learning_rates_fall_on_a_plateau_and_again_after_as_long() -> None:
    courses = course_of(Judge("ne", higher=False, plateau_patience=2, plateau_factor=0.1), [1, 1, 1, 1, 1, 0.5, 1, 1])
    assert [course.scale for course in courses] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001])


def test_a_measure_that_is_not_defined_says_nothing() -> None:
    first, second = course_of(Judge("auc", patience=1), [None, None])
    assert (second.validations, second.stale, second.best, first.best_of("samples-10", 10)) == (2, 0, None, None)


def test_a_checkpoint_knows_the_best_one_also_if_it_is_itself() -> None:
    course = course_of(Judge("auc"), [0.5, 0.7, 0.6])[-1]
    assert course.best_of("samples-20", 20) == "samples-20"
    assert course.best_of("samples-30", 30) is None, "the best state was never saved"
    named = msgspec.structs.replace(course, checkpoint="samples-20")
    assert named.best_of("samples-30", 30) == "samples-20"
    assert course_of(Judge("auc"), [0.5, 0.7, 0.6, 0.8])[-1].checkpoint == ""


VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=30)


@given(VALUES, st.integers(1, 5), st.integers(1, 5))
def test_going_on_from_what_was_stored_decides_the_same(values: list[float | None], patience: int, wait: int) -> None:
    judge, course = Judge("auc", 0.01, patience, wait), Course()
    for at, value in enumerate(values, start=1):
        course = msgspec.json.decode(msgspec.json.encode(course), type=Course)
        course = judge.after(course, {"auc": value}, 10 * at, 11 * at)
    assert course == course_of(judge, values)[-1]
    known = [value for value in values if value is not None]
    assert course.waited <= course.stale < max(1, len(known))


def test_on_other_rows_nothing_was_the_best_yet_and_rates_stay_down() -> None:
    judge = Judge(plateau_patience=1)
    before = course_of(judge, [0.5, 0.7, 0.6])[-1].on_rows("one")
    assert (before.rows, before.best) == ("one", 0.7), "a checkpoint of before does not know its rows"
    assert before.on_rows("one") is before.on_rows("") is before
    other = before.on_rows("other")
    assert (other.best, other.best_samples, other.stale, other.checkpoint) == (None, 0, 0, "")
    assert (other.validations, other.passed, other.scale) == (3, 33, 0.5)
    assert judge.after(other, {"auc": 0.1}, 40, 44).best == 0.1
