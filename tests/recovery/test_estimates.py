"""Costs measured on the way."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.recovery.estimates import Estimates, Priors, time_between_failures

DAY = 86_400.0
PRIORS = Priors(save_s=60.0, restart_s=15.0, fail_s=DAY)


def test_before_anything_was_measured_the_priors_hold() -> None:
    costs = Estimates(PRIORS, started_s=100.0).costs(100.0)
    assert (costs.save_s, costs.load_s, costs.restart_s, costs.lost_servers) == (60, 60, 15, 1)
    assert costs.fail_s == pytest.approx(DAY)
    assert Estimates(Priors(load_s=5.0)).costs(0.0).load_s == 5


def test_a_first_measurement_replaces_the_prior_and_recent_ones_weigh_more() -> None:
    estimates = Estimates(PRIORS)
    estimates.save.add(2.0)
    assert estimates.costs(0.0).load_s == 2, "a load is believed to be as long as a save"
    estimates.load.add(7.0)
    estimates.restart.add(3.0)
    for _ in range(20):
        estimates.save.add(4.0)
    costs = estimates.costs(0.0)
    assert (costs.save_s, costs.load_s, costs.restart_s) == (pytest.approx(4, abs=0.01), 7, 3)


def test_servers_that_fail_together_are_one_failure() -> None:
    estimates = Estimates(PRIORS)
    estimates.failed(4)
    estimates.failed()
    assert (estimates.failures, estimates.costs(DAY).lost_servers) == (2, 2.5)


def test_time_without_a_failure_speaks_for_a_better_machine() -> None:
    estimates = Estimates(PRIORS)
    expected = [estimates.costs(t).fail_s / DAY for t in (0, DAY, 10 * DAY, 100 * DAY)]
    assert expected == sorted(expected)
    assert expected[1] == pytest.approx(1.763, abs=1e-3), "1/T with 1/T = e^-T: the omega constant"


def test_a_prior_that_is_wrong_by_orders_of_magnitude_costs_a_few_failures() -> None:
    """Killed every 30 s where one failure a day was expected."""
    after = [time_between_failures(PRIORS, n, 30.0 * n) for n in (0, 2, 10, 30, 1000)]
    assert after == sorted(after, reverse=True)
    assert after[0] == pytest.approx(DAY, rel=1e-6)
    assert after[2] < 160
    assert after[4] == pytest.approx(30, rel=0.01)


def test_without_a_prior_only_measurements_count() -> None:
    priors = Priors(fail_s=math.inf)
    assert time_between_failures(priors, 0, 100.0) == math.inf
    assert time_between_failures(priors, 4, 100.0) == 25
    assert time_between_failures(priors, 4, 0.0) == math.inf


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 1e7), st.floats(0.1, 3.0), st.integers(0, 5000), st.floats(0, 1e9))
def test_the_estimate_solves_its_equation(prior_s: float, spread: float, failures: int, exposure_s: float) -> None:
    priors = Priors(fail_s=prior_s, fail_spread=spread)
    found_s = time_between_failures(priors, failures, exposure_s)
    u = math.log(prior_s / found_s)
    exposed = max(exposure_s, 1e-6) / found_s
    assert failures - exposed - u / spread**2 == pytest.approx(0, abs=1e-6 * (1 + failures + exposed))


@pytest.mark.parametrize(("fail_s", "spread"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)])
def test_priors_that_cannot_be(fail_s: float, spread: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Priors(fail_s=fail_s, fail_spread=spread)
