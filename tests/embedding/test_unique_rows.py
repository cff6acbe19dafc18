"""Distinct rows instead of pooled vectors: the same job with less traffic, where there is less."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from embedding_cases import (
    ADAM,
    CLOSE,
    EACH,
    KINDS,
    ROWS,
    SOURCE,
    STORAGES,
    TABLES,
    client,
    dense_gradient,
    jagged,
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
from shadowsync.embedding.distinct import find_distinct
from shadowsync.embedding.messages import pack_rows
from shadowsync.embedding.routing import REQUEST_BYTES, Traffic, UniqueChoice, UniqueRows, choose
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard
from shadowsync.errors import DataError

ALWAYS, AUTO = UniqueRows("always"), UniqueRows("auto", every=2)


class Chosen(UniqueChoice):
    """Another set of tables in each pull."""

    sets = (frozenset({"user", "tag"}), frozenset({"shop"}), frozenset({"item", "day", "shop"}), frozenset())

    def tables(self, ids):
        return self.sets[next(self._pulls) % len(self.sets)]


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_some_tables_may_be_pooled_here_and_others_there(storage, kind, monkeypatch):
    one, held, _ = client(TABLES, SOURCE, [whole(TABLES)], storage, ADAM)
    monkeypatch.setattr("shadowsync.embedding.client.UniqueChoice", Chosen)
    user, item = TABLES[:2]
    placed = [[Shard(user, 15, 40), *whole(TABLES[2:4])], [*whole(TABLES[4:]), Shard(item, 0, 30), Shard(user, 0, 15)]]
    mixed, held_mixed, _ = client(TABLES, SOURCE, placed, storage, ADAM)
    torch.testing.assert_close(train(mixed, 5, kind), train(one, 5, kind), **CLOSE)
    for found in TABLES:
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(rows_of(held_mixed, found.name, name), rows_of(held, found.name, name), **CLOSE)
    assert [int(rows.tensors["step"]) for server in held_mixed for rows in server.state()] == [5] * 6


def test_weights_of_single_ids_count():
    ids = replace(random_ids(ROWS, 6, 0, "single"), weights=torch.linspace(-2, 2, 42))
    answers = []
    for unique in (ALWAYS, UniqueRows()):
        job, held, _ = client(TABLES, SOURCE, [whole(TABLES)], unique=unique)
        pulled = job.pull(ids)
        job.push(pulled, dense_gradient(6, job.width, 1), 0.1).result()
        answers.append([pulled.pooled, *(rows_of(held, found.name) for found in TABLES)])
    torch.testing.assert_close(*answers, **CLOSE)


def test_each_row_crosses_once_either_way():
    wide, narrow = table("wide", 10, 8, ("a", "b")), table("narrow", 10, 4)
    for codec, size in ((None, 4), (Bf16(), 2)):
        placed = [[Shard(wide, 0, 5)], [Shard(wide, 5, 10), Shard(narrow, 0, 10)]]
        job, _, counter = client([wide, narrow], ["a", "narrow", "b"], placed, codec=codec, unique=ALWAYS)
        ids = jagged([[[1, 1], [6]], [[3], [3]], [[6, 1], [9]]], 2)  # rows 1, 6, 9 of wide and 3 of narrow
        pulled = job.pull(ids)
        job.push(pulled, torch.ones(2, 20), 0.1).result()
        floats = 3 * 8 + 1 * 4
        numbers = pack_rows(torch.tensor([1]), 5).nbytes + pack_rows(torch.tensor([3, 10 + 1, 10 + 4]), 15).nbytes
        assert counter.totals().bytes == {"pull": numbers + floats * size, "push": floats * size}
        assert counter.totals().raw_bytes == {"pull": 4 * 4 + floats * 4, "push": floats * 4}


class Watched(EmbeddingServer):
    """Writes down what it is asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def pull(self, lookup):
        self.seen.append(lookup)
        return super().pull(lookup)


def test_look_ups_have_numbers_of_their_own():
    servers = [Watched(whole(found), STORAGES[0].values[0], ADAM, 0) for found in (TABLES[:2], TABLES[2:])]
    job = EmbeddingClient(TABLES, SOURCE, servers, ALWAYS)
    for step in range(3):
        job.pull(random_ids(ROWS, 6, step))
    numbers = [lookup.number for server in servers for lookup in server.seen]
    assert len(numbers) == len(set(numbers)) == 6


