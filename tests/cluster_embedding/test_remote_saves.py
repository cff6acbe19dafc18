"""Rows of a served embedding server that are saved beside training: what crosses, and what is refused."""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, SOURCE, TABLES, train
from helpers import PackedConnection
from torch import Tensor

from shadowsync.checkpoint.loading import Written
from shadowsync.checkpoint.remote_save import RemoteSave
from shadowsync.compression.plain import Plain
from shadowsync.embedding import saves as embedding_saves
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.saves import SaveMethods
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Rows, RowSet, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.embedding.watching import RowPriority, RowTracking
from shadowsync.errors import DataError
from shadowsync.registry import members
from shadowsync.rpc.connection import EMPTY, Connection, Payload
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.served import Served, ask

Connect = Callable[[EmbeddingService], Connection]
SHARDS = (Shard(TABLES[0], 10, 40), *(Shard(table, 0, table.rows) for table in TABLES[1:]))
PRIORITIES = members("shadowsync.recovery", RowPriority)
MIN_ROWS = 25


def made(priority: str = "all", optimizer: Any = ADAGRAD) -> EmbeddingServer:
    """A server whose tables of at least 25 rows are tracked; all of them under `all`."""
    tracking = RowTracking(PRIORITIES[priority], 0.5, 1 if priority == "all" else MIN_ROWS, 0)
    return EmbeddingServer(SHARDS, TorchStorage, optimizer, 3, tracking)


def trained(server: EmbeddingServer, steps: int = 2) -> None:
    rest = EmbeddingServer([Shard(TABLES[0], 0, 10)], TorchStorage, ADAGRAD, 3)
    train(EmbeddingClient(TABLES, SOURCE, [server, rest]), steps, "multi")


def serving(server: EmbeddingServer) -> EmbeddingService:
    return EmbeddingService(server, Plain(), Plain())


def served(server: EmbeddingServer) -> Served:
    return Served(serving(server))


def spoken_of(found: Sequence[Rows | RowSet]) -> dict[str, list[int]]:
    """The rows that were copied of each table."""
    numbers: dict[str, list[int]] = {}
    for rows in found:
        got = (
            rows.numbers.tolist()
            if isinstance(rows, RowSet)
            else list(range(rows.start, rows.start + len(rows.tensors["weight"])))
        )
        numbers.setdefault(rows.table.name, []).extend(got)
    return numbers


