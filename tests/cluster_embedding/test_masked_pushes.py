"""The cut (DCT-MP): gradients go back under the mask of their pull, in process and over the wire alike."""

import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, KINDS, ROWS, SGD, TABLES, client, dense_gradient, random_ids, table, whole
from remote_cases import CUT, ONE, direct, far, near

from shadowsync.compression.auto import Auto
from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel
from shadowsync.compression.low_bit import Int4, Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.data.batch import Jagged
from shadowsync.embedding.messages import Coded, Sent
from shadowsync.embedding.proxy import ANY, ServerProxy
from shadowsync.embedding.requests import Lookup, RowLookup
from shadowsync.embedding.routing import UniqueRows
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import DataError
from shadowsync.rpc.kept import Kept, KeptLimits
from shadowsync.rpc.served import ask

SAMPLES = 24
THIRD = Threshold(keep=0.3, feedback=False)
MODES = {mode: UniqueRows(mode, every=2) for mode in ("never", "always")}
PUSHES = [Plain(), Bf16(), Int8(), Int4(rounding="stochastic"), Threshold(values="int8", feedback=False)]
PULLS = [
    THIRD,
    Threshold(keep=0.3, values="int4", rounding="stochastic", feedback=False),
    Threshold(keep=0.3, scope="group", feedback=False),
    Threshold(keep=1, feedback=False),
]


def weights(servers):
    return [tensor for server in servers for rows in server.state() for tensor in rows.tensors.values()]


def run(job, steps=4, kind="multi", hold=False):
    found = []
    for step in range(steps):
        pulled = job.pull(random_ids(ROWS, SAMPLES, step, kind))
        gradient = dense_gradient(SAMPLES, job.width, step)
        (job.hold(pulled, gradient, step) if hold else job.push(pulled, gradient, 0.1)).result()
        found.append(pulled.pooled)
    return found


def assert_same(there, here, held_here, counted_here, **how):
    for found, expected in zip(run(there.client(how.pop("unique")), **how), run(here, **how), strict=True):
        assert torch.equal(found, expected)
    assert all(map(torch.equal, weights(there.servers), weights(held_here)))
    assert there.counter.totals() == counted_here.totals()


@pytest.mark.parametrize("unique", MODES.values(), ids=MODES)
@pytest.mark.parametrize("push", PUSHES, ids=lambda codec: codec.name)
def test_behind_a_connection_all_is_as_in_process(connect, unique, push):
    here = near(CUT, ADAM, codec=THIRD, push=push, unique=unique)
    there = far(connect, CUT, ADAM, codec=THIRD, push=push)
    assert_same(there, *here, unique=unique)
    assert [service.kept for service in there.services] == [0, 0, 0]


