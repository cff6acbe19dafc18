"""A server that takes another one's place: row for row what that one was, whatever was pushed meanwhile."""

import threading

import numpy as np
import pytest
import torch
from embedding_cases import ADAGRAD, BY_NAME, EACH, ROWS, SOURCE, TABLES, copied, dense_gradient, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.plain import Plain
from shadowsync.data.batch import Jagged
from shadowsync.data.source import Dynamic
from shadowsync.embedding import moving
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.keys import DEFAULT, NOBODY
from shadowsync.embedding.moving import ArrivingService
from shadowsync.embedding.server import EmbeddingServer, RowStep
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import WAYS, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.embedding.watching import RowTracking
from shadowsync.errors import DataError
from shadowsync.memory.shared import SharedMemory, bytes_of, can_share
from shadowsync.recovery.priority import EveryRow, MostFrequentlyUsed, Scar
from shadowsync.rpc.served import direct

FOLLOWED = RowTracking(EveryRow, 1.0, 1, 0)
SHARDS = [Shard(TABLES[0], 0, 17), Shard(TABLES[0], 17, 40), *(Shard(table, 0, table.rows) for table in TABLES[1:])]
KEYED = [Table("user", 8 * WAYS, 4, ("user",), ids=Dynamic(admit=1)), Table("hour", 24, 4, ("hour",))]


def pair(storage, optimizer, shards, tracking=None):
    """A server, and one that is to take its place."""
    source = EmbeddingServer(shards, storage, optimizer, 3, tracking, moving=FOLLOWED)
    target = EmbeddingServer(shards, storage, optimizer, None, tracking, moving=FOLLOWED)
    return source, target, arriving(source, target)


def arriving(source, target):
    return ArrivingService(target, direct(EmbeddingService(source, Plain(), Plain())), Plain(), Plain())


def push(job, seed, samples=6):
    pulled = job.pull(random_ids(ROWS, samples, seed))
    job.push(pulled, dense_gradient(samples, job.width, seed), 0.1).result()


def assert_same(source, target):
    for there, here in zip(copied(source), copied(target), strict=True):
        assert there.tensors.keys() == here.tensors.keys()
        for name, tensor in there.tensors.items():
            torch.testing.assert_close(here.tensors[name], tensor, rtol=0, atol=0, msg=f"{there.table.name}.{name}")


@EACH
@BY_NAME
def test_rows_that_change_while_they_are_copied_are_copied_again(storage, optimizer):
    source, target, service = pair(storage, optimizer, SHARDS)
    job = EmbeddingClient(TABLES, SOURCE, [source])
    push(job, 0)
    assert service.take_all().rows == sum(shard.rows for shard in SHARDS)
    assert_same(source, target)
    assert service.take_changed().rows == 0
    for seed in (1, 2):
        push(job, seed)
    changed = service.take_changed()
    assert 0 < changed.rows < sum(shard.rows for shard in SHARDS)
    assert changed.bytes > 4 * changed.rows
    push(job, 3)
    service.take_over()
    assert_same(source, target)
    push(job, 4)
    push(EmbeddingClient(TABLES, SOURCE, [target]), 4)
    assert_same(source, target)


