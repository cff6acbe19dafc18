"""Embedding servers behind connections: the same job to the bit, with the bytes counted alike."""

import threading

import msgspec
import pytest
import torch
from embedding_cases import (
    ADAM,
    BY_NAME,
    CLOSE,
    EACH,
    HISTORIES,
    HISTORY_SOURCE,
    KINDS,
    ROWS,
    SGD,
    TABLES,
    assert_close_rows,
    client,
    dense_gradient,
    random_ids,
    rows_of,
    train,
    train_histories,
    whole,
)
from remote_cases import CUT, ONE, direct, far, near

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.data.batch import Jagged
from shadowsync.embedding.messages import Coded, unpack_rows
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.requests import Lookup, RowLookup
from shadowsync.embedding.routing import UniqueRows
from shadowsync.embedding.server import RowStep
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Shard, Table
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import EMPTY, Connection, Payload
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.kept import KeptLimits
from shadowsync.rpc.pending import Promise
from shadowsync.rpc.served import Served, ask

MODES = {mode: UniqueRows(mode, every=2) for mode in ("never", "always", "auto")}


def assert_same_rows(found, expected, tables=TABLES):
    for table in tables:
        assert torch.equal(rows_of(found, table.name), rows_of(expected, table.name))


item, user, shop, tag, word = HISTORIES
SEQUENCE_CUT = [
    [Shard(item, 9, 30), *whole([user, word])],
    [Shard(shop, 0, 4), Shard(item, 0, 9)],
    [Shard(shop, 4, 25), *whole([tag])],
]


@pytest.mark.parametrize("codec", [None, Bf16()], ids=["plain", "bf16"])
def test_sequences_behind_a_connection_are_those_in_process(connect, codec):
    here, held_here, counted_here = client(HISTORIES, HISTORY_SOURCE, SEQUENCE_CUT, optimizer=ADAM, codec=codec)
    there = far(connect, SEQUENCE_CUT, ADAM, codec=codec)
    there.tables, there.features = HISTORIES, HISTORY_SOURCE
    assert all(map(torch.equal, train_histories(there.client(), 3), train_histories(here, 3)))
    assert_same_rows(there.servers, held_here, HISTORIES)
    assert there.counter.totals() == counted_here.totals()
    assert [service.kept for service in there.services] == [0, 0, 0]


@pytest.mark.parametrize("unique", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("kind", "codec"), [("single", None), ("multi", Bf16()), ("weighted", None)], ids=KINDS)
def test_behind_a_connection_all_is_as_in_process(connect, unique, kind, codec):
    here, held_here, counted_here = near(CUT, ADAM, codec=codec, unique=unique)
    there = far(connect, CUT, ADAM, codec=codec)
    assert all(map(torch.equal, train(there.client(unique), 3, kind), train(here, 3, kind)))
    assert_same_rows(there.servers, held_here)
    assert there.counter.totals() == counted_here.totals()
    assert [service.kept for service in there.services] == [0, 0, 0]


@EACH
@BY_NAME
@pytest.mark.parametrize("mode", ["never", "always"])
def test_every_storage_and_optimizer_may_be_served(storage, optimizer, mode):
    here, held_here, _ = near(ONE, optimizer)
    there = far(direct, CUT, optimizer, storage)
    torch.testing.assert_close(train(there.client(MODES[mode]), 3, "multi"), train(here, 3, "multi"), **CLOSE)
    assert_close_rows(there.servers, held_here)


@pytest.mark.parametrize(("mode", "codec"), [("never", None), ("always", Bf16()), ("auto", Bf16())], ids=MODES)
def test_gradients_are_held_and_committed_as_in_process(connect, mode, codec):
    unique = MODES[mode]
    here, held_here, counted_here = near(CUT, ADAM, codec=codec, unique=unique)
    there = far(connect, CUT, ADAM, codec=codec)
    for job in (here, there.client(unique)):
        for number in range(3):
            pulled = job.pull(random_ids(ROWS, 6, number))
            job.hold(pulled, dense_gradient(6, job.width, number), number).result()
    step = RowStep(0, {0: 1.0, 2: 1.0}, None, 0.1, 3)
    for server in held_here:
        server.commit(step)
    held = [server.held_bytes for server in there.servers]
    assert all(held)
    assert [ask(way, EmbeddingService.commit, step, 0) for way in there.connections] == held
    assert [ask(way, EmbeddingService.commit, step, 0) for way in there.connections] == [0, 0, 0]
    assert_same_rows(there.servers, held_here)
    assert there.counter.totals() == counted_here.totals()
    assert [server.held_bytes for server in there.servers] == [0, 0, 0]
    for way in there.connections:
        ask(way, EmbeddingService.forget_held, -1, 0)
        ask(way, EmbeddingService.commit, step, 0)
    assert_same_rows(there.servers, held_here)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_look_up_that_is_kept_no_more_comes_again_and_is_applied_once(connect, mode):
    here, held_here, counted_here = near(CUT, SGD)
    there = far(connect, CUT, SGD, limits=KeptLimits(count=2))
    job = there.client(MODES[mode])
    batches = [random_ids(ROWS, 6, step) for step in range(5)]
    for ahead, gradient in [(job.pull(ids), dense_gradient(6, job.width, 1)) for ids in batches]:
        job.push(ahead, gradient, 0.1).result()
    for ids in batches:
        here.push(here.pull(ids), dense_gradient(6, here.width, 1), 0.1).result()
    assert_close_rows(there.servers, held_here)
    if mode == "never":
        more = there.counter.totals().bytes["push"] - counted_here.totals().bytes["push"]
        assert 0 < more < counted_here.totals().bytes["pull"]