@pytest.mark.parametrize("bad", [-1, 40, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("kind", ["single", "multi"])
def test_an_id_that_is_no_row_is_refused_before_anybody_is_asked(bad, kind):
    job, _, counter = client(TABLES, SOURCE, [whole(TABLES)], unique=ALWAYS)
    ids = random_ids(ROWS, 6, 0, kind)
    user = 6 if ids.offsets is None else int(ids.offsets[6])
    ids.values[user] = bad
    with pytest.raises(DataError, match=rf"^feature user: id {bad} is not a row of table user, which has rows 0 to 39"):
        job.pull(ids)
    assert counter.totals().bytes == {}


# --- the choice -------------------------------------------------------------------------------------------------------


def ids_of(counts):
    """One feature for each count, with that many distinct single ids in 1,000 samples."""
    return Jagged(torch.cat([torch.arange(1000) % count for count in counts]), None, None, len(counts), 1000)


@pytest.mark.parametrize(
    ("counts", "unique"), [((1000, 1000), False), ((1000, 900), False), ((1000, 700), True), ((10, 1000), True)]
)
def test_single_ids_never_get_larger_so_that_all_tables_go_together_or_none(counts, unique):
    tables = [table("a", 1000, 16), table("b", 1000, 16)]
    choice = UniqueChoice(AUTO, tables, ["a", "b"], [whole(tables)])
    assert choice.tables(ids_of(counts)) == ({"a", "b"} if unique else set())


def test_the_estimate_is_what_is_counted():
    tables = [table("a", 5000, 16), table("b", 5000, 4, pooling="mean")]
    features, servers = ["b", "a"], [[Shard(tables[0], 0, 2000), *whole(tables[1:])], [Shard(tables[0], 2000, 5000)]]
    ids = random_ids([5000, 5000], 400, 0)
    choice = UniqueChoice(AUTO, tables, features, servers)
    expected = {True: 0.0, False: 0.0}
    for found in tables:
        traffic = choice._traffic(found, ids)
        expected[True] += traffic.unique
        expected[False] += traffic.pooled
    for unique, estimate in expected.items():
        job, _, counter = client(tables, features, servers, unique=ALWAYS if unique else UniqueRows())
        job.push(job.pull(ids), torch.ones(400, 20), 0.1).result()
        counted = sum(counter.totals().bytes.values())
        if unique:
            rows = sum(len(ids.select([feature]).values.unique()) for feature in (0, 1))
            assert abs(counted - estimate) < 0.2 * rows  # bytes of a row's number, of 1 or 2
        else:
            assert counted - estimate == 4 * 3  # look-ups of a route have one offset more than bags


def test_the_choice_follows_the_data_now_and_then():
    tables = [table("a", 1000, 16)]
    choice = UniqueChoice(UniqueRows("auto", every=3), tables, ["a"], [whole(tables)])
    repeated, distinct = ids_of([10]), ids_of([1000])
    batches = [repeated, distinct, distinct, distinct, repeated, repeated, repeated]
    assert [bool(choice.tables(ids)) for ids in batches] == [True, True, True, False, False, False, True]
    for mode in ("always", "never"):
        fixed = UniqueChoice(UniqueRows(mode), tables, ["a"], [whole(tables)])
        assert {bool(fixed.tables(ids)) for ids in batches} == {mode == "always"}


def test_rows_that_cross_no_network_are_pooled_by_their_server():
    tables = [table(name, 1000, 16) for name in ("here", "there", "split")]
    servers = [[*whole(tables[:1]), Shard(tables[2], 0, 500)], [*whole(tables[1:2]), Shard(tables[2], 500, 1000)]]
    ids = ids_of((10, 10, 10))
    assert UniqueChoice(AUTO, tables, ["here", "there", "split"], servers).tables(ids) == {"here", "there", "split"}
    choice = UniqueChoice(AUTO, tables, ["here", "there", "split"], servers, here=[0])
    assert choice.tables(ids) == {"there", "split"}


LARGE = 100 * REQUEST_BYTES


@pytest.mark.parametrize(
    ("traffic", "chosen"),
    [
        ({"few": Traffic(100, 50)}, {"few"}),
        ({"few": Traffic(100, 91)}, set()),
        ({"few": Traffic(100, 50), "many": Traffic(100, 140)}, set()),  # not worth requests of their own
        ({"few": Traffic(LARGE, LARGE / 2), "many": Traffic(100, 140)}, {"few", "many"}),
        ({"few": Traffic(LARGE, LARGE / 2), "many": Traffic(LARGE, 1.5 * LARGE)}, {"few"}),
        ({"few": Traffic(LARGE, 0.9 * LARGE), "many": Traffic(LARGE, 1.5 * LARGE)}, set()),
        ({"many": Traffic(LARGE, 1.5 * LARGE)}, set()),
        ({}, set()),
    ],
)
def test_tables_are_pooled_there_where_that_pays_for_requests_of_their_own(traffic, chosen):
    assert choose(traffic, servers=2) == chosen


# --- the search for duplicates ---------------------------------------------------------------------------------------


KEYS = st.lists(st.integers(0, 12), max_size=40).map(lambda keys: np.array(keys, dtype=np.int64))


@pytest.mark.parametrize("scale", [1, 2**40, 2**59], ids=["small", "large", "beyond one integer with its position"])
@settings(deadline=None, max_examples=40, derandomize=True)
@given(keys=KEYS)
def test_distinct_keys_and_where_they_occur(scale, keys):
    keys = keys * (scale // 2 or 1)
    found = find_distinct(keys, limit=13 * (scale // 2 or 1))
    expected, inverse = np.unique(keys, return_inverse=True)
    np.testing.assert_array_equal(found.keys, expected)
    np.testing.assert_array_equal(found.inverse.numpy(), inverse)
    np.testing.assert_array_equal(found.order.numpy(), np.argsort(keys, kind="stable"))
    assert found.starts.tolist() == [*np.searchsorted(np.sort(keys), expected), len(keys)]


@settings(deadline=None, max_examples=40, derandomize=True)
@given(keys=KEYS, weighted=st.booleans(), shared=st.booleans())
def test_sums_are_over_the_occurrences(keys, weighted, shared):
    generator = torch.Generator().manual_seed(len(keys))
    vectors = torch.randn(5 if shared else len(keys), 3, generator=generator)
    index = torch.randint(5, (len(keys),), generator=generator) if shared else None
    weights = torch.randn(len(keys), generator=generator) if weighted else None
    expected = torch.zeros(13, 3)
    for occurrence, key in enumerate(keys):
        vector = vectors[occurrence if index is None else index[occurrence]]
        expected[key] += vector if weights is None else vector * weights[occurrence]
    found = find_distinct(keys, limit=13)
    torch.testing.assert_close(found.sum(vectors, index, weights), expected[torch.from_numpy(found.keys)], **CLOSE)
