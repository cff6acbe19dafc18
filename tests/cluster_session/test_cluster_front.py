"""Whoever was given up, or belongs to an earlier generation, is not heard any more."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shadowsync.aggregation.conductor import Arrived, Conductor, StepParts, StepRule
from shadowsync.aggregation.conductor_remote import ConductorRemote
from shadowsync.aggregation.conductor_service import ConductorService
from shadowsync.aggregation.gba import Gba
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.cluster.front import FrontDesk
from shadowsync.cluster.records import RecordTaker
from shadowsync.data.desk import Desk
from shadowsync.data.desk_service import DeskService
from shadowsync.data.leases import Lease, LeaseBook, Plan
from shadowsync.errors import RunError
from shadowsync.metrics.recorder import Recorder
from shadowsync.rpc.connection import DirectConnection
from shadowsync.rpc.generation import Generation
from shadowsync.rpc.served import ask
from shadowsync.training.rates import Rates


def make_desk() -> Desk:
    return Desk(LeaseBook(Plan([10, 10], 1, shuffle=False, seed=0)), 1)


def front(
    banned: frozenset[str] = frozenset(), desk: Desk | None = None, conducting: ConductorService | None = None
) -> FrontDesk:
    reader = cast("Any", SimpleNamespace(desk=desk or make_desk(), slices=[]))
    return FrontDesk(reader, cast("Any", None), RecordTaker(Recorder(1, 100)), banned, conducting)


def lease(connection: DirectConnection, rank: int = 0) -> Lease | None:
    return ask(connection, DeskService.lease, rank, False)[1]


def test_a_trainer_that_was_given_up_gets_no_rows_and_its_rows_come_back() -> None:
    desk = front()
    old, new = DirectConnection(desk), DirectConnection(desk)
    first = lease(old)
    desk.ban(0)
    with pytest.raises(RunError, match="given up"):
        lease(old)
    again = lease(new)
    assert first is not None
    assert again is not None
    assert (again.slice, again.number) == (first.slice, first.number + 1)


def first_batch(desk: Desk, leased: Lease | None) -> int:
    """Its number, as the desk gives it to whoever holds the lease."""
    assert leased is not None
    assert desk.opened(leased, 10)
    claim = desk.claim(leased, 0, 2)
    assert claim is not None
    return claim.number


def test_late_words_of_a_trainer_that_was_given_up_do_not_touch_its_successor() -> None:
    desk = make_desk()
    parts = StepParts(cast("Any", None), [], lambda: 0)
    conductor = Conductor(Gba(), StepRule(2, 0.1, 0.1, Rates(), rows_by_buffer=False), parts)
    served = front(desk=desk, conducting=ConductorService(conductor, desk))
    old, new = DirectConnection(served), DirectConnection(served)
    zombie, successor = ConductorRemote(old), ConductorRemote(new)
    lost = first_batch(desk, lease(old))
    assert zombie.ask((0, 0), lost).result()
    served.ban(0)
    assert not conductor.aggregator.in_flight
    number = first_batch(desk, lease(new))
    assert successor.ask((0, 0), number).result()
    with pytest.raises(RunError, match="given up"):
        zombie.idle((0, 0))
    with pytest.raises(RunError, match="given up"):
        zombie.ask((0, 0), number).result()
    zombie.left((0, 0))
    assert set(conductor.aggregator.in_flight) == {number}
    successor.left((0, 0))
    assert not conductor.aggregator.in_flight


@pytest.mark.parametrize("told", [False, True], ids=["not told", "told"])
def test_rows_that_a_trainer_gives_back_itself_are_in_no_two_gradients(told: bool) -> None:
    """Some of its gradients wait for their step: they count as trained. Of others nobody was told: they never count."""
    desk, steps = make_desk(), list[DenseStep]()
    parts = StepParts(cast("Any", SimpleNamespace(commit=steps.append)), [], lambda: desk.trained)
    conductor = Conductor(Gba(), StepRule(2, 0.1, 0.1, Rates(), rows_by_buffer=False), parts)
    served = front(desk=desk, conducting=ConductorService(conductor, desk))
    gone, other = DirectConnection(served), DirectConnection(served)
    number, others = (first_batch(desk, lease(trainer, rank)) for rank, trainer in enumerate((gone, other)))
    assert ConductorRemote(gone).ask((0, 0), number).result()
    assert ConductorRemote(other).ask((1, 0), others).result()
    if told:
        ConductorRemote(gone).arrived(number, Arrived(0, 2, 0, lambda: None)).result()
    ask(gone, DeskService.abandon, 0)
    assert desk.trained == (2 if told else 0)
    ConductorRemote(gone).arrived(number, Arrived(0, 2, 0, lambda: None)).result()  # too late
    again = lease(other, 1)
    assert again is not None
    assert desk.opened(again, 10)
    claims = [desk.claim(again, start, start + 2) for start in range(0, 10, 2)]
    numbers = [others, *(claim.number for claim in claims if claim is not None)]
    assert len(numbers) == 1 + (4 if told else 5)
    for index, each in enumerate(numbers):
        assert ConductorRemote(other).ask((1, 0), each).result()
        ConductorRemote(other).arrived(each, Arrived(1, 2, 0, lambda: None)).result()
        assert len(steps) == (index + 1 + told) // 2
    ConductorRemote(other).left((1, 0))
    assert conductor.settle(0.0)
    stepped = [each for step in steps for each, weight in step.weights.items() if weight > 0]
    assert sorted(stepped) == sorted([*numbers, number] if told else numbers)
    assert desk.trained == 12


def test_whoever_spoke_before_is_not_heard_in_the_next_generation() -> None:
    before = front()
    zombie = DirectConnection(before)
    assert ask(zombie, DeskService.status).trained == 0
    after = front(before.clients)
    later = DirectConnection(after)
    later.client = zombie.client
    with pytest.raises(RunError, match="given up"):
        lease(later)
    assert lease(DirectConnection(after)) is not None


def test_a_server_refuses_what_another_generation_sends() -> None:
    Generation(3).check(3)
    with pytest.raises(RunError, match="gone back to a checkpoint"):
        Generation(3).check(2)
