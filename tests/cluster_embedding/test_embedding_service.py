"""What a served embedding server refuses, remembers and gives out."""

import threading
import tracemalloc
from dataclasses import dataclass

import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, ROWS, SOURCE, TABLES, dense_gradient, random_ids, train, whole
from msgspec.structs import replace
from remote_cases import CUT, ONE, far

from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.int8 import Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.data.batch import Jagged
from shadowsync.embedding.messages import (
    Coded,
    CommitAsked,
    Ids,
    PullAsked,
    PushAsked,
    Pushed,
    ReadAsked,
    StepAsked,
)
from shadowsync.embedding.remote import EmbeddingRemote, Remote
from shadowsync.embedding.saves import RemoteRows, SaveMethods
from shadowsync.embedding.server import EmbeddingServer, Lookup, RowLookup
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import DataError
from shadowsync.metrics.wire import WireCounter
from shadowsync.rpc.connection import DirectConnection
from shadowsync.rpc.pending import Promise
from shadowsync.rpc.served import ask
from shadowsync.rpc.service import EMPTY, Payload

INT = torch.int32
HELD = [Shard(Table("user", 40, 8, ("user",)), 0, 40), Shard(Table("item", 30, 4, ("item",)), 0, 30)]
IDS = Ids((0, 1), 2, True, False)
VALUES, OFFSETS = torch.tensor([0, 39, 1, 2], dtype=INT), torch.tensor([0, 2, 2, 3, 4], dtype=INT)
GRADIENT, SHAPE = torch.ones(2, 12), Coded(((2, 12),), (1,))
NUMBERS = torch.tensor([0, 29, 31], dtype=INT)
"""Two rows of item, then one of user: narrow rows have the lower numbers."""
SUMS, SHAPES = (torch.ones(2, 4), torch.ones(1, 8)), Coded(((2, 4), (1, 8)), (1, 1))


def serve(codec=None):
    """A server of `HELD` and a connection to it."""
    server = EmbeddingServer(HELD, TorchStorage, ADAGRAD, seed=3)
    return server, DirectConnection(EmbeddingService(server, codec or Plain(), codec or Plain()))


def copied(server):
    return [{name: tensor.clone() for name, tensor in rows.tensors.items()} for rows in server.state()]


def test_the_messages_that_the_others_spoil_are_good():
    server, connection = serve()
    before = copied(server)
    pulled = connection.call("pull", Payload.of(PullAsked(0, 1, IDS), (VALUES, OFFSETS))).result()
    assert (pulled.read(Coded), pulled.tensors[0].shape) == (replace(SHAPE, codec="plain"), (2, 12))
    read = connection.call("read", Payload.of(ReadAsked(0, 2, (0, 1)), (NUMBERS,))).result()
    assert read.read(Coded) == replace(SHAPES, codec="plain")
    for known in (True, False):
        pushed = connection.call("push", Payload.of(PushAsked(0, 1, 0.1, SHAPE, None), (GRADIENT,))).result()
        stepped = connection.call("step", Payload.of(StepAsked(0, 2, 0.1, SHAPES, None), SUMS)).result()
        assert (pushed.read(Pushed).known, stepped.read(Pushed).known) == (known, known)
    changed = [
        (rows["weight"] != old["weight"]).any(1).nonzero().flatten().tolist()
        for rows, old in zip(copied(server), before, strict=True)
    ]
    assert changed == [[0, 1, 39], [0, 1, 2, 29]]
    connection.call("push", Payload.of(PushAsked(0, 9, 0.1, SHAPE, IDS), (VALUES, OFFSETS, GRADIENT))).result()
    connection.call("step", Payload.of(StepAsked(0, 9, 0.1, SHAPES, (0, 1)), (NUMBERS, *SUMS))).result()


def pull(ids=IDS, *tensors):
    return "pull", PullAsked(0, 1, ids), tensors or (VALUES, OFFSETS)


def push(coded=SHAPE, *tensors, lr=0.1, ids=IDS):
    return "push", PushAsked(0, 5, lr, coded, ids), tensors or (VALUES, OFFSETS, GRADIENT)


def step(coded=SHAPES, *tensors, lr=0.1, shards=(0, 1)):
    return "step", StepAsked(0, 5, lr, coded, shards), tensors or (NUMBERS, *SUMS)


def row(*numbers, dtype=INT):
    return torch.tensor(numbers, dtype=dtype)


FRAMES = [(), (0,), (0, *[255] * 9), (1, 7), (2,), (2, 255), (8, 200), (8, *[1] * 10), (25, 1, 1, 1, 1)]
"""None of row numbers of these tables."""

