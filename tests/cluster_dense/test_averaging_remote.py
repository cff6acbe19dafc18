"""Trainers in different places average: all get the same, whoever fails, leaves, dies or comes back."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing

import pytest
import torch
from helpers import PackedConnection
from rings import PATIENCE_S, Hall, Hasty, Rounded, until
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Connection, Service
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.served import Client, Served
from shadowsync.sync.all_reduce import Board, RemoteAveraging
from shadowsync.sync.averaging import AveragingService, RingBroken
from shadowsync.sync.rendezvous import Left

Connect = Callable[[Service, int], list[Connection]]
SOON_S = 0.02


class Threads(ThreadPoolExecutor):
    """Threads that end with the test, although a trainer may be waiting in one of them."""

    def __init__(self) -> None:
        super().__init__(12)
        self.services: list[AveragingService] = []

    def serve(self, n: int) -> AveragingService:
        self.services.append(AveragingService(range(n)))
        return self.services[-1]

    def close(self) -> None:
        for service in self.services:
            for rank in range(6):
                service.dead(rank)
        self.shutdown()


@pytest.fixture
def threads() -> Iterator[Threads]:
    with closing(Threads()) as pool:
        yield pool


class Trainers:
    """Some trainers' ends around one service."""

    def __init__(
        self, n: int, hall: Hall, threads: Threads, wire: Connect | None = None, codec: Codec | None = None
    ) -> None:
        self.service, self.hall, self.codec = threads.serve(n), hall, codec or Plain()
        served = Served(self.service)
        connections = wire(served, n) if wire else [PackedConnection(served) for _ in range(n)]
        self.connections, self.counters = connections, [WireCounter() for _ in range(n)]
        self.ends = [self.end(rank, connections[rank]) for rank in range(n)]

    def end(self, rank: int, connection: Connection, give_up_s: float = 120.0) -> RemoteAveraging:
        counter = self.counters[rank]
        return RemoteAveraging(
            rank, connection, self.hall.ring, self.codec, counter, check_s=SOON_S, give_up_s=give_up_s
        )


def result(future: Future[Tensor]) -> list[float]:
    return future.result(PATIENCE_S).tolist()


def ones(value: float, length: int = 3) -> Tensor:
    return torch.full((length,), float(value))


@pytest.mark.parametrize("rounds", [[1], [4, 0, 2, 4, 3]], ids=str)
def test_uneven_trainers_get_the_mean_of_those_still_there(rounds: list[int], threads: Threads, wire: Connect) -> None:
    trainers = Trainers(len(rounds), Hall(), threads, wire)

    def trains(rank: int) -> list[float]:
        end = trainers.ends[rank]
        results = [float(end.mean(ones(rank + 10 * turn))[0]) for turn in range(rounds[rank])]
        end.leave()
        return results

    got = list(threads.map(trains, range(len(rounds)), timeout=PATIENCE_S))
    for rank, count in enumerate(rounds):
        there = [[other for other, last in enumerate(rounds) if last > turn] for turn in range(count)]
        assert got[rank] == pytest.approx([sum(r) / len(r) + 10 * turn for turn, r in enumerate(there)])
    assert trainers.service._book.members == set()
    assert trainers.service._book.round == max(rounds)


def test_where_one_fails_all_repeat_with_the_vectors_they_had(threads: Threads, wire: Connect) -> None:
    """Two of three had a result already; and the replicas move on meanwhile."""
    hall = Hall(fails={(1, 1)})
    trainers, weights = Trainers(3, hall, threads, wire), [ones(float(rank)) for rank in range(3)]
    hall.before_reduction = lambda: torch._foreach_add_(weights, 100)
    got = [threads.submit(end.mean, w) for end, w in zip(trainers.ends, weights, strict=True)]
    assert [result(g) for g in got] == [[1, 1, 1]] * 3
    assert sorted({seat.epoch for seat in hall.seats}) == [1, 2]
    assert trainers.service._book.round == 1
    assert [counter.totals().bytes["dense"] for counter in trainers.counters] == [16] * 3, "2 · 2/3 · 12, once"


