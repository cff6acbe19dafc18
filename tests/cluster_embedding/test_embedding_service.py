"""What a served embedding server refuses, remembers and gives out."""

import threading
import tracemalloc
from dataclasses import dataclass
from dataclasses import replace as with_fields

import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, HISTORIES, ROWS, SOURCE, TABLES, dense_gradient, random_ids, train, whole
from helpers import PackedConnection
from msgspec.structs import replace
from remote_cases import CUT, ONE, direct, far

from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.low_bit import Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.data.batch import Jagged
from shadowsync.embedding.messages import Coded, Sent
from shadowsync.embedding.proxy import ANY, UNCOUNTED, ServerProxy
from shadowsync.embedding.requests import Lookup, RowLookup
from shadowsync.embedding.saves import SaveMethods, read_rows, write_rows
from shadowsync.embedding.server import EmbeddingServer, RowStep
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import DataError
from shadowsync.rpc.connection import EMPTY
from shadowsync.rpc.pending import Promise
from shadowsync.rpc.served import Served, ask

INT = torch.int32
NAN, INFINITY = float("nan"), float("inf")
HELD = [Shard(Table("user", 40, 8, ("user",)), 0, 40), Shard(Table("item", 30, 4, ("item",)), 0, 30)]


def row(*numbers, dtype=INT):
    return torch.tensor(numbers, dtype=dtype)


IDS = Jagged(row(0, 39, 1, 2), row(0, 2, 2, 3, 4), None, 2, 2)
POOLED, COLUMNS = Lookup((0, 1), IDS, 1), (2, 12)
SINGLE, SHAPES = RowLookup((0, 1), row(0, 29, 31), 2), ((2, 4), (1, 8))
"""Two rows of item, then one of user: narrow rows have the lower numbers."""
GRADIENT = Coded((COLUMNS,), ((torch.ones(COLUMNS),),))
SUMS = Coded(SHAPES, tuple((torch.ones(shape),) for shape in SHAPES))
PUSH, STEP = Sent(5, GRADIENT, 0, 0, POOLED), Sent(5, SUMS, 0, 0, SINGLE)


def serve(push=None):
    """A server of `HELD` and a connection to it."""
    server = EmbeddingServer(HELD, TorchStorage, ADAGRAD, seed=3)
    return server, direct(EmbeddingService(server, Plain(), push or Plain()))


def pull(way, lookup, stream=0, codec=""):
    return ask(way, EmbeddingService.pull, lookup, stream, codec, ANY)


def push(way, sent, lr=0.1):
    return ask(way, EmbeddingService.push, sent, lr, ANY)


def hold(way, sent, batch=3):
    return ask(way, EmbeddingService.hold_gradients, sent, batch, ANY)


def commit(way, *step):
    return ask(way, EmbeddingService.commit, RowStep(*step), 0)


def copied(server):
    return [{name: tensor.clone() for name, tensor in rows.tensors.items()} for rows in server.state()]


def test_the_messages_that_the_others_spoil_are_good():
    server, way = serve()
    before = copied(server)
    for lookup, coded in ((POOLED, GRADIENT), (SINGLE, SUMS)):
        answer = pull(way, lookup)
        assert (answer.shapes, answer.codec) == (coded.shapes, "plain")
        for known in (True, False):
            assert push(way, Sent(lookup.number, coded, 0, 0)) is known
    changed = [
        (rows["weight"] != old["weight"]).any(1).nonzero().flatten().tolist()
        for rows, old in zip(copied(server), before, strict=True)
    ]
    assert changed == [[0, 1, 39], [0, 1, 2, 29]]
    assert push(way, PUSH)
    assert push(way, STEP)
    assert hold(way, PUSH)


def ids(**wrong):
    return replace(POOLED, ids=with_fields(IDS, **wrong))