BAD = [
    ("pull", PullAsked(0, 1, IDS, "int8"), (VALUES, OFFSETS)),
    ("pull", PullAsked(0, 1, IDS, "auto"), (VALUES, OFFSETS)),
    ("pull", PullAsked(0, 1, IDS, "x" * 5000), (VALUES, OFFSETS)),
    ("read", ReadAsked(0, 1, (0, 1), "bf16"), (NUMBERS,)),
    push(replace(SHAPE, codec="bf16")),
    step(replace(SHAPES, codec="\0")),
    pull(IDS, VALUES),
    pull(IDS, VALUES, OFFSETS, OFFSETS),
    pull(IDS, VALUES.float(), OFFSETS),
    pull(IDS, VALUES, OFFSETS.float()),
    pull(IDS, VALUES, torch.tensor(0, dtype=INT)),
    pull(IDS, VALUES[:3], OFFSETS),
    pull(IDS, VALUES.view(2, 2), OFFSETS),
    pull(IDS, row(0, 40, 1, 2), OFFSETS),
    pull(IDS, row(0, -1, 1, 2), OFFSETS),
    pull(IDS, VALUES, OFFSETS[:4]),
    pull(IDS, VALUES, row(0, 4, 2, 3, 4)),
    pull(IDS, VALUES, row(0, 2, 2, 3, 5)),
    pull(Ids((0, 1), 2, True, True), VALUES, OFFSETS, torch.ones(4, dtype=torch.float64)),
    pull(Ids((0, 1), 2, True, True), VALUES, OFFSETS, torch.ones(3)),
    pull(Ids((0, 2), 2, True, False)),
    pull(Ids((0, -1), 2, True, False)),
    pull(Ids((0,), 2, True, False)),
    pull(Ids((0, 1), 3, True, False)),
    pull(Ids((0, 1), 1 << 60, False, False), VALUES),
    pull(Ids((), -1, False, False), VALUES[:0]),
    push(SHAPE, VALUES, OFFSETS),
    push(SHAPE, VALUES, OFFSETS, GRADIENT, GRADIENT),
    push(SHAPE, VALUES, OFFSETS, GRADIENT.double()),
    push(SHAPE, VALUES, OFFSETS, GRADIENT[:1]),
    push(Coded(((12, 2),), (1,))),
    push(Coded(((2, 12),), (2,))),
    push(Coded(((-2, -12),), (1,))),
    push(Coded(((2, 12),), (0,)), VALUES, OFFSETS),
    push(Coded(((2, 6), (2, 6)), (1, 1)), VALUES, OFFSETS, torch.ones(2, 6), torch.ones(2, 6)),
    push(Coded((), (1,))),
    push(Coded(((2, 12), (2, 12)), (2, -1))),
    push(lr=float("nan")),
    push(lr=float("inf")),
    push(ids=Ids((0, 1), 2, True, True)),
    ("read", ReadAsked(0, 1, (0, 1)), ()),
    ("read", ReadAsked(0, 1, (0, 1)), (NUMBERS, NUMBERS)),
    ("read", ReadAsked(0, 1, (0, 1)), (NUMBERS.float(),)),
    ("read", ReadAsked(0, 1, (0, 1)), (row(1, 0),)),
    ("read", ReadAsked(0, 1, (0, 1)), (row(-1, 0),)),
    ("read", ReadAsked(0, 1, (0, 1)), (row(69, 70),)),
    *[("read", ReadAsked(0, 1, (0, 1)), (row(*frame, dtype=torch.uint8),)) for frame in FRAMES],
    ("read", ReadAsked(0, 1, (0, 1)), (row(2, 1, dtype=torch.uint8).view(1, 2),)),
    ("read", ReadAsked(0, 1, (1,)), (NUMBERS,)),
    ("read", ReadAsked(0, 1, (0, 2)), (NUMBERS,)),
    step(SHAPES, NUMBERS, SUMS[0]),
    step(Coded(((1, 8), (2, 4)), (1, 1)), NUMBERS, *reversed(SUMS)),
    step(Coded(((2, 4),), (1,)), NUMBERS, SUMS[0]),
    step(SHAPES, row(0, 0, 31), *SUMS),
    step(SHAPES, row(0, 29, 70), *SUMS),
    step(lr=float("-inf")),
    step(shards=(0,)),
    step(shards=(0, 9)),
    ("push", PushAsked(0, 5, 0.1, SHAPE, IDS, held=3), (VALUES, OFFSETS, GRADIENT[:1])),
    ("step", StepAsked(0, 5, 0.1, SHAPES, (0,), held=3), (NUMBERS, *SUMS)),
    ("push", PushAsked(0, 5, 0.1, SHAPE, IDS, held=-1), (VALUES, OFFSETS, GRADIENT)),
    ("step", StepAsked(0, 5, 0.1, SHAPES, (0, 1), held=-1), (NUMBERS, *SUMS)),
    ("commit", CommitAsked(0, (1, 2), (1.0,), 2.0, 0.1, 0), ()),
    ("commit", CommitAsked(0, (1,), (1.0,), 0.0, 0.1, 0), ()),
    ("commit", CommitAsked(0, (1,), (1.0,), float("nan"), 0.1, 0), ()),
    ("commit", CommitAsked(0, (1,), (float("nan"),), 2.0, 0.1, 0), ()),
    ("commit", CommitAsked(0, (1,), (1.0,), None, float("inf"), 0), ()),
    ("forget_held", None, ()),
    ("pull", Coded((), ()), (VALUES, OFFSETS)),
    ("push", None, (GRADIENT,)),
]


