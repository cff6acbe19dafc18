"""Placement: every row once, the same every time, balanced, within memory."""

import time
from itertools import count
from typing import ClassVar

import pytest
from embedding_cases import ADAGRAD, ADAM, SGD, STORAGES, random_ids, table
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.assembly import make_tables, place_tables
from shadowsync.choices import choose_all
from shadowsync.config import parse
from shadowsync.embedding import placement
from shadowsync.embedding.optimizers import RowwiseAdagrad
from shadowsync.embedding.placement import SURROGATE_ROWS, Cost, costly_parts, cut, measure_costs, place, row_wise
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.table import Shard
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import ConfigError

ROW = RowwiseAdagrad.row_bytes(4)


def many(rows, dim=4):
    return [table(f"t{index}", count, dim) for index, count in enumerate(rows)]


def even(tables):
    return of_ids({found.name: 1.0 for found in tables})


def of_ids(costs):
    """So many ids in a sample that the bags do not count."""
    return {name: Cost(seconds, bags=0.0) for name, seconds in costs.items()}


jobs = st.tuples(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.lists(st.floats(0.01, 100), min_size=12, max_size=12),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 30)),
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(job=jobs)
def test_each_row_is_in_one_shard_and_loads_stay_within_the_bound_of_lpt(job):
    rows, costs, count, split_rows = job
    tables, servers = many(rows), (count, None, split_rows)
    cost = of_ids({found.name: costs[index] for index, found in enumerate(tables)})
    placed = place(tables, cost, ADAGRAD, *servers)
    assert placed == place(tables, dict(reversed(cost.items())), ADAGRAD, *servers)
    assert len(placed) == count
    for found in tables:
        spans = sorted((s.start, s.stop) for shards in placed for s in shards if s.table == found)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == found.rows
        assert split_rows is None or max(stop - start for start, stop in spans) <= split_rows
    items = [item.cost for item in cut(tables, cost, ADAGRAD, *servers)]
    loads = [sum(cost[s.table.name].of(s.rows / s.table.rows) for s in shards) for shards in placed]
    # what no packing can beat, and Graham's 4/3 − 1/(3m) over it is at most mean + (1 − 1/m) of the last item placed
    assert max(loads) <= sum(items) / count + (1 - 1 / count) * max(items) + 1e-9


def test_the_costliest_go_first_to_the_least_loaded():
    tables = many([5] * 5)
    cost = of_ids({"t0": 2.0, "t1": 3.0, "t2": 9.0, "t3": 4.0, "t4": 5.0})
    placed = place(tables, cost, SGD, 2)
    assert [[shard.table.name for shard in shards] for shards in placed] == [["t1", "t2"], ["t0", "t3", "t4"]]


def test_split_rows_cuts_into_even_parts():
    placed = place(many([100]), of_ids({"t0": 1.0}), SGD, 2, split_rows=30)
    assert sorted(shard.rows for shards in placed for shard in shards) == [25] * 4
    assert [sum(shard.rows for shard in shards) for shards in placed] == [50, 50]


def test_only_what_is_larger_than_an_even_share_and_worth_it_is_cut(monkeypatch):
    tables = many([100, 10, 10])
    assert place(tables, even(tables), SGD, 3)[0] == (Shard(tables[0], 0, 100),)
    monkeypatch.setattr(placement, "WORTH_CUTTING_BYTES", 0)
    parts = [item.shard for item in cut(tables, even(tables), SGD, 3)]
    assert [part.rows for part in parts] == [33, 33, 34, 10, 10]
    assert [item.shard.rows for item in cut(tables, even(tables), SGD, 1)] == [100, 10, 10]


MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def works(costs, parts, servers):
    """Of each server."""
    tables = many([1000] * len(costs))
    counted = {name: cost._replace(seconds=cost.work(1.0)) for name, cost in costs.items()}
    items = cut(tables, counted, SGD, servers, least_parts=parts)
    placed = placement._pack(sorted(items, key=lambda item: -item.cost), servers, None)
    return [sum(item.cost for item in found) for found in placed]


