"""The page's section on recovery: when it is there, what it draws, and how emulated times are labelled."""

import re

import msgspec
import pytest
from fake_runs import make_decisions, make_events, make_failing_frames, make_frames, make_recovery_result, make_result

from shadowsync.metrics.history import RoleEvent
from shadowsync.report.cards import Section, recovery_section, timeline_section
from shadowsync.report.page import render_page
from shadowsync.report.result import Recovery, RecoverySeconds, Wire

NOTHING = RecoverySeconds(save=0.0, load=0.0, lost=0.0, wait=0.0)


def section(recovery: Recovery | None = None) -> Section:
    result = make_result(3, recovery=recovery or make_recovery_result())
    made = recovery_section(result, make_failing_frames(), make_decisions())
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("mode", "failures", "told"), [("none", 0, False), ("none", 1, True), ("full", 0, True), ("partial", 0, True)]
)
def test_it_is_there_where_there_is_something_to_tell(mode: str, failures: int, told: bool) -> None:
    plain = Recovery(failures=failures, pls=0.0, saves=1, seconds=NOTHING, interval_s=None, mode=mode)
    assert (recovery_section(make_result(recovery=plain), make_frames(), []) is not None) == told
    html = render_page(make_result(recovery=plain), make_frames())
    assert ('id="recovery"' in html) == told
    assert ("Portion of lost samples: those" in html) == told


def test_without_an_account_there_is_none() -> None:
    assert recovery_section(make_result(), make_frames(), make_decisions()) is None


def test_its_numbers_say_what_was_chosen_and_what_it_came_to() -> None:
    shown = {row.name: row.value for row in section().numbers}
    assert shown == {
        "mode": "partial",
        "priority": "all",
        "time between saves": "44.8 h",
        "checkpoints": "4",
        "failures": "3",
        "PLS": "0.063",
        "target PLS": "0.1",
    }
    full = section(make_recovery_result(mode="full", target_pls=None))
    assert "target PLS" not in {row.name for row in full.numbers}
    assert "against the target" not in full.cards[0].good


def test_the_loss_is_drawn_against_its_target_with_every_failure_and_checkpoint() -> None:
    drawn = section().cards[0].svg
    assert drawn is not None
    for text in ("target 0.1", "lost", "failure", "checkpoint", "portion of lost samples (PLS)"):
        assert f">{text}<" in drawn
    assert "stroke-dasharray" in drawn
    assert sorted(marks_in(drawn)) == [3 + 1, 4 + 1]  # one more of each stands in the legend


def marks_in(svg: str) -> list[int]:
    """How often each symbol is drawn."""
    used = re.findall(r'xlink:href="#(m\w+)"', svg)
    return [used.count(symbol) for symbol in dict.fromkeys(used)]


def test_without_failures_only_checkpoints_are_marked() -> None:
    quiet = [msgspec.structs.replace(frame, failures=0, pls=0.0) for frame in make_failing_frames()]
    made = recovery_section(make_result(recovery=make_recovery_result(failures=0)), quiet, [])
    assert made is not None
    assert made.cards[0].svg is not None
    assert ">failure<" not in made.cards[0].svg
    assert ">checkpoint<" in made.cards[0].svg


def test_counts_that_begin_anew_with_a_resume_are_marked_all_the_same() -> None:
    frames = make_failing_frames(32)
    late = frames[20].samples
    resumed = [msgspec.structs.replace(frame, failures=int(frame.samples > late), saves=1) for frame in frames[16:]]
    made = recovery_section(make_result(recovery=make_recovery_result()), frames[:16] + resumed, [])
    assert made is not None
    assert made.cards[0].svg is not None
    assert sorted(marks_in(made.cards[0].svg)) == [2 + 1, 3 + 1]


def test_marks_of_a_long_run_stay_few() -> None:
    frames = [msgspec.structs.replace(frame, saves=i) for i, frame in enumerate(make_failing_frames(2_000))]
    made = recovery_section(make_result(recovery=make_recovery_result()), frames, [])
    assert made is not None
    assert max(marks_in(made.cards[0].svg or "")) <= 301 + 1


