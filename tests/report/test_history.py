"""metrics.jsonl: flushed, cut where a resume begins, readable after a kill."""

from pathlib import Path

import msgspec
import pytest
from fake_runs import make_frames

from shadowsync.errors import DataError, SaveError
from shadowsync.report.history import History, frames_until, read_frames


def write(folder: Path, count: int = 5) -> Path:
    with History(folder) as history:
        for frame in make_frames(count):
            history.append(frame)
    return folder / "metrics.jsonl"


def test_what_is_appended_is_read_at_once(tmp_path: Path) -> None:
    frames = make_frames(3)
    with History(tmp_path) as history:
        for i, frame in enumerate(frames):
            history.append(frame)
            assert read_frames(tmp_path) == frames[: i + 1]


def test_a_new_run_does_not_keep_the_frames_of_an_old_one(tmp_path: Path) -> None:
    write(tmp_path)
    History(tmp_path).close()
    assert read_frames(tmp_path) == []


def test_a_resumed_run_drops_what_was_trained_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 5)
    frames = make_frames(5)
    earlier = frames_until(read_frames(tmp_path), samples=frames[2].samples)
    with History(tmp_path, earlier) as history:
        history.append(frames[4])
    assert read_frames(tmp_path) == [*frames[:3], frames[4]]


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_frames(tmp_path) == make_frames(5)[:4]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"seconds": 1}\n', lines[2]]))
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 2 is not a frame .*; remove the line"):
        read_frames(tmp_path)
    told: list[str] = []
    assert read_frames(tmp_path, told.append) == [make_frames(3)[0], make_frames(3)[2]]
    assert len(told) == 1
    assert "line 2 is not a frame" in told[0]


def test_no_file_means_no_frames(tmp_path: Path) -> None:
    assert read_frames(tmp_path) == []


def test_undefined_measures_survive(tmp_path: Path) -> None:
    frame = msgspec.structs.replace(make_frames(1)[0], auc=None, ne_window=None, loss=None, sync_gap=None)
    with History(tmp_path) as history:
        history.append(frame)
    assert read_frames(tmp_path) == [frame]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file of Linux that is always full")
def test_a_full_disk_is_a_save_error(tmp_path: Path) -> None:
    history = History(tmp_path)
    history._file.close()
    history._file = Path("/dev/full").open("ab")  # noqa: SIM115 closed by the history
    with pytest.raises(SaveError, match=r"metrics\.jsonl: cannot be written: No space left"):
        history.append(make_frames(1)[0])
    with pytest.raises(SaveError):
        history.close()
