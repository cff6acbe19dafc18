"""The language of scripted failures."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.errors import ConfigError
from shadowsync.recovery.failures import AT_ONCE, At, Failure, FailureScript, Gamma, parse_schedules

ROLES = {"embedding": 8, "trainer": 3, "dense": 1, "reader": 2}
QUICK = settings(max_examples=40, deadline=None)


def script_of(text: str, roles: dict[str, int] = ROLES) -> FailureScript:
    return FailureScript(parse_schedules(text), roles)


def first(text: str, count: int) -> list[Failure]:
    (part,) = parse_schedules(text)
    return list(islice(part.failures(ROLES[part.kind]), count))


def test_a_schedule_says_all_it_has_to() -> None:
    schedules = parse_schedules("gamma:mean_s=5,seed=3,shape=2,kind=trainer,count=4,share=0.5; at:0.45+0.9,unit=epoch")
    gamma = Gamma(mean_s=5.0, seed=3, shape=2.0, kind="trainer", count=4, share=0.5)
    assert schedules == (gamma, At(at=(0.45, 0.9), unit="epoch"))
    assert parse_schedules(" at : 1 + 2 , index = 0 + 3 ") == (At(at=(1.0, 2.0), index=(0, 3)),)
    assert parse_schedules("at:at=1") == (At(at=(1.0,)),)


def test_fixed_times_are_what_was_written_in_order() -> None:
    found = first("at:0.9+0.45,unit=epoch,index=2+0,kind=trainer", 9)
    assert found == [Failure(at, "epoch", "trainer", (0, 2)) for at in (0.45, 0.9)]


@QUICK
@given(st.integers(0, 1000), st.sampled_from(["mean_s", "mean_epochs"]))
def test_a_seed_gives_the_same_failures_again_and_another_gives_others(seed: int, mean: str) -> None:
    once, again = (first(f"gamma:{mean}=2,seed={seed}", 20) for _ in range(2))
    assert once == again
    assert [failure.at for failure in once] == sorted(failure.at for failure in once)
    assert {failure.unit for failure in once} == {"s" if mean == "mean_s" else "epoch"}
    assert once != first(f"gamma:{mean}=2,seed={seed + 1}", 20)


def test_gamma_has_the_mean_and_the_shape_it_was_given() -> None:
    gaps = np.diff([failure.at for failure in first("gamma:mean_s=5,shape=4,seed=1", 4000)])
    assert gaps.mean() == pytest.approx(5, rel=0.03)
    assert gaps.std() == pytest.approx(5 / 2, rel=0.05)
    assert len(first("gamma:mean_s=5,count=3", 9)) == 3


def test_everybody_gets_their_turn() -> None:
    drawn = first("gamma:mean_s=5,seed=1", 800)
    assert all(len(failure.indices) == 1 for failure in drawn)
    counts = np.bincount([failure.indices[0] for failure in drawn])
    assert len(counts) == 8
    assert counts.min() > 60


def test_a_seed_decides_who_fails_at_fixed_times() -> None:
    victims = {seed: [one.indices for one in first(f"at:1+2+3+4+5+6,seed={seed}", 6)] for seed in (1, 2)}
    assert victims[1] != victims[2]
    assert victims[1] == [one.indices for one in first("at:1+2+3+4+5+6,seed=1", 6)]


@QUICK
@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_share_fails_at_once(number: int, share: float, seed: int) -> None:
    (part,) = parse_schedules(f"at:1,share={share},seed={seed}")
    (failure,) = part.failures(number)
    assert len(set(failure.indices)) == len(failure.indices)
    assert list(failure.indices) == sorted(failure.indices)
    assert 0 <= failure.indices[0] <= failure.indices[-1] < number
    assert len(failure.indices) == max(1, int(share * number + 0.5))


def test_a_script_hands_each_failure_out_once_when_its_time_has_come() -> None:
    script = script_of("at:1+3+3.5,index=0;at:0.5+1,unit=epoch,kind=dense,index=0")
    assert script.due(0.9, 0.4) == []
    assert script.due(1.0, 0.4) == [Failure(1, "s", "embedding", (0,))]
    assert script.due(1.1, 0.4) == []
    assert [(one.at, one.unit) for one in script.due(9.0, 0.6)] == [(3, "s"), (3.5, "s"), (0.5, "epoch")]
    assert [one.kind for one in script.due(9.0, 1.0)] == ["dense"]
    assert script.due(1e9, 1e9) == []


@pytest.mark.parametrize("least", ["mean_s=0.001", "mean_s=5,shape=0.01", "mean_s=0.001,shape=0.01"])
def test_the_least_that_can_be_given_comes_to_an_end(least: str) -> None:
    """Bursts have gaps that are 0 in a float; in the mean time goes on as it was asked to."""
    mean_s = float(least.partition(",")[0].partition("=")[2])
    script, found = script_of(f"gamma:{least}"), 0
    while due := script.due(2000 * mean_s, 0.0):
        assert len(due) <= AT_ONCE, "who asks is not held up by one that runs far ahead"
        found += len(due)
    assert 500 < found < 8000


def test_a_script_that_goes_on_for_ever_is_drawn_as_needed() -> None:
    script = script_of("gamma:mean_s=5")
    assert 20 < len(script.due(250.0, 0.0)) < AT_ONCE


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["there is no schedule"]),
        ("gama:mean_s=5", ["recovery.inject=gama", "did you mean gamma?"]),
        ("gamma:mean_s=5;", ["recovery.inject=gamma:mean_s=5;:", "there is no schedule before or after a semicolon"]),
        ("gamma:", ["mean_s or mean_epochs"]),
        ("gamma:mean_s=5,mean_epochs=1", ["mean_s or mean_epochs"]),
        ("gamma:mean=5", ["recovery.inject.mean is not an option of gamma", "did you mean mean_s?"]),
        ("gamma:5", ["'5'", "option=value"]),
        ("gamma:mean_s=", ["'mean_s='", "option=value"]),
        ("gamma:mean_s=5,,seed=3", ["''", "option=value"]),
        ("gamma:mean_s=5,mean_s=6", ["mean_s is given twice"]),
        ("gamma:mean_s=-5", ["recovery.inject.mean_s=-5", "greater than or equal to 0.001"]),
        ("gamma:mean_s=1e-300", ["recovery.inject.mean_s=1e-300", "greater than or equal to 0.001"]),
        ("gamma:mean_epochs=1e-9", ["recovery.inject.mean_epochs=1e-9", "greater than or equal to 0.0001"]),
        ("gamma:mean_s=5,shape=1e-9", ["recovery.inject.shape=1e-9", "greater than or equal to 0.01"]),
        ("gamma:mean_s=inf", ["recovery.inject.mean_s=inf", "finite"]),
        ("gamma:mean_s=soon", ["recovery.inject.mean_s=soon", "number"]),
        ("gamma:mean_s=5,share=2", ["recovery.inject.share=2", "less than or equal to 1"]),
        ("gamma:mean_s=5,kind=disk", ["recovery.inject.kind=disk", "embedding", "trainer", "dense", "reader"]),
        ("gamma:mean_s=5,count=0", ["recovery.inject.count=0"]),
        ("gamma:mean_s=5,seed=-1", ["recovery.inject.seed=-1"]),
        ("gamma:mean_s=5,unit=s", ["recovery.inject.unit is not an option of gamma"]),
        ("at:", ["recovery.inject.at is required"]),
        ("at:unit=s", ["recovery.inject.at is required"]),
        ("at:1+later", ["recovery.inject.at.1=later", "number"]),
        ("at:-1", ["recovery.inject.at.0=-1"]),
        ("at:1,unit=hour", ["recovery.inject.unit=hour", "'s' or 'epoch'"]),
        ("at:1,2", ["'2'", "option=value"]),
        ("at:1,index=0,share=0.5", ["give share or index, not both"]),
        ("at:1,index=-1", ["recovery.inject.index"]),
    ],
)
def test_what_is_not_in_the_language(text: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_schedules(text)
    for part in named:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "roles", "named"),
    [
        ("at:1,index=8", ROLES, "no embedding 8 that could fail; it has 8"),
        ("gamma:mean_s=1,kind=dense,index=0+1", ROLES, "no dense 1 that could fail; it has 1"),
        ("at:1,kind=dense", {"embedding": 2}, "no dense 0 that could fail; it has none"),
    ],
)
def test_roles_that_a_job_does_not_have(text: str, roles: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        script_of(text, roles)


def test_a_script_tells_when_the_next_failure_counted_in_epochs_is() -> None:
    script = script_of("at:0.5+0.2,unit=epoch;at:0.3,unit=epoch;at:0.1", {"embedding": 1})
    assert script.next_epochs == 0.2
    script.due(0.0, 0.3)
    assert script.next_epochs == 0.5
    script.due(0.0, 0.5)
    assert script.next_epochs is None