@pytest.mark.parametrize("pull", PULLS, ids=["fp32", "int4", "group", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_whatever_the_pull_keeps(pull, kind):
    here = near(CUT, ADAGRAD, codec=pull, push=Int8())
    assert_same(far(direct, CUT, ADAGRAD, codec=pull, push=Int8()), *here, unique=MODES["never"], kind=kind)


@pytest.mark.parametrize("unique", MODES.values(), ids=MODES)
def test_held_gradients_have_their_masks_too(connect, unique):
    here, there = near(CUT, SGD, codec=THIRD, unique=unique), far(connect, CUT, SGD, codec=THIRD)
    assert_same(there, *here, unique=unique, hold=True)
    held = [[server.held_bytes for server in servers] for servers in (there.servers, here[1])]
    assert held[0] == held[1]
    assert all(held[0])


def test_keeping_everything_is_the_plain_job_bit_for_bit(connect):
    here, held_here, counted_here = near(CUT, ADAM)
    there = far(connect, CUT, ADAM, codec=Threshold(keep=1, feedback=False), push=Plain())
    assert all(map(torch.equal, run(there.client()), run(here)))
    assert all(map(torch.equal, weights(there.servers), weights(held_here)))
    assert there.counter.totals().bytes == counted_here.totals().bytes
    assert there.counter.totals().kept_shares == {"pull": 1, "push": 1}


def test_the_model_sees_zeros_where_nothing_came_and_nothing_is_learnt_there():
    tables = [table("a", 500, 8), table("b", 500, 8)]
    job, (server,), counter = client(tables, ["a", "b"], [whole(tables)], optimizer=SGD, codec=THIRD, push=Plain())
    before = [rows.tensors["weight"].clone() for rows in server.state()]
    ids = Jagged(torch.stack([torch.randperm(500)[:64] for _ in tables]).flatten(), None, None, 2, 64)
    (exact,), found = server.pull(Lookup((0, 1), ids)), job.pull(ids)
    job.push(found, torch.ones(64, 16), 0.5).result()
    pulled = found.pooled
    came = pulled != 0
    assert int(came.sum()) == round(0.3 * 64 * 16)
    assert torch.equal(pulled[came], exact[came])
    change = torch.cat(
        [
            old[own] - rows.tensors["weight"][own]
            for old, rows, own in zip(before, server.state(), ids.values.view(2, -1), strict=True)
        ],
        1,
    )
    torch.testing.assert_close(change, came * 0.5, rtol=0, atol=1e-6)
    assert counter.totals().bytes["push"] == 4 * int(came.sum()), "positions do not cross again"
    assert counter.totals().kept_shares["push"] == pytest.approx(0.3, abs=1e-3)


def test_every_feature_has_a_threshold_of_its_own_where_groups_are_asked_for():
    tables = [table("large", 300, 8), table("small", 300, 4)]
    features = [each.name for each in tables]
    ids = random_ids([300, 300], 64, 0, "single")
    shares = {}
    for scope in ("tensor", "group"):
        codec = Threshold(keep=0.25, scope=scope, feedback=False)
        job, (server,), _ = client(tables, features, [whole(tables)], codec=codec, push=Plain())
        server.state()[1].tensors["weight"].mul_(1e-3)
        pulled = job.pull(ids).pooled
        shares[scope] = [float((part != 0).float().mean()) for part in (pulled[:, :8], pulled[:, 8:])]
    assert shares["tensor"][1] == 0
    assert shares["group"] == pytest.approx([0.25, 0.25], abs=0.01)


@pytest.mark.parametrize(("mode", "push"), [("never", Plain()), ("always", Int8())], ids=["pooled", "rows"])
def test_a_mask_that_the_server_keeps_no_more_comes_again(connect, mode, push):
    here, held_here, counted_here = near(CUT, SGD, codec=THIRD, push=push, unique=MODES[mode])
    there = far(connect, CUT, SGD, codec=THIRD, push=push, limits=KeptLimits(count=2))
    batches = [random_ids(ROWS, SAMPLES, step) for step in range(5)]
    for job in (here, there.client(MODES[mode])):
        ahead = [(job.pull(ids), dense_gradient(SAMPLES, job.width, step)) for step, ids in enumerate(batches)]
        for pulled, gradient in ahead:
            job.push(pulled, gradient, 0.1).result()
    assert all(map(torch.equal, weights(there.servers), weights(held_here)))
    assert there.counter.totals().bytes["push"] > counted_here.totals().bytes["push"]
    assert there.counter.totals().kept == counted_here.totals().kept


def test_a_gradient_whose_mask_the_client_dropped_goes_whole(connect):
    limits = KeptLimits(count=2)
    here, held_here, counted_here = near(ONE, SGD, codec=THIRD, push=Plain(), limits=limits)
    there = far(connect, ONE, SGD, codec=THIRD, push=Plain())
    for job in (here, there.client(limits=limits)):
        ahead = [job.pull(random_ids(ROWS, SAMPLES, step, "single")) for step in range(3)]
        for pulled in ahead:
            job.push(pulled, dense_gradient(SAMPLES, job.width, 1), 0.1).result()
    assert all(map(torch.equal, weights(there.servers), weights(held_here)))
    assert there.counter.totals() == counted_here.totals()
    elements = SAMPLES * here.width
    assert counted_here.totals().bytes["push"] == pytest.approx(4 * elements * 1.6, rel=0.05)


AUTO = Auto(strongest="threshold", keep=0.3)


class Chosen:
    def __init__(self, codec):
        self.codec = codec


@pytest.mark.parametrize(
    ("mode", "push"), [("never", "plain"), ("always", "int4"), ("never", "threshold"), ("always", "threshold")]
)
@pytest.mark.parametrize(("pull", "later"), [("threshold", "plain"), ("bf16", "threshold")])
def test_what_auto_sends_pulls_in_when_the_push_goes_is_nothing_to_it(connect, pull, later, push, mode):
    unique = MODES[mode]
    here, held_here, counted_here = near(CUT, ADAM, codec=AUTO.level(pull), push=AUTO.level(push), unique=unique)
    there, pulls, pushes = far(connect, CUT, ADAM, codec=AUTO), Chosen(pull), Chosen(push)
    there.lines = (
        Channel("pull", AUTO, there.counter, chosen=lambda: pulls.codec),
        Channel("push", AUTO, there.counter, chosen=lambda: pushes.codec),
    )
    remote = there.client(unique)
    for step in range(3):
        pulls.codec = pull
        jobs = [(job, job.pull(random_ids(ROWS, SAMPLES, step))) for job in (here, remote)]
        assert torch.equal(jobs[0][1].pooled, jobs[1][1].pooled)
        pulls.codec = later
        for job, pulled in jobs:
            job.push(pulled, dense_gradient(SAMPLES, here.width, step), 0.1).result()
    assert all(map(torch.equal, weights(there.servers), weights(held_here)))
    assert there.counter.totals() == counted_here.totals()
    thresholded = {"pull": {pull}, "push": {pull, push}}
    assert set(there.counter.totals().kept) == {kind for kind, codecs in thresholded.items() if "threshold" in codecs}


SHAPE = (64, 8)
LOOKUP = Lookup((0,), Jagged(torch.arange(64), None, None, 1, 64), 1)
ROWS_OF_IT = RowLookup((0,), torch.arange(64), 1)
VALUES = torch.ones(153)
"""Of a third of the elements, whose positions are …"""
POSITIONS = torch.tensor([0] + [255] * 19 + [128] + [0] * 44, dtype=torch.uint8)


def served():
    server = EmbeddingServer(whole([table("a", 64, 8)]), TorchStorage, SGD, seed=3)
    service = EmbeddingService(server, THIRD, Plain())
    return server, service, direct(service)


def asked(way):
    return ask(way, EmbeddingService.pull, LOOKUP, 0, "", ANY).mask


def pushed(way, mask, values=(VALUES,), shape=SHAPE, lookup=None, masks=()):
    sent = Sent(1, Coded((shape,), (values,), mask=mask), 0, 0, lookup, masks)
    return ask(way, EmbeddingService.push, sent, 0.1, ANY)


def test_a_pull_that_was_answered_twice_is_pushed_under_the_mask_that_arrived():
    _, _, way = served()
    first, second = asked(way), asked(way)
    assert first != second
    assert not pushed(way, first)
    assert pushed(way, first, lookup=LOOKUP, masks=(POSITIONS,))


BAD = {
    "no positions": ((VALUES,), ()),
    "positions of another form": ((torch.ones(1),), (torch.tensor([77, 1], dtype=torch.uint8),)),
    "positions that are numbers": ((VALUES,), (torch.ones(3),)),
    "another number of values": ((VALUES,), (torch.tensor([0] + [255] * 64, dtype=torch.uint8),)),
    "a mask too many": ((VALUES,), (POSITIONS, POSITIONS)),
    "a frame too many": ((torch.ones(SHAPE), torch.ones(SHAPE)), (torch.empty(0, dtype=torch.uint8),)),
}


@pytest.mark.parametrize("lookup", [LOOKUP, ROWS_OF_IT], ids=["pooled", "rows"])
@pytest.mark.parametrize(("values", "masks"), BAD.values(), ids=BAD)
def test_a_mask_that_cannot_be_is_refused_and_changes_nothing(values, masks, lookup):
    server, _, way = served()
    before = [tensor.clone() for tensor in weights([server])]
    with pytest.raises(DataError):
        pushed(way, 0, values, lookup=lookup, masks=masks)
    assert all(map(torch.equal, weights([server]), before))


def test_a_push_under_the_mask_of_another_shape_is_refused():
    _, _, way = served()
    for shape in ((1, 8), (64, 9)):
        mask = asked(way)
        with pytest.raises(DataError):
            pushed(way, mask, shape=shape)


def test_a_push_that_goes_again_is_counted_again_and_its_mask_only_as_sent():
    server, service, way = served()
    counter = WireCounter()
    channels = (Channel(kind, codec, counter) for kind, codec in (("pull", THIRD), ("push", Plain())))
    proxy = ServerProxy(way, server.shards, 0, *channels)
    counted = []
    for forgets in (False, True):
        proxy.pull(LOOKUP).result()
        if forgets:
            service.client_gone(way.client)
        before = counter.totals()
        proxy.push(LOOKUP, [torch.ones(SHAPE)], 0.0).result()
        after = counter.totals()
        sent, raw = (after.bytes["push"], after.raw_bytes["push"])
        counted.append((sent - before.bytes.get("push", 0), raw - before.raw_bytes.get("push", 0)))
    (once, raw), (twice, raw_twice) = counted
    ids, mask = 64 * 4, 65
    assert once == pytest.approx(0.3 * 512 * 4, abs=8)
    assert (raw, raw_twice) == (512 * 4, 2 * 512 * 4 + ids)
    assert 2 * once + ids < twice <= 2 * once + ids + mask


def test_rows_have_one_threshold_for_each_width():
    server = EmbeddingServer(whole(TABLES), TorchStorage, SGD, seed=3)
    codec = Threshold(keep=0.25, scope="group", feedback=False)
    proxy = ServerProxy.near(server, 0, Channel("pull", codec, WireCounter()), Channel("push", Plain(), WireCounter()))
    rows = proxy.pull(RowLookup(tuple(range(5)), torch.arange(server.numbers.total))).result()
    shares = [float((part != 0).float().mean()) for part in rows if part.numel() >= 256]
    assert shares == pytest.approx([0.25] * len(shares), abs=0.02)
    assert len(shares) == 1


def test_what_is_kept_is_bounded_in_number_and_bytes():
    kept = Kept(KeptLimits(count=3, bytes=100))
    for key, size in enumerate((10, 60, 30, 20)):
        kept.keep(key, str(key), size)
    assert [kept.take(key) for key in range(4)] == [None, None, "2", "3"]
    kept.keep(7, "old", 99)
    kept.keep(7, "new", 99)
    assert (len(kept), kept.take(7), kept.take(7)) == (1, "new", None)
