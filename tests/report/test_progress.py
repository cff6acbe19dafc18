"""The progress line on a terminal and elsewhere, and the final table."""

import io
import sys
import types
from typing import Any

import msgspec
import pytest
from fake_runs import make_frames, make_result, make_test
from rich.console import Console

from shadowsync.report.measures import key_numbers
from shadowsync.report.reporter import Progress, final_table, progress_line, trainer_speeds
from shadowsync.report.result import (
    ComputingSection,
    DataSection,
    EndedSection,
    RecoverySeconds,
    RecoverySection,
    Result,
)


def line_of(seconds_left: float | None = 75, trainers: int = 1, **changed: Any) -> str:
    """The line of one frame of a run, changed like that, of any length."""
    return progress_line(msgspec.structs.replace(make_frames(4, trainers)[1], **changed), seconds_left, columns=None)


def console(*, terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)


def printed(shown_on: Console) -> str:
    assert isinstance(shown_on.file, io.StringIO)
    return shown_on.file.getvalue()


def lines_of(shown_on: Console) -> list[str]:
    """The progress lines, without those that explain their words."""
    return [line for line in printed(shown_on).splitlines() if "examples/s" in line]


def test_the_line_holds_what_a_person_watches() -> None:
    frame = msgspec.structs.replace(
        make_frames(4)[1], eps=41_250.4, ne_window=0.61234, auc=0.90127, sync_gap=11.26, samples=500, total_samples=1000
    )
    frame = msgspec.structs.replace(frame, eps_per_trainer=(12_140.0, 850.0))
    line = progress_line(frame, seconds_left=75, columns=None)
    told = " 50 %  41,250 examples/s  NE 0.6123  AUC 0.9013  sync gap 11.3  1:15 left"
    assert line == f"{told}  trainers 12.1k 850"
    assert progress_line(frame, 75, columns=100).startswith("━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌  50 %")
    assert progress_line(frame, 75, columns=80) == told


def test_the_line_says_how_many_times_fewer_bytes_cross() -> None:
    """Of every codec, for bytes are counted; not of what crosses as it is."""
    sent = {"pull": 100, "push": 1000, "dense": 7, "other": 0}
    raw = {"pull": 790, "push": 15_000, "dense": 7, "other": 5}
    assert "  wire pull 7.9x push 15x  " in line_of(wire_raw_bytes=raw, wire_bytes=sent)
    assert "wire" not in line_of(wire_raw_bytes=sent, wire_bytes=sent)


def test_the_line_of_a_cluster_says_who_is_missing() -> None:
    roles = {"trainer-10": "dead", "trainer-9": "restarting", "dense-0": "unreachable", "trainer-1": "saving"}
    line = line_of(None, 2, failures=2, checkpointing=True, roles=roles, emulated_step_ms=20.0)
    assert "emulated examples/s" in line
    assert "saving  2 failures  trainer-9 restarting, trainer-10 dead and 1 more  — left" in line


def test_the_line_of_a_gradient_method_has_steps_and_staleness_in_place_of_the_gap() -> None:
    steps = {"sync_gap": None, "global_steps": 1234, "aggregation_mode": "gba"}
    line = line_of(staleness=0.84, **steps)
    assert line.endswith("  gba step 1,234  staleness 0.8  1:15 left")
    assert "sync gap" not in line
    assert line_of(staleness=None, **steps).endswith("  gba step 1,234  1:15 left")


@pytest.mark.parametrize(
    ("pls", "target", "shown"),
    [
        (0.01234, 0.1, "2 failures  PLS 0.0123/0.1  — left"),
        (0.5, None, "2 failures  PLS 0.5  — left"),
        (0.0, 0.1, "2 failures  — left"),
        (None, None, "2 failures  — left"),
    ],
)
def test_the_line_says_what_was_lost_once_something_was(pls: float | None, target: float | None, shown: str) -> None:
    assert line_of(None, failures=2, pls=pls, target_pls=target).endswith(shown)


