"""Groups of trainers: who meets, that all mix, and that a slow one holds up its group only."""

import heapq
import threading
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_threads import TIMEOUT_S, run_all

from shadowsync.choices import choose_all
from shadowsync.compression.channel import Channel
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.config import parse
from shadowsync.errors import ConfigError
from shadowsync.rpc.served import Client
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.sync.averaging import AveragingBook, AveragingService, Phase
from shadowsync.sync.ds_sync import DivideAndShuffle, Groups
from shadowsync.sync.meeting import Everybody, Meeting
from shadowsync.sync.method import Group
from shadowsync.sync.rendezvous import Left


@given(st.integers(2, 9), st.integers(2, 5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_groups_are_of_those_who_wait_and_change(members: int, size: int, draw: "object") -> None:
    groups, waiting, away = Groups(size), list[int](), list(range(members))
    last: dict[int, list[set[int]]] = {rank: [] for rank in range(members)}
    for _ in range(60):
        draw.shuffle(away)  # type: ignore[attr-defined]
        if away:
            waiting.append(away.pop())
        before = list(waiting)
        chosen = set(groups.choose(tuple(waiting), range(members)))
        assert chosen <= set(waiting)
        if not chosen:
            assert away, "where all wait, some meet"
            continue
        assert len(chosen) == min(size, members)
        if len(before) < members:
            assert any(last[rank][-2:] != [chosen, chosen] for rank in chosen), "as long as another may come"
        for rank in chosen:
            last[rank].append(chosen)
        waiting = [rank for rank in waiting if rank not in chosen]
        away += chosen


def test_fewer_than_a_group_meet_all_together_and_one_alone() -> None:
    assert set(Groups(4).choose((2, 5), {2, 5})) == {2, 5}
    assert set(Groups(4).choose((2,), {2})) == {2}
    assert not Groups(4).choose((2,), {2, 5})
    assert not Groups(4).choose((), ())


def meetings(rule: Meeting, trainers: int, slow_s: float, until_s: float) -> list[int]:
    """How often each meets where a meeting takes a second, but as long as that with the first one in it."""
    counts, ends, waiting = [0] * trainers, list[tuple[float, tuple[int, ...]]](), list(range(trainers))
    now = 0.0
    while now < until_s:
        while group := tuple(rule.choose(tuple(waiting), range(trainers))):
            waiting = [rank for rank in waiting if rank not in group]
            heapq.heappush(ends, (now + (slow_s if 0 in group else 1.0), group))
        now, group = heapq.heappop(ends)
        waiting += group
        for rank in group:
            counts[rank] += 1
    return counts


def test_a_slow_one_holds_up_its_group_only() -> None:
    alone = meetings(Groups(4), 16, 1.0, 1000.0)
    grouped, together = (meetings(rule, 16, 10.0, 1000.0) for rule in (Groups(4), Everybody()))
    assert sum(together[1:]) / sum(alone[1:]) == pytest.approx(0.1, abs=0.01)
    assert sum(grouped[1:]) / sum(alone[1:]) > 0.65, "0.8 is left of it, without those who meet it"
    assert min(grouped[1:]) > 3 * max(together)


@pytest.mark.parametrize("trainers", [4, 7, 16])
def test_all_of_them_mix_and_lose_nothing(trainers: int) -> None:
    rule, values = Groups(3), torch.arange(float(trainers))
    waiting = list(range(trainers))
    for _ in range(12 * trainers):
        group = list(rule.choose(tuple(waiting), range(trainers)))
        values[group] = values[group].mean()
        waiting = [rank for rank in waiting if rank not in group] + group
    assert values.sum().item() == pytest.approx(trainers * (trainers - 1) / 2)
    assert values.std() < 1e-3


def test_two_rounds_at_once_know_nothing_of_each_other() -> None:
    book = AveragingBook(range(4), Groups(2))
    for rank in (3, 1, 0, 2):
        book.arrive(rank, 1)
    first, second = book.verdict(1, 1), book.verdict(0, 1)
    assert (first.members, second.members) == ((1, 3), (0, 2))
    assert first.epoch != second.epoch
    assert book.epochs == {first.epoch, second.epoch}
    book.dead(3)
    assert book.verdict(1, 1).phase is Phase.VOID
    assert book.verdict(0, 1).phase is Phase.GO
    book.report(1, first.attempt, success=False)
    assert book.verdict(1, 1).phase is Phase.WAIT, "for somebody to meet"
    for rank in (0, 2):
        book.report(rank, second.attempt, success=True)
        assert book.verdict(rank, 1).phase is (Phase.WAIT if rank == 0 else Phase.DONE)
    book.arrive(2, 2, holds=1)
    assert book.verdict(1, 1).members == (1, 2)
    assert (book.verdict(1, 1).common, book.verdict(2, 2).round) == (False, 0)


def test_trainers_in_threads_average_in_groups_until_they_leave() -> None:
    method = DivideAndShuffle(group=2, alpha=1.0).resolved(5)
    averages = LocalAverages(range(5), Channel("dense", Plain(), WireCounter()), nullcontext, method.meeting())
    weights, done = [torch.full((3,), float(rank)) for rank in range(5)], threading.Semaphore(0)

    all_there = threading.Barrier(5)

    def train(rank: int) -> None:
        all_there.wait(TIMEOUT_S)
        group = Group(averages.of[rank], None)  # type: ignore[arg-type]
        for _ in range(30):
            try:
                method.sync(weights[rank], group, {})
            except Left:
                break
        group.leave()
        done.release()

    run_all(train, range(5))
    assert all(done.acquire(blocking=False) for _ in range(5))
    assert torch.stack(weights).std(0).max() < 0.5
    assert torch.stack(weights).mean().item() == pytest.approx(2.0, abs=0.5)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"sync\.group=5 is more than there are trainers \(4\)"):
        DivideAndShuffle(group=5).resolved(4)
    assert DivideAndShuffle().resolved(16).group == 4
    assert DivideAndShuffle().resolved(1).group == 2


def test_trainers_of_one_machine_do_not_read_each_others_memory() -> None:
    """Its owner may be in the next group before all of the last have read."""
    for meeting, near in ((Groups(2), ()), (Everybody(), ("memory 0", "memory 1"))):
        service = AveragingService(range(2), meeting=meeting)
        for rank in range(2):
            service.place(rank, "machine", f"memory {rank}")
        said = [service.arrive(Client(f"{rank}"), rank, 1, 0) for rank in range(2)]
        assert [answer.result().near for answer in said] == [near] * 2
        assert all(answer.result().leaders == ((0, 1) if not near else (0,)) for answer in said)


@pytest.mark.parametrize("codec", ["int8", "threshold"])
def test_codecs_of_differences_are_refused(codec: str) -> None:
    config = parse({"data": {"name": "synthetic"}, "sync": {"method": "ds_sync"}, "compression": {"dense": codec}})
    with pytest.raises(
        ConfigError, match=f"compression.dense={codec} would hardly save bytes with sync.method=ds_sync"
    ):
        choose_all(config, own_model=False)
