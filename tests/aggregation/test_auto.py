"""Synchronous or GBA: what stragglers cost, and when the mode changes."""

import math
import random
from collections.abc import Callable

import pytest
from cluster_simulator import Cluster, StepTime
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.aggregation.aggregator import Aggregation, Begun, Sync, kept
from shadowsync.aggregation.auto import RECENT, Auto, StepTimes, lost_share, round_s
from shadowsync.aggregation.gba import Gba
from shadowsync.aggregation.stragglers import Stragglers, parse_stragglers

WORKERS = 8
QUICK = settings(max_examples=60, deadline=None)
TIMES = st.lists(st.floats(0.1, 10), min_size=2, max_size=9)


def scripted(stragglers: Stragglers, noise: float = 0.0, seed: int = 0) -> StepTime:
    """A second a batch, drawn out by a script and by noise of each batch's own."""

    def seconds(worker: int, number: int, now: float) -> float:
        own = random.Random(seed * 1_000_003 + number).lognormvariate(0, noise) if noise else 1.0
        return stragglers.factor(worker, now) * own

    return seconds


def busy(aggregation: Aggregation, step_time: StepTime, until_s: float) -> Cluster:
    return Cluster(aggregation, WORKERS, 10**6, step_time, until_s, workers=WORKERS)


def run(aggregation: Aggregation, step_time: StepTime, until_s: float) -> Cluster:
    return busy(aggregation, step_time, until_s).run()


def modes(cluster: Cluster) -> list[str]:
    return [switch.mode for switch in cluster.aggregator.switches]


def trained(cluster: Cluster) -> int:
    return len(cluster.received)


EVEN_BUSY_EVEN = parse_stragglers("index=2,slow=5,from_s=200,until_s=500")


def test_it_goes_to_gba_under_a_straggler_and_back() -> None:
    cluster = run(Auto(), scripted(EVEN_BUSY_EVEN), 700)
    assert modes(cluster) == ["gba", "sync"]
    to_gba, back = cluster.aggregator.switches
    assert 200 < cluster.commit_times[to_gba.step - 1] < 280
    assert 500 < cluster.commit_times[back.step - 1] < 540
    assert "above share=20% for 2 commits" in to_gba.why
    assert "of 8 workers the slowest takes 2 s a batch on average, the median 1 s" in to_gba.why
    assert "below even=10% for 20 commits" in back.why
    assert cluster.aggregator.mode == "sync"


def test_it_is_nearly_as_fast_as_the_better_of_both() -> None:
    """Counted in batches trained while the cluster is even, busy for a while, and even again."""
    script = parse_stragglers("share=0.25,slow=3-10,for_s=300,from_s=500,until_s=1500,seed=4")
    auto, sync, gba = (trained(run(m, scripted(script), 2000)) for m in (Auto(), Sync(), Gba()))
    assert gba > 1.4 * sync
    assert auto > 0.95 * gba


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slow", "expected"), [(1.0, []), (1.5, ["gba"])])
def test_it_does_not_flap_under_noise(seed: int, slow: float, expected: list[str]) -> None:
    """Even workers and uneven ones, whose step times vary by a tenth."""
    assert modes(run(Auto(), scripted(parse_stragglers(f"index=0,slow={slow}"), noise=0.1, seed=seed), 400)) == expected


@pytest.mark.parametrize("seed", range(2))
def test_between_the_bounds_it_stays_what_it_is(seed: int) -> None:
    """Rounds lose about 15 %, either from the start on, or after a straggler has made it switch."""
    between = parse_stragglers("index=0,slow=1.2;index=1,slow=5,from_s=200,until_s=300")
    cluster = run(Auto(), scripted(between, noise=0.03, seed=seed), 600)
    assert modes(cluster) == ["gba"]
    assert 200 < cluster.commit_times[cluster.aggregator.switches[0].step] < 300


def test_noise_alone_can_call_for_gba() -> None:
    """With step times that vary by a third, rounds of eight lose a third, though all workers are alike."""
    step_time = scripted(parse_stragglers("index=0,slow=1"), noise=0.3)
    auto, sync, gba = (run(method, step_time, 400) for method in (Auto(), Sync(), Gba()))
    assert trained(sync) < 0.75 * trained(gba)
    assert trained(auto) > 0.95 * trained(gba)
    assert modes(auto) == ["gba"]


def test_a_hiccup_now_and_then_changes_nothing() -> None:
    def hiccups(worker: int, number: int, now: float) -> float:
        return 20.0 if number % 397 == 396 else 1.0

    assert modes(run(Auto(), hiccups, 500)) == []