def test_time_is_drawn_by_kind() -> None:
    card = section().cards[1]
    assert card.svg is not None
    for text in ("saving held training up", "10", "2.25", "training repeated", "0", "18", "seconds"):
        assert f">{text}<" in card.svg
    assert "30.2 s in all" in card.shows
    long = section(make_recovery_result(seconds=RecoverySeconds(save=7200.0, load=90.0, lost=0.0, wait=0.0))).cards[1]
    assert ">hours<" in (long.svg or "")
    assert ">2<" in (long.svg or "")
    assert section(make_recovery_result(seconds=NOTHING)).cards[1].svg is None


def test_a_run_without_frames_has_no_curve() -> None:
    made = recovery_section(make_result(recovery=make_recovery_result()), [], [])
    assert made is not None
    assert made.cards[0].svg is None


def test_decisions_are_listed_and_escaped_and_the_oldest_of_many_left_out() -> None:
    assert [time for time, _ in section().told] == ["0:00", "0:20"]
    many = [msgspec.structs.replace(make_decisions()[0], seconds=float(k)) for k in range(25)]
    made = recovery_section(make_result(recovery=make_recovery_result()), [], many)
    assert made is not None
    assert (len(made.told), made.left_out, made.told[-1][0]) == (20, 5, "0:24")
    html = render_page(make_result(recovery=make_recovery_result()), make_failing_frames(), make_decisions())
    assert "a save &lt;every&gt; 4 s" in html


def test_emulated_times_are_labelled_wherever_they_are_told() -> None:
    recovery = make_recovery_result(emulated_job_s=72_000.0)
    html = render_page(make_result(3, recovery=recovery), make_failing_frames(), make_decisions())
    assert "this run stands for a job of 20 h (recovery.emulate_job_s)" in html
    for text in (
        "Recovery (emulated): what failures cost",
        "<b>Emulated.</b> Chosen at the end: partial recovery",
        "emulated time between saves",
        "Emulated time that recovery took",
        ">emulated seconds<",
        "emulated 30.2 s in all",
        "in emulated times",
        "<td>emulated: partial recovery: 0.60 % of the time",
    ):
        assert text in html
    real = render_page(make_result(3, recovery=make_recovery_result()), make_failing_frames(), make_decisions())
    assert "emulated" not in re.sub(r"<details id=\"configuration\">.*?</details>", "", real, flags=re.S).lower()


def test_a_decision_is_marked_on_the_timeline_and_changes_no_state() -> None:
    plain, told = (
        timeline_section(events, make_frames()) for events in (make_events(), [*make_events(), *make_decisions()])
    )
    assert plain is not None
    assert told is not None
    assert "A diamond marks a decision." in told.cards[0].shows
    assert "diamond" not in plain.cards[0].shows
    states = [
        re.findall(r'(?s)<path d="[^"]*" clip-path="[^"]*" style="[^"]*"/>', made.cards[0].svg or "")
        for made in (plain, told)
    ]
    assert len(states[0]) == len(states[1]) > 10
    assert len(marks_in(told.cards[0].svg or "")) == len(marks_in(plain.cards[0].svg or "")) + 1
    assert ("0:00", "driver", "decided", make_decisions()[0].detail) in told.told


def test_what_was_decided_about_codecs_is_on_the_timeline_and_not_here() -> None:
    codec = RoleEvent(7.0, "trainer-1", "decided", "int8 instead of plain, because it is slow", "codec")
    job = make_recovery_result(emulated_job_s=3600.0)
    made = recovery_section(make_result(3, recovery=job), make_failing_frames(), [*make_decisions(), codec])
    assert made is not None
    assert codec.detail not in [sentence for _, sentence in made.told]
    html = render_page(make_result(3, recovery=job), make_failing_frames(), [*make_decisions(), codec])
    assert html.count(codec.detail) == 1
    assert f"emulated: {codec.detail}" not in html


def test_the_page_names_the_codecs_at_the_end() -> None:
    wire = Wire(bytes={"pull": 3}, raw_bytes={"pull": 9}, codecs={"pull": "int8, int4", "push": "plain"})
    html = render_page(make_result(1, wire=wire), make_frames())
    assert "Codecs at the end: pulled embeddings int8, int4." in html
