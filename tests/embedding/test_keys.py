"""Dynamic tables: each key has one row at most, no row two keys, whatever happens, and its row is its own."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.data.source import Dynamic
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.initial import initial_rows
from shadowsync.embedding.keys import (
    DEFAULT,
    HALVED,
    KEPT_CALLS,
    LOWEST,
    NOBODY,
    PINNED,
    Clock,
    KeyRules,
    Wanted,
    hashes_of,
    salt_of,
    sets_of,
)
from shadowsync.embedding.optimizers import SGD, RowwiseAdagrad
from shadowsync.embedding.requests import RowLookup
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import WAYS, Rows, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import DataError
from shadowsync.memory.shared import SharedMemory, bytes_of, can_share

USER = Table("user", 4 * WAYS, 3, ("user",), ids=Dynamic(admit=1))
ITEM = Table("item", 2 * WAYS, 3, ("item",), ids=Dynamic(admit=1, evict="lru"))
FIXED = Table("hour", 24, 3, ("hour",))
ADAGRAD = RowwiseAdagrad(eps=1e-8)


def server_of(*shards: Shard, key_seed: int = 7) -> EmbeddingServer:
    return EmbeddingServer(shards, TorchStorage, ADAGRAD, 0, key_rules=KeyRules(key_seed))


def whole(table: Table) -> Shard:
    return Shard(table, 0, table.rows)


def find(server: EmbeddingServer, keys: list[int], samples: int = 0, shard: int = 0, minute: int = 0) -> list[int]:
    wanted = Wanted((shard,), (len(keys),), torch.tensor(keys, dtype=torch.int64), samples, minute)
    return server.rows_of(wanted).tolist()


def set_of(table: Table, key: int) -> int:
    return int(sets_of(hashes_of(np.array([key]), salt_of(table.name)), table.rows // WAYS)[0])


def keys_of_set(table: Table, number: int, count: int) -> list[int]:
    return [key for key in range(100_000) if set_of(table, key) == number][:count]


OWN = WAYS - 1  # rows of a set that keys can have for themselves, as long as one is shared


def wait(server: EmbeddingServer, batches: int = KEPT_CALLS + 1) -> None:
    """Rows of batches that may be under way stay."""
    for _ in range(batches):
        find(server, [], samples=1)


def owners(server: EmbeddingServer, shard: int = 0) -> list[int]:
    return (server.state()[shard].tensors["key"] ^ NOBODY).tolist()


def test_a_key_has_a_row_from_its_first_look_up_in_training_on() -> None:
    server = server_of(whole(USER))
    keys = [5, -3, 1 << 62, 5, LOWEST]
    assert find(server, keys) == [-1] * 5, "who only asks admits nobody"
    rows = find(server, keys, samples=5)
    assert rows[0] == rows[3]
    assert len({*rows}) == 4
    assert min(rows) > 0, "the first row is the one that others share"
    assert find(server, keys) == rows
    assert [owners(server)[row] for row in rows] == keys
    assert owners(server)[0] == DEFAULT
    found = server.state()[0].tensors["weight"][rows[:3]]
    assert torch.equal(found, torch.from_numpy(initial_rows(USER, np.array(keys[:3]), 7)))
    assert found.abs().max() <= USER.rows**-0.5


def test_initial_rows_of_tables_have_nothing_in_common() -> None:
    """Equal ones in all tables would make features that have the same number alike."""
    keys = np.arange(1000)
    first, second = (initial_rows(replace(USER, name=name), keys, 7) for name in ("user", "item"))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    assert not np.array_equal(first, initial_rows(USER, keys, 8))


def test_keys_that_are_none_count_as_the_lowest() -> None:
    server = server_of(whole(USER))
    assert len({*find(server, [NOBODY, DEFAULT, LOWEST], samples=3)}) == 1
    assert find(server, [0], samples=1) != find(server, [LOWEST])


@pytest.mark.parametrize(("evict", "goes"), [("lfu", 1), ("lru", 0), ("never", None)])
def test_a_full_set_gives_a_row_of_the_key_that_its_policy_chooses(evict: str, goes: int | None) -> None:
    table = replace(ITEM, ids=Dynamic(admit=1, evict=evict, unadmitted="zeros"))
    server = server_of(whole(table))
    *held, new = keys_of_set(table, 1, WAYS + 1)
    find(server, held, samples=1)
    for _ in range(4):
        find(server, [held[0], *held[2:]], samples=1)  # the second is used least often
    find(server, held[1:], samples=1)  # and the first not for the longest time
    wait(server)
    before = find(server, held)
    rows = [find(server, [new], samples=1)[0] for _ in range(5 if evict == "lfu" else 1)]  # more than twice as often
    counts = server.keys
    assert counts is not None
    expected = [-1] if goes is None else [before[goes]] if evict == "lru" else [-1, -1, -1, -1, before[goes]]
    assert rows == expected
    left = [-1 if index == goes else row for index, row in enumerate(before)]
    assert find(server, held) == left
    gone = int(goes is not None)
    assert (counts.admitted, counts.refused, counts.evicted) == (WAYS + gone, expected.count(-1), gone)


def test_keys_that_come_as_often_do_not_take_turns() -> None:
    """Each would lose what it has learnt."""
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=1))))
    *held, new = keys_of_set(ITEM, 1, OWN + 1)
    for key in [*held, new] * 3:
        find(server, [key], samples=1)
        wait(server)
    counts = server.keys
    assert counts is not None
    assert (counts.admitted, counts.evicted) == (OWN, 0)


def test_what_was_looked_up_long_ago_counts_less() -> None:
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=1))))
    *held, new = keys_of_set(ITEM, 1, OWN + 1)
    for _ in range(20):
        find(server, held, samples=1)
    before = find(server, held)
    wait(server)
    assert find(server, [new], samples=1) == [-1]
    for _ in range(100):
        find(server, [], samples=ITEM.rows)
    assert find(server, [new], samples=1)[0] not in before
    for _ in range(5 * HALVED):
        find(server, [], samples=ITEM.rows)
    assert find(server, [new], samples=1)[0] in before


def test_rows_are_shared_where_they_are_looked_up_more_often_than_a_key_is() -> None:
    """As many as it takes until they are not, and each begins as the one whose keys it takes over."""
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=2))))
    keys = keys_of_set(ITEM, 1, 8 * WAYS)
    often, seldom = keys[:4], keys[4:]
    for _ in range(OWN):
        find(server, often, samples=1)
    weight = server.state()[0].tensors["weight"]
    weight[WAYS:] = torch.arange(float(WAYS))[:, None]
    (first,) = [row for row in range(WAYS, 2 * WAYS) if owners(server)[row] == DEFAULT]
    trained = weight[first].clone()
    for _ in range(8):
        for key in seldom:
            find(server, [key], samples=1)
        wait(server)
    shared = [row for row in range(WAYS, 2 * WAYS) if owners(server)[row] == DEFAULT]
    assert len(shared) == WAYS - 2, "two may always be of keys"
    assert bool((weight[torch.tensor(shared)] == trained).all())
    kept = set(find(server, often)) - set(shared)
    assert len(kept) == 2, "of those that come most often"
    assert {*find(server, seldom)} == {*shared}, "and the others share all of them"


def test_a_shared_row_goes_back_to_a_key_that_comes_more_often_than_those_that_share_it() -> None:
    """When many were there for a while; the first of a set stays."""
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=2))))
    keys = keys_of_set(ITEM, 1, 6 * WAYS)
    for _ in range(8):
        for key in keys:
            find(server, [key], samples=1)
        wait(server)
    shared = [row for row in range(WAYS, 2 * WAYS) if owners(server)[row] == DEFAULT]
    assert len(shared) == WAYS - 2
    for _ in range(300):
        found = find(server, keys[:4], samples=1)
    left = [row for row in range(WAYS, 2 * WAYS) if owners(server)[row] == DEFAULT]
    assert WAYS in left, "the first"
    assert len({*found} - {*left}) == 4


def test_pinned_keys_that_come_late_get_rows_of_those_that_are_shared() -> None:
    *keys, _ = keys_of_set(ITEM, 1, 6 * WAYS)
    pinned, others = tuple(keys[:10]), keys[10:]
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=2, pinned=pinned))))
    for _ in range(8):
        for key in others:
            find(server, [key], samples=1)
        wait(server)
    rows = find(server, list(pinned), samples=1)
    assert [owners(server)[row] for row in rows] == list(pinned)
    for _ in range(8):
        for key in others:
            find(server, [key], samples=1)
        wait(server)
    assert find(server, list(pinned)) == rows


def test_a_clock_that_another_process_has_set_on_halves_nothing() -> None:
    server = server_of(whole(USER))
    for _ in range(50):
        find(server, [5], samples=1)
    (row,) = find(server, [5])
    own = server.state()[0].tensors
    own["seen"][row] = 10**9  # read by one, written by another meanwhile
    find(server, [5], samples=1)
    assert int(own["count"][row]) == 51


def test_rows_whose_time_is_not_known_stay() -> None:
    """As those of a run before, whose data had none."""
    server = server_of(whole(replace(USER, ids=Dynamic(admit=1, ttl="1d"))))
    rows = find(server, [1, 2], samples=1)
    find(server, [1], samples=1, minute=10**6)
    find(server, [1], samples=1, minute=10**6 + 1441)
    momentum = server.state()[0].tensors["momentum"]
    momentum[:] = 1
    assert find(server, [1, 2], samples=1, minute=10**6 + 1442) == rows
    assert momentum[torch.tensor(rows)].tolist() == [1, 1]


def test_a_jump_of_time_takes_no_row_of_a_batch_under_way() -> None:
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=1, evict="lru", ttl="1d"))))
    *held, new = keys_of_set(ITEM, 1, OWN + 1)
    find(server, held, samples=1, minute=10_000)
    assert find(server, [new], samples=1, minute=20_000) == [-1]
    wait(server)
    assert find(server, [new], samples=1)[0] > 0


def test_a_row_with_a_new_owner_has_no_state_of_the_old_one() -> None:
    table = replace(ITEM, ids=Dynamic(admit=1, evict="lru"))
    server = server_of(whole(table))
    *held, new = keys_of_set(table, 1, OWN + 1)
    rows = torch.tensor(find(server, held, samples=1)).sort().values
    server.push(RowLookup((0,), rows), [torch.ones(OWN, table.dim)], 0.1)
    assert bool((server.state()[0].tensors["momentum"][rows] > 0).all())
    wait(server)
    (row,) = find(server, [new], samples=1)
    own = server.state()[0].tensors
    assert own["momentum"][row] == 0
    assert torch.equal(own["weight"][row], torch.from_numpy(initial_rows(table, np.array([new]), 7))[0])


def test_rows_of_batches_under_way_stay() -> None:
    server = server_of(whole(ITEM))
    *held, new = keys_of_set(ITEM, 1, OWN + 1)
    before = find(server, held, samples=10)
    assert find(server, [new], samples=10) == [-1]
    assert find(server, held) == before
    for _ in range(KEPT_CALLS - 3):
        find(server, [], samples=10)
    shared = [owners(server).index(DEFAULT, WAYS)]
    for _ in range(3):  # the short ends of files
        assert find(server, [new], samples=1) == shared
    find(server, [], samples=10)
    assert find(server, [new], samples=10)[0] in before


def test_more_batches_may_be_under_way() -> None:
    """As many as workers have, and a global step waits for."""
    server = EmbeddingServer([whole(ITEM)], TorchStorage, ADAGRAD, 0, key_rules=KeyRules(7, 2 * KEPT_CALLS))
    *held, new = keys_of_set(ITEM, 1, OWN + 1)
    before = find(server, held, samples=10)
    for _ in range(2 * KEPT_CALLS - 1):
        find(server, [], samples=10)
    assert find(server, [new], samples=10) == [-1]
    assert find(server, [new], samples=10)[0] in before


def test_a_key_that_was_gone_for_too_long_and_is_not_admitted_again_has_no_row() -> None:
    """Else it would train a row that may be another's at any moment."""
    server = server_of(whole(replace(USER, ids=Dynamic(admit=3, ttl=10))))
    (row,) = [find(server, [5], samples=1)[0] for _ in range(3)][2:]
    assert owners(server)[row] == 5
    for _ in range(12):
        find(server, [], samples=1)
    shared = owners(server).index(DEFAULT, row // WAYS * WAYS)
    assert find(server, [5], samples=1) == [shared]
    assert find(server, [5], samples=1) == [row]


def test_loaded_rows_are_pinned_as_the_table_says_now() -> None:
    *held, other = keys_of_set(ITEM, 1, 3)
    before = server_of(whole(replace(ITEM, ids=Dynamic(admit=1, pinned=(held[0], other)))))
    rows = find(before, [*held, other], samples=1)
    saved = [Rows(own.table, own.start, {n: t.clone() for n, t in own.tensors.items()}) for own in before.state()]
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=1, pinned=(held[0], held[1])))))
    server.load(saved)
    count = server.state()[0].tensors["count"]
    assert [int(count[row]) == PINNED for row in rows] == [True, True, False]


