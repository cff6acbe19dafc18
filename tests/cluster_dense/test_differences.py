"""Averages that cross as differences: what was sent and what is left, alike in one process and among several."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import PackedConnection, WholeCopy
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import PATIENCE_S, Hall
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.low_bit import Int4, Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import DataError, NonFiniteTensor, RunError
from shadowsync.rpc.served import Served
from shadowsync.rpc.tensors import bundle, bundle_length, unbundle
from shadowsync.sync.all_reduce import LocalAverages, MakeRing, PublicCopy, RemoteAveraging, mean_of, strategy_of
from shadowsync.sync.averaging import AveragingService
from shadowsync.sync.bmuf import Bmuf
from shadowsync.sync.gloo import GlooRing
from shadowsync.sync.method import Group
from shadowsync.sync.schedule import Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.pieces import Pieces

WIDTHS = (700, 30, 300)
SIZE = sum(WIDTHS)
ALMOST_ALL = 1 - 1e-9
"""A share that is rounded to all elements, and yet no `keep=1`, which is plain averaging."""


def pieces(**options: Any) -> Codec:
    """As a job has it: a threshold for each parameter."""
    return Pieces(Threshold(**options).resolved("compression.dense"), ("first", "bias", "second"), WIDTHS)


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Trainers:
    """Replicas around the averages of one process; each round they train, average and approach the average."""

    n: int
    codec: Codec
    alpha: float = 0.5
    counter: WireCounter = field(default_factory=WireCounter)

    def __post_init__(self) -> None:
        self.averages = LocalAverages(range(self.n), Channel("dense", self.codec, self.counter), nullcontext)
        self.weights = [drawn(rank) for rank in range(self.n)]
        self.steps = 0

    def train(self, ranks: Sequence[int]) -> None:
        self.steps += 1
        for rank in ranks:
            self.weights[rank].add_(drawn(1000 * self.steps + rank, 0.1))

    def average(self, ranks: Sequence[int]) -> Tensor:
        return self.averages.combine({rank: self.weights[rank] for rank in ranks})

    def round(self, ranks: Sequence[int]) -> Tensor:
        self.train(ranks)
        average = self.average(ranks)
        for rank in ranks:
            self.averages.of[rank].strategy.approach(self.weights[rank], average, self.alpha)
        return average

    def standing(self, rank: int) -> Any:
        return self.averages.of[rank].strategy


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).double().sum(0)


@given(
    n=st.integers(1, 5),
    keep=st.sampled_from([0.003, 0.03, 0.3, ALMOST_ALL]),
    values=st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    alpha=st.sampled_from([0.05, 0.5, 1.0]),
    present=st.lists(st.sets(st.integers(0, 4)), max_size=8),
)
@settings(deadline=None, max_examples=30, derandomize=True)
def test_what_was_sent_and_what_is_left_are_the_replicas(
    n: int, keep: float, values: str, alpha: float, present: list[set[int]]
) -> None:
    """Whoever comes, goes or comes back: no step of any replica is lost or counts twice."""
    trainers = Trainers(n, pieces(keep=keep, values=values), alpha)
    for chosen in [set(range(n)), *present, set(range(n)), set(range(n))]:
        ranks = sorted(chosen & set(range(n)))
        if not ranks:
            continue
        trainers.train(ranks)
        before = total([trainers.weights[rank] for rank in ranks])
        average = trainers.average(ranks)
        for rank in ranks:
            assert trainers.standing(rank).average is average
        known = total([trainers.standing(rank).known for rank in ranks]) / len(ranks)
        torch.testing.assert_close(known, average.double(), atol=1e-5, rtol=0)
        left = {rank: trainers.weights[rank] - trainers.standing(rank).known for rank in ranks}
        for rank in ranks:
            trainers.averages.of[rank].strategy.approach(trainers.weights[rank], average, alpha)
            now = trainers.weights[rank] - trainers.standing(rank).known
            torch.testing.assert_close(now, left[rank], atol=2e-6, rtol=0)
        after = total([trainers.weights[rank] for rank in ranks])
        torch.testing.assert_close(after, before, atol=2e-5, rtol=0)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_where_all_elements_cross_the_averages_are_the_plain_ones(alpha: float) -> None:
    """Within rounding: a difference is added to what was taken off before."""
    trainers, plain = Trainers(3, pieces(keep=ALMOST_ALL), alpha), [drawn(rank) for rank in range(3)]
    for step in range(1, 20):
        average = trainers.round(range(3))
        for rank, weights in enumerate(plain):
            weights.add_(drawn(1000 * step + rank, 0.1))
        expected = mean_of(plain)
        torch.testing.assert_close(average, expected, atol=3e-6, rtol=0)
        for rank, weights in enumerate(plain):
            weights.lerp_(expected, alpha)
            torch.testing.assert_close(trainers.weights[rank], weights, atol=3e-6, rtol=0)


@pytest.mark.parametrize("codec", [pieces(keep=1.0), Plain()], ids=["keep=1", "plain"])
def test_keeping_everything_is_plain_averaging_bit_for_bit(codec: Codec) -> None:
    counter = WireCounter()
    ends = LocalAverages(range(2), Channel("dense", codec, counter), nullcontext).of
    weights = [drawn(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for step in range(3):
            expected = mean_of(weights)
            got = list(threads.map(lambda rank: ends[rank].mean(weights[rank]), range(2), timeout=PATIENCE_S))
            assert torch.equal(got[0], expected)
            for rank in range(2):
                moved = weights[rank] + (expected - weights[rank]).mul_(0.5)
                ends[rank].strategy.approach(weights[rank], got[rank], 0.5)
                assert torch.equal(weights[rank], moved)
                weights[rank].add_(drawn(step))
    totals = counter.totals()
    assert totals.bytes == totals.raw_bytes == {"dense": 2 * 3 * SIZE * 4}
    assert not totals.elements


@pytest.mark.parametrize("codec", [pieces(keep=0.05), Plain(), Bf16()], ids=["threshold", "plain", "bf16"])
def test_what_workers_do_while_an_average_is_under_way_stays(codec: Codec) -> None:
    trainers = Trainers(2, codec, alpha=1.0)
    trainers.round(range(2))
    average, meanwhile = trainers.average(range(2)), drawn(99)
    at_rest, step = trainers.weights[0].clone(), average - trainers.standing(0).known
    trainers.weights[0].add_(meanwhile)
    trainers.averages.of[0].strategy.approach(trainers.weights[0], average, 1.0)
    torch.testing.assert_close(trainers.weights[0], at_rest + step + meanwhile, atol=1e-6, rtol=0)


def test_what_a_codec_rounds_off_a_vector_stays_in_the_replica() -> None:
    """Steps of less than half a digit of bf16 are not lost."""
    trainers = Trainers(2, Bf16(), alpha=1.0)
    trainers.weights = [torch.ones(SIZE) for _ in range(2)]
    for _ in range(50):
        for weights in trainers.weights:
            weights.add_(0.001)
        average = trainers.average(range(2))
        for rank in range(2):
            trainers.standing(rank).approach(trainers.weights[rank], average, 1.0)
    torch.testing.assert_close(trainers.weights[0], torch.full((SIZE,), 1.05), atol=1e-5, rtol=0)


def test_replicas_that_rest_come_together_although_little_crosses() -> None:
    trainers = Trainers(4, pieces(keep=0.05), 0.5)
    start = mean_of(trainers.weights)
    average = trainers.average(range(4))
    for _ in range(100):
        for rank in range(4):
            trainers.averages.of[rank].strategy.approach(trainers.weights[rank], average, 0.5)
        average = trainers.average(range(4))
    for weights in trainers.weights:
        torch.testing.assert_close(weights, start, atol=1e-2, rtol=0)


def test_bytes_are_those_of_a_message_to_each_other_member() -> None:
    trainers = Trainers(3, pieces(keep=0.02))
    trainers.round(range(3))
    whole = trainers.counter.totals()
    assert whole.bytes["dense"] == whole.raw_bytes["dense"] == 3 * round(SIZE * 4 * 4 / 3)
    assert not whole.elements, "shares are of messages that a threshold cut"
    trainers.round(range(3))
    first = trainers.counter.totals()
    assert first.raw_bytes["dense"] == 2 * whole.raw_bytes["dense"]
    crossed = 3 * 2 * sum((2 + 14 * 4, 30 * 4, 2 + 6 * 4))
    assert 0 < first.bytes["dense"] - whole.bytes["dense"] - crossed < 3 * 2 * 30, "besides values, their places"
    assert first.elements == {"dense": 3 * SIZE}
    assert first.kept == {"dense": 3 * (14 + 30 + 6)}
    assert first.refreshes == {"dense": 3 * 2}


@pytest.mark.parametrize(("codec", "fewer"), [(Int8(), 3.9), (Int4(), 7.7)], ids=["int8", "int4"])
def test_low_bits_round_differences_and_not_replicas(codec: Codec, fewer: float) -> None:
    """What is rounded off is in the next difference, so that the average comes ever closer to that of the replicas."""
    trainers = Trainers(2, codec)
    trainers.round(range(2))
    whole = trainers.counter.totals().bytes["dense"]
    apart = []
    for _ in range(4):
        average = trainers.average(range(2))
        apart.append(float((average - mean_of(trainers.weights)).abs().max()))
        for rank in range(2):
            trainers.averages.of[rank].strategy.approach(trainers.weights[rank], average, 1.0)
    assert apart[-1] < apart[0] / 50 < 0.01
    sent = trainers.counter.totals().bytes["dense"] - whole
    assert 4 * 2 * SIZE * 4 / sent > fewer
    assert not trainers.counter.totals().elements


def test_vectors_cross_where_differences_would_be_longer() -> None:
    """Each of n messages goes to n − 1 members, so that with many of them a threshold does not pay."""
    trainers = Trainers(5, pieces(keep=0.5))
    for _ in range(3):
        trainers.round(range(5))
    totals = trainers.counter.totals()
    assert totals.bytes == totals.raw_bytes
    assert not totals.elements


def test_a_threshold_that_lets_too_much_pass_notices_although_vectors_cross() -> None:
    trainers = Trainers(4, pieces(keep=0.1))
    trainers.round(range(4))
    trainers.round(range(4))
    for rank in range(4):
        trainers.weights[rank].add_(drawn(rank, 5.0))
    for _ in range(12):
        trainers.round(range(4))
        for rank in range(4):
            trainers.weights[rank].add_(drawn(trainers.steps + rank, 5.0))
    shown = trainers.counter.totals()
    assert shown.elements["dense"] >= 4 * 4 * SIZE, "after some averages of whole vectors messages are short again"


@pytest.mark.parametrize(
    ("ranks", "missed"),
    [([0, 1, 2], False), ([0, 1], False), ([0, 1, 2, 3], True)],
    ids=["the same", "one fewer", "one more"],
)
def test_all_are_told_if_one_of_them_had_not_the_average_before(ranks: list[int], missed: bool) -> None:
    """Others cross whole then, too: of whoever left, nobody but itself has the copy."""
    trainers = Trainers(4, pieces(keep=0.02))
    trainers.round([0, 1, 2])
    assert all(trainers.averages.of[rank].missed for rank in (0, 1, 2)), "of the first average nobody knows that"
    trainers.round([0, 1, 2])
    assert not any(trainers.averages.of[rank].missed for rank in (0, 1, 2))
    before = trainers.counter.totals().elements["dense"]
    expected = mean_of([trainers.weights[rank] + drawn(3000 + rank, 0.1) for rank in ranks])
    average = trainers.round(ranks)
    whole = trainers.counter.totals().elements["dense"] == before
    assert whole == (ranks != [0, 1, 2])
    assert torch.equal(average, expected) == whole
    assert {trainers.averages.of[rank].missed for rank in ranks} == {missed}


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_takes_all_to_one_point(nesterov: bool) -> None:
    """Also after one was away: all hold the same model and the same average, and differences cross again."""
    counter, method = WireCounter(), Bmuf(alpha=0.6, momentum=0.7, nesterov=nesterov)
    ends = LocalAverages(range(3), Channel("dense", pieces(keep=0.05), counter), nullcontext).of
    no_servers = WholeCopy(torch.zeros(1), 1, Channel("dense", Plain(), counter))
    parts = [
        Synchronisation(method, drawn(rank), Group(ends[rank], no_servers.of(rank)), 1, Gate()) for rank in range(3)
    ]
    for part in parts:
        part.state = method.init(drawn(7))
    present = {0, 1, 2}
    with ThreadPoolExecutor(3) as threads:
        for step, members in enumerate([{0, 1, 2}, {0, 1, 2}, {0, 2}, {0, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2}]):
            for rank in present - members:
                ends[rank].leave()
            for rank in members - present:
                ends[rank].join()
            present = members
            list(threads.map(lambda rank: parts[rank].once(), members, timeout=PATIENCE_S))
            models = [parts[rank].state["global"] for rank in members]
            standings: list[Any] = [ends[rank].strategy for rank in members]
            assert all(torch.equal(model, models[0]) for model in models)
            assert all(torch.equal(standing.average, standings[0].average) for standing in standings)
            known = mean_of([standing.known for standing in standings])
            torch.testing.assert_close(known, standings[0].average, atol=2e-6, rtol=0)
            for rank in members:
                parts[rank].weights.add_(drawn(100 * step + rank, 0.1))
    assert counter.totals().elements["dense"] == (3 + 2 + 3 + 3) * SIZE, "four of seven averages were of differences"


def test_a_message_that_was_given_up_is_the_same_again() -> None:
    copy = PublicCopy(pieces(keep=0.02, values="int8", rounding="stochastic"), WireCounter(), "a replica")
    copy.settle(copy.pack(drawn(0)), drawn(0), 2)
    for step in range(1, 4):
        given_up, again = copy.pack(drawn(step)), copy.pack(drawn(step))
        copy.mean_here([copy, copy], [given_up, again], complete=True)
        average = copy.mean_here([copy, copy], [given_up, again], complete=True)
        assert given_up.message is not None
        assert again.message is not None
        assert not again.whole
        assert all(torch.equal(a, b) for a, b in zip(given_up.message.frames, again.message.frames, strict=True))
        copy.settle(again, average, 2)


def test_a_replica_that_is_not_finite_is_named() -> None:
    trainers = Trainers(2, pieces(keep=0.02))
    trainers.round(range(2))
    trainers.weights[1][5] = float("nan")
    said = r"^the replica of trainer 1 cannot be sent: 1 of 700 elements of first are NaN"
    with pytest.raises(NonFiniteTensor, match=said):
        trainers.round(range(2))


def test_frames_of_something_else_are_refused() -> None:
    copy = PublicCopy(pieces(keep=0.02), WireCounter(), "a replica")
    copy.settle(copy.pack(drawn(0)), drawn(0), 2)
    broken = copy.pack(drawn(1))
    broken.message = Encoded((torch.zeros(3),), (SIZE,))
    with pytest.raises(DataError, match="none of codec threshold"):
        copy.mean_here([copy, copy], [broken, broken], complete=True)


def test_tensors_cross_as_one_row_of_bytes() -> None:
    tensors = [torch.arange(7, dtype=torch.uint8), torch.empty(0), torch.randn(3, 2), torch.ones(5).to(torch.bfloat16)]
    row = bundle(tensors)
    for got, tensor in zip(unbundle(row), tensors, strict=True):
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)
    assert unbundle(bundle([])) == ()
    assert [bundle_length(some) for some in (tensors, [])] == [len(row), len(bundle([]))]
    for broken in (row[:-1], row[:5], row[:2], torch.full((40,), 255, dtype=torch.uint8)):
        with pytest.raises(DataError, match="are no tensors"):
            unbundle(broken.clone())


class Far:
    """Trainers in processes of their own, as it were, beside the same in one process."""

    def __init__(self, n: int, codec: Codec, make_ring: MakeRing, threads: ThreadPoolExecutor) -> None:
        self.n, self.codec, self.make_ring, self.threads = n, codec, make_ring, threads
        self.service = AveragingService(range(n))
        self.counter = WireCounter()
        self.near = Trainers(n, codec)
        self.weights = [weights.clone() for weights in self.near.weights]
        self.ends = [self.end(rank) for rank in range(n)]
        self.present = set(range(n))

    def end(self, rank: int) -> RemoteAveraging:
        connection = PackedConnection(Served(self.service))
        return RemoteAveraging(rank, connection, self.make_ring, self.codec, self.counter, check_s=0.02)

    def go_and_come(self, ranks: set[int]) -> None:
        for rank in self.present - ranks:
            self.ends[rank].leave()
        for rank in ranks - self.present:
            self.ends[rank].join()
        self.present = ranks

    def die(self, rank: int) -> None:
        """It is replaced by one that knows nothing but its replica."""
        self.service.dead(rank)
        self.ends[rank] = self.end(rank)
        self.ends[rank].join()
        near = self.near.averages.of[rank]
        near.holds, near.strategy = 0, strategy_of(self.codec, self.near.counter, rank)

    def start(self, ranks: Sequence[int]) -> list[Future[Tensor]]:
        for rank in ranks:
            self.weights[rank].add_(drawn(1000 * (self.near.steps + 1) + rank, 0.1))
        return [self.threads.submit(self.ends[rank].mean, self.weights[rank]) for rank in ranks]

    def check_round(self, ranks: Sequence[int]) -> None:
        self.check(ranks, self.start(ranks))

    def check(self, ranks: Sequence[int], means: Sequence[Future[Tensor]]) -> None:
        got = [mean.result(PATIENCE_S) for mean in means]
        expected = self.near.round(ranks)
        for rank, mean in zip(ranks, got, strict=True):
            assert torch.equal(mean, expected)
            assert self.ends[rank].missed == self.near.averages.of[rank].missed
            self.ends[rank].strategy.approach(self.weights[rank], mean, self.near.alpha)
            assert torch.equal(self.weights[rank], self.near.weights[rank])


MakeFar = Callable[[int, Codec, MakeRing], Far]


@pytest.fixture
def make_far() -> Iterator[MakeFar]:
    """Trainers that leave at the end of the test."""
    made: list[Far] = []

    def make(n: int, codec: Codec, make_ring: MakeRing) -> Far:
        made.append(Far(n, codec, make_ring, threads))
        return made[-1]

    with ThreadPoolExecutor(8) as threads:
        yield make
        for far in made:
            far.go_and_come(set())


Happening = Callable[[Far, int], None]
HAPPENINGS: list[Happening] = [
    lambda far, rank: None,
    lambda far, rank: None,
    lambda far, rank: far.go_and_come(far.present - {rank} or {rank}),
    lambda far, rank: far.go_and_come(far.present | {rank}),
    lambda far, rank: far.die(rank) if rank in far.present else None,
    lambda far, rank: far.make_ring.__self__.fails.add((far.service._book.epoch, 0)),  # type: ignore[attr-defined]
]


@given(
    n=st.integers(1, 4),
    keep=st.sampled_from([0.01, 0.2, ALMOST_ALL]),
    happenings=st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 3)), max_size=8),
)
@settings(deadline=None, max_examples=15, derandomize=True)
def test_among_processes_it_is_as_in_one_whoever_dies_or_comes_back(
    n: int, keep: float, happenings: list[tuple[Happening, int]]
) -> None:
    """Rings that fail make all repeat, bit for bit."""
    with ThreadPoolExecutor(4) as threads:
        far = Far(n, pieces(keep=keep, values="int8"), Hall().ring, threads)
        for happening, rank in happenings:
            far.check_round(sorted(far.present))
            happening(far, rank % n)
        for _ in range(2):
            far.check_round(sorted(far.present))
        assert far.counter.totals() == far.near.counter.totals()
        far.go_and_come(set())


@pytest.mark.parametrize("keep", [0.94, 0.95, 0.96, 0.97])
def test_where_messages_are_as_long_as_two_vectors_it_is_as_in_one_process(keep: float) -> None:
    with ThreadPoolExecutor(2) as threads:
        far = Far(2, pieces(keep=keep), Hall().ring, threads)
        for _ in range(6):
            far.check_round([0, 1])
        assert far.counter.totals() == far.near.counter.totals()
        far.go_and_come(set())


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(pieces(keep=0.05), id="threshold"),
        pytest.param(pieces(select="significant", significance=1.0), id="significant"),
        pytest.param(Int8(), id="int8"),
        pytest.param(Int4("stochastic"), id="int4"),
    ],
)
def test_over_gloo_it_is_as_in_one_process_while_members_come_and_go(codec: Codec, make_far: MakeFar) -> None:
    far = make_far(3, codec, GlooRing)
    for members in ([0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [2], [0, 1, 2], [0, 1, 2]):
        far.go_and_come(set(members))
        far.check_round(members)
    totals = far.counter.totals()
    assert totals == far.near.counter.totals()
    assert totals.bytes["dense"] < totals.raw_bytes["dense"]
    if codec.sparse:
        assert 0 < totals.kept["dense"] < 0.2 * totals.elements["dense"]


@pytest.mark.parametrize("keep", [0.05, 0.9], ids=["messages", "vectors instead"])
def test_a_member_that_dies_while_messages_cross_holds_nobody_up(keep: float, make_far: MakeFar) -> None:
    """Nothing comes back from it, not even an error; those who are left average their vectors, and lose nothing."""
    hall = Hall(deaf={2})
    far = make_far(3, pieces(keep=keep), hall.ring)
    far.check_round([0, 1, 2])
    far.ends[0].leave()  # for a ring of another epoch with the same members
    far.ends[0].join()
    gathered = hall.gathered
    means = far.start([0, 1, 2])
    while hall.gathered < gathered + 3:
        assert not [mean for mean in means if mean.done()]
    far.service.dead(2)
    far.check([0, 1], means[:2])
    with pytest.raises(RunError, match="trainer 2 was given up"):
        means[2].result(PATIENCE_S)
    far.present = {0, 1}
    far.check_round([0, 1])
    assert hall.gathered > gathered + 3, "from then on differences cross again"


def test_who_came_back_too_late_for_an_average_is_told_apart(make_far: MakeFar) -> None:
    """A member that left in the middle, and never heard that the average counted, has an older one than the others."""
    far = make_far(2, pieces(keep=0.05), Hall().ring)
    for _ in range(2):
        far.check_round([0, 1])
    far.ends[1].holds -= 1
    far.near.averages.of[1].holds -= 1
    far.check_round([0, 1])
    assert far.ends[0].missed
    assert far.counter.totals().elements["dense"] == 2 * SIZE, "in one of three rounds differences crossed"
