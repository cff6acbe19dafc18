"""The page's section on gradient methods: when it is there, what it draws, and what it says."""

import msgspec
import pytest
from fake_runs import (
    make_aggregation,
    make_decisions,
    make_failing_frames,
    make_frames,
    make_gradient_frames,
    make_gradient_result,
    make_recovery_result,
    make_result,
    make_switch_events,
)

from shadowsync.metrics.history import Frame
from shadowsync.report.cards import aggregation_section, histogram, recovery_section, timeline_section
from shadowsync.report.compare import Run, compare
from shadowsync.report.measures import key_numbers
from shadowsync.report.page import render_page
from shadowsync.report.result import Aggregation, Result

TITLES = ["Staleness", "Dropped gradients", "Mode over time", "Step time of the workers", "Mean step time by worker"]


def titles(result: Result, frames: list[Frame]) -> list[str]:
    section = aggregation_section(result, frames)
    assert section is not None
    return [card.title for card in section.cards]


def test_there_is_none_where_replicas_were_merged() -> None:
    assert aggregation_section(make_result(), make_frames()) is None
    page = render_page(make_result(), make_frames())
    assert 'id="aggregation"' not in page
    assert "Sync gap" in page


def test_a_run_under_auto_has_everything() -> None:
    section = aggregation_section(make_gradient_result(), make_gradient_frames())
    assert section is not None
    assert [card.title for card in section.cards] == TITLES
    assert all(card.svg is not None for card in section.cards)
    told = {row.name: row.value for row in section.numbers}
    assert told == {
        "method": "auto",
        "at the end": "sync",
        "global steps": "900",
        "gradients dropped": "100 (0.7 %)",
        "staleness, mean / largest": "0.50 / 4",
        "switches": "2",
        "step time, median / slowest": "44.5 / 90 ms",
        "gradients held, at most": "6.3 MB",
    }
    assert section.told[0][:2] == ("300", "gba")


def test_a_method_that_never_changes_has_no_mode_over_time() -> None:
    steady = make_gradient_result(aggregation=make_aggregation(method="gba", mode="gba", switches=()))
    assert "Mode over time" not in titles(steady, make_gradient_frames())


def test_a_result_of_before_there_were_details_is_shown() -> None:
    bare = make_result(1, sync=None, aggregation=Aggregation(10, 1, 0.5, 3))
    assert titles(bare, make_frames(4, 1)) == ["Staleness", "Dropped gradients", "Step time of the workers"]
    assert "No gradient was applied." in render_page(bare, make_frames(4, 1))


@pytest.mark.parametrize(("workers", "band"), [(8, False), (9, True), (200, True)])
def test_of_many_workers_the_range_is_drawn_and_the_slowest_are_listed(workers: int, band: bool) -> None:
    section = aggregation_section(make_gradient_result(workers), make_gradient_frames(40, workers))
    assert section is not None
    lines, bars = section.cards[-2:]
    assert ("grey band" in lines.shows) == band
    assert ("faster" in bars.shows) == (workers > 16)
    assert bars.svg is not None
    assert bars.svg.count(">0.") == min(workers, 16)


@pytest.mark.parametrize(
    ("staleness", "names", "values"),
    [
        (((0, 5),), ["0 steps"], [5]),
        (((0, 5), (3, 2)), ["0 steps", "1 step", "2 steps", "3 steps"], [5, 0, 0, 2]),
        (((0, 1), (1, 2), (13, 4), (14, 8)), [f"{2 * i} to {2 * i + 1} steps" for i in range(8)], [3, *[0] * 5, 4, 8]),
        (((12, 3),), ["0 steps", "1 step", *(f"{i} steps" for i in range(2, 13))], [*[0] * 12, 3]),
    ],
)
def test_the_histogram_has_a_bar_for_each_step_or_a_few_together(
    staleness: tuple[tuple[int, int], ...], names: list[str], values: list[int]
) -> None:
    bars = histogram(staleness)
    assert [bar.label for bar in bars][: len(names)] == names
    assert sum(bar.value for bar in bars) == sum(values)
    assert [bar.value for bar in bars] == values


def test_a_huge_staleness_makes_no_endless_histogram() -> None:
    assert len(histogram(((0, 1), (10**9, 1)))) <= 13


def test_switches_are_not_decisions_on_recovery_but_stand_on_the_timeline() -> None:
    result = make_gradient_result(recovery=make_recovery_result(emulated_job_s=72_000.0))
    events = [*make_switch_events(), *make_decisions()]
    recovery = recovery_section(result, make_failing_frames(), events)
    assert recovery is not None
    assert [sentence for _, sentence in recovery.told] == [event.detail for event in make_decisions()]
    page = render_page(result, make_failing_frames(), events)
    assert "emulated: gradients are aggregated" not in page
    assert "emulated: partial recovery" in page


def test_the_timeline_marks_switches() -> None:
    told = timeline_section(make_switch_events(), make_gradient_frames())
    assert told is not None
    assert "A diamond marks a decision." in told.cards[0].shows
    assert [detail for *_, event, detail in told.told if event == "decided"] == [
        switch.sentence for switch in make_aggregation().switches
    ]


def test_the_page_speaks_of_gradients_and_not_of_replicas() -> None:
    page = render_page(make_gradient_result(), make_gradient_frames(), make_switch_events())
    assert "the gradients aggregated by auto" in page
    assert "below &lt;even&gt;=10 %" in page
    assert "Staleness over time" in page
    assert "Sync gap" not in page
    assert "replica" not in page.split('id="setup"')[0].split("<main>")[1]


def test_the_terminal_s_table_names_the_method() -> None:
    told = {row.name: row.meaning for row in key_numbers(make_gradient_result())}
    assert told["global steps"] == "made by auto, 2 switches"


def test_the_comparison_names_the_methods() -> None:
    runs = [Run("a", make_result(2), []), Run("b", make_gradient_result(), [])]
    headings, rows = compare(runs)
    cells = [dict(zip(headings, (cell.text for cell in row), strict=True)) for row in rows]
    assert [row["method"] for row in cells] == ["easgd", "auto"]
    assert [row["dropped"] for row in cells] == ["—", "100"]
    assert "dropped" not in compare(runs[:1])[0]


def test_frames_are_read_as_they_were_written_and_older_ones_too() -> None:
    frame = make_gradient_frames()[15]
    written = msgspec.json.decode(msgspec.json.encode(frame))
    assert msgspec.convert(written, Frame) == frame
    for key in ("global_steps", "dropped", "aggregation_mode", "step_seconds", "held_bytes"):
        del written[key]
    assert msgspec.convert(written, Frame).global_steps is None