@pytest.mark.parametrize(("takes_s", "expected"), [(2.5, []), (3.5, ["gba"])])
def test_a_batch_is_under_way_for_long_before_its_round_is_left(takes_s: float, expected: list[str]) -> None:
    def pauses(worker: int, number: int, now: float) -> float:
        return takes_s if number == 400 else 1.0

    cluster = busy(Auto(), pauses, 60)
    cluster.look(0.25, 60)
    assert modes(cluster.run())[:1] == expected


@pytest.mark.parametrize(("commits", "seconds", "later", "lasting"), [(9, 0.0, 8, 90), (1, 60.0, 12, 601)])
def test_it_takes_as_many_commits_and_seconds_as_it_is_told_and_back_ten_times(
    commits: int, seconds: float, later: int, lasting: int
) -> None:
    """A second a commit, and five seconds beside a straggler."""
    at_once = run(Auto(steady_commits=1, steady_s=0.0), scripted(EVEN_BUSY_EVEN), 900)
    cluster = run(Auto(steady_commits=commits, steady_s=seconds), scripted(EVEN_BUSY_EVEN), 1300)
    assert cluster.aggregator.switches[0].step == at_once.aggregator.switches[0].step + later
    assert "for 10 commits" in at_once.aggregator.switches[1].why
    assert f"for {lasting} commits" in cluster.aggregator.switches[1].why


def test_gradients_in_flight_enter_the_first_round() -> None:
    """Nothing is dropped at the switch, and the round waits for what began before it."""
    cluster = run(Auto(tolerance=1000), scripted(EVEN_BUSY_EVEN), 700)
    back = cluster.aggregator.switches[1]
    first, second = cluster.commits[back.step : back.step + 2]
    assert min(cluster.began_at_step[number] for number in first.weights) < back.step
    assert {cluster.began_at_step[number] for number in second.weights} == {second.step}
    assert cluster.dropped == 0
    assert len(first.weights) == len(second.weights) == WORKERS


def test_a_worker_that_hangs_is_seen_before_it_is_done() -> None:
    def hangs(worker: int, number: int, now: float) -> float:
        return 1e4 if worker == 1 and now > 300 else EVEN_BUSY_EVEN.factor(worker, now)

    cluster = busy(Auto(), hangs, 800)
    cluster.die(1, 750)
    assert modes(cluster.run()) == ["gba", "sync"]
    assert cluster.commit_times[cluster.aggregator.switches[1].step - 1] > 750, "not while one hangs"


def test_a_worker_that_hangs_in_a_round_is_not_waited_for() -> None:
    def hangs(worker: int, number: int, now: float) -> float:
        return 1e4 if worker == 1 and now > 100 else 1.0

    cluster = busy(Auto(), hangs, 200)
    cluster.look(0.25, 200)
    cluster.die(1, 300)
    cluster.run()
    (switch,) = cluster.aggregator.switches
    assert switch.mode == "gba"
    assert 103 < cluster.commit_times[switch.step] < 108, "three usual batches later, what has arrived begins a step"
    assert "a batch has taken" in switch.why
    assert trained(cluster) > 100 * WORKERS + 90 * (WORKERS - 1)
    assert cluster.dropped == 0


def test_nothing_is_wrong_with_a_batch_before_any_was_finished() -> None:
    aggregator = Auto().start(2)
    assert aggregator.begin(Begun(0, 0, "a"), 0.0)
    assert aggregator.begin(Begun(1, 0, "b"), 0.0)
    assert not aggregator.look(1e6)


def test_all_workers_standing_still_are_even() -> None:
    """As at a checkpoint for which everybody stops."""
    aggregator = Auto().start(2)
    for step in range(3):
        for number, worker in ((2 * step, "a"), (2 * step + 1, "b")):
            assert aggregator.begin(Begun(number, step, worker), float(step))
        for number in (2 * step, 2 * step + 1):
            aggregator.arrived(number, step + 1.0)
    assert aggregator.begin(Begun(6, 3, "a"), 3.0)
    assert aggregator.begin(Begun(7, 3, "b"), 3.0)
    assert not aggregator.look(1e6)


def test_a_batch_that_got_lost_does_not_count_as_under_way() -> None:
    aggregator = Auto(steady_commits=1, steady_s=0.0).start(2)
    aggregator.begin(Begun(0, 0, "a"), 0.0)
    aggregator.retired(0)
    for number, worker in ((1, "a"), (2, "b")):
        assert aggregator.begin(Begun(number, 0, worker), 100.0)
        commits = aggregator.arrived(number, 101.0)
    assert (len(commits), aggregator.switches) == (1, [])


