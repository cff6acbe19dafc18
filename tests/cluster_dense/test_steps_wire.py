"""Coordinator and dense stepper behind connections: what they do in process, and nothing for senseless messages.

`P` elements of the dense part.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from helpers import PackedConnection, Workers
from rings import Hasty, until
from step_models import TwoParameters
from torch import Tensor, nn

from shadowsync.aggregation.aggregator import Aggregation, Sync
from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.gba import Gba
from shadowsync.aggregation.stepping import (
    DenseGradient,
    DenseStep,
    DenseStepper,
    Parameters,
    ParameterSender,
    Version,
    divide,
)
from shadowsync.aggregation.update import DenseClient, GradientUpdate, ParameterReceiver
from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel, Message
from shadowsync.compression.codec import Codec
from shadowsync.compression.low_bit import Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.data.leases import Claim, LeaseBook, LeaseService
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Connection, Service
from shadowsync.rpc.pending import Done
from shadowsync.rpc.served import Client, Served, ask, direct
from shadowsync.training.optimizers import Adagrad, Rates
from shadowsync.training.pieces import by_parameter
from shadowsync.training.replica import Replica

Connect = Callable[[Service, int], list[Connection]]
PATIENCE_S = 120.0


def stepper(codec: Codec | None = None, **more: Any) -> DenseStepper:
    return DenseStepper(Replica(TwoParameters(), Adagrad(), {}), None, codec=codec, **more)


def gradient(made: DenseStepper, seed: int) -> DenseGradient:
    flat = torch.randn(made.replica.flat.shape, generator=torch.Generator().manual_seed(seed))
    return DenseGradient(flat, (True, seed % 2 == 0))


def client(
    made: DenseStepper, way: Connection | None, codec: Codec, counter: WireCounter, worker: int = 0
) -> DenseClient:
    """Of a stepper here, or of one behind that connection."""
    parts, length = divide(made.replica.slots, 1), len(made.replica.flat)
    return DenseClient((0, worker), parts, [way or direct(made)], [Channel("dense", codec, counter)], length)


@pytest.mark.parametrize("codec", [Plain(), Bf16()], ids=lambda codec: codec.name)
def test_a_stepper_behind_a_wire_does_what_one_in_process_does(codec: Codec, wire: Connect) -> None:
    here, there, counters = stepper(codec), stepper(codec), (WireCounter(), WireCounter())
    (way,) = wire(Served(there), 1)
    near, far = client(here, None, codec, counters[0]), client(there, way, codec, counters[1])
    for step in range(3):
        for number in (2 * step, 2 * step + 1):
            near.hold(number, gradient(here, number)).result()
            far.hold(number, gradient(there, number)).result()
        made = DenseStep(step, {2 * step: 1.0, 2 * step + 1: 0.5}, 2.0, 0.1, 2 * step + 2)
        held = there.held_bytes
        here.commit(made)
        assert ask(way, DenseStepper.commit, made) == held > 0
        ours, theirs = far.newer(step).result(), near.newer(step).result()
        assert ours is not None
        assert theirs is not None
        assert (ours.number, ours.flat.tolist()) == (theirs.number, theirs.flat.tolist())
        assert far.newer(step + 1).result() is None
    assert torch.equal(there.replica.flat, here.replica.flat)
    assert counters[1].totals() == counters[0].totals()
    assert there.held_bytes == 0


class Wide(nn.Module):
    """A large parameter and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.ones(40, 20)), nn.Parameter(torch.ones(9))

    def forward(self, dense: Tensor, _: object) -> Tensor:
        return dense.sum(1) * self.large.sum() * self.small.sum()


def test_what_a_client_has_is_forgotten_with_it() -> None:
    service = stepper(Int8())
    connection = PackedConnection(Served(service))
    for stream in (0, 1, 0):
        assert ask(connection, DenseStepper.newer, Client(""), stream, -1, "", 0) is not None
    assert [len(streams) for streams in service._senders.values()] == [2]
    service.client_gone(connection.client)
    assert service._senders.values() == []