def test_a_trainer_that_dies_in_the_middle_holds_nobody_up(threads: Threads, wire: Connect) -> None:
    """Its machine is gone, so that nothing comes back from the ring, not even an error."""
    hall = Hall(deaf={1})
    trainers = Trainers(3, hall, threads, wire)
    got = [threads.submit(end.mean, ones(float(rank))) for rank, end in enumerate(trainers.ends)]
    until(lambda: len(hall.moved) == 3)
    trainers.service.dead(2)
    assert [result(g) for g in got[:2]] == [[0.5] * 3] * 2
    with pytest.raises(RunError, match="trainer 2 was given up"):
        result(got[2])


def test_a_connection_that_goes_is_a_trainer_that_died(threads: Threads) -> None:
    trainers = Trainers(2, Hall(), threads)
    trainers.ends[1].join()
    got = threads.submit(trainers.ends[0].mean, ones(4))
    trainers.connections[1].close()
    assert result(got) == [4, 4, 4]


def test_who_waits_is_released_when_it_leaves(threads: Threads, wire: Connect) -> None:
    trainers = Trainers(3, Hall(), threads, wire)
    got = threads.submit(trainers.ends[1].mean, ones(1))
    until(lambda: 1 in trainers.service._book._arrived)
    trainers.ends[1].leave()
    with pytest.raises(Left):
        result(got)
    others = [threads.submit(trainers.ends[rank].mean, ones(float(rank))) for rank in (0, 2)]
    assert [result(g) for g in others] == [[1, 1, 1]] * 2
    with pytest.raises(Left):
        trainers.ends[1].mean(ones(1))


def test_who_leaves_in_the_middle_of_a_round_ends_it_and_then_closes_its_end_of_the_ring(threads: Threads) -> None:
    hall = Hall()
    trainers = Trainers(2, hall, threads)
    hall.before_reduction = trainers.ends[1].leave
    got = [threads.submit(end.mean, ones(float(rank))) for rank, end in enumerate(trainers.ends)]
    assert [result(g) for g in got] == [[0.5] * 3] * 2
    assert trainers.service._book.members == {0}
    assert (1, 1) in [(seat.epoch, seat.position) for seat in hall.closed]


def test_who_leaves_and_comes_back_has_missed_what_was_between(threads: Threads, wire: Connect) -> None:
    trainers = Trainers(2, Hall(), threads, wire)

    def together() -> list[bool]:
        for got in [threads.submit(end.mean, ones(1)) for end in trainers.ends]:
            result(got)
        return [end.missed for end in trainers.ends]

    assert together() == [False, False]
    trainers.ends[1].leave()
    trainers.ends[1].join()
    assert together() == [False, False], "nobody averaged meanwhile"
    trainers.ends[1].leave()
    trainers.ends[0].mean(ones(1))
    trainers.ends[1].join()
    assert together() == [False, True]
    assert together() == [False, False]


def test_a_trainer_started_anew_takes_its_place(threads: Threads, wire: Connect) -> None:
    """Before anybody noticed that it had died; the old one, should it still live, is not listened to."""
    trainers = Trainers(1, Hall(), threads, wire)
    assert trainers.ends[0].mean(ones(2)).tolist() == [2, 2, 2]
    (connection,) = wire(Served(trainers.service), 1)
    anew = trainers.end(0, connection)
    anew.join()
    assert anew.mean(ones(3)).tolist() == [3, 3, 3]
    assert anew.missed
    for call in (lambda: trainers.ends[0].mean(ones(9)), trainers.ends[0].join):
        with pytest.raises(RunError, match="given up"):
            call()
    trainers.ends[0].leave()
    assert trainers.service._book.members == {0}


def test_trainers_that_never_reach_each_other_say_so(threads: Threads) -> None:
    hall = Hall()
    hall.always_fails = True
    trainers = Trainers(2, hall, threads)
    ends = [trainers.end(rank, trainers.connections[rank], give_up_s=0.03) for rank in range(2)]
    got = [threads.submit(end.mean, ones(1)) for end in ends]
    first = wait(got, PATIENCE_S, FIRST_COMPLETED).done
    with pytest.raises(RunError, match=r"cannot average with trainers \[0, 1\]: closed; every trainer must reach"):
        result(first.pop())


def test_who_waits_longer_than_the_patience_of_a_call_asks_again(threads: Threads, wire: Connect) -> None:
    trainers = Trainers(2, Hall(), threads, wire)
    hasty = Hasty(trainers.connections[0])
    got = threads.submit(trainers.end(0, hasty).mean, ones(1))
    until(lambda: hasty.asked.count("arrive") == 3)
    assert [result(threads.submit(trainers.ends[1].mean, ones(3))), result(got)] == [[2, 2, 2]] * 2


