"""How long each worker takes for a batch, as people see it."""

import pytest

from shadowsync.aggregation.step_times import Paces

A = (0, 0)


def paced(*steps_s: float) -> Paces:
    """Worker A has taken so long for its batches."""
    paces = Paces()
    for step_s in steps_s:
        paces.add(A, step_s)
    return paces


def test_the_recent_time_follows_and_the_mean_is_exact() -> None:
    paces = paced(1.0, 1.0, 6.0)
    assert paces.recent_s()[A] == pytest.approx(2.0)
    assert paces.mean_s()[A] == pytest.approx(8.0 / 3)


def test_a_lasting_change_is_soon_the_recent_time() -> None:
    assert paced(*[1.0] * 5, *[4.0] * 20).recent_s()[A] == pytest.approx(4.0, rel=0.02)


def test_a_copy_does_not_follow() -> None:
    paces = paced(1.0)
    copy = paces.so_far()
    paces.add(A, 3.0)
    assert (copy.mean_s(), paces.mean_s()) == ({A: 1.0}, {A: 2.0})


def test_of_very_many_workers_those_heard_of_least_recently_are_forgotten() -> None:
    paces = Paces()
    for number in range(5000):
        paces.add((0, 0) if number % 2 else (number, 0), 1.0)
    for number in range(5000, 10_000):
        paces.add((number, 0), 1.0)
        paces.add((0, 0), 1.0)
    assert len(paces.mean_s()) == 4096
    assert (0, 0) in paces.mean_s()
    assert (5000, 0) not in paces.mean_s()