@given(st.integers(0, 1 << 32))
@settings(max_examples=20)
def test_loaded_rows_are_counted_however_they_come(seed: int) -> None:
    draw = np.random.default_rng(seed)
    before = server_of(whole(USER))
    find(before, draw.integers(0, 1000, 40).tolist(), samples=1)
    server = server_of(whole(USER))
    find(server, draw.integers(0, 1000, 40).tolist(), samples=1)
    edges = [0, *sorted(draw.integers(1, USER.rows, 3).tolist()), USER.rows]
    for start, stop in pairwise(edges):
        tensors = {name: tensor[start:stop].clone() for name, tensor in before.state()[0].tensors.items()}
        server.load([Rows(USER, start, tensors)], partial=True)
        counts = server.keys
        assert counts is not None
        assert counts.keys == sum(owner >= LOWEST for owner in owners(server))


def test_a_key_is_admitted_after_so_many_look_ups() -> None:
    server = server_of(whole(replace(USER, ids=Dynamic(admit=3))))
    found = [find(server, [9], samples=1)[0] for _ in range(4)]
    assert [owners(server)[row] for row in found[1:]] == [DEFAULT, 9, 9]
    assert found[0] == -1


def test_a_key_is_admitted_with_a_probability() -> None:
    table = Table("user", 256 * WAYS, 2, ("user",), ids=Dynamic(admit=0.25))
    rows = find(server_of(whole(table)), list(range(1000)), samples=1)
    assert 180 < sum(row >= 0 for row in rows) < 320