def test_the_line_says_which_codecs_were_chosen() -> None:
    line = line_of(None, wire_codecs={"pull": "int8", "push": "bf16, int4"})
    assert line.endswith("codecs pull=int8 push=bf16/int4  — left")


@pytest.mark.parametrize(
    ("trainers", "room", "shown"),
    [
        (1, None, ""),
        (3, None, "trainers 0 1.0k 2.0k"),
        (8, None, "trainers 0 1.0k 2.0k 3.0k 4.0k 5.0k 6.0k 7.0k"),
        (9, None, "9 trainers 0/4.0k/8.0k"),
        (100, 200, "100 trainers 0/49.5k/99.0k"),
        (9, 60, "trainers 0 1.0k 2.0k 3.0k 4.0k 5.0k 6.0k 7.0k 8.0k"),
        (9, 30, "9 trainers 0/4.0k/8.0k"),
        (9, 21, ""),
        (3, -4, ""),
    ],
)
def test_as_many_trainers_as_fit(trainers: int, room: int | None, shown: str) -> None:
    assert trainer_speeds([1000.0 * rank for rank in range(trainers)], room) == shown


@pytest.mark.parametrize("columns", [80, 100, 120, 160, 300])
@pytest.mark.parametrize("trainers", [2, 4, 30])
def test_the_single_trainers_never_make_the_line_too_long(trainers: int, columns: int) -> None:
    frame = make_frames(4, trainers)[1]
    assert len(progress_line(frame, 75, columns)) <= max(columns, 80)


@pytest.mark.parametrize("terminal", [True, False])
def test_words_are_explained_once_above_the_line_in_which_they_first_stand(terminal: bool) -> None:
    shown_on, frames = console(terminal=terminal, width=200), make_frames(4)
    with Progress(shown_on, plain_every_s=0.0) as progress:
        progress.show(msgspec.structs.replace(frames[0], sync_gap=None))
        progress.show(frames[1])
        progress.show(msgspec.structs.replace(frames[2], failures=1, pls=0.02, target_pls=0.1))
        progress.show(msgspec.structs.replace(frames[3], failures=1, pls=0.03, target_pls=0.1))
    said = printed(shown_on)
    for word, first in (("NE: ", "AUC"), ("sync gap: steps", "sync gap "), ("PLS: portion", "PLS 0.02/")):
        assert said.count(word) == 1
        assert said.index(word) < said.index(first)


def test_the_line_without_anything_defined() -> None:
    frame = msgspec.structs.replace(make_frames(1)[0], ne_window=None, auc=None, sync_gap=None, total_samples=0)
    assert "NE —  AUC —  — left" in progress_line(frame, None, columns=80)


def test_elsewhere_lines_come_every_ten_seconds_and_the_last_one_always() -> None:
    screen, now = console(terminal=False), [0.0]
    frames = make_frames(25)
    with Progress(screen, clock=lambda: now[0]) as progress:
        for frame in frames:
            now[0] += 1.0
            progress.show(frame)
    lines = lines_of(screen)
    assert [line.split()[0] for line in lines] == ["4", "44", "84", "100"]
    assert "  0:00 left  trainers " in lines[-1]


@pytest.mark.parametrize("frames", [0, 1])
def test_the_last_line_is_printed_once_and_nothing_without_frames(frames: int) -> None:
    screen = console(terminal=False)
    with Progress(screen, clock=lambda: 0.0) as progress:
        for frame in make_frames(frames):
            progress.show(frame)
    assert len(lines_of(screen)) == frames
    assert bool(printed(screen)) == bool(frames)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_a_terminal_one_line_is_redrawn(width: int) -> None:
    screen = console(terminal=True, width=width)
    with Progress(screen) as progress:
        for frame in make_frames(3):
            progress.show(frame)
    shown = printed(screen)
    assert shown.count("\n") == 3  # two words are explained
    assert "100 %" in shown
    assert ("━" in shown) == (width == 120)


