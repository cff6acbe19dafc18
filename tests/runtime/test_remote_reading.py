"""Leases and readers behind a wire: the same batches as in process, every row once, whoever dies."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch
from helpers import PackedConnection

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.leases import LOGGED, DoneLog, DoneRows, Lease, LeaseBook, LeaseClient, LeaseService
from shadowsync.data.reader import PARSE_S, Feed, LeasedBatch, Parser, Reader, ReaderOptions
from shadowsync.data.source import Feature, OpenSource, Schema, Slice
from shadowsync.errors import DataError, RunError
from shadowsync.memory.shared import SharedMemory, bytes_of
from shadowsync.rpc import served as rpc_served
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import Connection, JobKeys, Payload, Service
from shadowsync.rpc.errors import GONE, CallTimeout
from shadowsync.rpc.pending import Pending, Promise
from shadowsync.rpc.served import Served, ask, later
from shadowsync.rpc.server import WireServer

OPTIONS = ReaderOptions(batch_size=4, slice_rows=8, epochs=2, seed=3)
Connect = Callable[[Service], Connection]


class Bags(OpenSource):
    """Row n has n % 3 weighted ids of one feature and one id of another."""

    def __init__(self, rows: int) -> None:
        self.schema = Schema(("number",), (Feature("many", 9, multi_hot=True), Feature("one", 9)))
        self.rows = rows

    def read(self, part: Slice) -> Batch:
        numbers = torch.arange(part.start, part.start + part.rows)
        lengths = torch.cat([numbers % 3, torch.ones_like(numbers)])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.arange(int(offsets[-1])) % 9
        ids = Jagged(values, offsets, values.float() / 9, 2, part.rows)
        return Batch(numbers.float() % 2, numbers.float()[:, None], ids)

    def place(self, part: Slice, row: int) -> str:
        return f"bags, row {part.start + row + 1}"


class Broken(Bags):
    def read(self, part: Slice) -> Batch:
        raise DataError("row 7 of bags.tsv has 3 columns")


@pytest.fixture(params=["direct", "wire"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with ExitStack() as stack:
        if request.param == "direct":
            yield lambda service: stack.enter_context(closing(PackedConnection(service)))
            return
        keys = JobKeys.make()
        connector = stack.enter_context(closing(WireClient(keys)))

        def over_the_wire(service: Service) -> Connection:
            server = stack.enter_context(closing(WireServer(service, keys)))
            server.start()
            return connector.connect(server.address)

        yield over_the_wire


def leases_of(source: OpenSource) -> LeaseService:
    parser = Parser(source, OPTIONS)
    return LeaseService(LeaseBook([part.rows for part in parser.slices], OPTIONS.epochs, True, OPTIONS.seed), 4)


def feed_over(
    connect: Connect,
    leases: LeaseService,
    source: OpenSource,
    trainer: int,
    log: DoneLog | None = None,
    ahead: bool = True,
) -> Feed:
    parse = partial(later, connect(Served(Parser(source, OPTIONS))), Parser.parse)
    return Feed(trainer, LeaseClient(connect(Served(leases)), log, ahead), parse, OPTIONS.prefetch)


def tell(feed: Feed, leased: LeasedBatch) -> None:
    """Says that a batch is done, by somebody who claims nothing after it."""
    feed.done(leased)
    assert isinstance(feed.leases, LeaseClient)
    assert feed.leases.settle(30)


def drain(feed: Feed) -> Iterator[LeasedBatch]:
    while (leased := feed.next()) is not None:
        yield leased
        feed.done(leased)


@pytest.mark.parametrize("ahead", [False, True])
def test_batches_are_those_of_a_reader_in_process(connect: Connect, ahead: bool) -> None:
    reader = Reader(Bags(29), OPTIONS)
    expected = list(drain(reader.feed(0)))
    reader.close()
    leases = leases_of(Bags(29))
    found = list(drain(feed_over(connect, leases, Bags(29), 0, ahead=ahead)))
    assert [leased.number for leased in found] == list(range(len(expected)))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.start, mine.stop, mine.lease.slice) == (theirs.start, theirs.stop, theirs.lease.slice)
        for name in ("values", "offsets", "weights"):
            assert torch.equal(getattr(mine.batch.ids, name), getattr(theirs.batch.ids, name))
        assert torch.equal(mine.batch.labels, theirs.batch.labels)
        assert torch.equal(mine.batch.dense, theirs.batch.dense)
    assert leases.finished
    assert leases.trained == 58


def test_slices_are_decoded_by_those_who_train_them(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that serves all connections of a trainer would hold up its pulls meanwhile."""
    threads, unpack = set(), rpc_served._unpack

    def noted(decoder: Any, what: str, payload: Payload) -> Any:
        if what == "the answer of parse":
            threads.add(threading.current_thread())
        return unpack(decoder, what, payload)

    monkeypatch.setattr(rpc_served, "_unpack", noted)
    assert sum(len(leased.batch) for leased in drain(feed_over(connect, leases_of(Bags(29)), Bags(29), 0))) == 58
    assert threads == {threading.current_thread()}


