"""Sequences behind connections: as in process, to the bit and with the bytes counted alike."""

import pytest
import torch
from embedding_cases import ADAM, HISTORIES, HISTORY_SOURCE, client, rows_of, train_histories, whole
from remote_cases import far

from shadowsync.compression.bf16 import Bf16
from shadowsync.embedding.saves import SaveMethods
from shadowsync.embedding.table import Shard
from shadowsync.rpc.served import ask

item, user, shop, tag, word = HISTORIES
CUT = [
    [Shard(item, 9, 30), *whole([user, word])],
    [Shard(shop, 0, 4), Shard(item, 0, 9)],
    [Shard(shop, 4, 25), *whole([tag])],
]


@pytest.mark.parametrize("codec", [None, Bf16()], ids=["plain", "bf16"])
def test_sequences_behind_a_connection_are_those_in_process(connect, codec):
    here, held_here, counted_here = client(HISTORIES, HISTORY_SOURCE, CUT, optimizer=ADAM, codec=codec)
    there = far(connect, CUT, ADAM, codec=codec)
    there.tables, there.features = HISTORIES, HISTORY_SOURCE
    assert all(map(torch.equal, train_histories(there.client(), 3), train_histories(here, 3)))
    for table in HISTORIES:
        assert torch.equal(rows_of(there.servers, table.name), rows_of(held_here, table.name))
    assert there.counter.totals() == counted_here.totals()
    assert [service.kept for service in there.services] == [0, 0, 0]


@pytest.mark.parametrize("table", HISTORIES, ids=lambda table: table.name)
def test_a_shard_crosses_with_the_pooling_of_each_feature(connect, table):
    (way,) = far(connect, [[Shard(table, 2, 7)]]).connections
    assert ask(way, SaveMethods.shards) == (Shard(table, 2, 7),)
