"""The update of the replica methods: pushes are on their way while the worker goes on, and done when acknowledged."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from shadowsync.errors import RunError
from shadowsync.rpc.pending import DONE, Pending, Promise
from shadowsync.training.worker import LocalUpdate


@dataclass
class Remote:
    """An embedding client whose pushes are acknowledged when told."""

    pushes: list[Promise[None]] = field(default_factory=list)

    def push(self, pulled: object, gradient: object, lr: float) -> Pending[None]:
        self.pushes.append(Promise())
        return self.pushes[-1]


@dataclass
class Done:
    """A feed that writes down what is done."""

    numbers: list[int] = field(default_factory=list)

    def done(self, leased: SimpleNamespace) -> bool:
        self.numbers.append(leased.number)
        return True


class Bench:
    def __init__(self, most_under_way: int = 3) -> None:
        self.remote, self.feed, self.steps = Remote(), Done(), []
        self.update = LocalUpdate(self.remote, self.feed, 0.5, 0.25, most_under_way=most_under_way)
        self.module = SimpleNamespace(step=self.steps.append)

    def apply(self, *numbers: int) -> None:
        for number in numbers:
            self.update.apply(SimpleNamespace(number=number), None, self.module, torch.zeros(1), 1.0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_batch_is_done_when_its_push_is_acknowledged_in_any_order(order: tuple[int, ...]) -> None:
    bench = Bench()
    bench.apply(0, 1, 2)
    assert (bench.feed.numbers, bench.steps) == ([], [0.5] * 3)
    for number in order:
        bench.remote.pushes[number].keep(None)
    assert bench.feed.numbers == list(order)
    bench.update.settle()


class Waited(Promise[None]):
    """Ends when it is waited for."""

    def result(self) -> None:
        self.keep(None)
        super().result()


def test_a_worker_waits_for_the_oldest_when_too_many_are_under_way() -> None:
    bench = Bench(most_under_way=2)
    waited = [Waited() for _ in range(5)]
    pushes = iter(waited)
    bench.remote.push = lambda *_: next(pushes)  # type: ignore[method-assign]
    bench.apply(0, 1)
    assert bench.feed.numbers == []
    bench.apply(2)
    assert bench.feed.numbers == [0]
    waited[1].keep(None)  # makes room by itself
    bench.apply(3)
    assert bench.feed.numbers == [0, 1]
    bench.apply(4)
    assert bench.feed.numbers == [0, 1, 2]
    bench.update.settle()
    assert bench.feed.numbers == [0, 1, 2, 3, 4]
    bench.update.settle()


@pytest.mark.parametrize("later", ["apply", "settle"])
def test_a_push_that_fails_is_not_done_and_told_next(later: str) -> None:
    bench = Bench()
    bench.apply(0, 1)
    bench.remote.pushes[0].fail(RunError("no server"))
    bench.remote.pushes[1].keep(None)
    with pytest.raises(RunError, match="no server"):
        bench.apply(2) if later == "apply" else bench.update.settle()
    assert bench.feed.numbers == [1]


def test_in_process_every_batch_is_done_at_once() -> None:
    bench = Bench(most_under_way=0)
    bench.remote.push = lambda *_: DONE  # type: ignore[method-assign]
    bench.apply(0, 1)
    assert bench.feed.numbers == [0, 1]


def test_updates_do_not_share_what_is_under_way() -> None:
    one, other = Bench(), Bench()
    one.apply(0)
    other.update.settle()
    assert one.feed.numbers == []
