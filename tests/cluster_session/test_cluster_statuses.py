"""What the driver hears of trainers: each sentence crosses once."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch

from shadowsync.cluster.statuses import Statuses
from shadowsync.cluster.trainer_messages import StatusAsked, TrainerStatus
from shadowsync.errors import RunError
from shadowsync.rpc.errors import PeerLost


class Teller:
    """A member that has decided something new before each answer, and whose second answer is lost."""

    def __init__(self) -> None:
        self.role, self.index, self.living, self.connection = "trainer-0", 0, True, self
        self.decided: list[str] = []
        self.sent: list[int] = []

    def call(self, method: str, asked: StatusAsked) -> Future[Any]:
        self.decided.append(f"decision {len(self.decided)}")
        answer: Future[Any] = Future()
        if len(self.decided) == 2:
            answer.set_exception(PeerLost("lost"))
            return answer
        decisions = tuple(self.decided[asked.heard :])
        self.sent.append(len(decisions))
        status = TrainerStatus(0, False, False, None, {}, 0, {}, asked.heard, decisions, None)
        answer.set_result(SimpleNamespace(read=lambda _: status, tensors=(torch.zeros(1),)))
        return answer


def test_a_sentence_crosses_once_and_none_is_missed() -> None:
    member: Any = Teller()
    statuses, heard = Statuses(lambda: None), []
    statuses.add(member)
    for _ in range(6):
        for each, _ in statuses.ask(0.0):
            heard += statuses.untold(each)
    assert heard == [f"decision {number}" for number in range(5)]
    assert member.sent == [1, 2, 1, 1, 1]
    assert statuses.untold(member) == []


def test_a_trainer_that_cannot_say_how_it_is_has_failed() -> None:
    member: Any = Teller()
    answer: Future[Any] = Future()
    answer.set_exception(RunError("status failed with Panic: out of bounds"))
    member.call = lambda *_: answer
    statuses = Statuses(lambda: None)
    statuses.add(member)
    assert statuses.ask(0.0) == []
    ((_, status),) = statuses.ask(0.0)
    assert status.fault is not None
    assert str(status.fault.error()) == "status failed with Panic: out of bounds"