def test_look_ups_are_bounded_in_number_and_bytes_and_go_with_their_client(connect):
    few = far(connect, limits=KeptLimits(count=3))
    job = few.client()
    for step in range(10):
        job.pull(random_ids(ROWS, 6, step, "single"))
    assert few.services[0].kept == 3
    small = far(connect, limits=KeptLimits(bytes=2 * 7 * 6 * 8))  # of two batches
    jobs = small.client(), small.client(MODES["always"], stream=1)
    for step in range(10):
        jobs[0].pull(random_ids(ROWS, 6, step, "single"))
    assert small.services[0].kept == 2
    for step in range(10):
        jobs[1].pull(random_ids(ROWS, 6, step, "single"))
    assert 2 <= small.services[0].kept <= 6
    small.services[0].client_gone("somebody else")
    assert small.services[0].kept
    small.services[0].client_gone(small.connections[0].client)
    assert not small.services[0].kept


def test_nothing_is_kept_for_a_client_that_only_predicts(connect):
    there = far(connect)
    for mode in ("never", "always"):
        there.client(MODES[mode], stream=None).pull(random_ids(ROWS, 6, 0))
    assert there.services[0].kept == 0


@pytest.mark.parametrize("mode", ["never", "always"])
def test_workers_that_share_a_connection_do_not_get_each_others_look_ups(connect, mode):
    here, held_here, _ = near(CUT, SGD)
    there = far(connect, CUT, SGD)
    jobs = [there.client(MODES[mode], stream) for stream in (0, 1)]
    pulled = [job.pull(random_ids(ROWS, 6, step)) for step, job in enumerate(jobs)]
    for step in (1, 0):
        jobs[step].push(pulled[step], dense_gradient(6, here.width, step), 0.1).result()
        here.push(here.pull(random_ids(ROWS, 6, step)), dense_gradient(6, here.width, step), 0.1)
    assert_close_rows(there.servers, held_here)


def test_pushes_of_many_threads_are_all_applied(connect):
    there, (here, held_here, _) = far(connect, CUT, SGD), near(CUT, SGD)

    def work(stream):
        job = there.client(MODES["always" if stream % 2 else "never"], stream)
        # rows that no other thread looks up: steps of one row without a lock may be lost
        for step in range(5):
            job.push(job.pull(own_rows(stream, step)), dense_gradient(6, job.width, step), 0.1).result()

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in range(3):
        for step in range(5):
            here.push(here.pull(own_rows(stream, step)), dense_gradient(6, here.width, step), 0.1)
    assert_close_rows(there.servers, held_here)


