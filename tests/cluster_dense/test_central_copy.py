"""Dense servers behind connections: what in-process servers do, bit for bit, and all of them at once."""

from collections.abc import Callable

import pytest
import torch
from helpers import PackedConnection, WholeCopy
from rings import Rounded
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel, Message
from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import EMPTY, Connection, Payload, Service
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import Pending, Promise
from shadowsync.rpc.served import Client, Served, ask, served
from shadowsync.sync.dense import CPU_S_PER_BYTE, CentralCopy, DenseServer

ODD_SIZE = 1003
Connect = Callable[[Service, int], list[Connection]]


def server(values: Tensor, codec: Codec) -> tuple[DenseServer, Connection]:
    made = DenseServer(values, codec)
    return made, PackedConnection(Served(made))


def copies(
    center: Tensor, count: int, codec: Codec, connect: Connect
) -> tuple[WholeCopy, WholeCopy, tuple[WireCounter, WireCounter]]:
    """A central copy in this process, the same behind connections, and what was counted of either."""
    counters = WireCounter(), WireCounter()
    near, far = (Channel("dense", codec, counter) for counter in counters)
    return (
        WholeCopy(center, count, near),
        WholeCopy(center, count, far, lambda server: connect(Served(server), 1)[0]),
        counters,
    )


def elastic(
    connection: Connection, frames: tuple[Tensor, ...], alpha: float = 0.5, codec: str = "", whole: bool = True
) -> Message | None:
    return ask(connection, DenseServer.elastic, Client(""), 0, alpha, codec, Message(frames, whole))


