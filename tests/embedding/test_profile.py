"""Costs are measured, on surrogates, with the clock handed in."""

import time
from itertools import count
from typing import ClassVar

import pytest
from embedding_cases import ADAGRAD, STORAGES, random_ids, table

from shadowsync.embedding.placement import SURROGATE_ROWS, Probe, measure_costs
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.torch_storage import TorchStorage

EACH = pytest.mark.parametrize("storage", STORAGES)


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
    costs = measure_costs(tables, ["y", "big", "x"], [ids], Probe(Recording, ADAGRAD, 3, lambda: Recording.ticks))
    lengths = [len(ids.select([feature]).values) for feature in range(3)]
    assert costs == {"big": 2 * lengths[1], "pair": 2 * (lengths[0] + lengths[2])}
    assert [shards[0].rows for shards in Recording.made] == [SURROGATE_ROWS, 50]


def test_the_median_ignores_a_disturbance():
    times = count()
    jumps = {3: 1000.0}
    clock = lambda: (tick := next(times)) + jumps.get(tick, 0.0)  # noqa: E731
    ids = random_ids([5], 4, 0)
    assert measure_costs([table("t", 5)], ["t"], [ids], Probe(TorchStorage, ADAGRAD, 3, clock)) == {"t": 1.0}


@EACH
def test_a_feature_of_many_ids_costs_more_than_one_of_few(storage: type[Storage]):
    tables = [table("few", 20_000, 16), table("many", 20_000, 16, tuple("abcdefgh"))]
    ids = random_ids([20_000] * 9, 600, 0)
    # time of the processor, not of the day: other processes on this machine take none of it
    probe = Probe(storage, ADAGRAD, repeats=9, clock=time.thread_time)
    costs = measure_costs(tables, ["few", *"abcdefgh"], [ids], probe)
    assert 0 < costs["few"] < costs["many"] < 1