def gradient(shapes=(COLUMNS,), frames=None, **wrong):
    frames = tuple((torch.ones(shape),) for shape in shapes) if frames is None else frames
    return replace(PUSH, gradients=Coded(shapes, frames, **wrong))


def numbers(rows, shards=(0, 1)):
    return RowLookup(shards, rows, 1)


PACKED = [(), (0,), (0, *[255] * 9), (1, 7), (2,), (2, 255), (8, 200), (8, *[1] * 10), (25, 1, 1, 1, 1)]
"""None of row numbers of these tables."""
BAD_LOOKUPS = [
    ids(values=IDS.values.float()),
    ids(offsets=IDS.offsets.float()),
    ids(offsets=torch.tensor(0, dtype=INT)),
    ids(values=IDS.values[:3], offsets=None),
    ids(values=IDS.values[:3]),
    ids(values=IDS.values.view(2, 2)),
    ids(values=row(0, 40, 1, 2)),
    ids(values=row(0, -1, 1, 2)),
    ids(offsets=IDS.offsets[:4]),
    ids(offsets=row(0, 4, 2, 3, 4)),
    ids(offsets=row(0, 2, 2, 3, 5)),
    ids(weights=torch.ones(4, dtype=torch.float64)),
    ids(weights=torch.ones(3)),
    ids(samples=3),
    ids(samples=1 << 60, offsets=None),
    ids(feature_count=1),
    replace(POOLED, slots=(0, 2)),
    replace(POOLED, slots=(0, -1)),
    replace(POOLED, slots=(0,)),
    Lookup((), Jagged(IDS.values[:0], None, None, 0, -1)),
    numbers(SINGLE.rows.float()),
    numbers(row(1, 0)),
    numbers(row(0, 0, 31)),
    numbers(row(-1, 0)),
    numbers(row(69, 70)),
    *[numbers(row(*packed, dtype=torch.uint8)) for packed in PACKED],
    numbers(row(2, 1, dtype=torch.uint8).view(1, 2)),
    numbers(SINGLE.rows, (1,)),
    numbers(SINGLE.rows, (0, 2)),
]
BAD_GRADIENTS = [
    gradient(codec="bf16"),
    gradient(frames=((),)),
    gradient(frames=()),
    gradient(frames=((torch.ones(COLUMNS), torch.ones(COLUMNS)),)),
    gradient(frames=((torch.ones(COLUMNS).double(),),)),
    gradient(frames=((torch.ones(1, 12),),)),
    gradient(((12, 2),)),
    gradient(((-2, -12),), ((torch.ones(COLUMNS),),)),
    gradient(((2, 6), (2, 6))),
    gradient(()),
    replace(PUSH, gradients=SUMS),
    replace(STEP, gradients=replace(SUMS, codec="\0")),
    replace(STEP, gradients=Coded(SHAPES, SUMS.frames[:1])),
    replace(STEP, gradients=Coded(SHAPES[::-1], SUMS.frames[::-1])),
    replace(STEP, gradients=Coded(SHAPES[:1], SUMS.frames[:1])),
]
BAD = {
    **{f"pull {number}": (pull, lookup) for number, lookup in enumerate(BAD_LOOKUPS)},
    **{
        f"{send.__name__} {number} again": (send, replace(PUSH if isinstance(lookup, Lookup) else STEP, lookup=lookup))
        for number, lookup in enumerate(BAD_LOOKUPS)
        for send in (push, hold)
    },
    **{f"{send.__name__} {number}": (send, sent) for number, sent in enumerate(BAD_GRADIENTS) for send in (push, hold)},
    **{
        f"in {codec[:9]}": (pull, lookup, 0, codec)
        for codec in ("int8", "auto", "x" * 5000)
        for lookup in (POOLED, SINGLE)
    },
    **{f"rate {lr}": (push, sent, lr) for lr in (NAN, INFINITY, -INFINITY) for sent in (PUSH, STEP)},
    "batch": (hold, PUSH, -1),
    **{
        f"step {number}": (commit, *step)
        for number, step in enumerate(
            [
                (0, {1: 1.0}, 0.0, 0.1, 0),
                (0, {1: 1.0}, NAN, 0.1, 0),
                (0, {1: NAN}, 2.0, 0.1, 0),
                (0, {1: 1.0}, None, INFINITY, 0),
            ]
        )
    },
    "no lookup": (pull, None),
    "no gradients": (push, None),
    "no step": (lambda way: way.call("forget_held").result(),),
}


