"""The client: any placement gives the same, and bytes are counted as on a wire."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from embedding_cases import (
    ADAGRAD,
    ADAM,
    BY_NAME,
    CLOSE,
    EACH,
    KINDS,
    ROWS,
    SGD,
    SOURCE,
    TABLES,
    assert_close_rows,
    client,
    dense_gradient,
    jagged,
    placements,
    random_ids,
    rows_of,
    table,
    train,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.bf16 import Bf16
from shadowsync.data.batch import Jagged
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.requests import mean_weighted
from shadowsync.embedding.routing import NEVER, UniqueRows
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import ConfigError, DataError
from shadowsync.rpc.pending import Promise


@EACH
@BY_NAME
@settings(deadline=None, max_examples=10, derandomize=True)
@given(servers=placements(), kind=st.sampled_from(KINDS), unique=st.sampled_from([NEVER, UniqueRows("always")]))
def test_any_placement_and_place_of_pooling_gives_the_same_outputs_and_rows(storage, optimizer, servers, kind, unique):
    one, held_by_one, _ = client(TABLES, SOURCE, [whole(TABLES)], storage, optimizer)
    many, held_by_many, _ = client(TABLES, SOURCE, servers, storage, optimizer, unique=unique)
    torch.testing.assert_close(train(many, 3, kind), train(one, 3, kind), **CLOSE)
    assert_close_rows(held_by_many, held_by_one)


@EACH
@pytest.mark.parametrize("cut", [1, 10, 39])
def test_a_table_of_two_parts_is_exactly_one_of_one_part(storage, cut):
    user = TABLES[0]
    one, whole_table, _ = client([user], ["user"], [whole([user])], storage)
    two, parts, _ = client([user], ["user"], [[Shard(user, cut, 40)], [Shard(user, 0, cut)]], storage)
    for step in range(4):
        ids, gradient = random_ids([40], 30, step, "single"), dense_gradient(30, 8, step)
        pulled = [job.pull(ids) for job in (one, two)]
        assert torch.equal(pulled[0].pooled, pulled[1].pooled)
        one.push(pulled[0], gradient, 0.1)
        two.push(pulled[1], gradient, 0.1)
    for name in ("weight", "momentum"):
        assert torch.equal(rows_of(whole_table, "user", name), rows_of(parts, "user", name))


def test_three_parts_are_added_up_in_one_order_whatever_the_placement():
    wide = table("t", 3, 4)
    ids = jagged([[[0, 1, 2]] * 5], 5)
    parts = [Shard(wide, row, row + 1) for row in range(3)]
    answers = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        job, servers, _ = client([wide], ["t"], [[parts[index]] for index in order])
        for server in servers:  # three numbers whose float32 sum depends on the order
            server.state()[0].tensors["weight"].fill_((1e8, -1e8, 1.0)[server.shards[0].start])
        answers.append(job.pull(ids).pooled)
    assert all(torch.equal(answer, torch.ones(5, 4)) for answer in answers)


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_in_the_order_of_the_tables_and_means_divide_by_the_number_of_ids(storage, kind):
    job, servers, _ = client(TABLES, SOURCE, [whole(TABLES[3:]), whole(TABLES[:3])], storage)
    ids = random_ids(ROWS, 6, 0, kind)
    pooled = job.pull(ids).pooled
    assert list(job.columns) == ["user", "viewed", "bought", "day", "here", "there", "tag"]
    for found in TABLES:
        for feature in found.features:
            alone = ids.select([SOURCE.index(feature)])
            bag = torch.nn.functional.embedding_bag(
                alone.values,
                rows_of(servers, found.name),
                alone.bag_offsets(),
                mode="sum",
                per_sample_weights=alone.weights,
                include_last_offset=True,
            )
            if found.pooling == "mean":
                bag /= alone.lengths().clamp(min=1)[:, None]
            torch.testing.assert_close(pooled[:, job.columns[feature]], bag, **CLOSE)


def test_mean_weights_divide_explicit_weights_too():
    ids = jagged([[[1, 2], []], [[3, 4], [5]]], 2, torch.tensor([2.0, 4.0, 6.0, 8.0, 10.0]))
    weighted = mean_weighted(ids, torch.tensor([True, False]))
    assert weighted.weights.tolist() == [1.0, 2.0, 6.0, 8.0, 10.0]


def test_one_server_with_all_features_in_order_copies_nothing():
    tables = [table("a"), table("b")]
    _, servers, _ = client(tables, ["a", "b"], [whole(tables)])
    seen = []
    servers[0].pull = lambda lookup: seen.append(lookup.ids) or (answer,)
    servers[0].push = lambda lookup, gradients, lr: seen.extend(gradients)
    job = EmbeddingClient(tables, ["a", "b"], servers)
    answer, ids, gradient = torch.zeros(3, 8), random_ids([7, 7], 3, 0, "single"), torch.ones(3, 8)
    pulled = job.pull(ids)
    job.push(pulled, gradient, 0.1)
    assert seen[0] is ids
    assert pulled.pooled.data_ptr() == answer.data_ptr()
    assert seen[1].data_ptr() == gradient.data_ptr()


def test_look_ups_carry_weights_only_where_there_is_a_mean_of_several():
    job, _, _ = client(TABLES, SOURCE, [whole(TABLES)])
    kinds = {kind: [lookup.ids.weights is not None for _, lookup in job.pull(_ids(kind)).lookups] for kind in KINDS}
    assert kinds == {"single": [False], "multi": [False, True], "weighted": [True]}


def _ids(kind):
    return random_ids(ROWS, 6, 0, kind)


def test_pushes_may_come_later_and_in_another_order():
    job, servers, _ = client(TABLES, SOURCE, [whole(TABLES)], optimizer=SGD)
    again, servers_again, _ = client(TABLES, SOURCE, [whole(TABLES)], optimizer=SGD)
    for each, order in ((job, (0, 1)), (again, (1, 0))):
        pulled = [each.pull(random_ids(ROWS, 6, step)) for step in (0, 1)]
        for step in order:
            each.push(pulled[step], dense_gradient(6, each.width, step), 0.1)
    assert_close_rows(servers, servers_again)


@pytest.mark.parametrize("unique", [NEVER, UniqueRows("always")], ids=lambda unique: unique.mode)
def test_empty_batches_and_a_job_without_features(unique):
    job, servers, counter = client(TABLES, SOURCE, [whole(TABLES[:2]), whole(TABLES[2:])], unique=unique)
    before = rows_of(servers, "user").clone()
    for kind in KINDS:
        pulled = job.pull(random_ids(ROWS, 0, 0, kind))
        assert pulled.pooled.shape == (0, job.width)
        job.push(pulled, torch.zeros(0, job.width), 0.1)
    assert torch.equal(rows_of(servers, "user"), before)
    bare, _, counter = client([], [], [[]], unique=unique)
    pulled = bare.pull(random_ids([], 5, 0, "single"))
    assert pulled.pooled.shape == (5, 0)
    bare.push(pulled, torch.zeros(5, 0), 0.1)
    assert counter.totals().bytes == {}


def test_bytes_are_those_of_the_wire():
    tables = [table("a", dim=4), table("b", dim=8)]
    for codec, size in ((None, 4), (Bf16(), 2)):
        job, _, counter = client(tables, ["a", "b"], [whole(tables[:1]), whole(tables[1:])], codec=codec)
        pulled = job.pull(random_ids([7, 7], 5, 0, "single"))
        ids, floats = 2 * 5 * 4, 5 * 12
        assert counter.totals().bytes == {"pull": ids + floats * size}
        assert counter.totals().raw_bytes == {"pull": ids + floats * 4}
        job.push(pulled, torch.ones(5, 12), 0.1)
        assert counter.totals().bytes["push"] == floats * size
        assert counter.totals().raw_bytes["push"] == floats * 4
    job, _, counter = client(tables, ["a", "b"], [whole(tables)])
    ids = random_ids([7, 7], 5, 0, "weighted")
    job.pull(ids)
    assert counter.totals().bytes == {"pull": len(ids.values) * 8 + 11 * 4 + 5 * 12 * 4}


def test_codecs_are_applied_both_ways():
    user = TABLES[0]
    job, servers, _ = client([user], ["user"], [whole([user])], optimizer=SGD, codec=Bf16())
    before, ids = rows_of(servers, "user").clone(), Jagged(torch.tensor([5]), None, None, 1, 1)
    pulled = job.pull(ids)
    assert torch.equal(pulled.pooled, before[5:6].bfloat16().float())
    gradient = torch.full((1, 8), 1.001)  # rounds to 1 in bfloat16
    job.push(pulled, gradient, 0.5)
    assert torch.equal(rows_of(servers, "user")[5], before[5] - 0.5)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("bad", [-1, 40, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("kind", ["single", "multi"])
def test_an_id_outside_its_table_is_refused_wherever_the_table_is(bad, kind, cut):
    user, day = TABLES[0], TABLES[2]
    parts = [[Shard(user, 0, 15)], [Shard(user, 15, 40), Shard(day, 0, 3)]] if cut else [whole([user, day])]
    job, _, _ = client([user, day], ["user", "day"], parts)
    ids = random_ids([40, 3], 6, 0, kind)
    ids.values[0] = bad
    shown = "" if abs(bad) > 40 else f"{bad} "
    with pytest.raises(
        DataError, match=rf"^feature user: id .*{shown}.*is not a row of table user, which has rows 0 to 39"
    ):
        job.pull(ids)


def test_ids_of_other_features_are_refused():
    job, _, _ = client(TABLES, SOURCE, [whole(TABLES)])
    with pytest.raises(DataError, match="ids of 2 features for 3 samples do not fit a look-up of 7 features"):
        job.pull(random_ids([5, 5], 3, 0))


@pytest.mark.parametrize("unique", [NEVER, UniqueRows("always")], ids=lambda unique: unique.mode)
def test_a_gradient_of_another_shape_is_refused(unique):
    user = TABLES[0]
    job, _, _ = client([user], ["user"], [whole([user])], unique=unique)
    pulled = job.pull(random_ids([40], 3, 0))
    with pytest.raises(DataError, match=r"a gradient of torch.float32 \[3, 7\] does not fit .*\[3, 8\]"):
        job.push(pulled, torch.zeros(3, 7), 0.1)
    with pytest.raises(DataError, match=r"a gradient of torch.float64"):
        job.push(pulled, torch.zeros(3, 8, dtype=torch.float64), 0.1)


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [Shard(TABLES[0], 0, 39)],
        [Shard(TABLES[0], 1, 40)],
        [Shard(TABLES[0], 0, 21), Shard(TABLES[0], 20, 40)],
        [Shard(TABLES[0], 0, 40), Shard(TABLES[0], 0, 40)],
    ],
)
def test_servers_must_hold_each_row_once(shards):
    servers = [EmbeddingServer(shards, TorchStorage, ADAGRAD, 0)]
    with pytest.raises(ConfigError, match="table user: the servers do not hold each of its 40 rows exactly once"):
        EmbeddingClient([TABLES[0]], ["user"], servers)


class Late:
    """A server that answers when it is told to."""

    def __init__(self, server, asked):
        self.server, self.shards, self.asked, self.answer = server, server.shards, asked, None

    def pull(self, lookup):
        return self._promise(lambda: self.server.pull(lookup))

    def push(self, lookup, gradient, lr):
        return self._promise(lambda: self.server.push(lookup, gradient, lr))

    def _promise(self, act):
        promise = Promise()
        self.answer = lambda: promise.keep(act())
        self.asked.release()
        return promise


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_all_servers_are_asked_before_the_first_answers(order):
    placed = [whole(TABLES[:2]), whole(TABLES[2:4]), whole(TABLES[4:])]
    asked, held = threading.Semaphore(0), [EmbeddingServer(shards, TorchStorage, SGD, 3) for shards in placed]
    late = [Late(server, asked) for server in held]
    job = EmbeddingClient(TABLES, SOURCE, late)
    same, same_held, _ = client(TABLES, SOURCE, placed, optimizer=SGD)
    ids, gradient = random_ids(ROWS, 6, 0, "single"), dense_gradient(6, job.width, 0)
    with ThreadPoolExecutor(1) as threads:
        pull = threads.submit(job.pull, ids)
        assert all(asked.acquire(timeout=120) for _ in order)
        for position in order:
            assert not pull.done()
            late[position].answer()
        pulled = pull.result(120)
    pushed = job.push(pulled, gradient, 0.1)
    for position in order:
        assert not pushed.done()
        late[position].answer()
    pushed.result()
    same_pulled = same.pull(ids)
    assert torch.equal(pulled.pooled, same_pulled.pooled)
    same.push(same_pulled, gradient, 0.1)
    for found in TABLES:
        assert torch.equal(rows_of(held, found.name), rows_of(same_held, found.name))


def test_adam_counts_pushes_alike_in_every_part():
    user = TABLES[0]
    job, servers, _ = client([user], ["user"], [[Shard(user, 0, 20)], [Shard(user, 20, 40)]], optimizer=ADAM)
    low = random_ids([20], 4, 0, "single")
    for _ in range(3):
        job.push(job.pull(low), torch.ones(4, 8), 0.1)
    assert [int(server.state()[0].tensors["step"]) for server in servers] == [3, 3]


@EACH
def test_rows_of_a_table_are_stepped_once_however_each_feature_is_pooled(storage):
    """By all of their gradients, as where the distinct rows are pooled by the trainer, and as in PyTorch."""
    mixed = [Table("item", 9, 4, ("item", "recent"), ("sum", "mean"))]
    held = []
    for unique in (NEVER, UniqueRows("always")):
        job, servers, _ = client(mixed, ["item", "recent"], [whole(mixed)], storage, ADAGRAD, unique=unique)
        pulled = job.pull(jagged([[[3], [4]], [[3, 4], [3]]], 2))
        job.push(pulled, dense_gradient(2, job.width, 0), 0.1).result()
        held.append(servers)
    for name in ("weight", "momentum"):
        torch.testing.assert_close(*(rows_of(servers, "item", name) for servers in held), **CLOSE)
