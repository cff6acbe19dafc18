"""When synchronisation happens, and that trainers that end early hold up nobody."""

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import WholeCopy
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_threads import TIMEOUT_S, run_all

from shadowsync.compression.channel import Channel
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.registry import members
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.sync.background import Background, counted_cost
from shadowsync.sync.easgd import Easgd
from shadowsync.sync.every_k import EveryK
from shadowsync.sync.ma import ModelAveraging
from shadowsync.sync.method import Group, State, SyncMethod
from shadowsync.sync.schedule import Schedule, Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.worker import Driver

METHODS = members("shadowsync.sync", SyncMethod)
SCHEDULES: list[Schedule] = [Background(max_share=1.0), EveryK(k=2)]


def make_drivers(
    method: type[SyncMethod], schedule: Schedule, n: int, workers: int
) -> tuple[list[Driver], list[Synchronisation]]:
    gate, line, start = Gate(), Channel("dense", Plain(), WireCounter()), torch.zeros(5)
    averages, servers = LocalAverages(range(n), line, gate.waiting), WholeCopy(start, 1, line)
    chosen = method().resolved(n)
    parts = [
        Synchronisation(
            chosen,
            start.clone() + rank,
            Group(averages.of[rank], servers.of(rank)),
            workers,
            gate,
            chosen.init(start),
        )
        for rank in range(n)
    ]
    return [schedule.drive(part) for part in parts], parts


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("steps", [[[8], [3], [0]], [[6, 2], [4, 9]]], ids=str)
def test_uneven_trainers_end(method: type[SyncMethod], schedule: Schedule, steps: list[list[int]]) -> None:
    drivers, parts = make_drivers(method, schedule, len(steps), len(steps[0]))

    def trainer(rank: int) -> None:
        def worker(index: int) -> None:
            for iteration in range(1, steps[rank][index] + 1):
                drivers[rank].after_step(index, iteration)
            drivers[rank].worker_left(index)

        drivers[rank].start()
        run_all(worker, range(len(steps[rank])))
        drivers[rank].stop()

    run_all(trainer, range(len(steps)))
    if not method.active:
        assert [part.count for part in parts] == [0] * len(parts)
    elif isinstance(schedule, EveryK) and not method.collective:
        assert [part.count for part in parts] == [sum(s // schedule.k for s in worker_steps) for worker_steps in steps]


@pytest.mark.parametrize(
    ("schedule", "next_s"),
    [
        (Background(max_share=1.0), 102.0),
        (Background(every_s=5.0, max_share=1.0), 105.0),
        (Background(every_s=5.0, max_share=0.1), 110.0),
        (Background(every_s=0.5, max_share=0.8), 102.0),
    ],
    ids=["back to back", "every 5 s", "a tenth of a core", "it took longer"],
)
def test_background_pace(schedule: Background, next_s: float) -> None:
    """After a synchronisation from 100 to 102 s that used a core for one of them."""
    assert schedule.next_start(100.0, 102.0, 1.0) == pytest.approx(next_s)


@pytest.mark.parametrize(
    ("last", "counted"),
    [
        ([0.3], 0.0),
        ([0.3, 0.003], 0.003),
        ([0.003, 0.3], 0.012),
        ([0.002, 0.004, 0.3], 0.016),
        ([0.004, 0.003, 0.3, 0.3, 0.005], 0.005),
        ([0.3, 0.4, 0.5, 0.6, 0.7], 0.7),
    ],
)
def test_a_synchronisation_counts_for_a_few_times_the_usual_cost_at_most(last: list[float], counted: float) -> None:
    assert counted_cost(last) == counted


def test_one_that_was_costly_by_chance_keeps_nobody_from_the_next() -> None:
    """As where a garbage collection falls into it: by its own cost the shadow would rest for an hour."""
    drivers, parts = make_drivers(ModelAveraging, Background(max_share=0.02), 2, 1)
    costly, third = parts[0], threading.Event()
    spent, plain = itertools.chain([0.0, 0.0, 0.0], itertools.repeat(72.0)), costly.once  # the second takes 72 s

    def once() -> None:
        plain()
        if costly.count == 3:
            third.set()

    costly.once = once  # type: ignore[method-assign]
    costly.group.cpu_s = lambda: next(spent)  # type: ignore[method-assign]
    for driver in drivers:
        driver.start()
    assert third.wait(TIMEOUT_S)
    for driver in drivers:
        driver.stop()


def test_a_shadow_that_fails_says_so_and_hangs_nobody() -> None:
    class Broken(SyncMethod):
        name = "broken"
        collective = True

        def init(self, weights: torch.Tensor) -> State:
            return {}

        def sync(self, weights: torch.Tensor, group: Group, state: State) -> State:
            raise RuntimeError("broken on purpose")

    drivers, _ = make_drivers(Broken, Background(max_share=1.0), 2, 1)
    for driver in drivers:
        driver.start()
    for driver in drivers:
        with pytest.raises(RuntimeError, match="on purpose"):
            driver.stop()


class Membership:
    """A group that knows whether the trainer is in it; `before_leaving` is called on the way out."""

    def __init__(self) -> None:
        self.inside = True
        self.before_leaving: Callable[[], None] = lambda: None

    def join(self) -> None:
        self.inside = True

    def leave(self) -> None:
        self.before_leaving()
        self.inside = False


def foreground(group: Group, workers: int) -> Driver:
    method = ModelAveraging()
    return EveryK(k=1).drive(Synchronisation(method, torch.zeros(5), group, workers, Gate()))


def test_a_worker_that_comes_back_while_the_last_one_goes_trains_inside_the_group() -> None:
    """The last worker is on its way out of the group when the other gets a batch."""
    group = Membership()
    driver = foreground(group, workers=2)
    driver.worker_idle(1)
    back = threading.Thread(target=driver.worker_back, args=(1,), daemon=True)

    def comes_back() -> None:
        back.start()
        back.join(0.1)  # all the time that it needs, unless it is held until the other is out

    group.before_leaving = comes_back
    driver.worker_idle(0)
    back.join(TIMEOUT_S)
    assert not back.is_alive()
    assert group.inside


@given(calls=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=15))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_trainer_is_in_the_group_as_long_as_a_worker_trains(calls: list[tuple[int, bool]]) -> None:
    group, present = Membership(), {0, 1, 2}
    driver = foreground(group, workers=3)
    for worker, comes in calls:
        if comes and worker not in present:
            driver.worker_back(worker)
            present.add(worker)
        elif not comes and worker in present:
            driver.worker_idle(worker)
            present.discard(worker)
        assert group.inside == bool(present)
    driver.stop()
    assert not group.inside


class Announced:
    """A group that says when it is called to synchronise."""

    def __init__(self, group: Group) -> None:
        self._group, self.called = group, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name in ("mean", "elastic", "sequential"):
            self.called.set()
        return getattr(self._group, name)


def started(part: Synchronisation, driver: Driver) -> threading.Event:
    """Starts a shadow, and says when it has called its group."""
    part.group = group = Announced(part.group)
    driver.start()
    return group.called


@pytest.mark.parametrize("method", [m for m in METHODS.values() if m.collective])
def test_a_shadow_stops_although_the_others_never_come(method: type[SyncMethod]) -> None:
    drivers, parts = make_drivers(method, Background(), 3, 1)
    assert started(parts[1], drivers[1]).wait(TIMEOUT_S)
    run_all(lambda rank: drivers[rank].stop(), [1])
    assert parts[1].count == 0
    assert torch.equal(parts[1].weights, torch.ones(5)), "the replica is as it was"


def test_a_shadow_that_sleeps_is_woken_to_stop() -> None:
    (driver,), (part,) = make_drivers(Easgd, Background(every_s=3600.0), 1, 1)
    called = started(part, driver)
    driver.after_step(0, 1)
    assert called.wait(TIMEOUT_S)
    run_all(lambda _: driver.stop(), [0])
    assert part.count == 1


def test_no_exchange_of_workers_at_the_same_time_goes_uncounted() -> None:
    workers, rounds = 4, 200
    (driver,), (part,) = make_drivers(Easgd, EveryK(k=1), 1, workers)

    def worker(index: int) -> None:
        for iteration in range(1, rounds + 1):
            driver.after_step(index, iteration)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_all(worker, range(workers))
    finally:
        sys.setswitchinterval(interval)
    assert part.count == workers * rounds