@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_thresholds_are_the_same_near_and_far(wire: Connect, values: Literal["fp32", "int8"]) -> None:
    replicas = [Replica(Wide(), Adagrad(), {}) for _ in range(2)]
    flat = replicas[0].flat
    codec = by_parameter(Threshold(keep=0.05, values=values, feedback=True), replicas[0].slots, len(flat))
    made, counters = [DenseStepper(replica, None, codec=codec) for replica in replicas], (WireCounter(), WireCounter())
    (way,) = wire(Served(made[1]), 1)
    near = [client(made[0], None, codec, counters[0], worker) for worker in range(2)]
    far = [client(made[1], way, codec, counters[1], worker) for worker in range(2)]
    given, known = torch.zeros(2, len(flat)), -1
    for step in range(4):
        for worker in range(2):
            own = DenseGradient(torch.randn(len(flat), generator=torch.Generator().manual_seed(step)), (True, True))
            given[worker] += own.flat
            near[worker].hold(2 * step + worker, own).result()
            far[worker].hold(2 * step + worker, own).result()
            arrived = made[0]._held[2 * step + worker].flat
            assert torch.equal(made[1]._held[2 * step + worker].flat, arrived)
            given[worker] -= arrived
        commit = DenseStep(step, {2 * step: 1.0, 2 * step + 1: 1.0}, 2.0, 0.1, 2 * step + 2)
        made[0].commit(commit)
        ask(way, DenseStepper.commit, commit)
        ours, theirs = far[0].newer(known).result(), near[0].newer(known).result()
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.flat, theirs.flat)
        assert torch.equal(ours.flat, made[0].replica.flat) == (step == 0)
        known = ours.number
    for worker in range(2):
        left = near[worker].unsent["0.residual"]
        assert torch.equal(far[worker].unsent["0.residual"], left)
        torch.testing.assert_close(left, given[worker][:800], rtol=0, atol=1e-5)
    assert counters[1].totals() == counters[0].totals()
    assert 0.05 < counters[0].totals().kept_shares["dense"] < 0.2


class Versions:
    """Parameters that move by noise, and a worker's two ends of the way back."""

    def __init__(self, codec: Codec) -> None:
        self.replica, self.counter = Replica(Wide(), Adagrad(), {}), WireCounter()
        self.codec = by_parameter(codec, self.replica.slots, len(self.replica.flat))
        self.sender = ParameterSender("parameters")
        self.receiver = ParameterReceiver(Channel("dense", self.codec, self.counter), len(self.replica.flat))
        self.number = 0

    def move(self) -> Version:
        self.number += 1
        noise = torch.Generator().manual_seed(self.number)
        self.replica.flat.add_(torch.randn(len(self.replica.flat), generator=noise).pow(3))
        return Version(self.number, self.replica.flat.clone())

    def cross(self, version: Version) -> Version:
        return self.receiver.take(self.codec, self.answer(version))

    def answer(self, version: Version) -> Parameters:
        """What is sent to the worker as it is now."""
        return self.sender.answer(self.codec, version, self.receiver.having)


@pytest.mark.parametrize("values", ["fp32", "int4"])
def test_what_a_threshold_leaves_out_of_parameters_comes_later(values: Literal["fp32", "int4"]) -> None:
    versions = Versions(Threshold(keep=0.05, values=values, feedback=True))
    for _ in range(20):
        known = versions.cross(versions.move()).number
    still, apart = versions.replica.flat.clone(), []
    for number in range(known + 1, known + 400):
        taken = versions.cross(Version(number, still))
        apart.append(float((taken.flat - still).abs().max()))
    assert apart[0] > 0.1
    assert apart[-1] <= apart[0] / 1000
    assert 0.02 < versions.counter.totals().kept_shares["dense"] < 0.1


def test_a_worker_that_missed_an_answer_gets_the_parameters_whole() -> None:
    versions = Versions(Threshold(keep=0.05, feedback=True))
    versions.cross(versions.move())
    assert not versions.answer(versions.move()).message.whole  # and it is lost
    newest = versions.move()
    assert torch.equal(versions.cross(newest).flat, newest.flat)
    assert not torch.equal(versions.cross(versions.move()).flat, versions.replica.flat)