@pytest.mark.parametrize("message", BAD, ids=[f"{number}-{message[0]}" for number, message in enumerate(BAD)])
def test_what_is_wrong_is_refused_and_changes_nothing(message):
    server, connection = serve()
    before = copied(server)
    with pytest.raises(DataError):
        connection.call(message[0], Payload.of(*message[1:])).result()
    torch.testing.assert_close(copied(server), before, rtol=0, atol=0)
    assert connection.call("pull", Payload.of(*pull()[1:])).result().tensors[0].shape == (2, 12)


W, M = torch.ones(2, 8), torch.ones(2)
BAD_ROWS = [
    (SaveMethods.rows, 2, 0, 1),
    (SaveMethods.rows, -1, 0, 1),
    (SaveMethods.rows, 0, 0, 41),
    (SaveMethods.rows, 0, -1, 4),
    (SaveMethods.rows, 0, 4, 4),
    (SaveMethods.load_rows, 0, 0, 2, {}),
    (SaveMethods.load_rows, 0, 0, 2, {"weight": W}),
    (SaveMethods.load_rows, 0, 0, 2, {"weight": W, "momentum": torch.ones(1)}),
    (SaveMethods.load_rows, 0, 0, 2, {"weight": W, "momentum": M.double()}),
    (SaveMethods.load_rows, 0, 0, 2, {"weight": W, "exp_avg": M}),
    (SaveMethods.load_rows, 0, 39, 41, {"weight": W, "momentum": M}),
    (SaveMethods.load_rows, 2, 0, 2, {"weight": W, "momentum": M}),
]


@pytest.mark.parametrize("call", BAD_ROWS, ids=[f"{number}-{call[0].__name__}" for number, call in enumerate(BAD_ROWS)])
def test_rows_that_are_not_there_or_do_not_fit_are_refused_and_change_nothing(call):
    server, connection = serve()
    before = copied(server)
    with pytest.raises(DataError):
        ask(connection, *call)
    torch.testing.assert_close(copied(server), before, rtol=0, atol=0)


GAPS = torch.zeros(1 << 22, dtype=torch.uint8)
GAPS[0] = 8
HUGE = [((1 << 40,),), ((2, 12), (1 << 40,)), ((1 << 40,),) * 3, ((1 << 30, 12),)]
FRAMES = {
    "gaps": ("threshold", (GAPS, torch.ones(1 << 20))),
    "nothing": ("threshold", ()),
    "rows with scales": ("int8", (GAPS.view(torch.int8), GAPS.view(torch.bfloat16))),
}


