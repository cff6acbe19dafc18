"""The formulas of full and partial recovery, the choice between them, and the account of lost samples."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.recovery.policy import (
    Costs,
    Full,
    Goal,
    Partial,
    PlsAccount,
    RecoveryPolicy,
    decide,
    policies,
    spoken,
)
from shadowsync.registry import members

HOUR = 3600.0
PRODUCTION = Costs(save_s=318.0, load_s=200.0, restart_s=208.0, fail_s=28 * HOUR, servers=8)
"""A set of costs that gives the headline of the paper."""
QUICK = settings(max_examples=40, deadline=None)

seconds = st.floats(0.01, 1e5)
costs = st.builds(Costs, save_s=seconds, load_s=seconds, restart_s=seconds, fail_s=st.floats(1.0, 1e7))


def test_every_policy_is_listed() -> None:
    assert members("shadowsync.recovery", RecoveryPolicy).keys() == policies(0.1).keys()


def test_production_parameters_give_the_papers_headline() -> None:
    decision = decide(Goal(), PRODUCTION)
    assert decision.mode == "partial"
    assert decision.full.overhead == pytest.approx(0.0835, abs=5e-5)
    assert decision.partial.overhead == pytest.approx(0.0060, abs=5e-5)
    assert decision.full.interval_s == pytest.approx(math.sqrt(2 * 318 * 28 * HOUR))
    assert decision.interval_s == pytest.approx(2 * 0.1 * 8 * 28 * HOUR)
    assert decision.chosen.expected_pls == pytest.approx(0.1)
    for part in ("partial recovery: 0.60 %", "every 44.8 h", "full recovery 8.35 %", "every 2.22 h", "PLS of 0.1"):
        assert part in decision.why


@QUICK
@given(costs, st.floats(0.2, 5.0))
def test_no_interval_of_full_recovery_beats_its_own(costs: Costs, factor: float) -> None:
    best_s = Full().interval_s(costs)
    other_s = max(best_s * factor, costs.save_s)
    assert Full().overhead(costs, best_s) <= Full().overhead(costs, other_s) * (1 + 1e-12)


@QUICK
@given(costs, st.integers(1, 64), st.floats(0.001, 1.0))
def test_partial_recovery_saves_as_rarely_as_the_target_allows(costs: Costs, servers: int, target: float) -> None:
    partial, costs = Partial(target), replace(costs, servers=servers)
    interval_s = partial.interval_s(costs)
    expected = partial.expected_pls(costs, interval_s)
    assert expected == pytest.approx(target) or (expected > target and interval_s == costs.save_s)
    assert partial.overhead(costs, interval_s) <= partial.overhead(costs, 0.9 * interval_s)


@QUICK
@given(costs, st.integers(1, 64), st.floats(0.001, 1.0))
def test_partial_is_chosen_exactly_where_it_costs_less_and_keeps_the_target(
    costs: Costs, servers: int, target: float
) -> None:
    decision = decide(Goal(target_pls=target), replace(costs, servers=servers))
    keeps = decision.partial.expected_pls <= target * (1 + 1e-9)
    assert (decision.mode == "partial") == (keeps and decision.partial.overhead < decision.full.overhead)
    assert decision.chosen.overhead == min(decision.full.overhead, decision.partial.overhead) or not keeps


def test_a_small_target_falls_back_to_full() -> None:
    decision = decide(Goal(target_pls=0.001), PRODUCTION)
    assert decision.mode == "full"
    assert decision.chosen.expected_pls == 0
    assert decision.why.startswith("full recovery: 8.35 %")
    assert "partial recovery 20.12 %" in decision.why


def test_servers_that_fail_together_shorten_the_interval() -> None:
    together = replace(PRODUCTION, lost_servers=4)
    assert Partial().interval_s(together) == pytest.approx(Partial().interval_s(PRODUCTION) / 4)
    more_than_there_are = replace(PRODUCTION, lost_servers=99)
    assert Partial().expected_pls(more_than_there_are, HOUR) == pytest.approx(0.5 / 28)


def test_saving_for_nothing_is_done_all_the_time_and_then_full_loses_nothing() -> None:
    decision = decide(Goal(), replace(PRODUCTION, save_s=0.0))
    assert (decision.full.interval_s, decision.mode) == (0, "full")
    assert decision.full.overhead == decision.partial.overhead == pytest.approx(408 / (28 * HOUR))


def test_without_failures_nothing_is_saved_before_the_end() -> None:
    for save_s in (0.0, 318.0):
        never = replace(PRODUCTION, save_s=save_s, fail_s=math.inf)
        decision = decide(Goal(), never)
        assert (decision.mode, decision.interval_s, decision.chosen.overhead) == ("full", math.inf, 0)
        assert "no failures are expected" in decision.why
        assert decide(Goal(), replace(never, job_s=HOUR)).interval_s == HOUR


def test_one_server_alone_goes_back_on_its_own() -> None:
    decision = decide(Goal(), replace(PRODUCTION, servers=1))
    assert decision.mode == "partial"
    assert decision.interval_s == pytest.approx(0.2 * 28 * HOUR)
    assert decision.chosen.expected_pls == pytest.approx(0.1)


def test_an_interval_is_never_longer_than_the_job() -> None:
    decision = decide(Goal(), replace(PRODUCTION, job_s=HOUR))
    assert decision.full.interval_s == decision.partial.interval_s == HOUR
    assert decision.partial.expected_pls == pytest.approx(0.5 / (28 * 8))


def test_an_interval_is_never_shorter_than_a_save() -> None:
    often = Costs(save_s=60.0, load_s=1.0, restart_s=1.0, fail_s=10.0, servers=2)
    decision = decide(Goal(), often)
    assert decision.full.interval_s == decision.partial.interval_s == 60
    assert decision.mode == "full"
    assert "would lose a PLS of 1.5 (portion of lost samples), above the target of 0.1" in decision.why


def test_an_interval_asked_for_holds_for_both() -> None:
    hourly = decide(Goal(interval_s=HOUR), PRODUCTION)
    assert (hourly.mode, hourly.interval_s, hourly.full.interval_s) == ("partial", HOUR, HOUR)
    weekly = decide(Goal(interval_s=168 * HOUR), PRODUCTION)
    assert weekly.mode == "full"
    assert decide(Goal("none", interval_s=HOUR), PRODUCTION).interval_s == math.inf


@pytest.mark.parametrize("mode", ["none", "full", "partial"])
def test_a_mode_asked_for_is_taken(mode: str) -> None:
    decision = decide(Goal(mode, target_pls=0.001), replace(PRODUCTION, job_s=280 * HOUR))
    assert decision.mode == mode
    assert f"{mode.replace('none', 'no')} recovery, as set" in decision.why


def test_without_recovery_a_failure_loses_all_there_is() -> None:
    assert decide(Goal("none"), replace(PRODUCTION, job_s=280 * HOUR)).chosen.expected_pls == pytest.approx(
        0.5 * 10 / 8
    )
    assert decide(Goal("none"), replace(PRODUCTION, fail_s=math.inf)).chosen.expected_pls == 0


@pytest.mark.parametrize(
    "wrong", [{"save_s": -1.0}, {"load_s": math.nan}, {"restart_s": math.inf}, {"fail_s": 0.0}, {"lost_servers": 0.0}]
)
def test_costs_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(PRODUCTION, **wrong)


def test_times_are_spoken_in_their_unit() -> None:
    spans = (0.25, 90, 318, 2.5 * HOUR, 1080 * HOUR, math.inf)
    assert [spoken(span) for span in spans] == ["0.25 s", "90 s", "5.3 min", "2.5 h", "45 days", "never"]


# --- the account -----------------------------------------------------------------------------------------------------


def account_of(total: int, servers: int, begun: int = 0) -> PlsAccount:
    """Of servers that hold equal shares of the rows."""
    return PlsAccount(total, [1 / servers] * servers, begun)


def test_the_demos_failures() -> None:
    """One of eight shards lost at 45 % and at 90 % with nothing saved since the start, and four of eight."""
    one, four = account_of(1000, 8), account_of(1000, 8)
    for samples in (450, 900):
        one.failed([0], samples)
        four.failed([0, 1, 2, 3], samples)
    assert one.pls == pytest.approx((0.45 + 0.9) / 8)
    assert four.pls == pytest.approx(4 * (0.45 + 0.9) / 8)


def test_each_server_has_a_save_of_its_own() -> None:
    account = account_of(1000, 4)
    account.saved(1, 300)
    account.saved(2, 500)
    account.failed([0, 1, 2], 600)
    assert account.pls == pytest.approx((600 + 300 + 100) / 4000)
    account.failed([2], 700)
    assert account.pls == pytest.approx((1000 + 200) / 4000), "counts from its save again, as the paper does"
    account.failed([3, 3], 800)
    assert account.pls == pytest.approx((1000 + 200 + 800) / 4000), "a server is lost once"


def test_shares_weigh_the_loss() -> None:
    account = PlsAccount(100, (0.7, 0.2, 0.1))
    account.failed([0, 2], 50)
    assert account.pls == pytest.approx(0.5 * 0.8)


def test_saves_may_end_out_of_order() -> None:
    account = account_of(100, 1)
    account.saved(0, 60)
    account.saved(0, 40)
    account.failed([0], 70)
    assert account.pls == pytest.approx(0.1)


def test_an_older_checkpoint_loses_more_and_is_what_the_server_has_now() -> None:
    account = account_of(100, 2)
    account.saved(0, 60)
    account.failed([0], 70, loaded=40)
    assert account.pls == pytest.approx(30 / 200)
    account.failed([0], 80)
    assert account.pls == pytest.approx((30 + 40) / 200)


def test_nothing_is_lost_where_everybody_goes_back() -> None:
    account = account_of(100, 2)
    account.saved(0, 60)
    account.went_back(50)
    assert account.pls == 0
    account.failed([0], 55)
    assert account.pls == pytest.approx(5 / 200)


def test_a_job_that_goes_on_keeps_its_account() -> None:
    account = account_of(100, 2, begun=40)
    account.pls = 0.05
    account.failed([1], 50)
    assert account.pls == pytest.approx(0.1)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 20)), max_size=20))
def test_the_whole_is_the_sum_of_the_servers(events: list[tuple[int, bool, int]]) -> None:
    """Servers that fail together lose what they lose apart, and a loss never exceeds what was trained."""
    together = account_of(1000, 4)
    apart = [account_of(1000, 4) for _ in range(4)]
    samples = 0
    for server, fails, step in events:
        samples += step
        pair = {server, (server + 1) % 4}
        for account in (together, *apart):
            account.saved((server + 2) % 4, samples)
        if fails:
            before = together.pls
            together.failed(pair, samples)
            assert together.pls - before <= 0.5 * samples / 1000 + 1e-12
            for one in pair:
                apart[one].failed([one], samples)
    assert together.pls == pytest.approx(sum(account.pls for account in apart))