@pytest.mark.parametrize("codec", [Threshold(keep=0.05, feedback=True), Int8()], ids=lambda codec: codec.name)
def test_an_answer_that_is_made_twice_leaves_both_ends_alike(codec: Codec) -> None:
    """As where a connection is lost between an answer and its receipt, and the question is asked once more."""
    versions = Versions(codec)
    for _ in range(3):
        versions.cross(versions.move())
    newest = versions.move()
    first, again = versions.answer(newest), versions.answer(newest)
    assert first.version == again.version
    versions.receiver.take(versions.codec, first)
    known = versions.cross(versions.move())
    assert torch.equal(known.flat, versions.replica.flat)
    still = versions.replica.flat.clone()
    for number in range(known.number + 1, known.number + 100):
        known = versions.cross(Version(number, still))
    torch.testing.assert_close(known.flat, still, rtol=0, atol=1e-4)


def test_after_whole_parameters_in_between_changes_begin_anew() -> None:
    versions = Versions(Threshold(keep=0.05, feedback=True))
    coded = versions.codec
    versions.cross(versions.move())
    lost = versions.move()
    versions.answer(lost)
    versions.codec = Plain()
    versions.cross(lost)
    versions.codec = coded
    newest = versions.move()
    assert torch.equal(versions.cross(newest).flat, newest.flat)


def test_a_change_that_goes_on_from_nothing_is_refused() -> None:
    versions, other = Versions(Threshold(keep=0.05)), Versions(Threshold(keep=0.05))
    versions.cross(versions.move())
    message = versions.answer(versions.move())
    with pytest.raises(DataError, match="what has changed to a worker that has nothing"):
        other.receiver.take(other.codec, message)
    with pytest.raises(DataError, match="frames of the dense parameters are none of codec threshold"):
        versions.receiver.take(versions.codec, replace(message, message=Message(message.message.frames[1:], False)))


def test_the_whole_is_as_new_as_its_oldest_part() -> None:
    whole = DenseStepper(Replica(Wide(), Adagrad(), {}), None)
    parts = divide(whole.replica.slots, 2)
    servers = [DenseStepper(Replica(part.module(Wide(), buffers=False), Adagrad(), {}), None) for part in parts]
    line = Channel("dense", Plain(), WireCounter())
    worker = DenseClient((0, 0), parts, [direct(server) for server in servers], [line, line], len(whole.replica.flat))
    flat = torch.randn(whole.replica.flat.shape)
    first = worker.newer(-1).result()
    assert first is not None
    assert (first.number, first.flat.tolist()) == (0, whole.newest.flat.tolist())
    worker.hold(0, DenseGradient(flat, (True, False))).result()
    whole.hold(0, DenseGradient(flat, (True, False)))
    step = DenseStep(0, {0: 1.0}, 1.0, 0.1, 1)
    whole.commit(step)
    servers[0].commit(step)
    asked, told = worker.newer(0), list[BaseException | None]()
    asked.then(told.append)
    assert asked.result() is None
    assert asked.done()
    assert told == [None]
    servers[1].commit(step)
    second = worker.newer(0).result()
    assert second is not None
    assert (second.number, second.flat.tolist()) == (1, whole.newest.flat.tolist())


FLAT = stepper().replica.flat
STEP = DenseStep(0, {1: 1.0}, 1.0, 0.1, 0)
Call = Callable[[Connection], object]


def holds(number: int = 0, used: tuple[bool, ...] = (True, True), codec: str = "", *frames: Tensor) -> Call:
    return lambda connection: ask(connection, DenseStepper.receive, number, used, codec, frames)


def commits(**changed: Any) -> Call:
    return lambda connection: ask(connection, DenseStepper.commit, replace(STEP, **changed))


MALFORMED: dict[str, tuple[Call, str]] = {
    "no gradient": (holds(), "frames of a gradient"),
    "another size": (holds(0, (True, True), "", torch.zeros(3)), "frames of a gradient|not fit"),
    "another type": (holds(0, (True, True), "", FLAT.double()), "frames of a gradient|not fit"),
    "another model": (holds(0, (True,), "", FLAT), "does not fit"),
    "a number below 0": (holds(-1, (True, True), "", FLAT), "count from 0"),
    "another codec": (holds(0, (True, True), "int8", FLAT), "codec 'int8' is not one"),
    "an answer in another": (
        lambda connection: ask(connection, DenseStepper.newer, Client(""), 0, -1, "x" * 9000, 0),
        "codec 'x{20}' is not .*; allowed: plain$",
    ),
    "a divisor of 0": (commits(divisor=0.0), "make no global step"),
    "no number": (commits(lr=float("nan")), "make no global step"),
    "an infinite weight": (commits(weights={1: float("inf")}), "make no global step"),
}


