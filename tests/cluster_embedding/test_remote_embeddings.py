"""Embedding servers behind connections: the same job to the bit, with the bytes counted alike."""

import threading

import pytest
import torch
from embedding_cases import (
    ADAM,
    CLOSE,
    KINDS,
    OPTIMIZERS,
    ROWS,
    SGD,
    STORAGES,
    TABLES,
    dense_gradient,
    random_ids,
    rows_of,
    train,
)
from remote_cases import CUT, ONE, far, near

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel
from shadowsync.compression.plain import Plain
from shadowsync.data.batch import Jagged
from shadowsync.embedding.messages import Coded, PushAsked, Pushed
from shadowsync.embedding.remote import EmbeddingRemote, Remote
from shadowsync.embedding.requests import unpack_rows
from shadowsync.embedding.routing import UniqueRows
from shadowsync.embedding.server import Lookup, RowLookup, RowStep
from shadowsync.embedding.table import Shard, Table
from shadowsync.errors import DataError, RunError
from shadowsync.metrics.wire import WireCounter
from shadowsync.rpc.connection import Connection, DirectConnection
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.kept import KeptLimits
from shadowsync.rpc.pending import Promise
from shadowsync.rpc.service import EMPTY, Payload

MODES = {mode: UniqueRows(mode, every=2) for mode in ("never", "always", "auto")}


def assert_same_rows(found, expected):
    for table in TABLES:
        assert torch.equal(rows_of(found, table.name), rows_of(expected, table.name))


@pytest.mark.parametrize("unique", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [None, Bf16()], ids=["plain", "bf16"])
def test_behind_a_connection_all_is_as_in_process(connect, unique, kind, codec):
    here, held_here, counted_here = near(CUT, ADAM, codec=codec, unique=unique)
    there = far(connect, CUT, ADAM, codec=codec)
    assert all(map(torch.equal, train(there.client(unique), 3, kind), train(here, 3, kind)))
    assert_same_rows(there.servers, held_here)
    assert there.counter.totals() == counted_here.totals()
    assert [service.kept for service in there.services] == [0, 0, 0]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("mode", ["never", "always"])
def test_every_storage_and_optimizer_may_be_served(connect, storage, optimizer, mode):
    here, held_here, _ = near(ONE, optimizer)
    there = far(connect, CUT, optimizer, storage)
    torch.testing.assert_close(train(there.client(MODES[mode]), 3, "multi"), train(here, 3, "multi"), **CLOSE)
    for table in TABLES:
        torch.testing.assert_close(rows_of(there.servers, table.name), rows_of(held_here, table.name), **CLOSE)


@pytest.mark.parametrize("unique", MODES.values(), ids=MODES)
@pytest.mark.parametrize("codec", [None, Bf16()], ids=["plain", "bf16"])
def test_gradients_are_held_and_committed_as_in_process(connect, unique, codec):
    here, held_here, counted_here = near(CUT, ADAM, codec=codec, unique=unique)
    there = far(connect, CUT, ADAM, codec=codec)
    for job in (here, there.client(unique)):
        for number in range(3):
            pulled = job.pull(random_ids(ROWS, 6, number))
            job.hold(pulled, dense_gradient(6, job.width, number), number).result()
    step = RowStep(0, {0: 1.0, 2: 1.0}, None, 0.1, 3)
    for server in held_here:
        server.commit(step)
    ways = [EmbeddingRemote(Remote(way, (), 0), *there.lines) for way in there.connections]
    held = [server.held_bytes for server in there.servers]
    assert all(held)
    assert [way.commit(step).result() for way in ways] == held
    assert [way.commit(step).result() for way in ways] == [0, 0, 0]
    assert_same_rows(there.servers, held_here)
    assert there.counter.totals() == counted_here.totals()
    assert [server.held_bytes for server in there.servers] == [0, 0, 0]
    for way in ways:
        way.forget_held(-1).result()
        way.commit(step).result()
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
    for table in TABLES:
        torch.testing.assert_close(rows_of(there.servers, table.name), rows_of(held_here, table.name), **CLOSE)
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
        there.client(MODES[mode], learns=False).pull(random_ids(ROWS, 6, 0))
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
    for table in TABLES:
        torch.testing.assert_close(rows_of(there.servers, table.name), rows_of(held_here, table.name), **CLOSE)


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
    for table in TABLES:
        torch.testing.assert_close(rows_of(there.servers, table.name), rows_of(held_here, table.name), **CLOSE)


