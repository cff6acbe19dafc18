"""When a save is due, and when the choice is made anew."""

import math

import pytest

from shadowsync.recovery.costs import Scale
from shadowsync.recovery.decision import Goal
from shadowsync.recovery.estimates import Estimates, Priors
from shadowsync.recovery.governor import Due, Governor

HOUR = 3600.0
PRIORS = Priors(save_s=318.0, load_s=200.0, restart_s=208.0, fail_s=28 * HOUR)


def governor(goal: Goal = Goal(), share: float = 1.0, started_s: float = 0.0, measured: bool = True) -> Governor:  # noqa: B008 (frozen)
    estimates = Estimates(PRIORS, started_s)
    if measured:
        estimates.save.add(PRIORS.save_s)
    return Governor(goal, Scale(8), estimates, share=share)


def saves(held: Governor, until: float) -> list[tuple[float, Due]]:
    """The saves of a job that makes each of them at once."""
    found = []
    while (now := held.due_at) <= until:
        assert held.due(math.nextafter(now, -math.inf)) is Due.NOTHING
        due = held.due(now)
        held.saving(due, now)
        found.append((now, due))
    return found


def test_saves_follow_the_policys_interval_from_start_to_start() -> None:
    held = governor(Goal("full"), started_s=50.0)
    interval_s = math.sqrt(2 * 318 * 28 * HOUR)
    found = saves(held, 10 * HOUR)
    assert found == [(pytest.approx(50 + n * interval_s), Due.ROUND) for n in range(1, 5)]


def test_priority_cuts_a_round_into_shares() -> None:
    held = governor(Goal("partial", interval_s=80.0), share=0.25)
    found = saves(held, 170.0)
    assert [at for at, _ in found] == [20, 40, 60, 80, 100, 120, 140, 160]
    assert [due for _, due in found] == 2 * [Due.SHARE, Due.SHARE, Due.SHARE, Due.ROUND]


def test_a_late_share_does_not_put_off_the_round() -> None:
    held = governor(Goal("partial", interval_s=80.0), share=0.5)
    assert held.due(50.0) is Due.SHARE
    held.saving(Due.SHARE, 50.0)
    assert (held.due_at, held.due(80.0)) == (80, Due.ROUND)


def test_full_recovery_saves_everything_every_time() -> None:
    held = governor(Goal("full", interval_s=80.0), share=0.25)
    assert [due for _, due in saves(held, 170.0)] == [Due.ROUND, Due.ROUND]


def test_a_rounds_shares_together_are_the_cost_of_a_save() -> None:
    held = governor(Goal("partial"), share=0.5, measured=False)
    held.saved(Due.SHARE, 3.0)
    assert held.estimates.costs(0.0).save_s == 318
    held.saved(Due.ROUND, 4.0)
    assert held.estimates.costs(0.0).save_s == 7
    held.saved(Due.ROUND, 7.0)
    assert held.estimates.costs(0.0).save_s == pytest.approx(7)


def test_the_first_save_comes_early_for_it_measures() -> None:
    held = governor(measured=False)
    assert held.due_at == 600
    held.saving(Due.ROUND, 600.0)
    held.saved(Due.ROUND, 318.0)
    assert held.due_at == pytest.approx(600 + 44.8 * HOUR)
    assert governor(Goal("partial", interval_s=60.0), measured=False).due_at == 60


def test_without_recovery_nothing_is_ever_due() -> None:
    held = governor(Goal("none"), measured=False)
    assert (held.due_at, held.due(1e12)) == (math.inf, Due.NOTHING)


def test_what_moves_little_changes_nothing() -> None:
    held = governor()
    before = held.decision
    held.saved(Due.ROUND, 400.0)
    assert held.revise(0.15 * 28 * HOUR) is None
    assert held.decision is before


def test_moves_are_counted_from_the_last_choice() -> None:
    held = governor()
    said = []
    for cost_s in (500.0, 510.0, 520.0):
        held.estimates.save.value = cost_s
        held.revise(0.0)
        said.append(held.decision.full.overhead)
    assert said[0] == said[1] == said[2] > governor().decision.full.overhead


def test_what_moves_much_changes_the_interval_with_a_sentence() -> None:
    held = governor()
    for n in range(1, 4):
        held.estimates.failed()
        said = held.revise(n * HOUR)
    assert said is not None
    assert "\n" not in said
    for part in ("recovery is chosen anew", "time between failures is", "partial recovery", "before, partial with one"):
        assert part in said
    assert held.decision.interval_s < 0.5 * 44.8 * HOUR
    assert held.decision.expected_pls == pytest.approx(0.1)
    assert held.revise(3 * HOUR) is None


def test_the_policy_changes_when_its_costs_do() -> None:
    held = governor(Goal(target_pls=0.001))
    assert held.decision.mode == "full"
    for _ in range(30):
        held.estimates.save.add(10.0)
    said = held.revise(0.0)
    assert held.decision.mode == "partial"
    assert said is not None
    for part in ("a save is 10 s, was 5.3 min", "partial recovery: 1.03 %", "before, full with one every 2.22 h"):
        assert part in said


def test_servers_that_fail_together_change_the_interval() -> None:
    held = governor()
    held.estimates.failed(4)
    said = held.revise(28 * HOUR)
    assert said is not None
    assert held.decision.interval_s == pytest.approx(44.8 * HOUR / 4, rel=0.3)
    assert "a failure takes 4 servers" in said


def test_a_cost_that_leaves_the_interval_alone_needs_no_sentence() -> None:
    held = governor()
    held.estimates.load.add(2000.0)
    assert held.revise(0.0) is None
    assert held.decision.partial.overhead == pytest.approx((318 / 44.8 + (2000 + 208) / 28) / HOUR)


@pytest.mark.parametrize("share", [0.0, 1.5, math.nan])
def test_shares_that_cannot_be(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        governor(share=share)