def in_memory(rows: Rows | RowSet) -> Rows | RowSet:
    """Reads all of it, in two runs."""
    assert rows.source is not None
    count, tensors = len(rows.tensors["weight"]), {}
    for first, last in ((0, count // 2), (count // 2, count)):
        for name in rows.tensors:
            tensors.setdefault(name, []).extend(rows.source(first, last, name))
    return replace(
        rows, tensors={name: parts[-1] if name == "step" else torch.cat(parts) for name, parts in tensors.items()}
    )


def as_held(server: EmbeddingServer) -> Written:
    """What is written is what the server holds now."""

    def written(table: Table, rows: Tensor | range) -> Tensor:
        own = next(own for own in server.state() if own.table == table)
        places = torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
        return own.tensors["weight"][places - own.start]

    return written


def never_asked(table: Table, rows: Tensor | range) -> Tensor:
    raise AssertionError("nobody compares")


def assert_copies(found: Sequence[Rows | RowSet], server: EmbeddingServer) -> None:
    """What is copied is what the server holds."""
    for rows in map(in_memory, found):
        own = next(own for own in server.state() if own.table == rows.table)
        stop = rows.start + len(rows.tensors["weight"])
        places = (rows.numbers if isinstance(rows, RowSet) else torch.arange(rows.start, stop)) - own.start
        assert rows.tensors.keys() == own.tensors.keys()
        for name, tensor in own.tensors.items():
            assert torch.equal(rows.tensors[name], tensor if name == "step" else tensor[places])


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_saves, "MOST_ROWS", 5)


@pytest.fixture
def nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.checkpoint.remote_save.EARLY_BYTES", 0)


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize(("end_of_round", "optimizer"), [(False, ADAGRAD), (True, ADAM)], ids=["within", "end"])
def test_over_a_wire_the_same_rows_are_picked_copied_and_reported(
    connect: Connect, priority: str, optimizer: Any, end_of_round: bool
) -> None:
    server, twin = made(priority, optimizer), made(priority, optimizer)
    for each in (server, twin):
        trained(each)
    way = connect(serving(server))
    save = RemoteSave.begin(way, chunk_bytes=4 * 4 * 5)
    found = list(save.changed(SHARDS, end_of_round))
    twin_save = twin.watches.begin()
    wanted = [twin.pick(index, end_of_round) for index in range(len(SHARDS))]
    expected = {
        shard.table.name: list(range(shard.start, shard.stop)) if numbers is None else numbers.tolist()
        for shard, numbers in zip(SHARDS, wanted, strict=True)
    }
    assert spoken_of(found) == expected
    assert len(expected["user"]) > 5
    assert_copies(found, server)
    for index, shard in enumerate(SHARDS):
        for rows in found:
            if rows.table == shard.table:
                save.saved(index, shard, rows, as_held(server))
        numbers = wanted[index]
        rows = range(shard.start, shard.stop) if numbers is None else numbers
        twin.rows_saved(twin_save, index, rows, twin.copy_rows(index, rows)["weight"])
    for each in (server, twin):
        trained(each, 1)
    again = list(RemoteSave.begin(way).changed(SHARDS, False))
    twin.watches.begin()
    picks = [twin.pick(index, False) for index in range(len(SHARDS))]
    assert spoken_of(again) == {s.table.name: p.tolist() for s, p in zip(SHARDS, picks, strict=True) if p is not None}


@pytest.mark.usefixtures("nothing_early")
def test_everything_crosses_in_chunks_when_it_is_read(connect: Connect) -> None:
    server = made("scar", ADAM)
    trained(server)
    save = RemoteSave.begin(connect(serving(server)), chunk_bytes=4 * 8 * 9)
    assert save.compares
    found = list(save.everything(SHARDS))
    trained(server)
    for rows in found:
        assert rows.source is not None
        parts = list(rows.source(0, len(rows.tensors["weight"]), "weight"))
        assert max(part.numel() for part in parts) <= 8 * 9
    assert_copies(found, server)
    assert spoken_of(found) == {s.table.name: list(range(s.start, s.stop)) for s in SHARDS}
    for index, shard in enumerate(SHARDS):
        for rows in found:
            if rows.table == shard.table:
                save.saved(index, shard, rows, as_held(server))
    server.watches.begin()
    picks = [server.pick(index, False) for index in range(len(SHARDS))]
    assert [len(p) for p in picks if p is not None] == [0] * len(SHARDS)


def test_weights_cross_only_where_they_are_compared() -> None:
    sent: list[tuple[str, int]] = []

    class Counting(PackedConnection):
        def call(self, method: str, payload: Payload = EMPTY, timeout_s: Any = None) -> Any:
            sent.append((method, len(payload.tensors)))
            return super().call(method, payload, timeout_s)

    for priority, count in (("mfu", 1), ("scar", 2)):
        server = made(priority)
        trained(server)
        save = RemoteSave.begin(Counting(served(server)))
        found = list(save.changed(SHARDS, False))
        save.saved(0, SHARDS[0], found[0], as_held(server) if count == 2 else never_asked)
        assert sent[-1] == ("saved", count)


def test_what_a_save_costs_is_counted_where_its_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is said to take the processor for a second."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(seconds)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    server = made("mfu")
    trained(server)
    asked: list[str] = []

    class Counting(PackedConnection):
        def call(self, method: str, payload: Payload = EMPTY, timeout_s: Any = None) -> Any:
            asked.append(method)
            return super().call(method, payload, timeout_s)

    way = Counting(served(server))
    for _ in range(2):
        save = RemoteSave.begin(way)
        assert save.cost_s() == 0
        found = list(save.changed(SHARDS, True))
        picked_s = save.cost_s()
        assert picked_s > 0
        for rows in found:
            in_memory(rows)
        read_s = save.cost_s()
        save.saved(0, SHARDS[0], found[0], never_asked)
        assert picked_s < read_s < save.cost_s()
        calls = [method for method in asked if method not in ("begin_save", "save_cost")]
        assert save.cost_s() == len(calls) / 4
        assert {*calls} == {"pick", "rows", "singles", "saved"}
        asked.clear()
    assert replace(save, number=save.number - 1).cost_s() == 0


class Replaced(Connection):
    """A connection that is led to another server before the call of that number."""

    def __init__(self, first: EmbeddingServer, then: EmbeddingServer, calls: int) -> None:
        self._ways = [PackedConnection(served(first))] * calls + [PackedConnection(served(then))]
        self._calls = 0

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: Any = None) -> Any:
        way = self._ways[min(self._calls, len(self._ways) - 1)]
        self._calls += 1
        return way.call(method, payload)

    def switch(self) -> None:
        """From now on."""
        self._calls = len(self._ways)

    def close(self) -> None:
        raise AssertionError("the connection belongs to others")


