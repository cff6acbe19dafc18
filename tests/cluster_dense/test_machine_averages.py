"""Trainers of one machine average where their replicas lie, and meet those of other machines by the first of them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from helpers import PackedConnection
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import PATIENCE_S, Hall, until
from test_differences import ALMOST_ALL, SIZE, Trainers, drawn, pieces, total
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import RunError
from shadowsync.memory.shared import SharedMemory, bytes_of, can_share
from shadowsync.rpc.served import Served
from shadowsync.sync.all_reduce import MakeRing, RemoteAveraging
from shadowsync.sync.averaging import AveragingService
from shadowsync.sync.gloo import GlooRing
from shadowsync.sync.machine import Neighbours, ReplicaMemory
from shadowsync.sync.rendezvous import Left

pytestmark = pytest.mark.skipif(not can_share(), reason="needs memory without a name (memfd_create of Linux)")


class Machines:
    """Trainers on machines, by name.

    Attributes:
        weights: each one's replica, in the memory of its machine.
    """

    def __init__(
        self, machines: Sequence[str], codec: Codec, make_ring: MakeRing, threads: ThreadPoolExecutor, apart: bool
    ) -> None:
        self.machines, self.codec, self.make_ring, self.threads, self.apart = machines, codec, make_ring, threads, apart
        self.service = AveragingService(range(len(machines)))
        self.counters = [WireCounter() for _ in machines]
        self.memory: dict[int, SharedMemory] = {}
        self.weights: dict[int, Tensor] = {}
        self.ends = [self.end(rank) for rank in range(len(machines))]
        self.steps = 0

    def end(self, rank: int) -> RemoteAveraging:
        before = self.weights.get(rank, drawn(rank)).clone()
        self.memory[rank] = SharedMemory.create(bytes_of(ReplicaMemory.parts(SIZE)), "a replica")
        self.service.place(rank, self.machines[rank], self.memory[rank].path)
        neighbours = Neighbours(self.memory[rank].path, SIZE)
        self.weights[rank] = neighbours.own.replica.copy_(before)
        connection = PackedConnection(Served(self.service))
        return RemoteAveraging(
            rank,
            connection,
            self.make_ring,
            self.codec,
            self.counters[rank],
            check_s=0.02,
            give_up_s=0.2,
            neighbours=neighbours,
            apart=self.apart,
        )

    def replace(self, rank: int) -> None:
        """It dies, and another one goes on with its replica in memory of its own."""
        self.service.dead(rank)
        self.ends[rank] = self.end(rank)
        self.ends[rank].join()

    def train(self, ranks: Sequence[int]) -> dict[int, Tensor]:
        """By how much each goes."""
        self.steps += 1
        steps = {rank: drawn(1000 * self.steps + rank, 0.1) for rank in ranks}
        for rank, step in steps.items():
            self.weights[rank].add_(step)
        return steps

    def start(self, ranks: Sequence[int]) -> list[Future[Tensor]]:
        return [self.threads.submit(self.ends[rank].mean, self.weights[rank]) for rank in ranks]

    def average(self, ranks: Sequence[int]) -> Tensor:
        """The same bits for all."""
        got = [mean.result(PATIENCE_S) for mean in self.start(ranks)]
        assert all(torch.equal(each, got[0]) for each in got)
        return got[0]

    def approach(self, ranks: Sequence[int], target: Tensor, alpha: float) -> None:
        for rank in ranks:
            self.ends[rank].approach(self.weights[rank], target, alpha)

    def sent(self) -> list[int]:
        return [counter.totals().bytes.get("dense", 0) for counter in self.counters]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_on_one_machine_it_is_as_in_one_process_bit_for_bit(threads: ThreadPoolExecutor) -> None:
    """Also in what counts as sent, where that is asked for; no ring is built."""
    hall, near = Hall(), Trainers(3, Plain())
    far = Machines(["a"] * 3, Plain(), hall.ring, threads, apart=True)
    for ranks in ([0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2]):
        for rank in range(3):
            (far.ends[rank].join if rank in ranks else far.ends[rank].leave)()
        far.train(ranks)
        got, expected = far.average(ranks), near.round(ranks)
        assert torch.equal(got, expected)
        far.approach(ranks, got, near.alpha)
        for rank in ranks:
            assert torch.equal(far.weights[rank], near.weights[rank])
            assert far.ends[rank].missed == near.averages.of[rank].missed
    assert sum(far.sent()) == near.counter.totals().bytes["dense"]
    assert not hall.seats


def test_within_a_machine_of_a_cluster_nothing_crosses_and_no_codec_rounds(threads: ThreadPoolExecutor) -> None:
    far = Machines(["a"] * 2, Bf16(), Hall().ring, threads, apart=False)
    expected = (far.weights[0] + far.weights[1]).div_(2)
    assert torch.equal(far.average([0, 1]), expected)
    assert far.sent() == [0, 0]


def test_an_average_stays_as_it_is_when_the_next_one_is_made(threads: ThreadPoolExecutor) -> None:
    """A method may keep it in its state."""
    far = Machines(["a"] * 3, Plain(), Hall().ring, threads, apart=False)
    first = [mean.result(PATIENCE_S) for mean in far.start(range(3))]
    before = first[0].clone()
    far.train(range(3))
    assert not torch.equal(far.average(range(3)), before)
    assert all(torch.equal(each, before) for each in first)


MACHINES = ["a", "b", "c"]
EXACT = [pieces(keep=ALMOST_ALL), pieces(keep=1.0), Plain()]


@given(
    machines=st.lists(st.sampled_from(MACHINES), min_size=1, max_size=5),
    codec=st.sampled_from([*(pieces(keep=keep) for keep in (0.03, 0.3)), *EXACT, Bf16()]),
    alpha=st.sampled_from([0.05, 0.5, 1.0]),
    happenings=st.lists(st.tuples(st.sampled_from(["", "", "dies", "leaves", "fails"]), st.integers(0, 4)), max_size=6),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_no_step_of_any_replica_is_lost_or_counts_twice(
    machines: list[str], codec: Codec, alpha: float, happenings: list[tuple[str, int]]
) -> None:
    """Whatever crosses between machines, whoever leads one: replicas move towards each other, and their sum stays."""
    hall, n = Hall(), len(machines)
    present = set(range(n))
    with ThreadPoolExecutor(8) as threads:
        far = Machines(machines, codec, hall.ring, threads, apart=False)
        for happening, chosen in [("", 0), *happenings, ("", 0), ("", 0)]:
            rank = chosen % n
            if happening == "dies" and rank in present:
                far.replace(rank)
            elif happening == "leaves" and rank in present and len(present) > 1:
                far.ends[rank].leave()
                present.discard(rank)
            elif happening == "fails":
                hall.fails.add((far.service._book.epoch, 0))
            ranks = sorted(present)
            far.train(ranks)
            before = total([far.weights[rank] for rank in ranks])
            spread = torch.stack([far.weights[rank] for rank in ranks]).var(0, correction=0).sum()
            average = far.average(ranks)
            meanwhile = far.train(ranks)
            far.approach(ranks, average, alpha)
            after = [far.weights[rank] - meanwhile[rank] for rank in ranks]
            torch.testing.assert_close(total(after), before, atol=5e-5, rtol=0)
            if codec in EXACT:
                torch.testing.assert_close(average.double(), before / len(ranks), atol=2e-5, rtol=0)
                assert torch.stack(after).var(0, correction=0).sum() <= spread * (1 - alpha) ** 2 + 1e-3
        for end in far.ends:
            end.leave()


def test_over_gloo_only_the_first_of_each_machine_sends(threads: ThreadPoolExecutor) -> None:
    """A machine counts as many times as it has trainers."""
    far = Machines(["a", "b", "a", "c", "a"], Plain(), GlooRing, threads, apart=False)
    for _ in range(3):
        far.train(range(5))
        expected = torch.stack(list(far.weights.values())).mean(0)
        average = far.average(range(5))
        torch.testing.assert_close(average, expected, atol=1e-5, rtol=0)
        far.approach(range(5), average, 0.5)
    once = round(SIZE * 4 * 2 * 2 / 3)
    assert far.sent() == [3 * once, 3 * once, 0, 3 * once, 0]
    for end in far.ends:
        end.leave()


def test_where_the_first_of_a_machine_dies_while_it_averages_the_next_one_does(threads: ThreadPoolExecutor) -> None:
    hall = Hall(deaf={1})
    far = Machines(["a", "a", "a", "b"], Plain(), hall.ring, threads, apart=False)
    means = far.start(range(4))
    until(lambda: len(hall.moved) == 2)
    far.service.dead(0)
    expected = torch.stack([far.weights[rank] for rank in (1, 2, 3)]).mean(0)
    for mean in means[1:]:
        torch.testing.assert_close(mean.result(PATIENCE_S), expected, atol=1e-6, rtol=0)
    with pytest.raises(RunError, match="trainer 0 was given up"):
        means[0].result(PATIENCE_S)
    assert [seat.size for seat in hall.seats] == [2] * 4


def test_replicas_are_read_when_all_have_come(threads: ThreadPoolExecutor) -> None:
    """And not when each did: workers go on meanwhile."""
    far = Machines(["a", "a"], Plain(), Hall().ring, threads, apart=False)
    (first,) = far.start([0])
    until(lambda: 0 in far.service._book._arrived)
    far.weights[0].fill_(3.0)
    far.weights[1].fill_(5.0)
    (second,) = far.start([1])
    for mean in (first, second):
        assert torch.equal(mean.result(PATIENCE_S), torch.full((SIZE,), 4.0))


def test_a_replica_elsewhere_is_shown_where_the_others_can_see_it(threads: ThreadPoolExecutor) -> None:
    """One on a GPU, say."""
    far = Machines(["a", "a"], Plain(), Hall().ring, threads, apart=False)
    far.weights[1] = torch.full((SIZE,), 7.0)
    far.weights[0].fill_(1.0)
    average = far.average([0, 1])
    assert torch.equal(average, torch.full((SIZE,), 4.0))
    far.approach([0, 1], average, 0.5)
    assert [float(far.weights[rank][0]) for rank in (0, 1)] == [2.5, 5.5]


def test_who_leaves_while_another_averages_for_it_goes(threads: ThreadPoolExecutor) -> None:
    hall = Hall(deaf={1})
    far = Machines(["a", "a", "b"], Plain(), hall.ring, threads, apart=False)
    means = far.start(range(3))
    until(lambda: len(hall.moved) == 2)
    far.ends[1].leave()
    with pytest.raises(Left):
        means[1].result(PATIENCE_S)
    far.service.dead(2)
    torch.testing.assert_close(means[0].result(PATIENCE_S), far.weights[0], atol=0, rtol=0)


def test_memory_that_is_gone_is_said_after_a_while(threads: ThreadPoolExecutor) -> None:
    far = Machines(["a", "a"], Plain(), Hall().ring, threads, apart=False)
    far.service.place(1, "a", "/proc/self/fd/123456")
    with pytest.raises(RunError, match=r"trainer 0 cannot average with trainers \[0, 1\]: memory that the roles"):
        far.average([0, 1])
    far.service.close()


def test_memory_that_has_the_path_of_one_that_is_gone_is_not_taken_for_it() -> None:
    """Numbers of files are given again, mostly at once."""
    size = bytes_of(ReplicaMemory.parts(SIZE))
    own, first = SharedMemory.create(size, "a replica"), SharedMemory.create(size, "another one")
    neighbours = Neighbours(own.path, SIZE)
    neighbours.at([own.path, first.path])
    first.close()
    made: list[SharedMemory] = []
    while not made or made[-1].path != first.path:
        made.append(SharedMemory.create(size, "the one after"))
    made[-1].take(SIZE, torch.float32).fill_(3.0)
    mine, other = neighbours.at([own.path, first.path])
    assert mine is neighbours.own
    assert torch.equal(other.replica, torch.full((SIZE,), 3.0))


def test_who_is_left_alone_on_its_machine_sends_what_is_its_own(threads: ThreadPoolExecutor) -> None:
    """And not once more what it had added up, and weighted, with those who died."""
    hall = Hall(fails={(1, 1)}, deaf={2})
    far = Machines(["a", "a", "b"], Plain(), hall.ring, threads, apart=False)
    means = far.start(range(3))
    until(lambda: len(hall.moved) == 4)
    far.service.dead(1)
    expected = (far.weights[0] + far.weights[2]).div_(2)
    for mean in (means[0], means[2]):
        torch.testing.assert_close(mean.result(PATIENCE_S), expected, atol=1e-6, rtol=0)
