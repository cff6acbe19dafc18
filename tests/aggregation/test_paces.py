"""How long each worker takes for a batch, as people see it."""

import pytest

from shadowsync.aggregation.step_times import Paces

A, B = (0, 0), (1, 0)


def paced(*steps_s: float) -> Paces:
    """Worker A has taken so long for its batches."""
    paces, now = Paces(), 0.0
    for number, step_s in enumerate(steps_s):
        paces.began(number, A, now)
        now += step_s
        paces.arrived(number, now)
    return paces


def test_the_recent_time_follows_and_the_mean_is_exact() -> None:
    paces = paced(1.0, 1.0, 6.0)
    assert paces.recent_s({A}, 8.0)[A] == pytest.approx(2.0)
    assert paces.mean_s()[A] == pytest.approx(8.0 / 3)


def test_a_lasting_change_is_soon_the_recent_time() -> None:
    assert paced(*[1.0] * 5, *[4.0] * 20).recent_s({A}, 0.0)[A] == pytest.approx(4.0, rel=0.02)


def test_a_batch_under_way_counts_once_it_takes_longer() -> None:
    paces = paced(1.0)
    paces.began(7, A, 10.0)
    assert paces.recent_s({A}, 10.5) == {A: 1.0}
    assert paces.recent_s({A}, 14.0) == {A: 4.0}
    assert paces.mean_s() == {A: 1.0}


def test_only_those_asked_for_are_told_of() -> None:
    paces = paced(1.0)
    paces.began(7, B, 0.0)
    assert paces.recent_s({A}, 9.0) == {A: 1.0}
    assert paces.recent_s({B}, 9.0) == {B: 9.0}


def test_a_batch_that_was_lost_has_no_time() -> None:
    paces = paced(1.0)
    paces.began(7, A, 10.0)
    paces.left(A)
    paces.arrived(7, 99.0)
    assert paces.recent_s({A}, 99.0) == {A: 1.0}


def test_of_very_many_workers_those_heard_of_least_recently_are_forgotten() -> None:
    paces = Paces()
    for number in range(5000):
        worker = (0, 0) if number % 2 else (number, 0)
        paces.began(number, worker, 0.0)
        paces.arrived(number, 1.0)
    for number in range(5000, 10_000):
        paces.began(number, (number, 0), 0.0)
        paces.arrived(number, 1.0)
        paces.began(-1, (0, 0), 0.0)
        paces.arrived(-1, 1.0)
    assert len(paces.mean_s()) == 4096
    assert (0, 0) in paces.mean_s()
    assert (5000, 0) not in paces.mean_s()