def memory_of(call):
    """Bytes taken at most while a message is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("shapes", HUGE)
@pytest.mark.parametrize(("codec", "frames"), FRAMES.values(), ids=FRAMES)
def test_a_shape_that_is_only_claimed_takes_neither_memory_nor_time(codec, frames, shapes, known, monkeypatch):
    """Nothing is unpacked: the shape is that of the look-up, whatever the sender says of the gradient."""
    for where in ("compression.threshold.unpack", "embedding.messages.unpack_positions"):
        monkeypatch.setattr(f"shadowsync.{where}", lambda *_: pytest.fail("it is unpacked"))
    member = Threshold(feedback=False) if codec == "threshold" else Int8()
    server = EmbeddingServer(HELD, TorchStorage, ADAGRAD, seed=3)
    connection = DirectConnection(EmbeddingService(server, Plain(), member))
    coded = Coded(shapes, (len(frames),) * len(shapes), codec)
    if known:
        connection.call("pull", Payload.of(*pull()[1:])).result()
        connection.call("read", Payload.of(ReadAsked(0, 2, (0, 1)), (NUMBERS,))).result()
    for message in (
        ("push", PushAsked(0, 1, 0.1, coded, None if known else IDS), (VALUES, OFFSETS)[: 0 if known else 2]),
        ("step", StepAsked(0, 2, 0.1, coded, None if known else (0, 1)), (NUMBERS,)[: 0 if known else 1]),
    ):
        payload = Payload.of(message[1], (*message[2], *frames * len(shapes)))
        assert memory_of(lambda m=message[0], p=payload: connection.call(m, p).result()) < 100_000


@pytest.mark.parametrize("shapes", HUGE)
def test_a_mask_is_unpacked_for_the_shape_of_its_look_up(shapes):
    server = EmbeddingServer(HELD, TorchStorage, ADAGRAD, seed=3)
    connection = DirectConnection(EmbeddingService(server, Threshold(feedback=False), Plain()))
    coded = Coded(shapes, (1,) * len(shapes), "plain", 7)
    masks, values = (GAPS,) * len(shapes), (torch.ones(4),) * len(shapes)
    pushed = Payload.of(PushAsked(0, 1, 0.1, coded, IDS), (VALUES, OFFSETS, *masks, *values))
    stepped = Payload.of(StepAsked(0, 2, 0.1, coded, (0, 1)), (NUMBERS, *masks, *values))
    for method, payload in (("push", pushed), ("step", stepped)):
        assert memory_of(lambda m=method, p=payload: connection.call(m, p).result()) < 100_000


def test_a_push_of_a_read_and_a_step_of_a_pull_are_unknown():
    _, connection = serve()
    connection.call("pull", Payload.of(PullAsked(0, 1, IDS), (VALUES, OFFSETS))).result()
    connection.call("read", Payload.of(ReadAsked(0, 2, (0, 1)), (NUMBERS,))).result()
    wrong = [
        ("step", StepAsked(0, 1, 0.1, SHAPES, None), SUMS),
        ("push", PushAsked(0, 2, 0.1, SHAPE, None), (GRADIENT,)),
    ]
    answers = [connection.call(message[0], Payload.of(*message[1:])).result() for message in wrong]
    assert [answer.read(Pushed).known for answer in answers] == [False, False]


@dataclass(frozen=True)
class Rounded(Codec):
    """Whole numbers, with error feedback: what a message leaves out is added to the stream's next one."""

    name = "rounded"

    def encode(self, tensor, state=None, groups=()):
        wanted = tensor if state is None else tensor + state
        return Encoded((wanted.round(),), tuple(tensor.shape), wanted - wanted.round())

    def decode(self, frames, shape):
        return frames[0].view(shape)


def test_what_a_codec_remembers_belongs_to_one_client_stream_and_route():
    """Sent and residual make the sum in each stream, so the mean of what arrives becomes what was meant."""
    server, _ = serve()
    service = EmbeddingService(server, Rounded(), Rounded())
    connections = [DirectConnection(service), DirectConnection(service)]
    lookups = [
        Lookup((0,), Jagged(torch.tensor([1, 2]), None, None, 1, 2)),
        Lookup((1,), Jagged(torch.tensor([3, 4]), None, None, 1, 2)),
        RowLookup((0, 1), torch.tensor([3, 35])),
    ]
    for rows in server.state():
        rows.tensors["weight"].uniform_(-2, 2, generator=torch.Generator().manual_seed(1))
    remotes = [
        EmbeddingRemote(
            Remote(connection, server.shards, 0, stream, learns=False),
            Channel("pull", Plain(), WireCounter()),
            Channel("push", Rounded(), WireCounter()),
        )
        for connection in connections
        for stream in (0, 1)
    ]
    totals = {}
    for _ in range(40):
        for index, remote in enumerate(remotes):
            for route, lookup in enumerate(lookups):
                answers = remote.read_rows(lookup).result() if route == 2 else (remote.pull(lookup).result(),)
                for width, answer in enumerate(answers):
                    key = index, route, width
                    totals[key] = totals.get(key, torch.zeros_like(answer)) + answer
    for (_, route, width), total in totals.items():
        lookup = lookups[route]
        exact = server.read_rows(lookup)[width] if route == 2 else server.pull(lookup)
        assert float((total - 40 * exact).abs().max()) < 0.51


