"""What a codec remembers belongs to one stream: tensors of one shape on one line do not get each other's residuals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from helpers import WholeCopy
from torch import Tensor

from shadowsync.aggregation.update import gradient_stream, restore_all
from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel, Stream, float_bytes, pulled_and_pushed_bytes
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.low_bit import Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.data.batch import Jagged
from shadowsync.embedding import optimizers
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.requests import AnyLookup, Lookup, RowLookup
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import NonFiniteTensor
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.training.gate import Gate
from shadowsync.training.pieces import by_parameter
from shadowsync.training.replica import ParameterSlot

ROUNDS = 12
SGD = optimizers.SGD()


@dataclass(frozen=True)
class Rounded(Codec):
    """Whole numbers, with error feedback: what a message leaves out is added to the stream's next one."""

    name = "rounded"

    def encode(self, tensor: Tensor, state: Tensor | None = None, groups: Sequence[int] = ()) -> Encoded:
        wanted = tensor if state is None else tensor + state
        return Encoded((wanted.round(),), tuple(tensor.shape), wanted - wanted.round())

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return frames[0].view(shape)


@dataclass
class Books:
    """By stream: everything that was given to it, and everything that came out."""

    given: dict[object, Tensor] = field(default_factory=dict)
    received: dict[object, Tensor] = field(default_factory=dict)

    def enter(self, key: object, given: Tensor, received: Tensor) -> None:
        self.given[key] = self.given.get(key, torch.zeros_like(given)) + given
        self.received[key] = self.received.get(key, torch.zeros_like(given)) + received
        left = (self.given[key] - self.received[key]).abs()
        assert bool((left <= 0.5 + 1e-4).all()), f"{key}: sent + residual = sum no longer holds"


def rounded_line() -> Channel:
    return Channel("dense", Rounded(), WireCounter())


def test_sent_and_residual_make_the_sum_in_every_stream() -> None:
    line, books = rounded_line(), Books()
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROUNDS):
        for key in ("first", "second", ("third", 0)):
            tensor = torch.randn(4, generator=generator)
            books.enter(key, tensor, line.stream(key).cross(tensor).tensor)


def test_every_trainer_has_a_stream_to_each_dense_server() -> None:
    servers, books = WholeCopy(torch.zeros(4), 2, rounded_line()), Books()
    weights = [torch.tensor([0.4, 0.3, -0.4, -0.3]), torch.tensor([-0.3, -0.4, 0.3, 0.4])]
    for _ in range(ROUNDS):
        for rank in (0, 1):
            servers.sequential(rank, weights[rank], 1.0)  # the central copy is now what has arrived
            for server, part in enumerate((slice(0, 2), slice(2, 4))):
                books.enter((rank, server), weights[rank][part], servers.read()[part])


def test_every_trainer_has_a_stream_back_from_each_dense_server() -> None:
    center = torch.tensor([0.4, 0.3, -0.4, -0.3])
    servers, books = WholeCopy(center, 2, rounded_line()), Books()
    for _ in range(ROUNDS):
        for rank in (0, 1):
            books.enter(rank, center, servers.sequential(rank, torch.full((4,), 0.35), 1e-9))


def test_every_trainer_has_a_stream_to_the_average() -> None:
    ends, books = LocalAverages(range(2), rounded_line(), Gate().waiting).of, Books()
    ends[1].leave()
    for _ in range(ROUNDS):
        for rank, weights in enumerate((torch.tensor([0.4, -0.3]), torch.tensor([-0.4, 0.3]))):
            books.enter(rank, weights, ends[rank].mean(weights))  # alone, so that it is the average
            ends[1 - rank].join()
            ends[rank].leave()


class Deaf(EmbeddingServer):
    """Keeps its rows as they are, and what was pushed last."""

    pushed = torch.zeros(0)

    def push(self, lookup: AnyLookup, gradients: Sequence[Tensor], lr: float) -> None:
        (self.pushed,) = gradients


def test_every_server_and_route_has_a_stream_in_either_direction() -> None:
    pulls, pushes = Channel("pull", Rounded(), WireCounter()), Channel("push", Rounded(), WireCounter())
    tables = [Table(name, 4, 2, (name,)) for name in "ab"]
    servers = [Deaf([Shard(table, 0, 4) for table in tables], TorchStorage, SGD, seed) for seed in (0, 1)]
    proxies = [ServerProxy.near(server, position, pulls, pushes) for position, server in enumerate(servers)]
    routes = [Lookup((slot,), Jagged(torch.arange(3), None, None, 1, 3)) for slot in (0, 1)]
    books = Books()
    for _ in range(ROUNDS):
        for position, (server, proxy) in enumerate(zip(servers, proxies, strict=True)):
            for route in routes:
                (answer,), (pulled,) = server.pull(route), proxy.pull(route).result()
                books.enter(("pull", position, route.slots), answer, pulled)
                proxy.push(route, [-answer], 0.1).result()
                books.enter(("push", position, route.slots), -answer, server.pushed)