@pytest.mark.parametrize("codec", [Plain(), Bf16(), Rounded()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("count", [1, 5])
def test_remote_and_in_process_servers_agree_bit_for_bit(count: int, codec: Codec, wire: Connect) -> None:
    generator = torch.Generator().manual_seed(count)
    center = torch.randn(ODD_SIZE, generator=generator)
    near, far, counters = copies(center, count, codec, wire)
    for step in range(6):
        weights, rank = torch.randn(ODD_SIZE, generator=generator) * 3, step % 2
        for exchange in ("elastic", "sequential"):
            expected = getattr(near, exchange)(rank, weights, 0.3)
            assert torch.equal(getattr(far, exchange)(rank, weights, 0.3), expected)
        assert torch.equal(far.read(), near.read())
    assert counters[1].totals() == counters[0].totals()
    far.write(center)
    assert torch.equal(far.read(), center)


FEW = Threshold(keep=0.1, feedback=True)


@pytest.mark.parametrize(
    "codec",
    [FEW, Threshold(keep=0.1, values="int8", feedback=True), Threshold(select="significant", significance=0.1)],
    ids=["fp32", "int8", "significant"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_differences_near_and_far_are_the_same_and_conserved(count: int, codec: Codec, wire: Connect) -> None:
    generator = torch.Generator().manual_seed(count)
    center = torch.randn(ODD_SIZE, generator=generator)
    near, far, counters = copies(center, count, codec, wire)
    trainers = [torch.randn(ODD_SIZE, generator=generator) for _ in range(2)]
    before = center + sum(trainers)
    for step in range(40):
        rank = step % 2
        moved = near.elastic(rank, trainers[rank], 0.5)
        assert torch.equal(far.elastic(rank, trainers[rank], 0.5), moved)
        assert torch.equal(far.read(), near.read())
        trainers[rank] -= moved
        if step < 10:
            trainers[rank] += (drawn := torch.randn(ODD_SIZE, generator=generator) * 0.1)
            before += drawn
    for rank, trainer in enumerate(trainers):
        assert [servers.catch_up(rank) for servers in (near, far)] == [True, True]
        moved = near.elastic(rank, trainer, 0.5)
        assert torch.equal(far.elastic(rank, trainer, 0.5), moved)
        trainer.sub_(moved)
        assert [servers.catch_up(rank) for servers in (near, far)] == [False, False]
    torch.testing.assert_close(near.read() + sum(trainers), before, rtol=0, atol=1e-4)
    assert counters[1].totals() == counters[0].totals()
    shares = counters[0].totals().kept_shares
    assert 0.02 < shares["dense"] < 0.25


def test_what_a_threshold_leaves_out_comes_later() -> None:
    """Trainers that stand still meet the central copy, though a tenth of the elements moves at a time."""
    servers = WholeCopy(torch.zeros(ODD_SIZE), 1, Channel("dense", FEW, WireCounter()))
    trainer = torch.randn(ODD_SIZE, generator=torch.Generator().manual_seed(0))
    apart = [float((trainer - servers.read()).norm())]
    for _ in range(60):
        trainer -= servers.elastic(0, trainer, 0.5)
        apart.append(float((trainer - servers.read()).norm()))
    assert apart[-1] < 0.1 * apart[0]


def test_the_central_copy_takes_at_once_what_it_knows_and_owes_it() -> None:
    """A replica that has crossed whole and stands still moves the central copy as it would without a codec."""
    few, plain = (WholeCopy(torch.zeros(ODD_SIZE), 1, Channel("dense", c, WireCounter())) for c in (FEW, Plain()))
    trainers = [torch.randn(ODD_SIZE, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    for _ in range(8):
        for servers, trainer in zip((few, plain), trainers, strict=True):
            trainer.sub_(servers.elastic(0, trainer, 0.2))
        torch.testing.assert_close(few.read(), plain.read(), atol=1e-5, rtol=0)
    assert float((trainers[0] - trainers[1]).norm()) > 0.1, "the trainer has not heard of all of it"
    assert few.catch_up(0)
    trainers[0] -= few.elastic(0, trainers[0], 0.2)
    trainers[1] -= plain.elastic(0, trainers[1], 0.2)
    torch.testing.assert_close(trainers[0], trainers[1], atol=1e-5, rtol=0)


def test_after_a_write_differences_begin_anew() -> None:
    center, generator = torch.zeros(ODD_SIZE), torch.Generator().manual_seed(0)
    servers = WholeCopy(center, 2, Channel("dense", FEW, WireCounter()))
    for _ in range(3):
        servers.elastic(0, torch.randn(ODD_SIZE, generator=generator), 0.5)
    servers.write(center)
    moved = servers.elastic(0, torch.full((ODD_SIZE,), 2.0), 0.5)
    assert torch.equal(moved, torch.ones(ODD_SIZE))
    assert torch.equal(servers.read(), moved)


def test_who_keeps_everything_sends_the_vector_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    center, counters = torch.randn(ODD_SIZE, generator=generator), (WireCounter(), WireCounter())
    codecs = Plain(), Threshold(keep=1, feedback=True)
    plain, kept = (WholeCopy(center, 2, Channel("dense", c, n)) for c, n in zip(codecs, counters, strict=True))
    for _ in range(3):
        weights = torch.randn(ODD_SIZE, generator=generator)
        assert torch.equal(kept.elastic(0, weights, 0.3), plain.elastic(0, weights, 0.3))
    assert torch.equal(kept.read(), plain.read())
    assert counters[1].totals().bytes == counters[0].totals().bytes


def test_a_server_that_took_anothers_place_gets_the_replica_whole() -> None:
    """And so does one of which nobody knows what it has heard."""
    counter = WireCounter()
    made, connection = server(torch.zeros(ODD_SIZE), FEW)
    servers = CentralCopy(0, [connection], [(0, ODD_SIZE)], Channel("dense", FEW, counter))
    weights = torch.randn(ODD_SIZE, generator=torch.Generator().manual_seed(0))
    servers.elastic(weights, 0.5)
    whole = counter.totals().bytes["dense"]
    made.client_gone(connection.client)
    second = servers.elastic(weights, 0.5)
    assert counter.totals().bytes["dense"] > 1.9 * whole
    assert int((second != 0).sum()) > 0.9 * ODD_SIZE, "what comes whole is answered whole"
    servers._generation = 1
    with pytest.raises(RunError, match="gone back"):
        servers.elastic(weights, 0.5)
    servers._generation = 0
    third = counter.totals().bytes["dense"]
    servers.elastic(weights - second, 0.5)
    assert counter.totals().bytes["dense"] - third >= 4 * ODD_SIZE


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_difference_changes_nothing(whole: bool) -> None:
    _, connection = server(torch.ones(5), FEW)
    elastic(connection, (torch.ones(5),))
    for frames in [(torch.zeros(3),), (torch.zeros(5).double(),), (torch.zeros(5),) * 2, *([()] if whole else [])]:
        with pytest.raises(DataError, match="none of codec threshold"):
            elastic(connection, frames, whole=whole)
    assert torch.equal(ask(connection, DenseServer.read), torch.ones(5))


class Held(Connection):
    """Lets nothing through until so many calls wait on all connections of its kind, then the last one first."""

    def __init__(self, service: Service, waiting: list[Callable[[], None]], until: int) -> None:
        self._inner, self._waiting, self._until = PackedConnection(service), waiting, until

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        answer: Promise[Payload] = Promise()
        self._waiting.append(lambda: answer.keep(self._inner.call(method, payload).result()))
        if len(self._waiting) == self._until:
            while self._waiting:
                self._waiting.pop()()
        return answer

    def close(self) -> None:
        self._inner.close()


class Garbled(DenseServer):
    """A server that answers with other frames."""

    frames: tuple[Tensor, ...] = ()

    @served()
    def elastic(
        self, client: Client, trainer: int, alpha: float, codec: str, sent: Message, generation: int = 0
    ) -> Message | None:
        return Message(self.frames, sent.whole)


@pytest.mark.parametrize("codec", [FEW, Bf16()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("frames", [(), (torch.ones(2),) * 4], ids=["nothing", "too many"])
def test_an_answer_that_is_no_exchange_is_an_error_in_a_sentence(codec: Codec, frames: tuple[Tensor, ...]) -> None:
    garbled = Garbled(torch.ones(5), codec)
    garbled.frames = frames
    servers = CentralCopy(0, [PackedConnection(Served(garbled))], [(0, 5)], Channel("dense", codec, WireCounter()))
    with pytest.raises(DataError, match="the frames of an exchange are none of codec"):
        servers.elastic(torch.zeros(5), 0.5)


def test_all_servers_are_asked_before_any_answer_is_awaited() -> None:
    """With one at a time this would never end; the answers come in the wrong order."""
    center, count, waiting = torch.arange(11.0), 3, []
    servers = WholeCopy(
        center,
        count,
        Channel("dense", Plain(), WireCounter()),
        lambda server: Held(Served(server), waiting, count),
    )
    assert torch.equal(servers.read(), center)
    assert torch.equal(servers.elastic(0, center + 2, 0.5), torch.ones(11))
    assert torch.equal(servers.sequential(0, center, 0.5), center + 0.5)


def test_a_server_that_is_lost_is_told_after_the_others_are_done() -> None:
    servers = WholeCopy(
        torch.zeros(6), 2, Channel("dense", Plain(), WireCounter()), lambda server: PackedConnection(Served(server))
    )
    servers.of(0).connections[0].close()
    with pytest.raises(PeerLost):
        servers.elastic(0, torch.ones(6), 0.5)
    assert servers.read().tolist() == [0.0] * 3 + [0.5] * 3


def test_exchanges_cost_other_threads_time_where_they_cross() -> None:
    """Also of the way back; in one process there are no other threads."""
    near, far, _ = copies(torch.zeros(1000), 2, Plain(), lambda service, _: [PackedConnection(service)])
    for servers in (near, far):
        servers.elastic(0, torch.ones(1000), 0.5)
    assert near.of(0).cpu_s == 0
    assert far.of(0).cpu_s == pytest.approx(8000 * CPU_S_PER_BYTE)


def test_a_connection_that_goes_takes_its_residuals_along(wire: Connect) -> None:
    service = DenseServer(torch.zeros(1), Rounded())
    (first, second) = wire(Served(service), 2)
    half = torch.tensor([0.4])

    def sequential(connection: Connection) -> float:
        """With a local copy that leaves the center where it is, so that only the way back rounds."""
        ask(connection, DenseServer.write, half)
        sent = Message((torch.zeros(1, dtype=torch.int8),))
        answer = ask(connection, DenseServer.sequential, Client(""), 0, 1e-9, "", sent)
        assert answer is not None
        return float(answer.frames[0])

    assert [sequential(first), sequential(first)] == [0, 1], "0.4, then 0.8 with what was left out"
    assert sequential(second) == 0, "another connection has no part in it"
    service.client_gone(second.client)  # type: ignore[attr-defined]
    assert sequential(second) == 0, "it begins anew"


Call = Callable[[Connection], object]


def exchange(method: str, frames: tuple[Tensor, ...], alpha: float = 0.5, codec: str = "", generation: int = 0) -> Call:
    return lambda connection: ask(
        connection, getattr(DenseServer, method), Client(""), 0, alpha, codec, Message(frames), generation
    )


MISFITS = [
    exchange("elastic", ()),
    exchange("elastic", (torch.zeros(4),)),
    exchange("elastic", (torch.ones(3),), codec="int8"),
    exchange("sequential", (torch.ones(3),), codec="no such codec" * 1000),
    lambda connection: ask(connection, DenseServer.write, torch.zeros(2)),
    lambda connection: ask(connection, DenseServer.write, torch.zeros(3, dtype=torch.bfloat16)),
]
ONLY_PLAIN = [
    exchange("elastic", (torch.zeros(3, dtype=torch.float64),)),
    exchange("sequential", (torch.zeros(3, dtype=torch.int32),)),
]


@pytest.mark.parametrize(
    ("codec", "misfits"), [(Plain(), MISFITS + ONLY_PLAIN), (Bf16(), MISFITS)], ids=["plain", "bf16"]
)
def test_what_does_not_fit_changes_nothing(codec: Codec, misfits: list[Call]) -> None:
    _, connection = server(torch.arange(3.0), codec)
    for call in misfits:
        with pytest.raises(DataError):
            call(connection)
    assert ask(connection, DenseServer.read).tolist() == [0, 1, 2]


@pytest.mark.parametrize("method", ["elastic", "sequential"])
def test_an_exchange_of_another_generation_changes_nothing(method: str) -> None:
    connection = PackedConnection(Served(DenseServer(torch.zeros(3), Plain(), 2)))
    with pytest.raises(RunError, match="gone back"):
        exchange(method, (torch.ones(3),), generation=1)(connection)
    assert ask(connection, DenseServer.read).tolist() == [0, 0, 0]