def test_a_key_that_is_not_looked_up_for_too_long_begins_anew() -> None:
    server = server_of(whole(replace(USER, ids=Dynamic(admit=1, ttl=100))))
    rows = torch.tensor(find(server, [1, 2], samples=1))
    server.push(RowLookup((0,), rows.sort().values), [torch.ones(2, 3)], 0.1)
    find(server, [2], samples=60)
    find(server, [2], samples=60)
    assert find(server, [1, 2], samples=1) == rows.tolist()
    momentum = server.state()[0].tensors["momentum"]
    assert [momentum[row] > 0 for row in rows.tolist()] == [False, True]


def test_the_time_to_live_may_be_of_the_data() -> None:
    table = replace(USER, ids=Dynamic(admit=1, ttl="2h"))
    server = server_of(whole(table))
    rows = torch.tensor(find(server, [1, 2, 3], samples=1, minute=1000))
    server.push(RowLookup((0,), rows.sort().values), [torch.ones(3, 3)], 0.1)
    find(server, [2], samples=10**6, minute=1100)
    saved = [Rows(own.table, own.start, {n: t.clone() for n, t in own.tensors.items()}) for own in server.state()]
    server = server_of(whole(table))
    server.load(saved)
    assert server.catch_up(Clock(0, 7)).minutes == 1100, "time goes on from what was loaded"
    find(server, [3], samples=1, minute=1120)
    find(server, [], samples=1, minute=1090)  # rows are shuffled
    assert find(server, [1, 2, 3], samples=1, minute=1121) == rows.tolist()
    momentum = server.state()[0].tensors["momentum"]
    assert [bool(momentum[row] > 0) for row in rows.tolist()] == [False, True, True]