@pytest.mark.parametrize("codec", [Threshold(), Int8()], ids=["threshold", "int8"])
def test_what_cannot_be_sent_is_named(codec: Codec) -> None:
    stream = Channel("push", codec, WireCounter()).stream((0, (3, 4)), "the gradients of features a, b")
    stream.cross(torch.ones(20, 16))
    bad = torch.ones(20, 16).index_fill(0, torch.tensor([5, 6]), float("inf"))
    with pytest.raises(NonFiniteTensor, match=r"^the gradients of features a, b cannot be sent: 32 of 320 "):
        stream.cross(bad)
    assert stream.cross(torch.ones(20, 16)).tensor.mean() == pytest.approx(1, abs=0.01)


BAD_SERVER = EmbeddingServer([Shard(Table(name, 4, 8, (name,)), 0, 4) for name in "abcd"], TorchStorage, SGD, seed=0)


@pytest.mark.parametrize(
    ("slots", "named"), [((1, 2), "features b, c"), ((0, 1, 2, 3), r"features a, b, c, …"), ((3,), "feature d")]
)
def test_messages_of_embeddings_are_named_by_features_tables_and_server(slots: tuple[int, ...], named: str) -> None:
    bad, ids = torch.full((2, 8 * len(slots)), float("nan")), torch.zeros(2 * len(slots), dtype=torch.int64)
    ways = Channel("pull", Plain(), WireCounter()), Channel("push", Int8(), WireCounter())
    proxy = ServerProxy.near(BAD_SERVER, 5, *ways)
    with pytest.raises(NonFiniteTensor, match=f"^the gradients of {named} for embedding server 5 cannot be sent"):
        proxy.push(Lookup(slots, Jagged(ids, None, None, len(slots), 2)), [bad], 0.1)
    rows = RowLookup((0, 1, 2, 3), torch.arange(2))
    said = r"^the gradients of rows of tables a, b, c, … for embedding server 5 cannot be sent"
    with pytest.raises(NonFiniteTensor, match=said):
        proxy.push(rows, [bad[:, :8]], 0.1)


@pytest.mark.parametrize("codec", [Threshold(), Int8()], ids=["threshold", "int8"])
def test_messages_of_the_dense_part_are_named_by_trainer_worker_server_and_parameter(codec: Codec) -> None:
    slots = [ParameterSlot("top.0.weight", torch.Size([30, 10]), 0), ParameterSlot("top.0.bias", torch.Size([30]), 304)]
    bad = torch.zeros(400)
    bad[310] = float("inf")
    line = Channel("dense", by_parameter(codec, slots, 400), WireCounter())
    with pytest.raises(NonFiniteTensor, match=r"^the dense gradient of worker 0 of trainer 1 cannot .* top\.0\.bias"):
        gradient_stream(line, (1, 0), slots).encode(bad)
    servers = WholeCopy(torch.zeros(400), 2, Channel("dense", codec, WireCounter()))
    servers.elastic(3, torch.zeros(400), 0.5)
    with pytest.raises(NonFiniteTensor, match=r"^the replica of trainer 3 for dense server 1 cannot be sent"):
        servers.elastic(3, bad, 0.5)


def test_plain_is_sent_without_a_copy() -> None:
    counter, tensor = WireCounter(), torch.arange(12.0).view(3, 4)
    line = Channel("pull", Plain(), counter)
    assert line.stream("a").cross(tensor).tensor.data_ptr() == tensor.data_ptr()
    assert line.stream("a") is line.stream("a")
    assert counter.totals().bytes == counter.totals().raw_bytes == {"pull": 48}


def test_residuals_that_another_codec_cannot_read_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    threshold, rounding = Stream(Threshold(feedback=True)), Stream(Int8(rounding="stochastic"))
    for encoder in (threshold, rounding):
        encoder.encode(torch.randn(1000))
    restore_all([(Stream(Threshold()), threshold.tensors()), (Stream(Plain()), rounding.tensors())])
    assert not caplog.records
    restore_all([(Stream(Int8()), threshold.tensors())] * 2)
    (told,) = caplog.messages
    assert told.startswith("what 2 workers had not sent of their gradients is not of this codec")


def test_a_gradient_under_a_mask_is_reckoned_with_its_share():
    pull = Threshold(keep=0.25, feedback=False)
    assert pulled_and_pushed_bytes(Plain(), Bf16()) == 6.0
    there = float_bytes(pull)
    assert pulled_and_pushed_bytes(pull, Plain()) == pytest.approx(there + 4 * 0.25, rel=0.05)
    assert pulled_and_pushed_bytes(pull, Int8()) < there + 0.5