@pytest.mark.parametrize("calls", [1, 2, 3, 9])
def test_a_server_that_takes_the_place_does_not_answer_for_the_other(calls: int) -> None:
    first, then = made("mfu"), made("mfu")
    trained(first)
    save = RemoteSave.begin(Replaced(first, then, calls))
    with pytest.raises(PeerLost, match="an embedding server was replaced while its rows were"):
        list(map(in_memory, save.changed(SHARDS, True)))
    whole = RemoteSave.begin(Replaced(first, then, calls))
    with pytest.raises(PeerLost, match="an embedding server was replaced while its rows were copied"):
        list(map(in_memory, whole.everything(SHARDS)))


@pytest.mark.parametrize("optimizer", [ADAGRAD, ADAM], ids=lambda optimizer: optimizer.name)
def test_small_shards_are_copied_when_a_save_begins_and_anew_if_read_again(optimizer: Any) -> None:
    server = made("all", optimizer)
    trained(server)
    found = list(RemoteSave.begin(PackedConnection(served(server))).everything(SHARDS))
    then = [{name: tensor.clone() for name, tensor in own.tensors.items()} for own in server.state()]
    trained(server)
    for wanted in (then, [own.tensors for own in server.state()]):
        for rows, tensors in zip(found, wanted, strict=True):
            assert rows.source is not None
            for name in rows.tensors:
                read = torch.cat(list(rows.source(0, len(rows.tensors["weight"]), name)))
                assert torch.equal(read, tensors[name]), name


@pytest.mark.usefixtures("nothing_early")
@pytest.mark.parametrize("priority", ["all", "mfu"])
def test_rows_that_were_given_out_are_not_read_from_its_successor(priority: str) -> None:
    first, then = made(priority), made(priority)
    trained(first)
    way = Replaced(first, then, 1000)
    found = list(RemoteSave.begin(way).changed(SHARDS, True))
    way.switch()
    for rows in found:
        with pytest.raises(PeerLost, match="an embedding server was replaced while its rows were copied"):
            in_memory(rows)


def test_what_was_saved_of_a_server_that_is_gone_is_not_told_to_its_successor() -> None:
    first, then = made("mfu"), made("mfu")
    for server in (first, then):
        trained(server)
    save = RemoteSave.begin(PackedConnection(served(first)))
    rows = next(iter(save.changed(SHARDS, False)))
    then.watches.begin()
    before = then.pick(0, False)
    replace(save, connection=PackedConnection(served(then))).saved(0, SHARDS[0], rows, never_asked)
    after = then.pick(0, False)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


@pytest.fixture
def under_way() -> Iterator[tuple[EmbeddingServer, Connection, int]]:
    """A server that compares, a connection to it, and the number of a save in which shard 0 was picked."""
    server = made("scar")
    trained(server)
    with closing(PackedConnection(served(server))) as way:
        save = RemoteSave.begin(way).number
        ask(way, SaveMethods.pick, save, 0, False, 0)
        yield server, way, save


