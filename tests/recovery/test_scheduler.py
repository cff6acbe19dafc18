"""When a save is due, when the choice is made anew, and the costs measured on the way."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.recovery.policy import Goal
from shadowsync.recovery.scheduler import CheckpointScheduler, Due, Priors, time_between_failures

HOUR = 3600.0
DAY = 24 * HOUR
PRIORS = Priors(save_s=318.0, load_s=200.0, restart_s=208.0, fail_s=28 * HOUR)
AUTO = Goal()
DAILY = Priors(save_s=60.0, restart_s=15.0, fail_s=DAY)


def scheduler(
    goal: Goal = AUTO, share: float = 1.0, started_s: float = 0.0, measured: bool = True
) -> CheckpointScheduler:
    made = CheckpointScheduler(goal, PRIORS, servers=8, started_s=started_s, share=share)
    if measured:
        made.measure("save_s", PRIORS.save_s)
    return made


def saves(held: CheckpointScheduler, until: float) -> list[tuple[float, Due]]:
    """The saves of a job that makes each of them at once."""
    found = []
    while (now := held.due_at) <= until:
        assert held.due(math.nextafter(now, -math.inf)) is Due.NOTHING
        due = held.due(now)
        held.saving(due, now)
        found.append((now, due))
    return found


def test_saves_follow_the_policys_interval_from_start_to_start() -> None:
    held = scheduler(Goal("full"), started_s=50.0)
    interval_s = math.sqrt(2 * 318 * 28 * HOUR)
    found = saves(held, 10 * HOUR)
    assert found == [(pytest.approx(50 + n * interval_s), Due.ROUND) for n in range(1, 5)]


def test_priority_cuts_a_round_into_shares() -> None:
    held = scheduler(Goal("partial", interval_s=80.0), share=0.25)
    found = saves(held, 170.0)
    assert [at for at, _ in found] == [20, 40, 60, 80, 100, 120, 140, 160]
    assert [due for _, due in found] == 2 * [Due.SHARE, Due.SHARE, Due.SHARE, Due.ROUND]


def test_a_late_share_does_not_put_off_the_round() -> None:
    held = scheduler(Goal("partial", interval_s=80.0), share=0.5)
    assert held.due(50.0) is Due.SHARE
    held.saving(Due.SHARE, 50.0)
    assert (held.due_at, held.due(80.0)) == (80, Due.ROUND)


def test_full_recovery_saves_everything_every_time() -> None:
    held = scheduler(Goal("full", interval_s=80.0), share=0.25)
    assert [due for _, due in saves(held, 170.0)] == [Due.ROUND, Due.ROUND]


def test_a_rounds_shares_together_are_the_cost_of_a_save() -> None:
    held = scheduler(Goal("partial"), share=0.5, measured=False)
    held.saved(Due.SHARE, 3.0)
    assert held.costs(0.0).save_s == 318
    held.saved(Due.ROUND, 4.0)
    assert held.costs(0.0).save_s == 7
    held.saved(Due.ROUND, 7.0)
    assert held.costs(0.0).save_s == pytest.approx(7)


def test_the_first_save_comes_early_for_it_measures() -> None:
    held = scheduler(measured=False)
    assert held.due_at == 600
    held.saving(Due.ROUND, 600.0)
    held.saved(Due.ROUND, 318.0)
    assert held.due_at == pytest.approx(600 + 44.8 * HOUR)
    assert scheduler(Goal("partial", interval_s=60.0), measured=False).due_at == 60


def test_without_recovery_nothing_is_ever_due() -> None:
    held = scheduler(Goal("none"), measured=False)
    assert (held.due_at, held.due(1e12)) == (math.inf, Due.NOTHING)


def test_what_moves_little_changes_nothing() -> None:
    held = scheduler()
    before = held.decision
    held.saved(Due.ROUND, 400.0)
    assert held.revise(0.15 * 28 * HOUR) is None
    assert held.decision is before


def test_moves_are_counted_from_the_last_choice() -> None:
    held = scheduler()
    said = []
    for cost_s in (500.0, 510.0, 520.0):
        held.measured["save_s"] = cost_s
        held.revise(0.0)
        said.append(held.decision.full.overhead)
    assert said[0] == said[1] == said[2] > scheduler().decision.full.overhead


def test_what_moves_much_changes_the_interval_with_a_sentence() -> None:
    held = scheduler()
    for n in range(1, 4):
        held.failed()
        said = held.revise(n * HOUR)
    assert said is not None
    assert "\n" not in said
    for part in ("recovery is chosen anew", "time between failures is", "partial recovery", "before, partial with one"):
        assert part in said
    assert held.decision.interval_s < 0.5 * 44.8 * HOUR
    assert held.decision.chosen.expected_pls == pytest.approx(0.1)
    assert held.revise(3 * HOUR) is None


def test_the_sentence_names_the_servers_that_a_failure_takes_whatever_else_moved() -> None:
    held = scheduler()
    held.measured["save_s"] = 5000.0
    held.failed(servers=4)
    said = held.revise(HOUR)
    assert said is not None
    assert "a save is" in said
    assert "a failure takes 4 servers, was 1" in said
    assert held.lost_servers == 4


def test_the_policy_changes_when_its_costs_do() -> None:
    held = scheduler(Goal(target_pls=0.001))
    assert held.decision.mode == "full"
    for _ in range(30):
        held.measure("save_s", 10.0)
    said = held.revise(0.0)
    assert held.decision.mode == "partial"
    assert said is not None
    for part in ("a save is 10 s, was 5.3 min", "partial recovery: 1.03 %", "before, full with one every 2.22 h"):
        assert part in said


def test_servers_that_fail_together_change_the_interval() -> None:
    held = scheduler()
    held.failed(4)
    said = held.revise(28 * HOUR)
    assert said is not None
    assert held.decision.interval_s == pytest.approx(44.8 * HOUR / 4, rel=0.3)
    assert "a failure takes 4 servers" in said


def test_servers_that_are_believed_to_fail_together_set_the_interval_until_one_failure_has_come() -> None:
    held = CheckpointScheduler(Goal("partial"), replace(PRIORS, lost_servers=4.0), servers=8)
    assert held.decision.interval_s == pytest.approx(44.8 * HOUR / 4)
    assert held.decision.chosen.expected_pls == pytest.approx(0.1)
    held.failed()
    assert held.costs(28 * HOUR).lost_servers == 1
    held.revise(28 * HOUR)
    assert held.decision.interval_s == pytest.approx(44.8 * HOUR, rel=0.3)


def test_a_cost_that_leaves_the_interval_alone_needs_no_sentence() -> None:
    held = scheduler()
    held.measure("load_s", 2000.0)
    assert held.revise(0.0) is None
    assert held.decision.partial.overhead == pytest.approx((318 / 44.8 + (2000 + 208) / 28) / HOUR)


def test_before_anything_was_measured_the_priors_hold() -> None:
    costs = CheckpointScheduler(AUTO, DAILY, started_s=100.0).costs(100.0)
    assert (costs.save_s, costs.load_s, costs.restart_s, costs.lost_servers) == (60, 60, 15, 1)
    assert costs.fail_s == pytest.approx(DAY)
    assert CheckpointScheduler(AUTO, Priors(load_s=5.0)).costs(0.0).load_s == 5


def test_a_first_measurement_replaces_the_prior_and_recent_ones_weigh_more() -> None:
    held = CheckpointScheduler(AUTO, DAILY)
    held.measure("save_s", 2.0)
    assert held.costs(0.0).load_s == 2, "a load is believed to be as long as a save"
    held.measure("load_s", 7.0)
    held.measure("restart_s", 3.0)
    for _ in range(20):
        held.measure("save_s", 4.0)
    costs = held.costs(0.0)
    assert (costs.save_s, costs.load_s, costs.restart_s) == (pytest.approx(4, abs=0.01), 7, 3)


def test_servers_that_fail_together_are_one_failure() -> None:
    held = CheckpointScheduler(AUTO, DAILY)
    held.failed(4)
    held.failed()
    assert (held.failures, held.costs(DAY).lost_servers) == (2, 2.5)


def test_time_without_a_failure_speaks_for_a_better_machine() -> None:
    held = CheckpointScheduler(AUTO, DAILY)
    expected = [held.costs(t).fail_s / DAY for t in (0, DAY, 10 * DAY, 100 * DAY)]
    assert expected == sorted(expected)
    assert expected[1] == pytest.approx(1.763, abs=1e-3), "1/T with 1/T = e^-T: the omega constant"


def test_a_prior_that_is_wrong_by_orders_of_magnitude_costs_a_few_failures() -> None:
    """Killed every 30 s where one failure a day was expected."""
    after = [time_between_failures(DAILY, n, 30.0 * n) for n in (0, 2, 10, 30, 1000)]
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