@pytest.mark.parametrize("message", BAD.values(), ids=BAD)
def test_what_is_wrong_is_refused_and_changes_nothing(message):
    server, way = serve()
    before = copied(server)
    with pytest.raises(DataError):
        message[0](way, *message[1:])
    torch.testing.assert_close(copied(server), before, rtol=0, atol=0)
    assert not server.held_bytes
    assert pull(way, POOLED).shapes == (COLUMNS,)


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
    server, way = serve()
    before = copied(server)
    with pytest.raises(DataError):
        ask(way, *call)
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
    monkeypatch.setattr("shadowsync.compression.threshold.unpack", lambda *_: pytest.fail("it is unpacked"))
    _, way = serve(Threshold(feedback=False) if codec == "threshold" else Int8())
    coded = Coded(shapes, (frames,) * len(shapes), codec)
    for lookup in (POOLED, SINGLE):
        if known:
            pull(way, lookup)
        sent = Sent(lookup.number, coded, 0, 0, None if known else lookup)
        assert memory_of(lambda sent=sent: push(way, sent)) < 100_000


@pytest.mark.parametrize("shapes", HUGE)
def test_a_mask_is_unpacked_for_the_shape_of_its_look_up(shapes):
    server = EmbeddingServer(HELD, TorchStorage, ADAGRAD, seed=3)
    way = direct(EmbeddingService(server, Threshold(feedback=False), Plain()))
    coded = Coded(shapes, ((torch.ones(4),),) * len(shapes), "plain", 7)
    for lookup in (POOLED, SINGLE):
        sent = Sent(lookup.number, coded, 0, 0, lookup, (GAPS,) * len(shapes))
        assert memory_of(lambda sent=sent: push(way, sent)) < 100_000


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
    lookups = [
        Lookup((0,), Jagged(torch.tensor([1, 2]), None, None, 1, 2)),
        Lookup((1,), Jagged(torch.tensor([3, 4]), None, None, 1, 2)),
        RowLookup((0, 1), torch.tensor([3, 35])),
    ]
    for rows in server.state():
        rows.tensors["weight"].uniform_(-2, 2, generator=torch.Generator().manual_seed(1))
    ways = Channel("pull", Rounded(), WireCounter()), Channel("push", Rounded(), WireCounter())
    clients = [direct(service), direct(service)]
    proxies = [ServerProxy(way, server.shards, 0, *ways, stream) for way in clients for stream in (0, 1)]
    totals = {}
    for _ in range(40):
        for index, proxy in enumerate(proxies):
            for route, lookup in enumerate(lookups):
                for width, answer in enumerate(proxy.pull(lookup).result()):
                    totals[index, route, width] = totals.get((index, route, width), 0) + answer
    for (_, route, width), total in totals.items():
        assert float((total - 40 * server.pull(lookups[route])[width]).abs().max()) < 0.51


def test_who_only_predicts_sees_rows_as_they_are():
    server, _ = serve()
    way = direct(EmbeddingService(server, Rounded(), Rounded()))
    lookup = Lookup((0,), Jagged(torch.tensor([1, 2]), None, None, 1, 2))
    proxy = ServerProxy(way, server.shards, 0, UNCOUNTED, UNCOUNTED, stream=None)
    assert torch.equal(proxy.pull(lookup).result()[0], server.pull(lookup)[0])


