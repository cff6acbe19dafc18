"""events.jsonl: there with the first event, whole after a kill, told on by a resumed run."""

import threading
from pathlib import Path

import pytest
from fake_runs import make_events

from shadowsync.errors import DataError, SaveError
from shadowsync.metrics.roles import RoleEvent
from shadowsync.report.role_log import RoleLog, read_events


def test_what_is_appended_is_read_at_once(tmp_path: Path) -> None:
    events = make_events()[:4]
    with RoleLog(tmp_path) as log:
        assert list(tmp_path.iterdir()) == []
        for i, event in enumerate(events):
            log.append(event)
            assert read_events(tmp_path) == log.told == events[: i + 1]


def test_a_resumed_run_keeps_the_earlier_ones_and_a_new_one_does_not(tmp_path: Path) -> None:
    earlier, later = make_events()[:4], RoleEvent(99.0, "driver", "alive")
    with RoleLog(tmp_path, earlier) as log:
        assert read_events(tmp_path) == earlier
        log.append(later)
    assert read_events(tmp_path) == [*earlier, later]
    RoleLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    with RoleLog(tmp_path, make_events()[:3]):
        path = tmp_path / "events.jsonl"
        path.write_bytes(path.read_bytes()[:-5])
    assert read_events(tmp_path) == make_events()[:2]


def test_an_event_that_nobody_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"seconds": 1, "role": "driver", "event": "bored"}\n')
    with pytest.raises(DataError, match=r"events\.jsonl: line 1 is not an event of shadowsync train: .*'bored'"):
        read_events(tmp_path)


def test_what_comes_after_the_end_is_not_told(tmp_path: Path) -> None:
    with RoleLog(tmp_path) as log:
        log.append(make_events()[0])
    log.append(make_events()[1])
    assert read_events(tmp_path) == log.told == make_events()[:1]


def test_events_of_many_threads_are_whole(tmp_path: Path) -> None:
    def tell(role: str) -> None:
        for second in range(100):
            log.append(RoleEvent(float(second), role, "alive", "x" * 50))

    with RoleLog(tmp_path) as log:
        tellers = [threading.Thread(target=tell, args=(f"trainer-{rank}",)) for rank in range(4)]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
    assert read_events(tmp_path) == log.told
    assert len(log.told) == 400


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with RoleLog(tmp_path / "none") as log, pytest.raises(SaveError, match=r"events\.jsonl: cannot be written"):
        log.append(make_events()[0])