def own_rows(stream, step):
    ids = random_ids([rows // 3 for rows in ROWS], 6, 10 * stream + step, "single")
    return Jagged(3 * ids.values + stream, None, None, ids.feature_count, ids.samples)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("bad", [-1, 40, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_an_id_that_is_no_row_is_refused_before_it_is_narrowed(connect, bad, mode):
    there = far(connect)
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
        far(lambda service: wire.connect(wire.serve(service).address), ONE, SGD),
        near(ONE, SGD),
    )
    job, ids = there.client(MODES[mode]), random_ids(ROWS, 6, 0)
    pulled = job.pull(ids)
    new = far(DirectConnection, ONE, SGD)  # as a restarted server: the same rows, nothing kept
    there.connections[0].redirect(wire.serve(new.services[0]).address)
    job.push(pulled, dense_gradient(6, job.width, 0), 0.1).result()
    here.push(here.pull(ids), dense_gradient(6, here.width, 0), 0.1)
    for table in TABLES:
        torch.testing.assert_close(rows_of(new.servers, table.name), rows_of(held_here, table.name), **CLOSE)
    torch.testing.assert_close(job.pull(ids).pooled, here.pull(ids).pooled, **CLOSE)


class Slow(Connection):
    """A connection whose answers come when they are told to."""

    client = "slow"

    def __init__(self):
        self.calls = []

    def call(self, method, payload=EMPTY, timeout_s=None):
        self.calls.append((payload, Promise()))
        return self.calls[-1][-1]

    def close(self):
        raise AssertionError("the connection belongs to others")

    def answer(self, known):
        self.calls[-1][-1].keep(Payload.of(Pushed(known)))


USER = (Shard(TABLES[0], 0, 40),)
LOOKUP = Lookup((0,), random_ids([40], 6, 0), 17)


def slow_remote(shards=USER):
    slow, counter = Slow(), WireCounter()
    return slow, EmbeddingRemote(
        Remote(slow, shards, 0), Channel("pull", Plain(), counter), Channel("push", Plain(), counter)
    )


def test_a_push_ends_with_its_acknowledgement():
    slow, remote = slow_remote()
    pushed = remote.push(LOOKUP, torch.ones(6, 8), 0.1)
    assert not pushed.done()
    slow.answer(known=True)
    assert pushed.result() is None
    ((sent, _),) = slow.calls
    meta = sent.read(PushAsked)
    assert (meta.number, meta.ids, len(sent.tensors)) == (17, None, 1)


def test_an_unknown_look_up_comes_again_once():
    slow, remote = slow_remote()
    pushed = remote.push(LOOKUP, torch.ones(6, 8), 0.1)
    slow.answer(known=False)
    assert not pushed.done()
    (first, _), (second, _) = slow.calls
    assert second.read(PushAsked).ids.slots == (0,)
    assert [tensor.dtype for tensor in second.tensors] == [torch.int32, torch.int32, torch.float32]
    assert second.tensors[-1] is first.tensors[0], "encoded once, so that what a codec holds back is not sent twice"
    slow.answer(known=False)
    with pytest.raises(RunError, match="does not accept a push that brings its ids"):
        pushed.result()
    assert len(slow.calls) == 2


def test_what_goes_wrong_on_the_way_is_raised():
    slow, remote = slow_remote()
    for start in (lambda: remote.push(LOOKUP, torch.ones(6, 8), 0.1), lambda: remote.pull(LOOKUP)):
        end, told = start(), []
        end.then(told.append)
        slow.calls[-1][-1].fail(PeerLost("gone"))
        with pytest.raises(PeerLost, match="gone"):
            end.result()
        assert isinstance(told[0], PeerLost)
    nonsense = remote.push(LOOKUP, torch.ones(6, 8), 0.1)
    slow.calls[-1][-1].keep(Payload(b"nonsense"))
    with pytest.raises(DataError, match="does not hold a Pushed"):
        nonsense.result()


@pytest.mark.parametrize("shapes", [(), ((1 << 40, 8),), ((8, 6),), ((6, 8), (6, 8))], ids=str)
def test_an_answer_of_other_shapes_is_refused_before_memory_is_taken(shapes):
    slow, remote = slow_remote()
    rows = RowLookup((0,), torch.tensor([1, 5]), 3)
    for ask, asked in ((lambda: remote.pull(LOOKUP), r"\[6, 8\]"), (lambda: remote.read_rows(rows), r"\[2, 8\]")):
        pulled = ask()
        slow.calls[-1][-1].keep(Payload.of(Coded(shapes, (0,) * len(shapes), "plain")))
        with pytest.raises(DataError, match=f"^vectors of .* do not fit a look-up whose answer is {asked}$"):
            pulled.result()


def test_a_gradient_is_sent_as_it_lies_in_memory():
    slow, remote = slow_remote()
    remote.push(LOOKUP, torch.ones(8, 6).t(), 0.1)
    assert slow.calls[-1][0].tensors[0].is_contiguous()


def test_ids_are_narrow_where_rows_fit():
    slow, remote = slow_remote()
    remote.pull(LOOKUP)
    assert [payload.tensors[0].dtype for payload, _ in slow.calls] == [torch.int32]
    long = Table("long", 2**31 + 1, 4, ("long",))
    slow, remote = slow_remote((Shard(long, 0, long.rows),))
    remote.pull(Lookup((0,), Jagged(torch.tensor([2**31]), None, None, 1, 1)))
    remote.read_rows(RowLookup((0,), torch.tensor([2**31])))
    assert slow.calls[0][0].tensors[0].tolist() == unpack_rows(slow.calls[1][0].tensors, long.rows).tolist() == [2**31]
    halves = tuple(Shard(long, *edges) for edges in ((0, 2**30), (2**30, long.rows)))
    slow, remote = slow_remote(halves)
    remote.pull(Lookup((1,), Jagged(torch.tensor([2**30]), None, None, 1, 1)))
    remote.read_rows(RowLookup((1,), torch.tensor([2**31])))
    assert slow.calls[0][0].tensors[0].dtype == torch.int32
    assert unpack_rows(slow.calls[1][0].tensors, long.rows).tolist() == [2**31]


def test_what_a_server_should_refuse_is_not_turned_into_other_rows():
    for rows in ([3, 3], [5, 4], [-1, 2], [2**32]):
        slow, remote = slow_remote()
        remote.read_rows(RowLookup((0,), torch.tensor(rows)))
        assert slow.calls[0][0].tensors[0].tolist() == rows