@pytest.mark.parametrize(("servers", "before", "after"), [(4, 1.1, 1.05), (8, 2.2, 1.1), (16, 4.5, 1.25)])
def test_a_table_of_many_ids_is_cut_where_others_wait_for_its_server(servers, before, after):
    tables = many([1000] * 26)
    costs = {table.name: Cost(1.0, 1, ids) for table, ids in zip(tables, MLPERF_IDS, strict=True)}
    parts = costly_parts(tables, costs, servers)
    assert parts["t20"] > 1
    assert not any(costs[name].ids == 1 for name in parts)
    whole, found = works(costs, {}, servers), works(costs, parts, servers)
    assert max(whole) > before * sum(whole) / servers
    assert max(found) < after * sum(found) / servers
    assert max(found) < max(whole)


def test_tables_of_single_ids_stay_whole():
    tables = many([1000] * 3)
    assert costly_parts(tables, {t.name: Cost(1.0) for t in tables}, 30) == {}
    two = {t.name: Cost(1.0, 1, 3) for t in tables[:2]}
    assert costly_parts(tables[:2], two, 5) == {}, "six parts on five servers"
    costs = {t.name: Cost(1.0, 1, 30) for t in tables}
    assert [len(shards) for shards in place(tables, costs, SGD, 6)] == [1, 1, 1, 0, 0, 0]
    assert [len(shards) for shards in place(tables, costs, SGD, 6, cut_costly=True)] == [1] * 6


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    rows=st.lists(st.integers(1, 40), max_size=8),
    counts=st.lists(st.tuples(st.integers(1, 3), st.floats(0, 200), st.floats(0, 9)), min_size=8, max_size=8),
    servers=st.integers(1, 6),
)
def test_cuts_depend_on_counts_alone_and_pay(rows, counts, servers):
    tables = many(rows)
    costs = {t.name: Cost(seconds, bags, ids) for t, (bags, ids, seconds) in zip(tables, counts, strict=False)}
    parts = costly_parts(tables, costs, servers)
    assert parts == costly_parts(tables, {name: cost._replace(seconds=1.0) for name, cost in costs.items()}, servers)
    assert all(1 < parts.get(t.name, 2) <= max(2, min(t.rows, servers)) for t in tables)
    placed = place(tables, costs, SGD, servers, cut_costly=True)
    assert sum(shard.rows for shards in placed for shard in shards) == sum(rows)


def test_no_server_holds_more_than_it_can():
    tables = many([40, 30, 20, 10])
    placed = place(tables, of_ids({"t0": 1.0, "t1": 1.0, "t2": 50.0, "t3": 90.0}), ADAGRAD, 2, 50 * ROW)
    assert sorted(sum(shard.rows for shard in shards) for shards in placed) == [50, 50]


def test_a_table_larger_than_a_server_is_cut():
    placed = place(many([100]), of_ids({"t0": 1.0}), ADAGRAD, 4, capacity_bytes=25 * ROW)
    assert [[shard.rows for shard in shards] for shards in placed] == [[25]] * 4
    split = cut(many([100]), of_ids({"t0": 1.0}), ADAGRAD, 4, 25 * ROW, split_rows=90)
    assert max(item.bytes for item in split) <= 25 * ROW


def test_what_does_not_fit_is_named():
    tables = many([100, 30])
    with pytest.raises(ConfigError, match=r"need 2,600 bytes .*t0\[0:50\], 1,000\).* do not fit 2 servers of 1,000"):
        place(tables, even(tables), ADAGRAD, 2, capacity_bytes=1000)


@pytest.mark.parametrize(("rule", "expected"), [(SGD, 4 * 16), (ADAGRAD, 4 * 17), (ADAM, 4 * 48)])
def test_a_row_takes_its_weights_and_state(rule, expected):
    assert rule.row_bytes(16) == expected


def test_more_servers_than_tables_leave_some_empty():
    assert [len(shards) for shards in place(many([5]), of_ids({"t0": 1.0}), SGD, 3)] == [1, 0, 0]
    assert place([], {}, SGD, 2) == ((), ())


