"""Whoever was given up, or belongs to an earlier generation, is not heard any more."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers import PackedConnection, Workers

from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.gba import Gba
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.cluster.endpoints import DriverService
from shadowsync.cluster.records import RecordTaker
from shadowsync.data.leases import Lease, LeaseBook, LeaseService
from shadowsync.errors import RunError
from shadowsync.metrics.recorder import Recorder
from shadowsync.rpc.kept import check_generation
from shadowsync.rpc.served import ask
from shadowsync.training.optimizers import Rates


def make_leases() -> LeaseService:
    return LeaseService(LeaseBook([10, 10]), 1)


def front(
    banned: frozenset[str] = frozenset(), leases: LeaseService | None = None, conducting: StepCoordinator | None = None
) -> DriverService:
    reader = cast("Any", SimpleNamespace(leases=leases or make_leases(), slices=[]))
    return DriverService(reader, cast("Any", None), RecordTaker(Recorder(1, 100)), banned, conducting)


def lease(connection: PackedConnection, rank: int = 0) -> Lease | None:
    return ask(connection, LeaseService.lease, rank, False)[1]


def test_a_trainer_that_was_given_up_gets_no_rows_and_its_rows_come_back() -> None:
    served = front()
    old, new = PackedConnection(served), PackedConnection(served)
    first = lease(old)
    served.ban(0)
    with pytest.raises(RunError, match="given up"):
        lease(old)
    again = lease(new)
    assert first is not None
    assert again is not None
    assert (again.slice, again.number) == (first.slice, first.number + 1)


def first_batch(leases: LeaseService, leased: Lease | None) -> int:
    """Its number, as it is given to whoever holds the lease."""
    assert leased is not None
    assert leases.opened(leased, 10)[1]
    _, claim = leases.claim(leased, 0, 2)
    assert claim is not None
    return claim.number


def test_late_words_of_a_trainer_that_was_given_up_do_not_touch_its_successor() -> None:
    leases = make_leases()
    rule = StepRule(2, 0.1, 0.1, Rates(), rows_by_buffer=False)
    coordinator = StepCoordinator(Gba(), rule, leases, lambda dense, rows: None)
    served = front(leases=leases, conducting=coordinator)
    old, new = PackedConnection(served), PackedConnection(served)
    zombie, successor = Workers(old), Workers(new)
    lost = first_batch(leases, lease(old))
    zombie.begin((0, 0), lost)
    served.ban(0)
    assert not coordinator.aggregator.in_flight
    number = first_batch(leases, lease(new))
    successor.begin((0, 0), number)
    with pytest.raises(RunError, match="given up"):
        zombie.idle((0, 0))
    with pytest.raises(RunError, match="given up"):
        zombie.begin((0, 0), number)
    with pytest.raises(RunError, match="given up"):
        zombie.left((0, 0))
    assert set(coordinator.aggregator.in_flight) == {number}
    successor.left((0, 0))
    assert not coordinator.aggregator.in_flight


@pytest.mark.parametrize("told", [False, True], ids=["not told", "told"])
def test_rows_that_a_trainer_gives_back_itself_are_in_no_two_gradients(told: bool) -> None:
    """Some of its gradients wait for their step: they count as trained. Of others nobody was told: they never count."""
    leases, steps = make_leases(), list[DenseStep]()
    rule = StepRule(2, 0.1, 0.1, Rates(), rows_by_buffer=False)
    coordinator = StepCoordinator(Gba(), rule, leases, lambda dense, rows: steps.append(dense))
    served = front(leases=leases, conducting=coordinator)
    gone, other = PackedConnection(served), PackedConnection(served)
    number, others = (first_batch(leases, lease(trainer, rank)) for rank, trainer in enumerate((gone, other)))
    Workers(gone).begin((0, 0), number)
    Workers(other).begin((1, 0), others)
    if told:
        Workers(gone).arrived(number)
    ask(gone, LeaseService.abandon, 0)
    assert leases.trained == (2 if told else 0)
    Workers(gone).arrived(number)  # too late
    again = lease(other, 1)
    assert again is not None
    assert leases.opened(again, 10)[1]
    claims = [leases.claim(again, start, start + 2)[1] for start in range(0, 10, 2)]
    numbers = [others, *(claim.number for claim in claims if claim is not None)]
    assert len(numbers) == 1 + (4 if told else 5)
    for index, each in enumerate(numbers):
        Workers(other).begin((1, 0), each)
        Workers(other).arrived(each)
        assert len(steps) == (index + 1 + told) // 2
    Workers(other).left((1, 0))
    assert coordinator.settle(0.0)
    stepped = [each for step in steps for each, weight in step.weights.items() if weight > 0]
    assert sorted(stepped) == sorted([*numbers, number] if told else numbers)
    assert leases.trained == 12


def test_whoever_spoke_before_is_not_heard_in_the_next_generation() -> None:
    before = front()
    zombie = PackedConnection(before)
    assert ask(zombie, LeaseService.tell, ()).trained == 0
    after = front(before.clients)
    later = PackedConnection(after)
    later.client = zombie.client
    with pytest.raises(RunError, match="given up"):
        lease(later)
    assert lease(PackedConnection(after)) is not None


def test_a_server_refuses_what_another_generation_sends() -> None:
    check_generation(3, 3)
    with pytest.raises(RunError, match="gone back to a checkpoint"):
        check_generation(3, 2)