def own_rows(stream, step):
    ids = random_ids([rows // 3 for rows in ROWS], 6, 10 * stream + step, "single")
    return Jagged(3 * ids.values + stream, None, None, ids.feature_count, ids.samples)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("bad", [-1, 40, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_an_id_that_is_no_row_is_refused_before_it_is_narrowed(bad, mode):
    there = far(direct)
    ids = random_ids(ROWS, 6, 0, "single")
    ids.values[6] = bad
    with pytest.raises(DataError, match=rf"^feature user: id {bad} is not a row of table user, which has rows 0 to 39"):
        there.client(MODES[mode]).pull(ids)
    assert there.counter.totals().bytes == {}


@pytest.mark.parametrize("mode", ["never", "always"])
def test_an_empty_batch_is_nothing(connect, mode):
    there = far(connect, CUT)
    job = there.client(MODES[mode])
    pulled = job.pull(random_ids(ROWS, 0, 0))
    assert pulled.pooled.shape == (0, job.width)
    job.push(pulled, torch.zeros(0, job.width), 0.1).result()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_server_that_is_replaced_is_reached_again_and_brought_the_ids(wire, mode):
    """The gradient of a pull from the old server is applied by the new one, once."""
    there, (here, held_here, _) = (
        far(lambda service: wire.connect(wire.serve(Served(service)).address), ONE, SGD),
        near(ONE, SGD),
    )
    job, ids = there.client(MODES[mode]), random_ids(ROWS, 6, 0)
    pulled = job.pull(ids)
    new = far(direct, ONE, SGD)  # as a restarted server: the same rows, nothing kept
    there.connections[0].redirect(wire.serve(Served(new.services[0])).address)
    job.push(pulled, dense_gradient(6, job.width, 0), 0.1).result()
    here.push(here.pull(ids), dense_gradient(6, here.width, 0), 0.1)
    assert_close_rows(new.servers, held_here)
    torch.testing.assert_close(job.pull(ids).pooled, here.pull(ids).pooled, **CLOSE)


class Slow(Connection):
    """A connection whose answers come when they are told to."""

    client = "slow"

    def __init__(self):
        self.calls = []

    def call(self, method, payload=EMPTY, timeout_s=None):
        self.calls.append((payload.tensors, Promise()))
        return self.calls[-1][-1]

    def close(self):
        raise AssertionError("the connection belongs to others")

    def answer(self, value):
        self.calls[-1][-1].keep(Payload(msgspec.msgpack.encode(value)))


USER = (Shard(TABLES[0], 0, 40),)
LOOKUP = Lookup((0,), random_ids([40], 6, 0), 17)


def slow_proxy(shards=USER):
    slow, counter = Slow(), WireCounter()
    return slow, ServerProxy(slow, shards, 0, *(Channel(kind, Plain(), counter) for kind in ("pull", "push")))


def test_a_push_ends_with_its_acknowledgement():
    slow, proxy = slow_proxy()
    pushed = proxy.push(LOOKUP, [torch.ones(6, 8)], 0.1)
    assert not pushed.done()
    slow.answer(True)
    assert pushed.result() is None
    ((tensors, _),) = slow.calls
    assert len(tensors) == 1


def test_an_unknown_look_up_comes_again_once():
    slow, proxy = slow_proxy()
    pushed = proxy.push(LOOKUP, [torch.ones(6, 8)], 0.1)
    slow.answer(False)
    assert not pushed.done()
    (first, _), (second, _) = slow.calls
    assert [tensor.dtype for tensor in second] == [torch.float32, torch.int32, torch.int32]
    assert second[0] is first[0], "encoded once, so that what a codec holds back is not sent twice"
    slow.answer(False)
    with pytest.raises(RunError, match="does not accept a push that brings its ids"):
        pushed.result()
    assert len(slow.calls) == 2


def test_what_goes_wrong_on_the_way_is_raised():
    slow, proxy = slow_proxy()
    for start in (lambda: proxy.push(LOOKUP, [torch.ones(6, 8)], 0.1), lambda: proxy.pull(LOOKUP)):
        end, told = start(), []
        end.then(told.append)
        slow.calls[-1][-1].fail(PeerLost("gone"))
        with pytest.raises(PeerLost, match="gone"):
            end.result()
        assert isinstance(told[0], PeerLost)
    nonsense = proxy.push(LOOKUP, [torch.ones(6, 8)], 0.1)
    slow.answer("nonsense")
    with pytest.raises(DataError, match="the answer of push is not what it should be"):
        nonsense.result()


@pytest.mark.parametrize("shapes", [(), ((1 << 40, 8),), ((8, 6),), ((6, 8), (6, 8))], ids=str)
def test_an_answer_of_other_shapes_is_refused_before_memory_is_taken(shapes):
    slow, proxy = slow_proxy()
    for lookup, asked in ((LOOKUP, r"\[6, 8\]"), (RowLookup((0,), torch.tensor([1, 5]), 3), r"\[2, 8\]")):
        pulled = proxy.pull(lookup)
        slow.answer(Coded(shapes, ((),) * len(shapes), "plain"))
        with pytest.raises(DataError, match=f"^vectors of .* do not fit a look-up whose answer is {asked}$"):
            pulled.result()


def test_a_gradient_is_sent_as_it_lies_in_memory():
    slow, proxy = slow_proxy()
    proxy.push(LOOKUP, [torch.ones(8, 6).t()], 0.1)
    assert slow.calls[-1][0][0].is_contiguous()


def test_ids_are_narrow_where_rows_fit():
    slow, proxy = slow_proxy()
    proxy.pull(LOOKUP)
    assert [tensors[0].dtype for tensors, _ in slow.calls] == [torch.int32]
    long = Table("long", 2**31 + 1, 4, ("long",))
    halves = tuple(Shard(long, *edges) for edges in ((0, 2**30), (2**30, long.rows)))
    for shards, at, row, dtype in (
        ((Shard(long, 0, long.rows),), 0, 2**31, torch.int64),
        (halves, 1, 2**30, torch.int32),
    ):
        slow, proxy = slow_proxy(shards)
        proxy.pull(Lookup((at,), Jagged(torch.tensor([row]), None, None, 1, 1)))
        proxy.pull(RowLookup((at,), torch.tensor([2**31])))
        ((ids,), _), ((rows,), _) = slow.calls
        assert (ids.dtype, ids.tolist(), unpack_rows(rows, long.rows).tolist()) == (dtype, [row], [2**31])


def test_what_a_server_should_refuse_is_not_turned_into_other_rows():
    for rows in ([3, 3], [5, 4], [-1, 2], [2**32]):
        slow, proxy = slow_proxy()
        proxy.pull(RowLookup((0,), torch.tensor(rows)))
        assert slow.calls[0][0][0].tolist() == rows