def test_nothing_is_lost_of_what_others_push_meanwhile():
    source, target, service = pair(TorchStorage, ADAGRAD, SHARDS)
    over, jobs = threading.Event(), [EmbeddingClient(TABLES, SOURCE, [source]) for _ in range(2)]

    def train(job, first):
        for seed in range(first, first + 10_000):
            push(job, seed)
            if over.is_set():
                return

    threads = [threading.Thread(target=train, args=(job, 10_000 * at)) for at, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    service.take_all()
    for _ in range(20):
        service.take_changed()
    over.set()
    for thread in threads:
        thread.join()
    service.take_over()
    assert_same(source, target)


@pytest.mark.skipif(not can_share(), reason="this system has no memory that processes share: run it on Linux")
def test_what_others_write_in_its_memory_is_known_too():
    """As trainers of its machine do."""
    parts = TorchStorage.memory_parts(SHARDS, ADAGRAD, None)
    followed = [part for shard in SHARDS for part in FOLLOWED.parts(shard)]
    memory = SharedMemory.create(bytes_of([*parts, *followed]), "a test")
    source = EmbeddingServer(SHARDS, TorchStorage, ADAGRAD, 3, memory=memory, moving=FOLLOWED)
    beside = SharedMemory.open(memory.path)
    near = EmbeddingServer(SHARDS, TorchStorage, ADAGRAD, None, memory=beside, moving=FOLLOWED)
    target = EmbeddingServer(SHARDS, TorchStorage, ADAGRAD, None, moving=FOLLOWED)
    service = arriving(source, target)
    service.take_all()
    push(EmbeddingClient(TABLES, SOURCE, [near]), 1)
    assert service.take_over().rows > 0
    assert_same(near, target)


def test_many_changed_rows_come_in_several_messages(monkeypatch):
    monkeypatch.setattr("shadowsync.embedding.service.MOST_ROWS", 7)
    monkeypatch.setattr(moving, "MOST_ROWS", 7)
    monkeypatch.setattr(moving, "CHUNK_BYTES", 100)
    source, target, service = pair(TorchStorage, ADAGRAD, SHARDS)
    service.take_all()
    job = EmbeddingClient(TABLES, SOURCE, [source])
    for seed in range(5):
        push(job, seed)
    assert service.take_changed().rows > 28
    assert_same(source, target)


def test_gradients_that_wait_for_a_step_wait_there():
    source, target, service = pair(TorchStorage, ADAGRAD, SHARDS)
    job = EmbeddingClient(TABLES, SOURCE, [source])

    def hold(number):
        job.hold(job.pull(random_ids(ROWS, 6, number)), dense_gradient(6, job.width, number), number).result()

    hold(0)
    source.commit(RowStep(0, {0: 1.0}, None, 0.1, 1))
    hold(1)
    hold(2)
    service.take_all()
    service.take_over()
    assert target.held_bytes == source.held_bytes > 0
    for server in (source, target):
        server.commit(RowStep(0, {1: 1.0}, None, 0.1, 1))  # which was made before
        server.commit(RowStep(1, {1: 1.0, 2: 0.5}, None, 0.1, 3))
        assert server.held_bytes == 0
    assert_same(source, target)


@pytest.mark.parametrize("priority", [EveryRow, MostFrequentlyUsed, Scar])
def test_no_row_of_one_that_has_moved_counts_as_saved(priority):
    tracking = RowTracking(priority, 1.0, 1, 0)
    source, target, service = pair(TorchStorage, ADAGRAD, SHARDS, tracking)
    push(EmbeddingClient(TABLES, SOURCE, [source]), 1)
    service.take_all()
    service.take_over()
    for index, shard in enumerate(SHARDS):
        assert target.pick(index, end_of_round=True).tolist() == list(range(shard.start, shard.stop))


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(0, 60), st.integers(1, 3))
def test_keys_and_their_rows_move_whatever_comes_and_goes_meanwhile(seed, steps, size):
    draw = np.random.default_rng(seed)
    script = draw.integers(-40, 400, steps).tolist()
    shards = [Shard(KEYED[0], 0, 3 * WAYS), Shard(KEYED[0], 3 * WAYS, 8 * WAYS), Shard(KEYED[1], 0, 24)]
    source, target, service = pair(TorchStorage, ADAGRAD, shards)
    job, features = EmbeddingClient(KEYED, ("user", "hour"), [source], admits=True), 2
    service.take_all()
    for number, what in enumerate(script):
        if what < 0:
            service.take_changed()
            continue
        keys = torch.arange(what, what + size).repeat(100)[: size * 100 : 100]
        ids = Jagged(torch.cat([keys, keys % 24]), None, None, features, size)
        pulled = job.pull(ids)
        job.push(pulled, dense_gradient(size, job.width, number), 0.1).result()
    service.take_over()
    for there, here in zip(source.state(), target.state(), strict=True):
        for name in there.tensors.keys() - {"seen", "count", "candidate", "door"}:
            assert torch.equal(here.tensors[name], there.tensors[name]), name
    assert target.keys == source.keys
    owners = np.concatenate([own.tensors["key"].numpy() for own in target.state()[:2]])
    owners = owners[(owners != 0) & (owners != DEFAULT ^ NOBODY)]
    assert len(owners) == len(np.unique(owners))


def test_rows_of_a_job_whose_servers_stay_are_not_followed():
    source = EmbeddingServer(SHARDS, TorchStorage, ADAGRAD, 3)
    target = EmbeddingServer(SHARDS, TorchStorage, ADAGRAD, None)
    with pytest.raises(DataError, match=r"set cluster\.max_servers"):
        arriving(source, target).take_all()
