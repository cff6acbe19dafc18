"""What the driver hears of trainers: each sentence crosses once."""

from typing import Any

import torch
from helpers import PackedConnection

from shadowsync.cluster.statuses import Statuses
from shadowsync.cluster.supervisor import Member
from shadowsync.cluster.trainer import TrainerStatus
from shadowsync.compression.wire import WireTotals
from shadowsync.errors import RunError
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.served import Served, served
from shadowsync.runtime.runtime import LaunchRequest


class Teller:
    """A trainer that has decided something new before each answer, and whose second answer is lost."""

    def __init__(self) -> None:
        self.decided: list[str] = []
        self.sent: list[int] = []

    @served(once=False)
    def status(self, heard: int) -> TrainerStatus:
        self.decided.append(f"decision {len(self.decided)}")
        if len(self.decided) == 2:
            raise PeerLost("lost")
        decisions = tuple(self.decided[heard:])
        self.sent.append(len(decisions))
        return TrainerStatus(0, False, False, None, WireTotals(), 0, {}, heard, decisions, None, "", torch.ones(3))


class Failing(Teller):
    """A trainer that cannot say how it is."""

    @served(once=False)
    def status(self, heard: int) -> TrainerStatus:
        raise RunError("status failed with Panic: out of bounds")


def member_of(trainer: Teller) -> Member:
    connection: Any = PackedConnection(Served(trainer))
    elsewhere: Any = None
    return Member(LaunchRequest("trainer-0"), 0, elsewhere, elsewhere, connection)


def test_a_sentence_crosses_once_and_none_is_missed() -> None:
    teller = Teller()
    member, statuses, heard = member_of(teller), Statuses(lambda: None), []
    statuses.add(member)
    for _ in range(6):
        for each, _ in statuses.ask(0.0):
            heard += statuses.untold(each)
    assert heard == [f"decision {number}" for number in range(6)]
    assert teller.sent == [1, 2, 1, 1, 1]
    assert statuses.untold(member) == []
    assert [sketch.tolist() for sketch in statuses.sketches()] == [[1, 1, 1]]


def test_a_trainer_that_cannot_say_how_it_is_has_failed() -> None:
    statuses = Statuses(lambda: None)
    statuses.add(member_of(Failing()))
    ((_, status),) = statuses.ask(0.0)
    assert status.fault is not None
    assert str(status.fault.error()) == "status failed with Panic: out of bounds"
