"""metrics.jsonl and events.jsonl: flushed, whole after a kill, told on by a resumed run."""

import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from fake_runs import make_events, make_frames

from shadowsync.errors import DataError, SaveError
from shadowsync.metrics.history import RoleEvent
from shadowsync.report.files import read_events, read_frames, write_events, write_frames


def write(folder: Path, count: int = 5) -> Path:
    with closing(write_frames(folder)) as history:
        for frame in make_frames(count):
            history.append(frame)
    return folder / "metrics.jsonl"


def test_frames_are_read_at_once_and_a_new_run_does_not_keep_those_of_an_old_one(tmp_path: Path) -> None:
    assert read_frames(tmp_path) == []
    frames = make_frames(3)
    frames[1] = msgspec.structs.replace(frames[1], auc=None, ne_window=None, loss=None, sync_gap=None)
    with closing(write_frames(tmp_path)) as history:
        for i, frame in enumerate(frames):
            history.append(frame)
            assert read_frames(tmp_path) == frames[: i + 1]
    write_frames(tmp_path).close()
    assert read_frames(tmp_path) == []


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_frames(tmp_path) == make_frames(5)[:4]
    with closing(write_events(tmp_path, make_events()[:3])):
        path = tmp_path / "events.jsonl"
        path.write_bytes(path.read_bytes()[:-5])
    assert read_events(tmp_path) == make_events()[:2]


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file of Linux that is always full")
def test_a_full_disk_is_a_save_error(tmp_path: Path) -> None:
    history = write_frames(tmp_path)
    history._file.close()
    history._file = Path("/dev/full").open("ab")  # noqa: SIM115 closed by the history
    with pytest.raises(SaveError, match=r"metrics\.jsonl: cannot be written: No space left"):
        history.append(make_frames(1)[0])
    with pytest.raises(SaveError):
        history.close()


def test_events_are_there_with_the_first_one_and_read_at_once(tmp_path: Path) -> None:
    events = make_events()[:4]
    with closing(write_events(tmp_path)) as log:
        assert list(tmp_path.iterdir()) == []
        for i, event in enumerate(events):
            log.append(event)
            assert read_events(tmp_path) == log.lines == events[: i + 1]


def test_a_resumed_run_keeps_the_earlier_ones_and_a_new_one_does_not(tmp_path: Path) -> None:
    earlier, later = make_events()[:4], RoleEvent(99.0, "driver", "alive")
    with closing(write_events(tmp_path, earlier)) as log:
        assert read_events(tmp_path) == earlier
        log.append(later)
    assert read_events(tmp_path) == [*earlier, later]
    write_events(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_an_event_that_nobody_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"seconds": 1, "role": "driver", "event": "bored"}\n')
    with pytest.raises(DataError, match=r"events\.jsonl: line 1 is not an event of shadowsync train: .*'bored'"):
        read_events(tmp_path)


def test_what_comes_after_the_end_is_not_told(tmp_path: Path) -> None:
    with closing(write_events(tmp_path)) as log:
        log.append(make_events()[0])
    log.append(make_events()[1])
    assert read_events(tmp_path) == log.lines == make_events()[:1]


def test_events_of_many_threads_are_whole(tmp_path: Path) -> None:
    def tell(role: str) -> None:
        for second in range(100):
            log.append(RoleEvent(float(second), role, "alive", "x" * 50))

    with closing(write_events(tmp_path)) as log:
        tellers = [threading.Thread(target=tell, args=(f"trainer-{rank}",)) for rank in range(4)]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
    assert read_events(tmp_path) == log.lines
    assert len(log.lines) == 400


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with (
        closing(write_events(tmp_path / "none")) as log,
        pytest.raises(SaveError, match=r"events\.jsonl: cannot be written"),
    ):
        log.append(make_events()[0])
