"""Whoever was given up, or belongs to an earlier generation, is not heard any more."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shadowsync.aggregation.conductor import Conductor, StepParts, StepRule
from shadowsync.aggregation.gba import Gba
from shadowsync.cluster.front import FrontDesk
from shadowsync.cluster.records import RecordTaker
from shadowsync.data.desk import Desk
from shadowsync.data.leases import Lease, LeaseBook, Plan
from shadowsync.errors import RunError
from shadowsync.metrics.recorder import Recorder
from shadowsync.runtime.conductor_remote import ConductorRemote
from shadowsync.runtime.conductor_service import ConductorService
from shadowsync.runtime.generation import Generation
from shadowsync.runtime.reading_messages import DeskStatus, LeaseAsked, LeaseGiven
from shadowsync.runtime.wire.connection import Answer, DirectConnection
from shadowsync.training.rates import Rates


def make_desk() -> Desk:
    return Desk(LeaseBook(Plan([10, 10], 1, shuffle=False, seed=0)), 1)


def front(
    banned: frozenset[str] = frozenset(), desk: Desk | None = None, conducting: ConductorService | None = None
) -> FrontDesk:
    reader = cast("Any", SimpleNamespace(desk=desk or make_desk(), slices=[]))
    return FrontDesk(reader, cast("Any", None), RecordTaker(Recorder(1, 100)), banned, conducting)


def lease(connection: DirectConnection, rank: int = 0) -> Answer:
    return connection.call("lease", LeaseAsked(rank, False)).result()


def test_a_trainer_that_was_given_up_gets_no_rows_and_its_rows_come_back() -> None:
    desk = front()
    old, new = DirectConnection(desk), DirectConnection(desk)
    first = lease(old).read(LeaseGiven).lease
    desk.ban(0)
    with pytest.raises(RunError, match="given up"):
        lease(old)
    again = lease(new).read(LeaseGiven).lease
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
    lost = first_batch(desk, lease(old).read(LeaseGiven).lease)
    assert zombie.ask((0, 0), lost).result()
    served.ban(0)
    assert not conductor.aggregator.in_flight
    number = first_batch(desk, lease(new).read(LeaseGiven).lease)
    assert successor.ask((0, 0), number).result()
    with pytest.raises(RunError, match="given up"):
        zombie.idle((0, 0))
    with pytest.raises(RunError, match="given up"):
        zombie.ask((0, 0), number).result()
    zombie.left((0, 0))
    assert set(conductor.aggregator.in_flight) == {number}
    successor.left((0, 0))
    assert not conductor.aggregator.in_flight


def test_whoever_spoke_before_is_not_heard_in_the_next_generation() -> None:
    before = front()
    zombie = DirectConnection(before)
    assert zombie.call("status").result().read(DeskStatus).trained == 0
    after = front(before.clients)
    later = DirectConnection(after)
    later.client = zombie.client
    with pytest.raises(RunError, match="given up"):
        lease(later)
    assert lease(DirectConnection(after)).read(LeaseGiven).lease is not None


def test_a_server_refuses_what_another_generation_sends() -> None:
    Generation(3).check(3)
    with pytest.raises(RunError, match="gone back to a checkpoint"):
        Generation(3).check(2)
