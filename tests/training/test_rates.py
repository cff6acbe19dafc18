"""The learning rate's factor as a function of progress."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.errors import ConfigError
from shadowsync.training.optimizers import DECAYS, Rates

few = settings(deadline=None, max_examples=60, derandomize=True)


@st.composite
def rates(draw: st.DrawFn) -> Rates:
    warmup = draw(st.integers(0, 1000))
    total = draw(st.integers(warmup + 1, 5000))
    return Rates(warmup, draw(st.sampled_from(list(DECAYS))), draw(st.floats(0, 1)), total)


@given(rates(), st.integers(0, 6000), st.integers(0, 10_000))
@few
def test_once_settled_it_stays(rate: Rates, samples: int, later: int) -> None:
    if rate.settled(samples):
        assert rate.factor(samples + later) == rate.factor(samples)
    assert rate.settled(rate.total_samples)
    assert rate.settled(rate.warmup_samples) == (rate.decay == "none")


@given(rates())
@few
def test_it_rises_to_1_and_falls_to_the_end_value(rate: Rates) -> None:
    points = range(0, rate.total_samples + 1, max(rate.total_samples // 50, 1))
    factors = {samples: rate.factor(samples) for samples in points}
    rising = [factor for samples, factor in factors.items() if samples <= rate.warmup_samples]
    falling = [factor for samples, factor in factors.items() if samples >= rate.warmup_samples]
    assert all(0 <= factor <= 1 for factor in factors.values())
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert rate.factor(rate.warmup_samples) == pytest.approx(1)
    end = 1 if rate.decay == "none" else rate.final_lr
    assert rate.factor(rate.total_samples) == pytest.approx(end)
    assert rate.factor(10 * rate.total_samples) == pytest.approx(end)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("none", [0.25, 1, 1, 1]), ("linear", [0.25, 1, 0.6, 0.2]), ("cosine", [0.25, 1, 0.6, 0.2])],
)
def test_values_by_hand(decay: str, expected: list[float]) -> None:
    rate = Rates(warmup_samples=100, decay=decay, final_lr=0.2, total_samples=300)
    assert [rate.factor(samples) for samples in (25, 100, 200, 300)] == pytest.approx(expected)


def test_cosine_is_flat_at_both_ends() -> None:
    cosine, linear = (Rates(decay=decay, total_samples=1000) for decay in ("cosine", "linear"))
    assert cosine.factor(100) > linear.factor(100)
    assert cosine.factor(900) < linear.factor(900)


def test_the_default_changes_nothing() -> None:
    assert {Rates().factor(samples) for samples in (0, 1, 10_000)} == {1.0}


def test_a_warm_up_that_leaves_no_room_for_the_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.warmup_samples=10 leaves nothing of the 10 samples"):
        Rates(warmup_samples=10, decay="linear", total_samples=10)