def rows(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


W = torch.ones(2, 8)
BAD: list[Callable[[Connection, int], object]] = [
    lambda way, save: ask(way, SaveMethods.pick, save, 9, False, 0),
    lambda way, save: ask(way, SaveMethods.pick, save, -1, True, 0),
    lambda way, save: ask(way, SaveMethods.pick, save, 0, False, -1),
    lambda way, save: ask(way, SaveMethods.pick, save, 0, False, 1000),
    lambda way, save: ask(way, SaveMethods.pick, save, 1, False, 4),
    lambda way, save: way.call("pick").result(),
    lambda way, save: ask(way, SaveMethods.singles, save, 9, rows(10, 11)),
    lambda way, save: ask(way, SaveMethods.singles, save, -1, rows(10, 11)),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(10, 11).float()),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(10, 11).view(2, 1)),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(11, 10)),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(11, 11)),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(9, 10)),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(39, 40)),
    lambda way, save: ask(way, SaveMethods.singles, save, 0, rows(-1, 2**40, dtype=torch.int64)),
    lambda way, save: ask(way, SaveMethods.saved, save, 9, 0, 2, None, W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 9, 11, None, W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 39, 41, None, W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 12, 10, None, W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, -(2**62), 2**62, None, W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 12, None, None),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 12, None, W[:1]),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 12, None, W.double()),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 40, W, None),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 40, rows(10, 11), None),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 40, rows(11, 10), W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 40, rows(9, 10), W),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 40, rows(10, 11), W[:, :7]),
    lambda way, save: ask(way, SaveMethods.saved, save, 0, 10, 40, torch.tensor(10), W),
    lambda way, save: ask(way, SaveMethods.rows, 0, 9, 12, save),
    lambda way, save: ask(way, SaveMethods.rows, 0, -(2**62), 2**62, save),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_refused_and_told_to_nobody(
    under_way: tuple[EmbeddingServer, Connection, int], bad: Callable[[Connection, int], object]
) -> None:
    server, way, save = under_way
    before = server.pick(0, False)
    with pytest.raises(DataError):
        bad(way, save)
    after = server.pick(0, False)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
    assert server.watches.is_under_way(save)


def test_what_is_said_of_another_save_is_not_known(under_way: tuple[EmbeddingServer, Connection, int]) -> None:
    _, way, save = under_way
    assert ask(way, SaveMethods.singles, save, 0, rows(10, 11))
    assert ask(way, SaveMethods.rows, 0, 10, 12, save)
    assert ask(way, SaveMethods.saved, save, 0, 10, 40, rows(10, 11), W)
    other = save + 1
    with pytest.raises(PeerLost, match="an embedding server was replaced while its rows were chosen"):
        ask(way, SaveMethods.pick, other, 0, False, 0)
    with pytest.raises(PeerLost, match="an embedding server was replaced while its rows were copied"):
        ask(way, SaveMethods.singles, other, 0, rows(10, 11))
    with pytest.raises(PeerLost, match="an embedding server was replaced while its rows were copied"):
        ask(way, SaveMethods.rows, 0, 10, 12, other)
    assert not ask(way, SaveMethods.saved, other, 0, 10, 40, rows(10, 11), W)


def test_no_message_holds_more_than_is_allowed(
    under_way: tuple[EmbeddingServer, Connection, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, way, save = under_way
    monkeypatch.setattr(embedding_saves, "MOST_BYTES", 36 * 3)
    monkeypatch.setattr(embedding_saves, "MOST_ROWS", 3)
    ask(way, SaveMethods.singles, save, 0, rows(10, 11, 12))
    with pytest.raises(DataError, match="4 rows of table user are asked for at once; at most 3 are allowed"):
        ask(way, SaveMethods.singles, save, 0, rows(10, 11, 12, 13))
    with pytest.raises(DataError, match="4 rows of table user are asked for at once; at most 3 are allowed"):
        ask(way, SaveMethods.rows, 0, 10, 14)
    with pytest.raises(DataError, match="4 rows are reported at once; at most 3 are allowed"):
        ask(way, SaveMethods.saved, save, 0, 10, 14, None, torch.ones(4, 8))
    picked = ask(way, SaveMethods.pick, save, 0, False, 0)
    assert picked is not None
    numbers, total = picked
    assert (len(numbers), numbers.dtype) == (3, torch.int32)
    assert total > 3
