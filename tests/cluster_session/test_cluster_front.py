"""Whoever was given up, or belongs to an earlier generation, is not heard any more."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shadowsync.cluster.front import FrontDesk
from shadowsync.cluster.records import RecordTaker
from shadowsync.data.desk import Desk
from shadowsync.data.leases import LeaseBook, Plan
from shadowsync.errors import RunError
from shadowsync.metrics.recorder import Recorder
from shadowsync.runtime.generation import Generation
from shadowsync.runtime.reading_messages import DeskStatus, LeaseAsked, LeaseGiven
from shadowsync.runtime.wire.connection import Answer, DirectConnection


def front(banned: frozenset[str] = frozenset()) -> FrontDesk:
    desk = Desk(LeaseBook(Plan([10, 10], 1, shuffle=False, seed=0)), 1)
    reader = cast("Any", SimpleNamespace(desk=desk, slices=[]))
    return FrontDesk(reader, cast("Any", None), RecordTaker(Recorder(1, 100)), banned)


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