def test_rows_of_a_dead_trainer_and_of_a_slow_one_are_trained_by_the_others(connect: Connect) -> None:
    leases, source = leases_of(Bags(61)), Bags(61)
    dead, slow = (feed_over(connect, leases, source, trainer) for trainer in (0, 1))
    lost, held = dead.next(), slow.next()
    assert lost is not None
    assert held is not None
    seen: Counter[float] = Counter()
    quick = [feed_over(connect, leases, source, trainer) for trainer in (2, 3)]
    threads = [
        threading.Thread(target=lambda feed=feed: [seen.update(b.batch.dense[:, 0].tolist()) for b in drain(feed)])
        for feed in quick
    ]
    for thread in threads:
        thread.start()
    leases.abandon(0)
    seen.update(held.batch.dense[:, 0].tolist())
    tell(slow, held)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    tell(dead, lost)
    assert seen == dict.fromkeys(map(float, range(61)), 2)
    assert leases.finished
    assert leases.trained == 122


def test_what_a_dead_trainer_could_not_tell_is_read_from_its_log(connect: Connect) -> None:
    memory = SharedMemory.create(bytes_of(DoneLog.PARTS), "a log")
    leases, source = leases_of(Bags(61)), Bags(61)
    dead = feed_over(connect, leases, source, 0, DoneLog(SharedMemory.open(memory.path).take(*DoneLog.PARTS[0])))
    seen: Counter[float] = Counter()
    for _ in range(7):
        leased = dead.next()
        assert leased is not None
        seen.update(leased.batch.dense[:, 0].tolist())
        dead.done(leased)
    assert dead.next() is not None  # was never done
    assert leases.trained < sum(seen.values())
    leases.redo(DoneLog.of(memory.read()))
    assert leases.trained == sum(seen.values())
    leases.redo(DoneLog.of(memory.read()))  # what is known is not counted again
    leases.abandon(0)
    for leased in drain(feed_over(connect, leases, source, 1)):
        seen.update(leased.batch.dense[:, 0].tolist())
    assert seen == dict.fromkeys(map(float, range(61)), 2)


def test_a_log_keeps_the_last_batches_and_none_that_was_half_written() -> None:
    ring = torch.zeros(LOGGED * 3, dtype=torch.int64)
    log, lease = DoneLog(ring), Lease(0, 0, 0, 0, ())
    assert list(log) == []
    for start in range(LOGGED + 5):
        log.note(DoneRows(lease, start, start + 1))
    assert {start for _, start, _ in log} == set(range(5, LOGGED + 5))
    ring[0] = 0
    assert {start for _, start, _ in log} == {*range(5, LOGGED + 5)} - {LOGGED}


def test_claims_go_as_far_ahead_as_lasts_and_never_into_what_somebody_idle_took_over() -> None:
    leases = LeaseService(LeaseBook([400]), 4)
    client = LeaseClient(PackedConnection(Served(leases)), ahead=True)
    _, lease = client.lease(0, True)
    assert lease is not None
    client.opened(lease, 400)
    claims = [client.claim(lease, start, start + 4)[1] for start in range(0, 20, 4)]
    assert claims == [(number, 4 * number + 4) for number in range(5)]
    _, other = leases.lease(1, True)
    assert other is not None
    ((taken, end),) = other.spans
    assert end == 400
    rest = [claim for start in range(20, 400, 4) if (claim := client.claim(lease, start, start + 4)[1]) is not None]
    assert rest[-1].stop == taken
    assert leases.claim(other, taken, taken + 4)[1] is not None