def test_row_wise_servers_hold_the_same_share_of_every_table():
    placed = row_wise(many([10, 3]), ADAGRAD, 4)
    assert [[(shard.table.name, shard.start, shard.stop) for shard in shards] for shards in placed] == [
        [("t0", 0, 2)],
        [("t0", 2, 5), ("t1", 0, 1)],
        [("t0", 5, 7), ("t1", 1, 2)],
        [("t0", 7, 10), ("t1", 2, 3)],
    ]
    with pytest.raises(ConfigError, match="each of 4 embedding servers would hold"):
        row_wise(many([10, 3]), ADAGRAD, 4, capacity_bytes=3 * ROW)


# --- costs are measured, on surrogates, with the clock handed in -----------------------------------------------------


class Recording(TorchStorage):
    """Counts how far a fake clock would run: one tick per id pulled and per id pushed."""

    made: ClassVar = []
    ticks = 0

    def __init__(self, shards, features, optimizer, seed):
        super().__init__(shards, features, optimizer, seed)
        Recording.made.append(shards)

    def pull(self, ids, features):
        Recording.ticks += len(ids.values)
        assert not len(ids.values) or int(ids.values.max()) < SURROGATE_ROWS
        return super().pull(ids, features)

    def push(self, ids, features, gradient, lr):
        Recording.ticks += len(ids.values)
        super().push(ids, features, gradient, lr)


def test_cost_is_the_time_of_a_pull_and_a_push_of_the_tables_features(monkeypatch):
    monkeypatch.setattr(Recording, "made", [])
    tables = [table("big", 10**9, 4), table("pair", 50, 4, ("x", "y"))]
    ids = random_ids([50, 10**9, 50], 30, 0)
    costs = measure_costs(tables, ["y", "big", "x"], [ids], Recording, ADAGRAD, 3, lambda: Recording.ticks)
    lengths = [len(ids.select([feature]).values) for feature in range(3)]
    assert costs == {
        "big": Cost(2 * lengths[1], 1, lengths[1] / 30),
        "pair": Cost(2 * (lengths[0] + lengths[2]), 2, (lengths[0] + lengths[2]) / 30),
    }
    assert [shards[0].rows for shards in Recording.made] == [SURROGATE_ROWS, 50]


def test_the_median_ignores_a_disturbance():
    times = count()
    jumps = {3: 1000.0}
    clock = lambda: (tick := next(times)) + jumps.get(tick, 0.0)  # noqa: E731
    ids = random_ids([5], 4, 0)
    assert measure_costs([table("t", 5)], ["t"], [ids], TorchStorage, ADAGRAD, 3, clock)["t"].seconds == 1.0


@pytest.mark.parametrize("storage", STORAGES[:2])  # not the code that is chosen nowhere
def test_a_feature_of_many_ids_costs_more_than_one_of_few(storage: type[Storage]):
    tables = [table("few", 20_000, 16), table("many", 20_000, 16, tuple("abcdefgh"))]
    ids = random_ids([20_000] * 9, 4000, 0)
    # time of the processor, not of the day: other processes on this machine take none of it, but they do take its
    # caches, for some milliseconds on end
    costs = measure_costs(tables, ["few", *"abcdefgh"], [ids], storage, ADAGRAD, 15, time.thread_time)
    assert 0 < costs["few"].seconds < costs["many"].seconds < 1


@pytest.mark.parametrize(("cluster", "shards"), [({}, 2), ({"runtime": "ray", "address": "10.0.0.1:6379"}, 4)])
def test_a_job_cuts_tables_of_many_ids_where_its_servers_are_on_a_cluster(cluster, shards):
    data = {"name": "synthetic", "rows": 1000, "features": 2, "multi_hot": 30, "table_rows": 500}
    config = parse({"data": data, "embedding": {"servers": 4}, "cluster": cluster})
    choices = choose_all(config, None)
    source = choices.source.open("train", "error")
    tables = make_tables(config, source.schema, None, choices.model)
    placed = place_tables(config, choices, source.schema, tables, source)
    assert sum(len(found) for found in placed) == shards
