"""What gradient methods did so far: counts, staleness, and the switches that were not told yet."""

from collections.abc import Sequence

import msgspec
import pytest

from shadowsync.aggregation.aggregator import Switch
from shadowsync.aggregation.counts import AggregationCounts, AggregationState, untold

A, B, C = (Switch(step, mode, "why") for step, mode in ((3, "gba"), (8, "sync"), (8, "gba")))


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


def test_a_state_is_read_as_it_was_written() -> None:
    state = AggregationState(global_steps=9, staleness=((0, 4),), mode="sync", switches=(A, B))
    assert msgspec.convert(msgspec.to_builtins(state), AggregationState) == state


def test_a_state_of_before_there_were_modes_is_read() -> None:
    written = {"global_steps": 9, "received": 4, "dropped": 0, "staleness": [[0, 4]]}
    assert msgspec.convert(written, AggregationState) == AggregationState(
        global_steps=9, received=4, staleness=((0, 4),)
    )