def test_rows_go_out_in_chunks_and_into_servers_of_another_cut(connect):
    source, target = far(connect, CUT, ADAM), far(connect, ONE, ADAM)
    train(source.client(), 3, "multi")
    ways = zip(source.connections, CUT, strict=True)
    chunks = [chunk for way, shards in ways for chunk in read_rows(way, shards, chunk_bytes=8 * 4 * 7)]
    assert max(len(chunk.tensors["weight"]) * chunk.table.dim for chunk in chunks) == 7 * 8
    for chunk in chunks:
        for way in target.connections:
            write_rows(way, [chunk])
    (held,) = target.servers
    for rows in held.state():
        for name, tensor in rows.tensors.items():
            parts = [r for s in source.servers for r in s.state() if r.table == rows.table]
            expected = torch.cat([r.tensors[name] for r in sorted(parts, key=lambda r: r.start)])
            assert torch.equal(tensor, expected[: len(tensor)])


def test_a_row_that_is_given_out_is_a_copy():
    job = far(direct)
    rows = next(read_rows(job.connections[0], job.servers[0].shards))
    before = rows.tensors["weight"].clone()
    client = job.client()
    client.push(client.pull(random_ids(ROWS, 6, 0)), dense_gradient(6, client.width, 0), 0.1).result()
    assert torch.equal(rows.tensors["weight"], before)
    assert not torch.equal(job.servers[0].state()[0].tensors["weight"], before)


def test_rows_of_other_tables_are_passed_over_and_those_of_others_refused(connect):
    job = far(connect, [whole(TABLES[:1])])
    way, before = job.connections[0], copied(job.servers[0])
    write_rows(way, [Rows(TABLES[2], 0, {"weight": torch.ones(3, 6), "momentum": torch.ones(3)})])
    with pytest.raises(
        DataError, match=r"weight \[2, 8\] do not fit rows 38 to 39 of a shard that has weight \[2, 8\], mom"
    ):
        write_rows(way, [Rows(TABLES[0], 38, {"weight": torch.ones(2, 8)})])
    torch.testing.assert_close(copied(job.servers[0]), before, rtol=0, atol=0)


def test_a_client_learns_what_a_server_holds(connect):
    job = far(connect, CUT)
    held = [ask(way, SaveMethods.shards) for way in job.connections]
    assert held == [tuple(shards) for shards in CUT]
    assert {feature for shards in held for shard in shards for feature in shard.table.features} == set(SOURCE)
    for way, shards in zip(job.connections, CUT, strict=True):
        names = ask(way, SaveMethods.tensor_names)
        assert names == {shard.table.name: ("weight", "momentum") for shard in shards}
    pooled_in_many_ways = [Shard(table, 2, 7) for table in HISTORIES]
    (way,) = far(connect, [pooled_in_many_ways]).connections
    assert ask(way, SaveMethods.shards) == tuple(pooled_in_many_ways)


class Slow(PackedConnection):
    """Answers nothing but what a server holds until it is told to, and tells how much is under way at each call."""

    def __init__(self, service):
        super().__init__(Served(service))
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
    job = far(direct, [whole(TABLES[:1])])
    way = Slow(job.services[0])
    write_rows(way, row_chunks(way.answer))
    way.answer()
    assert way.under_way == [1] * 5, "each is sent before the next one is asked for"
    assert copied(job.servers[0])[0]["weight"][:, 0].tolist() == [float(row // 8 * 8) for row in range(40)]


def test_nothing_is_under_way_any_more_when_rows_cannot_be_read():
    job = far(direct, [whole(TABLES[:1])])
    way = Slow(job.services[0])

    def torn():
        yield next(row_chunks(lambda: None))
        threading.Thread(target=way.answer).start()
        raise DataError("torn")

    with pytest.raises(DataError, match="torn"):
        write_rows(way, torn())
    assert all(answered.done() for answered, _ in way.waiting)