def test_time_left_follows_the_recent_speed() -> None:
    screen = console(terminal=False)
    frames = [
        msgspec.structs.replace(frame, seconds=seconds, samples=samples, total_samples=2_000)
        for frame, seconds, samples in zip(make_frames(3), [100.0, 101.0, 102.0], [1_000, 1_100, 1_200], strict=True)
    ]
    with Progress(screen, plain_every_s=0.0) as progress:
        for frame in frames:
            progress.show(frame)
    assert [line.split("  ")[-2] for line in lines_of(screen)] == ["1:40 left", "0:09 left", "0:08 left"]


def table_of(result: Result, width: int = 120) -> str:
    screen = console(terminal=False, width=width)
    screen.print(final_table(result))
    return printed(screen)


def test_final_table() -> None:
    nothing = RecoverySeconds(save=0.0, load=0.0, lost=0.0, wait=0.0)
    recovery = RecoverySection(failures=2, pls=0.001, saves=3, seconds=nothing, interval_s=None, mode="full")
    data = DataSection(train_samples=10, trained_samples=9, test_samples=2, skipped_rows=1)
    shown = table_of(make_result(test=make_test(best_auc=0.95), recovery=recovery, data=data))
    for name in ("test AUC", "best reachable AUC", "test NE", "test calibration", "test log loss", "examples/s (EPS)"):
        assert name in shown
    for value in ("0.9500", "39,688", "1,024", "10.4", "bad rows skipped", "failures", "PLS 0.001"):
        assert value in shown
    assert "AUC" not in table_of(make_result(test=None, sync=None, train=None, wire=None))


def test_final_table_has_one_line_per_row_in_80_columns() -> None:
    result = make_result(test=make_test(best_auc=0.95))
    shown = table_of(result, 80)
    assert len(shown.splitlines()) == len(key_numbers(result))
    assert "…" not in shown


def test_why_training_ended_is_a_row_of_the_final_table() -> None:
    ended = EndedSection(why="early_stopping", detail="after 40 of 90 samples: nothing was better")
    shown = [" ".join(line.split()) for line in table_of(make_result(ended=ended)).splitlines()]
    assert "training ended by early stopping after 40 of 90 samples: nothing was better" in shown


def test_final_table_cuts_no_number_where_a_meaning_or_a_value_is_long() -> None:
    why = "this processor does not multiply bf16: slow, train.precision=auto takes fp32"
    result = make_result(test=make_test(ne=4.5e30), computing=ComputingSection("bf16", "torch", why))
    shown = table_of(result, 80)
    assert "4.5e+30" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for row in key_numbers(result):
        assert any(line.startswith(f"{row.name} {row.value}") for line in lines)
    assert "train.precision=auto" in shown, "the long meaning takes more lines"
    assert max(map(len, shown.splitlines())) <= 80


def test_a_notebook_has_one_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    cell = types.SimpleNamespace(update=drawn.append)

    def show(shown: Any, display_id: bool = False) -> Any:
        drawn.append(shown)
        return cell if display_id else None

    display = types.SimpleNamespace(HTML=str, display=show)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    notebook = console(terminal=False)
    monkeypatch.setattr(notebook, "is_jupyter", True)
    with Progress(notebook) as progress:
        for frame in make_frames(3):
            progress.show(frame)
    bars = [shown for shown in drawn if str(shown).startswith("<progress max=")]
    assert len(bars) == 3
    assert drawn[-1] is bars[-1], "no plain line beside it"


def test_a_result_shows_itself() -> None:
    result = make_result()
    assert str(result) == repr(result)
    for row in key_numbers(result):
        assert row.value in str(result)
    shown = result._repr_html_()
    assert shown.startswith("<table>")
    assert shown.count("<tr>") == len(key_numbers(result))