def test_a_straggler_that_dies_is_forgotten() -> None:
    cluster = busy(Auto(), scripted(parse_stragglers("index=0,slow=8")), 400)
    cluster.die(0, 200)
    assert modes(cluster.run()) == ["gba", "sync"]
    assert cluster.commit_times[cluster.aggregator.switches[1].step - 1] < 240


def test_one_batch_a_worker_is_the_rate_of_the_rounds_over_the_sum_of_rates() -> None:
    assert lost_share([[1.0] * 7 + [5.0]], 8) == pytest.approx(1 - (8 / 5) / (7 + 1 / 5))


@given(TIMES, st.integers(1, 20))
@QUICK
def test_the_loss_is_a_share_and_no_matter_of_units_or_order(times: list[float], size: int) -> None:
    rounds = [times, times[::-1], times]
    lost = lost_share(rounds, size)
    assert 0 <= lost < 1
    assert lost_share([[60 * t for t in one[::-1]] for one in rounds[::-1]], size) == pytest.approx(lost, abs=1e-9)
    assert lost_share([[times[0]] * len(times)], size) == pytest.approx(0, abs=1e-9)
    assert lost_share([times[:1]], size) == 0


def test_what_varies_from_batch_to_batch_costs_rounds_too_but_one_hiccup_passes() -> None:
    """Two workers that take turns at being slow: rounds take 3 s, the workers 2 s a batch on average."""
    assert lost_share([[1, 3], [3, 1], [1, 3], [3, 1]], 2) == pytest.approx(1 - 2 / 3)
    assert lost_share([[1, 1]] * 9 + [[1, 50]], 2) == 0


@given(TIMES, st.integers(1, 20))
@QUICK
def test_a_round_takes_as_long_as_in_the_simulator(times: list[float], size: int) -> None:
    if len(times) > size:
        return
    # no two batches end at one moment: who asks first then is nobody's rule
    times = [time * (1 + 0.001 * math.sqrt(2 + worker)) for worker, time in enumerate(times)]
    cluster = Cluster(Sync(), size, size, lambda worker, number, now: times[worker], workers=len(times))
    assert round_s(times, size) == pytest.approx(cluster.run().commit_times[0])


def test_with_more_workers_than_batches_everybody_takes_part_equally_often() -> None:
    """Of two drawn from 1, 2 and 4 s: the slowest is the second once, and the third twice, in three."""
    assert round_s([4.0, 1.0, 2.0], 2) == pytest.approx((2 + 4 + 4) / 3)


def test_rounds_are_put_together_from_the_last_step_times() -> None:
    times = StepTimes()
    for number, (worker, seconds) in enumerate([("a", 1.0), ("a", 2.0), ("a", 3.0), ("b", 5.0), ("b", 6.0)]):
        times.began(Begun(number, 0, worker), 100.0)
        times.began(Begun(number, 0, worker), 101.0)
        times.arrived(number, 100.0 + seconds)
    assert times.rounds(200.0) == [[3, 6], [2, 5], [1, 6]]
    times.began(Begun(10, 0, "a"), 200.0)
    times.began(Begun(11, 0, "c"), 203.0)
    assert times.rounds(201.0) == [[3, 6, 3.75], [2, 5, 3.75], [1, 6, 3.75]], "a newcomer is as fast as most"
    assert times.rounds(210.0) == [[10, 6, 7], [10, 5, 7]], "what is under way counts when it takes longer"
    times.retired(10)
    times.left("c")
    assert times.rounds(210.0) == [[3, 6], [2, 5], [1, 6]]
    times.left("a")
    times.left("b")
    assert times.rounds(210.0) == []


def test_only_the_last_step_times_count() -> None:
    times = StepTimes()
    for number in range(RECENT + 3):
        times.began(Begun(number, 0, "a"), 0.0)
        times.arrived(number, float(number + 1))
    assert times.rounds(0.0) == [[float(number + 1)] for number in range(RECENT + 2, 2, -1)]


@pytest.mark.parametrize("make", [Auto, lambda: Auto(divide_by="kept", tolerance=0)])
def test_the_gba_it_switches_to_has_the_options(make: Callable[[], Auto]) -> None:
    cluster = run(make(), scripted(parse_stragglers("index=0,slow=5")), 200)
    late = cluster.commits[cluster.aggregator.switches[0].step :][:-1]
    tolerance = cluster.aggregation.tolerance  # type: ignore[attr-defined]
    dropping = [commit for commit in late if 0 in commit.weights.values()]
    assert bool(dropping) == (tolerance == 0)
    assert all(commit.divisor == kept(commit.weights.values()) for commit in dropping)
