"""Everything a job writes about itself, through the one object it is given."""

import io
from pathlib import Path

import pytest
from fake_runs import make_events, make_frames, make_result
from rich.console import Console

from shadowsync.config import ReportConfig
from shadowsync.errors import SaveError
from shadowsync.report.files import frames_until, read_events, read_frames
from shadowsync.report.page import render_page
from shadowsync.report.reporter import Reporter
from shadowsync.report.result import read_result


def screen() -> Console:
    return Console(file=io.StringIO(), width=120, color_system=None)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_leaves_everything_behind(tmp_path: Path) -> None:
    console, frames = screen(), make_frames(4)
    with Reporter(tmp_path, console, ReportConfig()) as reporter:
        for frame in frames:
            reporter.show(frame)
        written = reporter.finish(make_result())
    assert files(tmp_path) == ["metrics.jsonl", "report.html", "result.json", "tensorboard"]
    assert [path.name for path in written] == ["result.json", "report.html"]
    assert read_frames(tmp_path) == frames
    assert read_result(tmp_path) == make_result()
    assert (tmp_path / "report.html").read_text() == render_page(make_result(), frames)
    assert "test AUC" in console.file.getvalue()


def test_outputs_can_be_left_out(tmp_path: Path) -> None:
    with Reporter(tmp_path, screen(), ReportConfig(tensorboard=False, html=False)) as reporter:
        reporter.show(make_frames(1)[0])
        reporter.finish(make_result())
    assert files(tmp_path) == ["metrics.jsonl", "result.json"]


def test_a_resumed_run_tells_one_story(tmp_path: Path) -> None:
    frames, events = make_frames(6), make_events()
    with Reporter(tmp_path, screen(), ReportConfig(html=False)) as reporter:
        for frame in frames[:5]:
            reporter.show(frame)
    at = frames[2].samples
    earlier = frames_until(read_frames(tmp_path), at)
    with Reporter(tmp_path, screen(), ReportConfig(), earlier, at, events[:5]) as reporter:
        for event in events[5:]:
            reporter.note(event)
        reporter.show(frames[5])
        reporter.finish(make_result())
        reporter.note(events[0])
    assert read_frames(tmp_path) == [*frames[:3], frames[5]]
    assert read_events(tmp_path) == events
    assert (tmp_path / "report.html").read_text() == render_page(make_result(), [*frames[:3], frames[5]], events)


def test_a_failed_run_keeps_its_frames_and_has_no_result(tmp_path: Path) -> None:
    def fail_after_a_frame() -> None:
        with Reporter(tmp_path, screen(), ReportConfig()) as reporter:
            reporter.show(make_frames(1)[0])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_a_frame()
    assert files(tmp_path) == ["metrics.jsonl", "tensorboard"]
    assert len(read_frames(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_is_known_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="cannot be written"):
        Reporter(tmp_path / "none", screen(), ReportConfig()).__enter__()
