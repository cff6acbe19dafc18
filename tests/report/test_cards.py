"""The page's sections on gradient methods, on recovery and on roles: when they are there, what they draw and say."""

import re
from typing import Any

import msgspec
import pytest
from fake_runs import (
    make_aggregation,
    make_decisions,
    make_events,
    make_failing_frames,
    make_frames,
    make_gradient_frames,
    make_gradient_result,
    make_recovery_result,
    make_result,
    make_switch_events,
    page_of,
)

from shadowsync.metrics.history import Frame, RoleEvent
from shadowsync.report.cards import PageSection, aggregation_section, histogram, recovery_section, timeline_section
from shadowsync.report.compare import PastRun, compare
from shadowsync.report.measures import key_numbers
from shadowsync.report.page import render_page
from shadowsync.report.result import AggregationSection, RecoverySeconds, RecoverySection, Result, WireSection

NOTHING = RecoverySeconds(save=0.0, load=0.0, lost=0.0, wait=0.0)


def there(section: PageSection | None) -> PageSection:
    assert section is not None
    return section


def svg(section: PageSection, card: int = 0) -> str:
    drawn = section.cards[card].svg
    assert drawn is not None
    return drawn


def marks_in(svg: str) -> list[int]:
    """How often each symbol is drawn."""
    used = re.findall(r'xlink:href="#(m\w+)"', svg)
    return [used.count(symbol) for symbol in dict.fromkeys(used)]


# --- gradient methods ------------------------------------------------------------------------------------------------


def titles(result: Result, frames: list[Frame]) -> list[str]:
    return [card.title for card in there(aggregation_section(result, frames)).cards]


def test_nothing_is_said_of_gradients_where_replicas_were_merged() -> None:
    assert aggregation_section(make_result(), make_frames()) is None
    assert 'id="aggregation"' not in page_of("full")
    assert "Sync gap" in page_of("full")


