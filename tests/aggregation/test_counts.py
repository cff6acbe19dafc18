"""What gradient methods did so far: counts, staleness, the switches that were not told yet, and step times."""

from collections.abc import Sequence

import msgspec
import pytest

from shadowsync.aggregation.aggregator import Switch
from shadowsync.aggregation.counts import AggregationCounts, AggregationState, Paces, untold

A, B, C = (Switch(step, mode, "why") for step, mode in ((3, "gba"), (8, "sync"), (8, "gba")))
WORKER = (0, 0)


@pytest.mark.parametrize(
    ("told", "made", "expected"),
    [
        ((), (), ()),
        ((), (A, B), (A, B)),
        ((A,), (A, B), (B,)),
        ((A, B), (A, B), ()),
        ((A, B), (A,), ()),
        ((A, B), (A, C), (C,)),
        ((A, B), (), ()),
    ],
)
def test_switches_are_told_once_also_where_the_job_went_back(
    told: Sequence[Switch], made: Sequence[Switch], expected: Sequence[Switch]
) -> None:
    assert untold(told, made) == expected


def test_counts_go_on_from_a_checkpoint() -> None:
    counts = AggregationCounts(AggregationState(), "gba")
    counts.add(0, {1: 1.0, 2: 0.0, 3: 1.0}, {1: 0, 2: 0, 3: 0})
    before = counts.state("gba", [A])
    counts = AggregationCounts(before, "gba")
    counts.add(3, {4: 1.0}, {4: 1})
    found = counts.state("gba", [B])
    assert (found.global_steps, found.received, found.dropped) == (4, 4, 1)
    assert found.staleness == ((0, 2), (2, 1))
    assert (found.applied, found.staleness_sum, found.max_staleness) == (3, 2, 2)
    assert found.mean_staleness == pytest.approx(2 / 3)
    assert found.switches == (A, B)


@pytest.mark.parametrize(("there", "here", "switches"), [("", "gba", 0), ("gba", "gba", 0), ("gba", "sync", 1)])
def test_another_method_than_at_the_checkpoint_is_a_switch(there: str, here: str, switches: int) -> None:
    found = AggregationCounts(AggregationState(global_steps=5, mode=there), here).state(here, [])
    assert [(switch.step, switch.mode) for switch in found.switches] == [(5, here)] * switches


def test_a_state_of_before_there_were_modes_is_read() -> None:
    written = {"global_steps": 9, "received": 4, "dropped": 0, "staleness": [[0, 4]]}
    assert msgspec.convert(written, AggregationState) == AggregationState(
        global_steps=9, received=4, staleness=((0, 4),)
    )


def paced(*steps_s: float) -> Paces:
    """Worker A has taken so long for its batches."""
    paces = Paces()
    for step_s in steps_s:
        paces.add(WORKER, step_s)
    return paces


def test_the_recent_time_follows_and_the_mean_is_exact() -> None:
    paces = paced(1.0, 1.0, 6.0)
    assert paces.recent_s()[WORKER] == pytest.approx(2.0)
    assert paces.mean_s()[WORKER] == pytest.approx(8.0 / 3)
    assert paced(*[1.0] * 5, *[4.0] * 20).recent_s()[WORKER] == pytest.approx(4.0, rel=0.02)


def test_a_copy_does_not_follow() -> None:
    paces = paced(1.0)
    copy = Paces(paces)
    paces.add(WORKER, 3.0)
    assert (copy.mean_s(), paces.mean_s()) == ({WORKER: 1.0}, {WORKER: 2.0})


def test_of_very_many_workers_those_heard_of_least_recently_are_forgotten() -> None:
    paces = Paces()
    for number in range(10_000):
        paces.add((number, 0), 1.0)
        paces.add((0, 0), 1.0)
    assert len(paces.mean_s()) == 4096
    assert (0, 0) in paces.mean_s()
    assert (5000, 0) not in paces.mean_s()