@pytest.mark.parametrize(("call", "said"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_to_the_dense_server_change_nothing(call: Call, said: str) -> None:
    made = stepper()
    with pytest.raises(DataError, match=said):
        call(PackedConnection(Served(made)))
    assert (made.newest.number, made.held_bytes) == (0, 0)
    assert torch.equal(made.replica.flat, FLAT)


def test_the_dense_server_refuses_another_generation() -> None:
    made = stepper(generation=2)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (DenseStepper.receive, (0, (True, True), "", (FLAT,), 1)),
        (DenseStepper.commit, (STEP, 1)),
        (DenseStepper.norm, (STEP, 1)),
        (DenseStepper.restart, (3, 1)),
    ]
    for method, arguments in calls:
        with pytest.raises(RunError, match="gone back"):
            ask(PackedConnection(Served(made)), method, *arguments)
    assert (made.newest.number, made.held_bytes) == (0, 0)


class Bench:
    """A coordinator behind a wire, beside a lease service of 40 rows."""

    def __init__(self, wire: Connect, method: Aggregation, size: int = 2) -> None:
        self.leases = LeaseService(LeaseBook([10] * 4), 2)
        rule = StepRule(size, 0.1, 0.1, Rates(), rows_by_buffer=False)
        self.coordinator = StepCoordinator(method, rule, self.leases, lambda dense, rows: None)
        (self.connection,) = wire(Served(self.coordinator), 1)
        self.remote = Workers(self.connection)
        self._held: dict[int, Any] = {}
        self._at: dict[int, int] = {}

    def claim(self, trainer: int) -> Claim:
        """The next two rows for a trainer."""
        if trainer not in self._held:
            _, self._held[trainer] = self.leases.lease(trainer, idle=True)
            assert self.leases.opened(self._held[trainer], 10)[1]
        start = self._at.get(trainer, 0)
        self._at[trainer] = start + 2
        _, claim = self.leases.claim(self._held[trainer], start, start + 2)
        assert claim is not None
        return claim


def test_rows_are_done_once_when_the_step_is_made(wire: Connect) -> None:
    bench = Bench(wire, Gba())
    first, second = bench.claim(0).number, bench.claim(1).number
    assert bench.remote.ask((0, 0), first).result() == 0
    assert bench.remote.ask((1, 0), second).result() == 0
    bench.remote.arrived(first)
    assert bench.leases.trained == 0
    bench.remote.arrived(second)
    bench.remote.arrived(second)
    assert bench.leases.trained == 4
    assert bench.coordinator.state.received == 2


def test_whoever_waits_longer_than_the_patience_of_a_call_asks_again(wire: Connect) -> None:
    bench = Bench(wire, Sync(), size=1)
    first, second = bench.claim(0), bench.claim(1)
    bench.remote.begin((0, 0), first.number)
    hasty, nothing_newer = Hasty(bench.connection), SimpleNamespace(newer=lambda than: Done(None))
    update = GradientUpdate((1, 0), hasty, nothing_newer, None, None)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        began = pool.submit(update.begin(second))  # type: ignore[arg-type]
        until(lambda: hasty.asked.count("ask") == 3)
        bench.remote.arrived(first.number)
        assert began.result(PATIENCE_S)


def test_the_coordinator_refuses_another_generation_and_unknown_batches(wire: Connect) -> None:
    bench = Bench(wire, Gba())
    number, worker = bench.claim(0).number, (0, 0)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (StepCoordinator.ask, (worker, number, 4)),
        (StepCoordinator.arrived, (number, 0, 4)),
        (StepCoordinator.idle, (worker, 4)),
        (StepCoordinator.left, (worker, 4)),
    ]
    for method, arguments in calls:
        with pytest.raises(RunError, match="gone back"):
            ask(bench.connection, method, *arguments)
    assert bench.remote.ask(worker, 77).result() is None
    bench.remote.arrived(77)
    assert bench.coordinator.state.received == 0