def test_a_run_under_auto_has_everything() -> None:
    section = there(aggregation_section(make_gradient_result(), make_gradient_frames()))
    assert [card.title for card in section.cards] == [
        "Staleness",
        "Dropped gradients",
        "Mode over time",
        "Step time of the workers",
        "Mean step time by worker",
    ]
    assert all(card.svg is not None for card in section.cards)
    assert {row.name: row.value for row in section.numbers} == {
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
    bare = make_result(1, sync=None, aggregation=AggregationSection(10, 1, 0.5, 3))
    assert titles(bare, make_frames(4, 1)) == ["Staleness", "Dropped gradients", "Step time of the workers"]
    first = there(aggregation_section(bare, make_frames(4, 1))).cards[0]
    assert (first.svg, first.missing) == (None, "No gradient was applied.")


@pytest.mark.parametrize(("workers", "band"), [(8, False), (9, True), (200, True)])
def test_of_many_workers_the_range_is_drawn_and_the_slowest_are_listed(workers: int, band: bool) -> None:
    section = there(aggregation_section(make_gradient_result(workers), make_gradient_frames(40, workers)))
    lines, bars = section.cards[-2:]
    assert ("grey band" in lines.shows) == band
    assert ("faster" in bars.shows) == (workers > 16)
    assert svg(section, -1).count(">0.") == min(workers, 16)


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
    assert [bar.value for bar in bars] == values
    assert len(histogram(((0, 1), (10**9, 1)))) <= 13


def test_the_page_speaks_of_gradients_and_not_of_replicas() -> None:
    page = page_of("gradients")
    for text in ("the gradients aggregated by auto", "below &lt;even&gt;=10 %", "Staleness over time"):
        assert text in page
    assert "Sync gap" not in page
    assert "replica" not in page.split('id="setup"')[0].split("<main>")[1]


def test_the_terminal_s_table_and_the_comparison_name_the_method() -> None:
    told = {row.name: row.meaning for row in key_numbers(make_gradient_result())}
    assert told["global steps"] == "made by auto, 2 switches"
    runs = [PastRun("a", make_result(2), []), PastRun("b", make_gradient_result(), [])]
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


# --- recovery --------------------------------------------------------------------------------------------------------


def recovery(frames: list[Frame] | None = None, events: list[RoleEvent] | None = None, **figures: Any) -> PageSection:
    result = make_result(3, recovery=make_recovery_result(**figures))
    told = make_decisions() if events is None else events
    return there(recovery_section(result, make_failing_frames() if frames is None else frames, told))


@pytest.mark.parametrize(
    ("mode", "failures", "told"), [("none", 0, False), ("none", 1, True), ("full", 0, True), ("partial", 0, True)]
)
def test_recovery_is_there_where_there_is_something_to_tell(mode: str, failures: int, told: bool) -> None:
    plain = RecoverySection(failures=failures, pls=0.0, saves=1, seconds=NOTHING, interval_s=None, mode=mode)
    assert (recovery_section(make_result(recovery=plain), make_frames(), []) is not None) == told
    assert recovery_section(make_result(), make_frames(), make_decisions()) is None


@pytest.mark.parametrize(("page", "told"), [("full", False), ("recovery", True)])
def test_a_page_speaks_of_recovery_where_there_is_some(page: str, told: bool) -> None:
    for text in ('id="recovery"', "Portion of lost samples: those"):
        assert (text in page_of(page)) == told


def test_its_numbers_say_what_was_chosen_and_what_it_came_to() -> None:
    assert {row.name: row.value for row in recovery().numbers} == {
        "mode": "partial",
        "priority": "all",
        "time between saves": "44.8 h",
        "checkpoints": "4",
        "failures": "3",
        "PLS": "0.063",
        "target PLS": "0.1",
    }
    full = recovery(mode="full", target_pls=None)
    assert "target PLS" not in {row.name for row in full.numbers}
    assert "against the target" not in full.cards[0].good


def test_the_loss_is_drawn_against_its_target_with_every_failure_and_checkpoint() -> None:
    drawn = svg(recovery())
    for text in ("target 0.1", "lost", "failure", "checkpoint", "portion of lost samples (PLS)"):
        assert f">{text}<" in drawn
    assert "stroke-dasharray" in drawn
    assert sorted(marks_in(drawn)) == [3 + 1, 4 + 1]  # one more of each stands in the legend


def test_only_what_happened_is_marked_also_where_counts_begin_anew_and_in_long_runs() -> None:
    quiet = [msgspec.structs.replace(frame, failures=0, pls=0.0) for frame in make_failing_frames()]
    drawn = svg(recovery(quiet, [], failures=0))
    assert ">failure<" not in drawn
    assert ">checkpoint<" in drawn
    frames = make_failing_frames(32)
    late = frames[20].samples
    resumed = [msgspec.structs.replace(frame, failures=int(frame.samples > late), saves=1) for frame in frames[16:]]
    assert sorted(marks_in(svg(recovery(frames[:16] + resumed, [])))) == [2 + 1, 3 + 1]
    long = [msgspec.structs.replace(frame, saves=i) for i, frame in enumerate(make_failing_frames(2_000))]
    assert max(marks_in(svg(recovery(long, [])))) <= 301 + 1
    assert recovery([], []).cards[0].svg is None


def test_time_is_drawn_by_kind() -> None:
    drawn = svg(recovery(), 1)
    for text in ("saving held training up", "10", "2.25", "training repeated", "0", "18", "seconds"):
        assert f">{text}<" in drawn
    assert "30.2 s in all" in recovery().cards[1].shows
    long = svg(recovery(seconds=RecoverySeconds(save=7200.0, load=90.0, lost=0.0, wait=0.0)), 1)
    assert ">hours<" in long
    assert ">2<" in long
    assert recovery(seconds=NOTHING).cards[1].svg is None


def test_decisions_are_listed_and_escaped_and_the_oldest_of_many_left_out() -> None:
    assert [time for time, _ in recovery().told] == ["0:00", "0:20"]
    many = recovery([], [msgspec.structs.replace(make_decisions()[0], seconds=float(k)) for k in range(25)])
    assert (len(many.told), many.left_out, many.told[-1][0]) == (20, 5, "0:24")
    assert "a save &lt;every&gt; 4 s" in page_of("recovery")


def test_emulated_times_are_labelled_wherever_they_are_told() -> None:
    for text in (
        "this run stands for a job of 20 h (recovery.emulate_job_s)",
        "Recovery (emulated): what failures cost",
        "<b>Emulated.</b> Chosen at the end: partial recovery",
        "emulated time between saves",
        "Emulated time that recovery took",
        ">emulated seconds<",
        "emulated 30.2 s in all",
        "in emulated times",
        "<td>emulated: partial recovery: 0.60 % of the time",
    ):
        assert text in page_of("recovery")
    real = render_page(make_result(3, recovery=make_recovery_result()), make_failing_frames(), make_decisions())
    assert "emulated" not in re.sub(r"<details id=\"configuration\">.*?</details>", "", real, flags=re.S).lower()


def test_switches_and_codecs_are_no_decisions_on_recovery_but_stand_on_the_timeline() -> None:
    codec = RoleEvent(7.0, "trainer-1", "decided", "int8 instead of plain, because it is slow", "codec")
    result = make_gradient_result(recovery=make_recovery_result(emulated_job_s=72_000.0))
    events = [*make_switch_events(), *make_decisions(), codec]
    section = there(recovery_section(result, make_failing_frames(), events))
    assert [sentence for _, sentence in section.told] == [event.detail for event in make_decisions()]
    page = render_page(result, make_failing_frames(), events)
    assert "emulated: gradients are aggregated" not in page
    assert "emulated: partial recovery" in page
    assert page.count(codec.detail) == 1
    assert f"emulated: {codec.detail}" not in page


def test_the_page_names_the_codecs_at_the_end() -> None:
    wire = WireSection(bytes={"pull": 3}, raw_bytes={"pull": 9}, codecs={"pull": "int8, int4", "push": "plain"})
    html = render_page(make_result(1, wire=wire), make_frames())
    assert "Codecs at the end: pulled embeddings int8, int4." in html


# --- the timeline of the roles ---------------------------------------------------------------------------------------


def timeline(events: list[RoleEvent], frames: list[Frame] | None = None) -> PageSection:
    return there(timeline_section(events, make_frames() if frames is None else frames))


def test_every_role_and_state_is_named() -> None:
    assert timeline_section([], make_frames()) is None
    drawn = svg(timeline(make_events()))
    for text in ("driver", "reader-0", "trainer-2", "embedding-1", "dense-0", "alive", "saving", "dead", "unreachable"):
        assert f">{text}<" in drawn
    assert drawn.index(">driver<") < drawn.index(">trainer-0<") < drawn.index(">dense-0<")


def test_the_legend_names_only_what_occurs() -> None:
    drawn = svg(timeline([RoleEvent(0.0, "driver", "alive"), RoleEvent(9.0, "driver", "left")]))
    assert ">alive<" in drawn
    for absent in ("dead", "saving", "restarting", "unreachable"):
        assert f">{absent}<" not in drawn


def test_events_are_told_in_order_and_only_so_many() -> None:
    made = timeline(make_events()[::-1])
    assert [row[0] for row in made.told] == sorted(row[0] for row in made.told)
    assert ("0:10", "trainer-1", "dead", "its process was killed by signal 9") in made.told
    assert made.left_out == 0
    saves = [RoleEvent(float(k), "driver", "saving" if k % 2 else "saved") for k in range(500)]
    many = timeline([*saves, RoleEvent(500.0, "driver", "dead")])
    assert [row[2] for row in many.told] == ["dead"]
    assert many.left_out == 500


def test_of_many_roles_the_eventful_ones_are_drawn() -> None:
    events = [RoleEvent(0.0, f"trainer-{rank}", "alive") for rank in range(60)]
    events += [RoleEvent(5.0, "trainer-57", "dead"), RoleEvent(9.0, "trainer-57", "restarted")]
    made = timeline(events)
    assert ">trainer-57<" in svg(made)
    assert "36 further roles had fewer troubles and are not drawn" in made.cards[0].shows


def test_events_at_the_very_end_and_of_one_moment_are_seen() -> None:
    ended = [RoleEvent(0.0, "trainer-0", "alive"), RoleEvent(100.0, "trainer-0", "dead")]
    assert ">dead<" in svg(timeline(ended))
    assert ">driver<" in svg(timeline([RoleEvent(50.0, "driver", "dead")]))
    assert svg(timeline([RoleEvent(0.0, "driver", "alive")], []))


def test_a_decision_is_marked_on_the_timeline_and_changes_no_state() -> None:
    plain, told = timeline(make_events()), timeline([*make_events(), *make_decisions()])
    assert "A diamond marks a decision." in told.cards[0].shows
    assert "diamond" not in plain.cards[0].shows
    shapes = r'(?s)<path d="[^"]*" clip-path="[^"]*" style="[^"]*"/>'
    states = [re.findall(shapes, svg(made)) for made in (plain, told)]
    assert len(states[0]) == len(states[1]) > 10
    assert len(marks_in(svg(told))) == len(marks_in(svg(plain))) + 1
    assert ("0:00", "driver", "decided", make_decisions()[0].detail) in told.told
    switches = timeline(make_switch_events(), make_gradient_frames())
    assert "A diamond marks a decision." in switches.cards[0].shows
    assert [detail for *_, event, detail in switches.told if event == "decided"] == [
        switch.sentence for switch in make_aggregation().switches
    ]