def test_a_service_that_is_closed_lets_everybody_go(threads: Threads) -> None:
    trainers = Trainers(2, Hall(), threads)
    got = threads.submit(trainers.ends[0].mean, ones(1))
    until(lambda: 0 in trainers.service._waiting)
    trainers.service.close()
    with pytest.raises(RunError, match="given up"):
        result(got)


def test_a_lost_driver_is_an_error(threads: Threads, wire: Connect) -> None:
    trainers = Trainers(2, Hall(), threads, wire)
    got = threads.submit(trainers.ends[0].mean, ones(1))
    until(lambda: 0 in trainers.service._book._arrived)
    trainers.connections[0].close()
    with pytest.raises(RunError):
        result(got)
    with pytest.raises(PeerLost):
        trainers.ends[0].join()
    trainers.ends[0].leave()  # which nobody hears


@pytest.mark.parametrize(
    ("codec", "moved", "sent"),
    [(Plain(), torch.float32, 12), (Bf16(), torch.bfloat16, 6)],
)
def test_the_vector_moves_in_the_codecs_type_and_what_moved_is_counted(
    codec: Codec, moved: torch.dtype, sent: int, threads: Threads
) -> None:
    hall = Hall()
    trainers = Trainers(2, hall, threads, codec=codec)
    got = [threads.submit(end.mean, ones(1.001 + rank)) for rank, end in enumerate(trainers.ends)]
    line = codec.decode(codec.encode(ones(1.001)).frames, (3,)), codec.decode(codec.encode(ones(2.001)).frames, (3,))
    assert result(got[0]) == result(got[1]) == ((line[0] + line[1]) / 2).tolist()
    assert {vector.dtype for vector in hall.moved} == {moved}
    totals = trainers.counters[0].totals()
    assert (totals.bytes["dense"], totals.raw_bytes["dense"]) == (sent, 12)


def test_a_codec_remembers_only_what_counted(threads: Threads) -> None:
    hall = Hall(fails={(1, 0)})
    trainers = Trainers(2, hall, threads, codec=Rounded())
    sums = torch.zeros(3)
    for _ in range(5):
        got = [threads.submit(end.mean, ones(0.4)) for end in trainers.ends]
        sums += got[0].result(PATIENCE_S)
    assert sums.tolist() == [2, 2, 2], "five times 0.4: the failed attempt left no residual behind"


def test_the_board_is_for_members_of_the_ring_only(threads: Threads, wire: Connect) -> None:
    hall = Hall(deaf={1})
    trainers = Trainers(2, hall, threads, wire)
    got = [threads.submit(end.mean, ones(1)) for end in trainers.ends]
    until(lambda: len(hall.seats) == 2)
    first, second = sorted(hall.seats, key=lambda seat: seat.position)
    reading = threads.submit(second.board.read, ["a", "b"])
    first.board.pin("a", b"1")
    first.board.pin("b", b"2")
    assert reading.result(PATIENCE_S) == (b"1", b"2")
    (stranger,) = wire(Served(trainers.service), 1)
    forged = Board(stranger, 0, 1)
    forged.pin("a", b"forged")
    with pytest.raises(RingBroken, match="ring 1 is void"):
        forged.read(["a"])
    assert second.board.read(["a"]) == (b"1",)
    with pytest.raises(DataError, match="at most"):
        first.board.pin("c", b"x" * 70_000)
    waits = threads.submit(second.board.read, ["never"])
    trainers.service.dead(0)
    with pytest.raises(RunError, match="ring 1 is void"):
        waits.result(PATIENCE_S)
    assert result(got[1]) == [1, 1, 1]
    assert isinstance(got[0].exception(PATIENCE_S), RunError)


def test_whoever_asks_again_leaves_no_answer_open() -> None:
    """A connection's task ends only with its answer, and with it what is remembered of the connection."""
    service = AveragingService(range(2))
    client = Client("trainer 0")
    for rank, who in ((0, client), (1, Client("trainer 1"))):
        service.join(who, rank)
    first, second = (service.arrive(client, 0, 1, 0) for _ in range(2))
    assert first.done()
    assert not second.done()
    service.client_gone("trainer 0")
    assert second.done()
