"""The authority over global steps, driven from threads: each gradient in one step, and nobody left waiting."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from shadowsync.aggregation.aggregator import Aggregation, Async, Sync
from shadowsync.aggregation.auto import Auto
from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.counts import AggregationState
from shadowsync.aggregation.gba import Gba
from shadowsync.aggregation.hop_bs import HopBs
from shadowsync.aggregation.hop_bw import HopBw
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.data.leases import Lease
from shadowsync.embedding.server import RowStep
from shadowsync.errors import RunError
from shadowsync.registry import members
from shadowsync.training.optimizers import Rates

METHODS = {name: member() for name, member in members("shadowsync.aggregation", Aggregation).items()}
A, B = (0, 0), (1, 0)
STEADY = Rates()


@dataclass
class Steps:
    """What was carried out; `gate` holds a step up."""

    dense: list[DenseStep] = field(default_factory=list)
    rows: list[RowStep] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    dispatched: int = 0
    dispatching: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, step: DenseStep) -> None:
        self.entered.set()
        assert self.gate.wait(120)
        self.dense.append(step)


class Bench:
    """A coordinator whose steps are written down, and the rows of batches that count as trained, out of `rows`."""

    def __init__(
        self,
        method: Aggregation,
        size: int = 2,
        rates: Rates = STEADY,
        by_buffer: bool = False,
        run: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.steps = Steps()
        self.steps.gate.set()
        self.trained, self.scale = 0, 1.0
        self.rows = 1_000_000
        self.now = 0.0
        self.rule = StepRule(size, 0.5, 2.0, rates, by_buffer)
        self.coordinator = StepCoordinator(method, self.rule, self, self.carry_out, lambda: self.now, run)

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        self.steps.commit(dense)
        self.steps.rows.append(rows)

    def number_by(self, give: Callable[[Lease, int, int], int]) -> None:
        self.give = give

    def done(self, lease: Lease, start: int, stop: int) -> None:
        """The lease has the number of the batch."""
        self.steps.done.append(lease.number)
        self.trained += stop - start

    @property
    def remaining(self) -> int:
        return self.rows - self.trained

    def dispatch(self, trainer: int, samples: int = 4) -> int:
        with self.steps.dispatching:
            number = self.give(Lease(self.steps.dispatched, trainer, 0, 0, ()), 0, samples)
            assert number == self.steps.dispatched
            self.steps.dispatched += 1
            return number

    def begin(self, worker: tuple[int, int]) -> int:
        number = self.dispatch(worker[0])
        assert self.coordinator.ask(worker, number).result() is not None
        return number

    def arrive(self, number: int, version: int = 0) -> None:
        self.coordinator.arrived(number, version)


def test_a_step_reaches_dense_part_and_rows_alike_and_then_batches_are_done() -> None:
    bench = Bench(Gba(), size=2)
    first, second = bench.begin(A), bench.begin(B)
    bench.arrive(second)
    assert not bench.steps.dense
    bench.arrive(first)
    (dense,), (rows,) = bench.steps.dense, bench.steps.rows
    assert (dense.step, dict(dense.weights), dense.divisor, dense.lr) == (0, {second: 1.0, first: 1.0}, 2.0, 0.5)
    assert (rows.step, rows.weights, rows.divisor, rows.lr) == (0, dense.weights, None, 2.0)
    assert sorted(bench.steps.done) == [first, second]
    assert bench.coordinator.state == AggregationState(global_steps=1, received=2, staleness=((0, 2),), mode="gba")


def test_step_times_are_those_from_begin_to_arrival_of_whoever_is_at_work() -> None:
    bench = Bench(Gba(), size=2)
    first = bench.begin(A)
    bench.now = 3.0
    second = bench.begin(B)
    bench.arrive(first)
    bench.now = 4.0
    assert bench.coordinator.recent_step_s() == {A: 3.0, B: 1.0}
    bench.arrive(second)
    bench.coordinator.left(A)
    assert bench.coordinator.recent_step_s() == {B: 1.0}
    assert bench.coordinator.mean_step_s() == {A: 3.0, B: 1.0}


def test_what_was_begun_before_a_restart_has_no_step_time() -> None:
    bench = Bench(Gba(), size=2)
    bench.begin(A)
    bench.coordinator.restart(AggregationState(global_steps=3))
    bench.now = 9.0
    assert bench.coordinator.recent_step_s() == {}


def test_step_times_go_on_in_another_coordinator() -> None:
    bench = Bench(Gba(), size=9)
    first = bench.begin(A)
    bench.now = 2.0
    bench.arrive(first)
    bench.begin(B)
    paces = bench.coordinator.paces
    goes_on = StepCoordinator(Gba(), bench.rule, bench, bench.carry_out, lambda: 9.0, paces=paces)
    assert goes_on.mean_step_s() == {A: 2.0}
    assert goes_on.recent_step_s() == {}


def test_whoever_goes_on_under_another_method_has_switched() -> None:
    bench = Bench(Gba(), size=2)
    bench.coordinator.restart(AggregationState(global_steps=7, mode="sync"))
    (switch,) = bench.coordinator.state.switches
    assert (switch.step, switch.mode) == (7, "gba")
    assert "at which sync was at work" in switch.sentence
    bench.coordinator.restart(bench.coordinator.state)
    assert bench.coordinator.state.switches == (switch,)


def test_rows_may_be_divided_as_the_dense_part() -> None:
    bench = Bench(Gba(), size=1, by_buffer=True)
    bench.arrive(bench.begin(A))
    assert bench.steps.rows[0].divisor == 1.0


def test_learning_rates_are_those_of_the_samples_after_the_step() -> None:
    bench = Bench(Gba(), size=2, rates=Rates(warmup_samples=16))
    for _ in range(2):
        numbers = [bench.begin(A), bench.begin(B)]
        for number in numbers:
            bench.arrive(number)
    assert [step.lr for step in bench.steps.dense] == [0.25, 0.5]
    assert [step.lr for step in bench.steps.rows] == [1.0, 2.0]


def test_learning_rates_have_the_factor_of_the_lease_service() -> None:
    bench = Bench(Gba(), size=1)
    for bench.scale in (1.0, 0.25):
        bench.arrive(bench.begin(A))
    assert [(dense.lr, rows.lr) for dense, rows in zip(bench.steps.dense, bench.steps.rows, strict=True)] == [
        (0.5, 2.0),
        (0.125, 0.5),
    ]


def test_learning_rates_follow_each_sample_once_also_of_a_dead_trainer() -> None:
    bench = Bench(Gba(), size=2, rates=Rates(warmup_samples=16))
    first, second = bench.begin(A), bench.begin(B)
    bench.arrive(first)
    bench.coordinator.abandoned(A[0])
    assert bench.steps.done == [first]
    bench.arrive(second)
    assert [step.lr for step in bench.steps.dense] == [0.25]


def test_stale_gradients_are_dropped_and_counted() -> None:
    bench = Bench(Gba(tolerance=0), size=1)
    old = bench.begin(A)
    for _ in range(2):
        bench.arrive(bench.begin(B))
    bench.arrive(old)
    assert bench.steps.dense[-1].weights == {old: 0.0}
    assert old in bench.steps.done
    assert (bench.coordinator.state.dropped, bench.coordinator.state.received) == (1, 3)


def test_staleness_is_the_steps_since_the_parameters_were_read() -> None:
    bench = Bench(Async())
    numbers = [bench.begin((index, 0)) for index in range(3)]
    for number in numbers:
        bench.arrive(number, version=0)
    assert bench.coordinator.state.staleness == ((0, 1), (1, 1), (2, 1))
    assert (bench.coordinator.state.mean_staleness, bench.coordinator.state.max_staleness) == (1.0, 2)


def test_servers_are_told_below_which_number_nothing_will_come() -> None:
    bench = Bench(Async())
    slow, quick, waiting = bench.begin(A), bench.begin(B), bench.dispatch(2)
    bench.arrive(quick)
    bench.arrive(slow)
    assert [step.below for step in bench.steps.dense] == [slow, waiting]


def test_rounds_wait_for_their_step_to_be_carried_out_wherever_that_is() -> None:
    """A batch of the next round must not be computed with parameters that are about to change."""
    jobs = list[Callable[[], None]]()
    bench = Bench(Sync(), size=1, run=jobs.append)
    bench.arrive(bench.begin(A))
    after = bench.coordinator.ask(B, bench.dispatch(1))
    assert (bench.steps.dense, after.done()) == ([], False)
    jobs.pop()()
    assert after.result() == 1


def test_who_does_not_wait_for_rounds_goes_on_while_a_step_is_made() -> None:
    bench = Bench(Gba(), size=1)
    first = bench.begin(A)
    bench.steps.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(bench.arrive, first)
        assert bench.steps.entered.wait(120)
        second = bench.begin(B)
        bench.arrive(second)
        assert bench.steps.dense == []
        bench.steps.gate.set()
        arriving.result(120)
    assert [step.step for step in bench.steps.dense] == [0, 1]


@pytest.mark.parametrize(("method", "steps"), [(Async(), 5), (Gba(), 3)], ids=["async", "gba"])
def test_gradients_do_not_pile_up_before_steps_that_take_long(method: Aggregation, steps: int) -> None:
    jobs: list[Callable[[], None]] = []
    bench = Bench(method, size=2, run=jobs.append)
    while bench.coordinator.aggregator.step < steps:
        bench.arrive(bench.begin(A))
    answer = bench.coordinator.ask(B, bench.dispatch(1))
    assert not answer.done()
    for job in jobs:
        job()
    assert answer.done()
    assert len(bench.steps.dense) == steps


def test_rounds_take_batches_in_the_order_in_which_they_were_handed_out() -> None:
    bench = Bench(Sync(), size=1)
    first, second = bench.dispatch(0), bench.dispatch(1)
    later = bench.coordinator.ask(B, second)
    assert bench.coordinator.ask(A, first).result() is not None
    assert not later.done()
    bench.arrive(first)
    assert later.result() is not None


@pytest.mark.parametrize(
    ("end", "version"),
    [(lambda c: c.left(A), 0), (lambda c: c.idle(A), 0), (lambda c: c.stop(), None)],
    ids=["left", "idle", "stopped"],
)
def test_nobody_waits_for_a_worker_that_left_or_once_the_job_stops(
    end: Callable[[StepCoordinator], None], version: int | None
) -> None:
    bench = Bench(Sync(), size=1)
    bench.begin(A)
    later = bench.coordinator.ask(B, bench.dispatch(1))
    assert not later.done()
    end(bench.coordinator)
    assert later.result() == version


@pytest.mark.parametrize("go", [lambda c: c.left(A), lambda c: c.abandoned(0)], ids=["left", "abandoned"])
def test_whoever_is_gone_waits_for_nothing_itself_and_nobody_for_it(go: Callable[[StepCoordinator], None]) -> None:
    bench = Bench(Sync(), size=1)
    bench.begin(A)
    ahead, after = bench.coordinator.ask(A, bench.dispatch(0)), bench.coordinator.ask(B, bench.dispatch(1))
    assert not ahead.done()
    go(bench.coordinator)
    assert ahead.result() is None
    assert after.result() == 0


def test_a_job_that_stops_makes_no_short_step() -> None:
    bench = Bench(Sync(), size=4)
    bench.arrive(bench.begin(A))
    bench.coordinator.stop()
    bench.coordinator.left(A)
    assert not bench.steps.dense
    assert not bench.steps.done
    bench.coordinator.abandoned(0)  # its rows go to nobody: what counts as trained is a step before an image is taken
    assert bench.coordinator.settle(0.0)
    assert len(bench.steps.dense) == 1


def test_a_pause_is_nobodys_step_time() -> None:
    bench = Bench(Auto(steady_s=1.0), size=2)
    for _ in range(4):
        for worker in (A, B):
            number = bench.begin(worker)
            bench.now += 0.1
            bench.arrive(number)
    bench.begin(A)
    with bench.coordinator.paused():
        bench.now += 60.0
        bench.coordinator.look()
    bench.coordinator.look()
    assert bench.coordinator.state.mode == "sync"
    assert bench.coordinator.recent_step_s()[A] < 1.0
    bench.now += 60.0
    bench.coordinator.look()
    assert bench.coordinator.state.mode == "gba"


def test_nobody_waits_for_batches_that_a_dead_trainer_never_began() -> None:
    bench = Bench(Sync(), size=1)
    bench.dispatch(0)
    later = bench.coordinator.ask(B, bench.dispatch(1))
    assert not later.done()
    bench.coordinator.abandoned(0)
    assert later.result() is not None


def test_a_batch_that_was_given_up_is_not_begun_and_does_not_count() -> None:
    bench = Bench(Gba(), size=1)
    number = bench.dispatch(0)
    bench.coordinator.abandoned(0)
    assert bench.coordinator.ask(A, number).result() is None
    late = bench.begin(A)
    bench.coordinator.left(A)
    bench.arrive(late)
    assert not bench.steps.dense
    assert not bench.steps.done


def test_what_waits_of_a_dead_trainer_counts_as_trained_at_once_and_only_once() -> None:
    bench = Bench(Gba(), size=2)
    first, second = bench.begin(A), bench.begin(B)
    bench.arrive(first)
    bench.coordinator.abandoned(0)
    assert bench.steps.done == [first]
    bench.arrive(second)
    assert bench.steps.dense[0].weights.keys() == {first, second}
    assert sorted(bench.steps.done) == [first, second]


def test_what_waits_of_a_dead_trainer_is_a_step_before_an_image_is_taken() -> None:
    bench = Bench(Gba(), size=4)
    lost, mine = bench.begin(A), bench.begin(B)
    under_way = bench.begin(B)
    bench.arrive(lost)
    bench.arrive(mine)
    assert bench.coordinator.settle(1.0)
    assert not bench.steps.dense, "they are trained anew after a resume"
    bench.coordinator.abandoned(A[0])
    assert bench.coordinator.settle(1.0)
    (step,) = bench.steps.dense
    assert (step.weights, step.divisor) == ({lost: 1.0, mine: 1.0}, 2.0)
    assert sorted(bench.steps.done) == [lost, mine]
    bench.arrive(under_way)
    assert bench.coordinator.settle(1.0)
    assert len(bench.steps.dense) == 1


def test_what_a_dead_trainer_was_at_never_comes_and_what_it_leaves_behind_is_in_a_step() -> None:
    bench = Bench(Gba(), size=4)
    bench.rows = 8
    arrived, under_way = bench.begin(A), bench.begin((0, 1))
    bench.arrive(arrived)
    bench.coordinator.abandoned(0)
    assert (bench.steps.done, bench.steps.dense) == ([arrived], [])
    bench.arrive(under_way)
    bench.arrive(again := bench.begin(B))
    assert [step.weights.keys() for step in bench.steps.dense] == [{arrived, again}]
    assert bench.steps.done == [arrived, again]


def test_whoever_asks_again_is_answered_as_before_or_in_place_of_the_first_time() -> None:
    bench = Bench(Sync(), size=1)
    first, second = bench.begin(A), bench.dispatch(1)
    assert bench.coordinator.ask(A, first).result() == 0
    once, again = bench.coordinator.ask(B, second), bench.coordinator.ask(B, second)
    assert once.result() is None
    assert not again.done()
    bench.arrive(first)
    assert again.result() == 1


def test_it_is_settled_when_every_step_is_carried_out_and_counted() -> None:
    bench = Bench(Gba(), size=1)
    assert bench.coordinator.settle(0)
    number = bench.begin(A)
    bench.steps.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(bench.arrive, number)
        assert bench.steps.entered.wait(120)
        assert not bench.coordinator.settle(0)
        bench.steps.gate.set()
        assert bench.coordinator.settle(20)
        assert bench.steps.done == [number]
        arriving.result(120)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_last_gradients_are_committed_when_no_other_rows_are_left(method: Aggregation) -> None:
    """Not when nobody is at work: whoever has leased rows may not have begun them yet."""
    bench = Bench(method, size=4)
    bench.rows = 8
    number = bench.begin(A)
    bench.begin(B)
    bench.arrive(number)
    bench.coordinator.left(B)
    bench.coordinator.idle(A)
    bench.coordinator.look()
    alone = isinstance(method, Async | HopBs)
    assert bench.steps.done == ([number] if alone else [])
    bench.arrive(again := bench.begin(A))
    assert bench.steps.done == [number, again]
    assert not bench.coordinator.aggregator.held
    assert bench.steps.dense[-1].divisor == (1.0 if alone else 2.0)


def test_when_the_last_rows_turn_out_bad_what_is_held_is_committed() -> None:
    bench = Bench(Gba(), size=4)
    bench.rows = 8
    bench.arrive(number := bench.begin(A))
    bench.rows = 4
    bench.coordinator.look()
    assert bench.steps.done == [number]


def test_after_a_step_of_a_part_of_the_batches_tokens_are_not_behind() -> None:
    bench = Bench(Gba(tolerance=0), size=4)
    for barrier in (4, 8, 12):
        bench.rows = barrier
        bench.arrive(bench.begin(A))
    assert bench.coordinator.state.dropped == 0
    assert bench.coordinator.state.global_steps == 3


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_many_threads(method: Aggregation) -> None:
    """Every batch is done once, and every step is carried out in order."""
    bench = Bench(method, size=3)
    bench.rows = 6 * 40 * 4

    def work(worker: tuple[int, int]) -> int:
        for _ in range(40):
            bench.arrive(bench.begin(worker))
        bench.coordinator.left(worker)
        return 40

    with ThreadPoolExecutor(6) as pool:
        total = sum(pool.map(work, [(rank, 0) for rank in range(6)]))
    assert sorted(bench.steps.done) == list(range(total))
    assert [step.step for step in bench.steps.dense] == list(range(len(bench.steps.dense)))
    named = [number for step in bench.steps.dense for number in step.weights]
    assert sorted(named) == list(range(total))
    assert bench.coordinator.state.received == total


def test_what_goes_wrong_in_a_step_is_raised_where_it_happened_and_to_who_waits() -> None:
    bench = Bench(Sync(), size=1)

    def fail(dense: DenseStep, rows: RowStep) -> None:
        raise RunError("no such server")

    bench.coordinator._carry_out_step = fail
    number = bench.begin(A)
    with pytest.raises(RunError, match="no such server"):
        bench.arrive(number)
    with pytest.raises(RunError, match="no such server"):
        bench.begin(B)


def test_after_going_back_steps_go_on_from_the_counts_of_the_checkpoint() -> None:
    bench = Bench(HopBw(backups=1), size=2)
    bench.begin(A)
    before = AggregationState(global_steps=7, received=20, dropped=5, staleness=((0, 15),), mode="hop_bw")
    bench.coordinator.restart(before)
    assert bench.coordinator.state == before
    for number in [bench.begin(A), bench.begin(B)]:
        bench.arrive(number)
    assert bench.steps.dense[0].step == 7