def test_pinned_keys_stay() -> None:
    *held, new = keys_of_set(ITEM, 1, OWN + 1)
    server = server_of(whole(replace(ITEM, ids=Dynamic(admit=1, evict="lru", ttl=50, pinned=tuple(held)))))
    before = find(server, held, samples=1)
    find(server, [], samples=1000)
    assert find(server, [new], samples=1) == [-1]
    assert find(server, held, samples=1) == before


def test_what_no_server_has_is_refused() -> None:
    server = server_of(Shard(USER, 0, WAYS), whole(FIXED))
    far = keys_of_set(USER, 3, 1)
    for shard, keys, counts in [(1, [1], (1,)), (5, [1], (1,)), (0, far, (1,)), (0, [1], (2,)), (0, [1], (-1,))]:
        with pytest.raises(DataError):
            server.rows_of(Wanted((shard,), counts, torch.tensor(keys)))
    with pytest.raises(DataError, match="int64"):
        server.rows_of(Wanted((0,), (1,), torch.tensor([1.0])))
    with pytest.raises(DataError, match="no dynamic table"):
        server_of(whole(FIXED)).rows_of(Wanted((0,), (1,), torch.tensor([1])))


@pytest.mark.skipif(not can_share(), reason="processes have memory in common on Linux only")
def test_processes_have_the_owners_in_common() -> None:
    from shadowsync.embedding.keys import parts_of as parts_of_keys  # noqa: PLC0415
    from shadowsync.embedding.memory import parts_of  # noqa: PLC0415

    shards = [whole(USER)]
    memory = SharedMemory.create(bytes_of([*parts_of(shards, ADAGRAD), *parts_of_keys(shards)]), "rows")
    first = EmbeddingServer(shards, TorchStorage, ADAGRAD, 0, memory=memory, key_rules=KeyRules(7))
    second = EmbeddingServer(
        shards, TorchStorage, ADAGRAD, None, memory=SharedMemory.open(memory.path), key_rules=KeyRules(7)
    )
    rows = find(first, [1, 2, 3], samples=3)
    assert find(second, [1, 2, 3]) == rows
    more = find(second, [4, 2, 1], samples=3)
    assert find(first, [4, 2, 1]) == more
    assert more[1:] == [rows[1], rows[0]]