def test_rows_go_out_in_chunks_and_into_servers_of_another_cut(connect):
    source, target = far(connect, CUT, ADAM), far(connect, ONE, ADAM)
    train(source.client(), 3, "multi")
    ways = zip(source.connections, CUT, strict=True)
    chunks = [chunk for way, shards in ways for chunk in RemoteRows(way).read(shards, chunk_bytes=8 * 4 * 7)]
    assert max(len(chunk.tensors["weight"]) * chunk.table.dim for chunk in chunks) == 7 * 8
    for chunk in chunks:
        for way in target.connections:
            RemoteRows(way).write([chunk])
    (held,) = target.servers
    for rows in held.state():
        for name, tensor in rows.tensors.items():
            parts = [r for s in source.servers for r in s.state() if r.table == rows.table]
            expected = torch.cat([r.tensors[name] for r in sorted(parts, key=lambda r: r.start)])
            assert torch.equal(tensor, expected[: len(tensor)])


def test_a_row_that_is_given_out_is_a_copy():
    job = far(DirectConnection)
    rows = next(RemoteRows(job.connections[0]).read(job.servers[0].shards))
    before = rows.tensors["weight"].clone()
    client = job.client()
    client.push(client.pull(random_ids(ROWS, 6, 0)), dense_gradient(6, client.width, 0), 0.1).result()
    assert torch.equal(rows.tensors["weight"], before)
    assert not torch.equal(job.servers[0].state()[0].tensors["weight"], before)


def test_rows_of_other_tables_are_passed_over_and_those_of_others_refused(connect):
    job = far(connect, [whole(TABLES[:1])])
    ways, before = RemoteRows(job.connections[0]), copied(job.servers[0])
    ways.write([Rows(TABLES[2], 0, {"weight": torch.ones(3, 6), "momentum": torch.ones(3)})])
    with pytest.raises(
        DataError, match=r"weight \[2, 8\] do not fit rows 38 to 39 of a shard that has weight \[2, 8\], mom"
    ):
        ways.write([Rows(TABLES[0], 38, {"weight": torch.ones(2, 8)})])
    torch.testing.assert_close(copied(job.servers[0]), before, rtol=0, atol=0)


def test_a_client_learns_what_a_server_holds(connect):
    job = far(connect, CUT)
    held = [ask(way, SaveMethods.shards) for way in job.connections]
    assert held == [tuple(shards) for shards in CUT]
    assert {feature for shards in held for shard in shards for feature in shard.table.features} == set(SOURCE)
    for way, shards in zip(job.connections, CUT, strict=True):
        names = ask(way, SaveMethods.tensor_names)
        assert names == {shard.table.name: ("weight", "momentum") for shard in shards}


class Slow(DirectConnection):
    """Answers nothing but what a server holds until it is told to, and tells how much is under way at each call."""

    def __init__(self, service):
        super().__init__(service)
        self.waiting = []
        self.under_way = []

    def call(self, method, payload=EMPTY, timeout_s=None):
        if method != "load_rows":
            return super().call(method, payload, timeout_s)
        answered = Promise()
        self.waiting.append((answered, super().call(method, payload, timeout_s)))
        self.under_way.append(sum(not promise.done() for promise, _ in self.waiting))
        return answered

    def answer(self):
        for answered, real in self.waiting:
            if not answered.done():
                answered.keep(real.result())


def row_chunks(between):
    for start in range(0, 40, 8):
        yield Rows(TABLES[0], start, {"weight": torch.full((8, 8), float(start)), "momentum": torch.ones(8)})
        between()


def test_the_next_rows_are_looked_for_while_others_cross():
    job = far(DirectConnection, [whole(TABLES[:1])])
    way = Slow(job.services[0])
    RemoteRows(way).write(row_chunks(way.answer))
    way.answer()
    assert way.under_way == [1] * 5, "each is sent before the next one is asked for"
    assert copied(job.servers[0])[0]["weight"][:, 0].tolist() == [float(row // 8 * 8) for row in range(40)]


def test_nothing_is_under_way_any_more_when_rows_cannot_be_read():
    job = far(DirectConnection, [whole(TABLES[:1])])
    way = Slow(job.services[0])

    def torn():
        yield next(row_chunks(lambda: None))
        threading.Thread(target=way.answer).start()
        raise DataError("torn")

    with pytest.raises(DataError, match="torn"):
        RemoteRows(way).write(torn())
    assert all(answered.done() for answered, _ in way.waiting)