def test_refused_claims_do_not_let_the_next_one_go_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who walks through what was taken over would else claim all of the next lease, and nobody could help with it."""
    leases = LeaseService(LeaseBook([80, 400]), 4)
    asked: list[tuple[int, int]] = []
    claim = LeaseService.claim
    monkeypatch.setattr(leases, "claim", lambda *given: [asked.append(given[1:3]), claim(leases, *given)][1])
    client = LeaseClient(PackedConnection(Served(leases)), ahead=True)
    first, second = (client.lease(0, True)[1] for _ in range(2))
    assert first is not None
    assert second is not None
    client.opened(first, 80)
    client.opened(second, 400)
    leases.abandon(0)  # the lease is another's now
    assert all(client.claim(first, start, start + 4)[1] is None for start in range(0, 80, 4))
    assert {stop - start for start, stop in asked} == {4}


def test_what_is_trained_never_falls_while_it_is_told() -> None:
    leases, held = LeaseService(LeaseBook([80]), 4), list[tuple[Promise[Payload], Pending[Payload]]]()

    class Slow(PackedConnection):
        def call(self, method: str, *given: Any, **more: Any) -> Pending[Payload]:
            found = super().call(method, *given, **more)
            if method != "tell":
                return found
            held.append((Promise(), found))
            return held[-1][0]

    client = LeaseClient(Slow(Served(leases)), ahead=True)
    _, lease = client.lease(0, True)
    assert lease is not None
    client.opened(lease, 80)
    for start in range(0, 12, 4):
        client.claim(lease, start, start + 4)
        client.done(lease, start, start + 4)
    assert client.trained == 12
    client.tell()
    assert client.trained == 12
    assert leases.trained == 12
    ((answer, found),) = held
    answer.keep(found.result())
    assert client.trained == 12


def test_an_error_of_the_data_reaches_the_trainer_in_its_own_words(connect: Connect) -> None:
    feed = feed_over(connect, leases_of(Bags(8)), Broken(8), 0)
    with pytest.raises(DataError, match=r"^row 7 of bags.tsv has 3 columns$"):
        feed.next()


@pytest.mark.parametrize("lease", [Lease(0, 0, 0, 9, ((0, 4),)), Lease(0, 0, -1, 0, ()), Lease(0, 0, 0, 0, ((4, 99),))])
def test_leases_of_other_data_are_refused(connect: Connect, lease: Lease) -> None:
    reader = connect(Served(Parser(Bags(29), OPTIONS)))
    with pytest.raises(DataError, match="does not fit this data"):
        ask(reader, Parser.parse, lease)


def test_rows_that_were_not_leased_cannot_be_reported_done(connect: Connect) -> None:
    leases = leases_of(Bags(29))
    connection = connect(Served(leases))
    remote = LeaseClient(connection)
    _, lease = remote.lease(0, True)
    assert lease is not None
    assert remote.opened(lease, 8)[1]
    with pytest.raises(DataError, match="are not among those to train"):
        ask(connection, LeaseService.tell, (DoneRows(lease, 4, 400),))
    assert leases.trained == 0


def test_a_reader_whose_file_system_hangs_is_no_peer_that_was_lost() -> None:
    """Else trainer after trainer would be replaced for it."""

    class Hanging(PackedConnection):
        def call(self, *asked: object, **more: object) -> Pending[Payload]:
            assert asked[-1] == PARSE_S
            answer: Promise[Payload] = Promise()
            answer.fail(CallTimeout("parse gave no answer"))
            return answer

    parse = partial(later, Hanging(Served(Parser(Bags(8), OPTIONS))), Parser.parse)
    feed = Feed(0, leases_of(Bags(8)), parse, OPTIONS.prefetch)
    with pytest.raises(RunError, match="no reader has read its rows within 900 s") as raised:
        feed.next()
    assert not isinstance(raised.value, GONE)