KEYS = st.lists(st.integers(0, 40), max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), KEYS),
        st.tuples(st.just("ask"), KEYS),
        st.tuples(st.just("time"), st.just([])),
        st.tuples(st.just("move"), st.lists(st.integers(1, 3), max_size=2)),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.sampled_from(["lfu", "lru", "never"]), st.sampled_from([1, 2, 0.5]), st.sampled_from([None, 40]))
def test_every_key_has_its_own_row_whatever_happens(
    steps: list[tuple[str, list[int]]], evict: str, admit: float, ttl: int | None
) -> None:
    """Against a dictionary of what each key has learnt: gradients of one each, through random look-ups in training and
    without, waiting, and moves into other numbers of servers by what a checkpoint holds."""
    table = Table("user", 4 * WAYS, 2, ("user",), ids=Dynamic(admit=admit, evict=evict, ttl=ttl))
    servers = [EmbeddingServer([whole(table)], TorchStorage, SGD(), 0, key_rules=KeyRules(7))]
    known: dict[int, Tensor] = {}
    for kind, numbers in steps:
        if kind == "move":
            cuts = sorted({0, *(number * WAYS for number in numbers), table.rows})
            shards = [Shard(table, *span) for span in pairwise(cuts)]
            saved = [rows for server in servers for rows in server.state()]
            servers = [EmbeddingServer([shard], TorchStorage, SGD(), None, key_rules=KeyRules(7)) for shard in shards]
            for server in servers:
                server.load(saved)
            continue
        client = EmbeddingClient([table], ["user"], servers, admits=kind != "ask")
        if kind == "time":
            for _ in range(KEPT_CALLS + 1):
                client.pull(Jagged(torch.tensor([999]), None, None, 1, 1))
            known.pop(999, None)
            continue
        keys = torch.tensor(numbers, dtype=torch.int64)
        pulled = client.pull(Jagged(keys, None, None, 1, len(numbers)))
        held = {owner: row for server in servers for row, owner in enumerate(owners(server)) if owner >= LOWEST}
        all_owners = [owner for server in servers for owner in owners(server) if owner >= LOWEST]
        assert len(held) == len(all_owners), "no key has two rows"
        for key in set(known) - set(held):
            del known[key]
        states = [own for server in servers for own in server.state()]
        shared = torch.cat([own.tensors["weight"][own.tensors["key"] == DEFAULT ^ NOBODY] for own in states])
        expired = set()
        for position, key in enumerate(numbers):
            if kind == "train" and ttl and admit != 1 and bool((pulled.pooled[position] == shared).all(1).any()):
                expired.add(key)  # or never admitted; its row is there for who asks until another has it
            elif key in held and (key not in known or not torch.allclose(known[key], pulled.pooled[position])):
                fresh = torch.from_numpy(initial_rows(table, np.array([key]), 7))[0]
                assert kind == "train"
                assert torch.equal(pulled.pooled[position], fresh), "a key begins anew, or goes on with its own row"
                known[key] = fresh.clone()
        if kind == "train" and numbers:
            client.push(pulled, torch.ones_like(pulled.pooled), 0.5).result()
            for key in numbers:
                if key in known and key not in expired:
                    known[key] = known[key] - 0.5


