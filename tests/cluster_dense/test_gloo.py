"""Rings over Gloo: the mean that one process would get, and an end that nobody has to wait for."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from helpers import PackedConnection
from rings import PATIENCE_S
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import RunError
from shadowsync.rpc.served import Served
from shadowsync.sync.all_reduce import LocalAverages, MakeRing, RemoteAveraging, Seat
from shadowsync.sync.averaging import AveragingService, RingBroken
from shadowsync.sync.gloo import GlooRing


@dataclass
class Pinboard:
    """A board within the test."""

    notes: dict[str, bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    void: bool = False

    def pin(self, key: str, value: bytes) -> None:
        with self.changed:
            self.notes[key] = value
            self.changed.notify_all()

    def read(self, keys: Sequence[str]) -> tuple[bytes, ...]:
        with self.changed:
            self.changed.wait_for(lambda: self.void or all(key in self.notes for key in keys), PATIENCE_S)
            if self.void:
                raise RingBroken("ring 1 is void")
            return tuple(self.notes[key] for key in keys)

    def make_void(self) -> None:
        with self.changed:
            self.void = True
            self.changed.notify_all()


def rings(n: int, board: Pinboard, timeout_s: float = PATIENCE_S) -> list[GlooRing]:
    return [GlooRing(Seat(1, position, n, board), timeout_s=timeout_s) for position in range(n)]


def results(futures: Sequence[Future[Tensor]]) -> list[Tensor]:
    return [future.result(PATIENCE_S) for future in futures]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("length", [1, 2, 1003])
@pytest.mark.parametrize("n", [2, 3])
def test_all_members_get_the_same_bits(n: int, length: int) -> None:
    generator, members = torch.Generator().manual_seed(n), rings(n, Pinboard())
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        vectors = [torch.randn(length, generator=generator).to(dtype) for _ in range(n)]
        first, *others = results([ring.mean(vector) for ring, vector in zip(members, vectors, strict=True)])
        total = vectors[0].float()
        for vector in vectors[1:]:
            total = total + vector.float()
        assert torch.equal(first, (total / n).to(dtype).float())
        assert all(torch.equal(first, other) for other in others)
        assert first.dtype == torch.float32
    for ring in members:
        ring.close()
    assert all(ring.join(PATIENCE_S) for ring in members)


def test_who_closes_a_ring_ends_it_for_the_others() -> None:
    members = rings(3, Pinboard())
    results([ring.mean(torch.ones(10)) for ring in members])
    waiting = [ring.mean(torch.ones(10)) for ring in members[:2]]
    members[2].close()
    for future in waiting:
        with pytest.raises(RingBroken):  # "closed" or "reset", as the other's end reaches it
            future.result(PATIENCE_S)
    with pytest.raises(RingBroken):
        members[0].mean(torch.ones(10)).result(PATIENCE_S)
    for ring in members:
        ring.close()
        assert ring.join(PATIENCE_S)


def test_a_ring_that_is_never_complete_ends_with_its_board() -> None:
    board = Pinboard()
    first, _ = Seat(1, 0, 2, board), Seat(1, 1, 2, board)
    ring = GlooRing(first)
    waiting = ring.mean(torch.ones(3))
    board.make_void()
    with pytest.raises(RingBroken):
        waiting.result(PATIENCE_S)
    ring.close()
    assert ring.join(PATIENCE_S)


def test_a_silent_member_is_given_up_after_the_timeout() -> None:
    first, second = rings(2, Pinboard(), timeout_s=0.2)
    results([ring.mean(torch.ones(3)) for ring in (first, second)])
    with pytest.raises(RingBroken, match=r"(?i)time"):
        first.mean(torch.ones(3)).result(PATIENCE_S)
    for ring in (first, second):
        ring.close()
        assert ring.join(PATIENCE_S)


def test_an_address_of_another_machine_breaks_the_ring() -> None:
    ring = GlooRing(Seat(1, 0, 2, Pinboard()), host="192.0.2.1")
    with pytest.raises(RingBroken):
        ring.mean(torch.ones(3)).result(PATIENCE_S)
    ring.close()
    assert ring.join(PATIENCE_S)


class Both:
    """Trainers that average in one process, and the same over Gloo."""

    def __init__(self, n: int, codec: Plain | Bf16) -> None:
        self.counters = WireCounter(), WireCounter()
        self.near = LocalAverages(range(n), Channel("dense", codec, self.counters[0]), nullcontext).of
        self.codec, self.service = codec, AveragingService(range(n))
        self.far = [self.end(rank) for rank in range(n)]

    def end(self, rank: int, make_ring: MakeRing = GlooRing) -> RemoteAveraging:
        connection = PackedConnection(Served(self.service))
        return RemoteAveraging(rank, connection, make_ring, self.codec, self.counters[1], check_s=0.02)


@pytest.mark.parametrize("codec", [Plain(), Bf16()], ids=lambda codec: codec.name)
def test_it_averages_as_in_one_process_while_members_come_and_go(
    codec: Plain | Bf16, threads: ThreadPoolExecutor
) -> None:
    """With bf16 the mean itself crosses too, and is rounded."""
    n, both, generator = 3, Both(3, codec), torch.Generator().manual_seed(1)
    present = [[0, 1, 2], [0, 1, 2], [0, 2], [2], [0, 1, 2], [1, 2]]
    before = present[0]
    for members in present:
        for rank in range(n):
            if rank in before and rank not in members:
                both.near[rank].leave()
                both.far[rank].leave()
            elif rank in members and rank not in before:
                both.near[rank].join()
                both.far[rank].join()
        before = members
        vectors = {rank: torch.randn(101, generator=generator) for rank in members}
        near = [threads.submit(both.near[rank].mean, vector) for rank, vector in vectors.items()]
        far = [threads.submit(both.far[rank].mean, vector) for rank, vector in vectors.items()]
        expected = results(near)[0]
        if isinstance(codec, Bf16) and len(members) > 1:
            expected = expected.to(torch.bfloat16).float()
        assert all(torch.equal(got, expected) for got in results(far))
        assert [both.far[rank].missed for rank in members] == [both.near[rank].missed for rank in members]
    assert both.counters[1].totals() == both.counters[0].totals()
    for end in both.far:
        end.leave()


def test_a_frozen_member_holds_nobody_up(threads: ThreadPoolExecutor) -> None:
    """In its second average it sends nothing, and its connections stay open until all is over."""
    silent, over = threading.Event(), threading.Event()

    class Freezes(GlooRing):
        calls = 0

        def mean(self, vector: Tensor) -> Future[Tensor]:
            self.calls += 1
            if self.calls == 1:
                return super().mean(vector)
            silent.set()
            return Future()

        def close(self) -> None:
            over.wait(PATIENCE_S)
            super().close()

    both = Both(3, Plain())
    ends = [*both.far[:2], both.end(2, Freezes)]
    vectors = [torch.full((101,), float(rank)) for rank in range(3)]

    def start() -> list[Future[Tensor]]:
        return [threads.submit(end.mean, vector) for end, vector in zip(ends, vectors, strict=True)]

    assert [float(mean[0]) for mean in results(start())] == [1, 1, 1]
    means = start()
    assert silent.wait(PATIENCE_S)
    both.service.dead(2)
    first, second = results(means[:2])
    assert torch.equal(first, torch.full((101,), 0.5))
    assert torch.equal(first, second)
    over.set()
    with pytest.raises(RunError, match="trainer 2 was given up"):
        means[2].result(PATIENCE_S)
    for end in ends[:2]:
        end.leave()
