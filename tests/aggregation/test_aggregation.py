"""Every gradient method: the seam's contract, whatever order gradients arrive in and whoever dies meanwhile."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from cluster_simulator import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.aggregation.aggregator import Aggregation, Async, Begun, Bsp, Commit, Sync, kept
from shadowsync.aggregation.auto import Auto
from shadowsync.aggregation.gba import Gba
from shadowsync.aggregation.hop_bs import HopBs
from shadowsync.aggregation.hop_bw import HopBw
from shadowsync.errors import ConfigError
from shadowsync.registry import build, members

MEMBERS = members("shadowsync.aggregation", Aggregation)
METHODS: list[Callable[[], Aggregation]] = [
    *MEMBERS.values(),
    lambda: HopBs(bound=0),
    lambda: HopBw(backups=0),
    lambda: Gba(tolerance=0, divide_by="kept"),
    lambda: Auto(share=0.02, even=0.01, steady_commits=1, steady_s=0.0),
]
NEVER_WAIT = ("async", "bsp", "gba")
QUICK = settings(max_examples=60, deadline=None)
SIZES = st.integers(2, 6)
DELAYS = st.lists(st.integers(1, 12), min_size=1, max_size=40)
FAULTS = st.tuples(st.sampled_from(["die", "join", "lose"]), st.integers(0, 8), st.integers(0, 40))


@dataclass
class Trouble:
    """60 batches in steps of `size`, each of which takes a time of its own, among workers that come and go."""

    size: int
    workers: int
    delays: list[int]
    faults: list[tuple[str, int, int]]

    def cluster(self, aggregation: Aggregation) -> Cluster:
        def step_time(worker: int, number: int, now: float) -> float:
            return self.delays[number % len(self.delays)]

        cluster = Cluster(aggregation, self.size, 60, step_time, step=3, workers=self.workers)
        for kind, worker, at in self.faults:
            getattr(cluster, kind)(worker, at + 0.5)
        return cluster

    def run(self, aggregation: Aggregation) -> Cluster:
        return self.cluster(aggregation).run()


TROUBLES = st.builds(Trouble, SIZES, st.integers(1, 9), DELAYS, st.lists(FAULTS, max_size=12))


def check(cluster: Cluster, first_step: int = 3) -> None:
    """What holds of every run that has ended."""
    assert [commit.step for commit in cluster.commits] == list(range(first_step, first_step + len(cluster.commits)))
    assert cluster.aggregator.step == first_step + len(cluster.commits)
    assert cluster.named == cluster.received, "each gradient enters one commit, in the order of arrival"
    assert sorted(cluster.received + cluster.lost) == sorted(cluster.dispatched)
    assert all(commit.divisor >= kept(commit.weights.values()) for commit in cluster.commits)
    assert (len(cluster.aggregator.held), dict(cluster.aggregator.in_flight)) == (0, {})


def holds_little(cluster: Cluster, batch: Begun) -> None:
    """Less than a step, and of those that come too late one for each worker."""
    workers = len({batch.worker for batch in cluster.dispatched.values()})
    assert len(cluster.aggregator.held) < cluster.size + workers


def test_the_members_are_those_of_the_configuration() -> None:
    assert list(MEMBERS) == ["async", "auto", "bsp", "gba", "hop_bs", "hop_bw", "sync"]


@pytest.mark.parametrize("make", METHODS)
@given(trouble=TROUBLES, flushes=st.lists(st.integers(0, 60)))
@QUICK
def test_contract(make: Callable[[], Aggregation], trouble: Trouble, flushes: list[int]) -> None:
    """Also with flushes in the middle."""
    cluster = trouble.cluster(make())
    cluster.watch = holds_little
    for at in flushes:
        cluster.flush(at)
    check(cluster.run())
    assert cluster.aggregator.flush() == []
    if cluster.aggregation.name in NEVER_WAIT:
        assert cluster.refusals == 0


@pytest.mark.parametrize("make", METHODS)
@given(size=SIZES, actions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
@QUICK
def test_any_order_of_events_even_impossible_ones(
    make: Callable[[], Aggregation], size: int, actions: list[tuple[int, int]]
) -> None:
    """Workers with several batches at once, reports that come twice or too late, or of batches nobody began."""
    aggregator = make().start(size)
    commits: list[Commit] = []
    received, began = set(), set()
    numbers = itertools.count()
    for at, (kind, which) in enumerate(actions):
        now, known = float(at), dict(aggregator.in_flight)
        if kind == 0:
            batch = Begun(next(numbers), aggregator.step, which % 4)
            began |= {batch.number} if aggregator.begin(batch, now) else set()
        elif kind == 1:
            number = next(iter(list(known)[which:]), which)
            received |= {number} & set(known)
            commits += aggregator.arrived(number, now)
        elif kind == 2:
            aggregator.retired(next(iter(list(known)[which:]), which))
        else:
            aggregator.left(which % 4)
            assert all(batch.worker != which % 4 for batch in aggregator.in_flight.values())
    named = [number for commit in commits for number in commit.weights]
    assert len(named) + len(aggregator.held) == len(received)
    named += [number for commit in aggregator.flush() for number in commit.weights]
    assert sorted(named) == sorted(received)
    assert received <= began


@given(TROUBLES)
@QUICK
def test_sync_is_large_batch_training_in_the_order_of_dispatch(trouble: Trouble) -> None:
    """A batch that waits is not passed by one that was dispatched after it; so nobody waits longer than others."""
    cluster = trouble.run(Sync())
    for commit in cluster.commits:
        assert {cluster.began_at_step[number] for number in commit.weights} == {commit.step}
        assert set(commit.weights.values()) == {1.0}
        assert commit.divisor == len(commit.weights)
    assert all(len(commit.weights) == trouble.size for commit in cluster.commits[:-1]), "only the last may be smaller"
    steps = [cluster.began_at_step[number] for number in sorted(cluster.began_at_step)]
    assert steps == sorted(steps)


@given(size=SIZES, delays=DELAYS)
@QUICK
def test_gba_without_delay_is_sync(size: int, delays: list[int]) -> None:
    """Rounds of M: M begin, M arrive in any order. So do bsp, and hop_bw without backups."""
    runs = []
    for method in (Sync(), Gba(tolerance=0), Gba(divide_by="kept"), Bsp(), HopBw(backups=0), Auto()):
        aggregator, found = method.start(size), []
        for k in range(4):
            batches = [Begun(k * size + i, k, i) for i in range(size)]
            assert all(aggregator.begin(batch, k) for batch in batches)
            for batch in sorted(batches, key=lambda b: delays[b.number % len(delays)]):
                found += aggregator.arrived(batch.number, k + 1)
        runs.append(found)
    assert len(runs[0]) == 4
    assert all(run == runs[0] for run in runs)


@given(TROUBLES)
@QUICK
def test_async_steps_with_every_gradient(trouble: Trouble) -> None:
    cluster = trouble.run(Async())
    assert [dict(commit.weights) for commit in cluster.commits] == [{number: 1.0} for number in cluster.received]
    assert {commit.divisor for commit in cluster.commits} <= {1.0}


@given(TROUBLES, st.integers(0, 3), st.sampled_from(["buffer", "kept"]))
@QUICK
def test_gba_drops_what_is_too_old_and_nothing_else(trouble: Trouble, tolerance: int, divide_by: str) -> None:
    cluster = trouble.run(build(Gba, {"tolerance": tolerance, "divide_by": divide_by}, "aggregation"))
    for commit in cluster.commits:
        for number, weight in commit.weights.items():
            assert weight == (commit.step - cluster.dispatched[number].token <= tolerance)
    for commit in cluster.commits[:-1]:
        assert len(commit.weights) == trouble.size
        assert commit.divisor == (trouble.size if divide_by == "buffer" else kept(commit.weights.values()))
    assert all(
        commit.divisor == kept(commit.weights.values())
        for commit in cluster.commits
        if len(commit.weights) < trouble.size
    )


def test_gba_by_hand() -> None:
    """A batch of step 0 that arrives at step 2 is too old for a tolerance of 1, and the sum is still divided by M."""
    for divide_by, divisor in (("buffer", 2.0), ("kept", 1.0)):
        aggregator = build(Gba, {"tolerance": 1, "divide_by": divide_by}, "aggregation").start(2)
        for number in range(6):
            aggregator.begin(Begun(number, number // 2, f"worker {number}"), 0.0)
        commits = [c for number in (1, 2, 3, 4, 0, 5) for c in aggregator.arrived(number, 1.0)]
        expected = [Commit(0, {1: 1, 2: 1}, 2), Commit(1, {3: 1, 4: 1}, 2), Commit(2, {0: 0, 5: 1}, divisor)]
        assert commits == expected


def test_a_step_of_which_everything_is_too_old_counts_but_divides_by_something() -> None:
    aggregator = Gba(tolerance=0, divide_by="kept").start(1, step=5)
    aggregator.begin(Begun(0, 4, 0), 0.0)
    (commit,) = aggregator.arrived(0, 1.0)
    assert commit == Commit(5, {0: 0.0}, 1.0)
    assert aggregator.step == 6


@given(TROUBLES, st.integers(0, 4))
@QUICK
def test_hop_bs_keeps_the_bound(trouble: Trouble, bound: int) -> None:
    """Whoever begins a batch has finished at most `bound` more than the slowest of the living."""

    def watch(cluster: Cluster, batch: Begun) -> None:
        settled = {*cluster.received, *cluster.lost} & set(cluster.began_at_step)
        finished = Counter(cluster.dispatched[number].worker for number in settled)
        joined = {batch.worker for batch in cluster.dispatched.values()} & cluster.alive
        assert finished[batch.worker] - min(finished[worker] for worker in joined) <= bound

    trouble.faults = [fault for fault in trouble.faults if fault[0] != "join"]
    cluster = trouble.cluster(HopBs(bound=bound))
    cluster.watch = watch
    check(cluster.run())


def test_hop_bs_lets_workers_run_ahead_as_far_as_the_bound() -> None:
    """While worker 0 computes for ever, the other finishes the three batches that a bound of 2 allows, and waits."""
    aggregator = HopBs(bound=2).start(4)
    assert aggregator.begin(Begun(0, 0, "slow"), 0.0)
    for number in (1, 2, 3):
        assert aggregator.begin(Begun(number, 0, "fast"), 0.0)
        assert [commit.weights for commit in aggregator.arrived(number, 1.0)] == [{number: 1.0}]
    assert not aggregator.begin(Begun(4, 0, "fast"), 2.0)
    assert aggregator.begin(Begun(5, 0, "newcomer"), 2.0), "who joins starts beside the slowest"
    aggregator.left("slow")
    assert not aggregator.begin(Begun(4, 0, "fast"), 3.0), "the newcomer is where the slowest was"
    aggregator.arrived(5, 4.0)
    assert aggregator.begin(Begun(4, 0, "fast"), 4.0)


def test_hop_bs_counts_what_a_worker_computes_at_the_same_time() -> None:
    aggregator = HopBs(bound=1).start(4)
    began = [aggregator.begin(Begun(number, 0, worker), 0.0) for number, worker in enumerate("baaab")]
    assert began == [True, True, True, False, True]


def test_hop_bs_waits_for_nobody_who_has_nothing_to_compute_after_a_flush() -> None:
    aggregator = HopBs(bound=0).start(4)
    for number, worker in enumerate(("idle", "busy")):
        assert aggregator.begin(Begun(number, 0, worker), 0.0)
    aggregator.arrived(1, 1.0)
    assert not aggregator.begin(Begun(2, 0, "busy"), 1.0)
    aggregator.retired(0)
    assert aggregator.begin(Begun(2, 0, "busy"), 2.0)
    aggregator.arrived(2, 3.0)
    assert not aggregator.begin(Begun(3, 0, "busy"), 3.0)
    assert aggregator.flush() == []
    assert aggregator.begin(Begun(3, 0, "busy"), 3.0)


@given(TROUBLES, st.integers(0, 5))
@QUICK
def test_hop_bw_drops_exactly_what_is_late(trouble: Trouble, backups: int) -> None:
    """Late is what arrives after the commit of the round in which it began."""
    method = HopBw(backups=min(backups, trouble.size - 1))
    cluster = trouble.run(method)
    for commit in cluster.commits:
        for number, weight in commit.weights.items():
            assert weight == (cluster.began_at_step[number] == commit.step)
    assert all(
        sum(commit.weights.values()) == commit.divisor == trouble.size - method.backups
        for commit in cluster.commits[:-1]
    )
    begun = Counter(cluster.began_at_step[number] for number in cluster.received)
    assert max(begun.values(), default=0) <= trouble.size, "a round admits the global batch"


def test_hop_bw_needs_a_batch_to_wait_for() -> None:
    with pytest.raises(ConfigError, match=r"aggregation\.backups=4: .* at most 3"):
        HopBw(backups=4).start(4)


@pytest.mark.parametrize("make", [Sync, HopBw])
def test_the_place_of_a_dead_workers_batch_goes_to_one_that_waits(make: Callable[[], Aggregation]) -> None:
    aggregator = make().start(3)
    began = [aggregator.begin(Begun(number, 0, f"worker {number}"), 0.0) for number in range(5)]
    assert began == [True, True, True, False, False]
    aggregator.left("worker 1")
    assert not aggregator.begin(Begun(5, 0, "worker 5"), 1.0), "the place is kept for those before it"
    assert not aggregator.begin(Begun(4, 0, "worker 4"), 1.0)
    assert aggregator.begin(Begun(3, 0, "worker 3"), 1.0)
    commits = [commit for number in (0, 2, 3) for commit in aggregator.arrived(number, 2.0)]
    assert sum(commits[0].weights.values()) == commits[0].divisor
    assert 1 not in commits[0].weights
    assert aggregator.begin(Begun(5, 1, "worker 5"), 3.0), "worker 4 has its place, and there is a second one"


def test_a_place_is_kept_for_nobody_who_left() -> None:
    aggregator = Sync().start(1)
    assert [aggregator.begin(Begun(number, 0, number), 0.0) for number in range(3)] == [True, False, False]
    aggregator.left(1)
    aggregator.arrived(0, 1.0)
    assert aggregator.begin(Begun(2, 0, 2), 1.0)


def test_asking_twice_is_beginning_once() -> None:
    for make in METHODS:
        aggregator = make().start(3)
        assert aggregator.begin(Begun(0, 0, "a"), 0.0)
        assert aggregator.begin(Begun(0, 0, "a"), 0.5)
        assert list(aggregator.in_flight) == [0]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gba", {"tolerance": -1}, r"aggregation\.tolerance=-1"),
        ("gba", {"divide_by": "m"}, r"aggregation\.divide_by=m"),
        ("hop_bs", {"bound": -1}, r"aggregation\.bound=-1"),
        ("hop_bw", {"backups": -1}, r"aggregation\.backups=-1"),
        ("auto", {"share": 1.5}, r"aggregation\.share=1\.5"),
        ("auto", {"share": 0.1, "even": 0.1}, r"^aggregation\.even=0\.1 has to be below aggregation\.share=0\.1"),
        ("auto", {"share": 0.05}, r"^aggregation\.even=0\.1 has to be below aggregation\.share=0\.05"),
    ],
)
def test_options_are_checked(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(MEMBERS[name], options, "aggregation")


def test_a_straggler_holds_up_rounds_and_nobody_else() -> None:
    """Eight workers, M = 8, one five times slower: async runs at 7 + 1/5 batches a second, sync at 8 in five."""

    def one_slow(worker: int, number: int, now: float) -> float:
        return 5.0 if worker == 0 else 1.0

    taken_s = {
        name: Cluster(make(), 8, 2000, one_slow, workers=8).run().commit_times[-1] for name, make in MEMBERS.items()
    }
    assert taken_s["async"] == pytest.approx(2000 / 7.2, rel=0.02)
    assert taken_s["sync"] == pytest.approx(2000 / 8 * 5, rel=0.02)
    assert taken_s["gba"] == pytest.approx(taken_s["async"], rel=0.02)
    assert taken_s["bsp"] == pytest.approx(taken_s["async"], rel=0.02)
    assert taken_s["auto"] < 1.2 * taken_s["async"]
    assert taken_s["hop_bs"] == pytest.approx(taken_s["sync"], rel=0.05), "the slowest sets the pace"


def test_equal_workers_are_equally_fast_under_every_method() -> None:
    for make in MEMBERS.values():
        cluster = Cluster(make(), 8, 800, lambda worker, number, now: 1.0, workers=8).run()
        assert cluster.commit_times[-1] == pytest.approx(100, rel=0.05)