def test_servers_of_a_cut_table_and_fixed_tables_beside_it() -> None:
    tables, features = [FIXED, USER, ITEM], ["item", "hour", "user"]
    held = [[Shard(USER, 0, WAYS), whole(FIXED)], [Shard(USER, WAYS, USER.rows), whole(ITEM)]]
    servers = [EmbeddingServer(shards, TorchStorage, SGD(), 0, key_rules=KeyRules(7)) for shards in held]
    alone = [EmbeddingServer([whole(table) for table in tables], TorchStorage, SGD(), 0, key_rules=KeyRules(7))]
    values = torch.tensor([3, 10**12, 3, 1, 23, 0, 8, -8, 10**15])
    ids = Jagged(values, None, None, 3, 3)
    found = [EmbeddingClient(tables, features, each, admits=True).pull(ids).pooled for each in (servers, alone)]
    assert torch.equal(*found)
    assert bool((found[0] != 0).any(1).all())


@pytest.mark.parametrize("unadmitted", ["shared", "zeros"])
def test_what_keys_without_a_row_look_up(unadmitted: str) -> None:
    table = replace(USER, ids=Dynamic(unadmitted=unadmitted, admit=2))  # type: ignore[arg-type]
    server = EmbeddingServer([whole(table)], TorchStorage, SGD(), 0, key_rules=KeyRules(7))
    weight = server.state()[0].tensors["weight"]
    weight[:] = 5.0
    client = EmbeddingClient([table], ["user"], [server], admits=True)
    client.pull(Jagged(torch.tensor([1]), None, None, 1, 1))
    pulled = client.pull(Jagged(torch.tensor([1, 2]), None, None, 1, 2))
    mine = torch.from_numpy(initial_rows(table, np.array([1]), 7))[0]
    other = torch.full((3,), 5.0 if unadmitted == "shared" else 0.0)
    assert torch.equal(pulled.pooled, torch.stack([mine, other]))
    client.push(pulled, torch.ones(2, 3), 1.0).result()
    assert sorted(weight[:, 0].tolist())[:2] == sorted([float(mine[0] - 1), 4.0 if unadmitted == "shared" else 5.0])


def test_a_key_that_was_copied_at_two_moments_has_one_row() -> None:
    server = server_of(whole(ITEM))
    keys = keys_of_set(ITEM, 1, 3)
    rows = find(server, keys, samples=1)
    own = server.state()[0]
    copy = replace(own, tensors={name: tensor.clone() for name, tensor in own.tensors.items()})
    copy.tensors["key"][rows[2]], copy.tensors["seen"][rows[2]] = keys[0] ^ NOBODY, 9
    server.load([copy])
    assert find(server, keys) == [rows[2], rows[1], owners(server).index(DEFAULT, WAYS)]
