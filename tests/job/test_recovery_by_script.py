"""Embedding servers and trainers fail by script in one process; what that does and costs is accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest
from job_helpers import Ledger, Witness, beside_own_model, checkpoints, settings, write_rows

from shadowsync import Job, Result

ROWS = 800
HOURS = 3600.0


def run(folder: Path, recovery: dict[str, Any], epochs: int = 1, resume: bool = False, keep: int = 2) -> Result:
    """Two servers, with the failures of `recovery`; checks that every row was trained once."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger()
    config = settings(
        write_rows(folder / "rows.parquet", ROWS),
        write_rows(folder / "test.parquet", 300, 1),
        train={"trainers": 2, "batch_size": 4, "emulate_step_ms": 4.0, "keep": keep},
        data={"epochs": epochs},
        embedding={"servers": 2},
        recovery=recovery,
    )
    out = folder / "out"
    job = Job(beside_own_model(config), model=Witness(ledger), out=out, resume=out if resume else None)
    result = job.run()
    assert ledger.rows == dict.fromkeys(range(ROWS), 1)
    assert result.data.trained_samples == ROWS * epochs
    return result


def test_what_a_server_has_learned_is_lost_where_nothing_was_saved(tmp_path: Path) -> None:
    result = run(tmp_path, {"inject": "at:0.5,unit=epoch,index=1", "mode": "partial"})
    assert result.recovery.failures == 1
    frames = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert frames[-1]["pls"] == result.recovery.pls
    assert 0.5 / 3 - 0.05 < result.recovery.pls < 0.5 * 2 / 3 + 0.05  # it holds one or two of the three tables


@pytest.mark.parametrize("priority", ["all", "scar"])
def test_saves_shorten_what_is_lost_and_can_be_resumed(tmp_path: Path, priority: str) -> None:
    by_priority = {} if priority == "all" else {"priority": priority, "share": 0.5, "min_rows": 1}
    recovery = {"inject": "at:0.9,unit=epoch,index=0", "mode": "partial", "interval_s": 0.05, **by_priority}
    result = run(tmp_path, recovery)
    assert result.recovery.saves > 3
    assert 0 <= result.recovery.pls < 0.4  # nothing, if a save ended at that very moment
    assert result.recovery.mode == "partial"
    assert result.recovery.priority == priority
    more = run(tmp_path, recovery, epochs=2, resume=True)
    assert more.recovery.pls >= result.recovery.pls


def parents(out: Path) -> list[bool]:
    """Whether each checkpoint but the first and the last builds on another, oldest first."""
    bodies = [json.loads((folder / "manifest.json").read_text())["body"] for folder in checkpoints(out)]
    return [body.get("parent") is not None for body in bodies[1:-1]]


def test_where_nearly_all_rows_change_between_saves_each_is_a_whole_one(tmp_path: Path) -> None:
    """As a delta it would be as large, and have to be rewritten."""
    run(tmp_path / "all", {"mode": "partial", "interval_s": 0.2}, keep=100)
    assert parents(tmp_path / "all/out")
    assert not any(parents(tmp_path / "all/out"))
    by_priority = {"priority": "mfu", "share": 0.25, "min_rows": 1}
    run(tmp_path / "mfu", {"mode": "partial", "interval_s": 0.2, **by_priority}, keep=100)
    assert any(parents(tmp_path / "mfu/out"))


def test_a_job_may_stand_for_a_longer_one(tmp_path: Path) -> None:
    """Seconds are those of the formulas: of so many saves, so many failures, and what was trained since."""
    costs = {"prior_save_s": 300.0, "prior_load_s": 100.0, "prior_restart_s": 50.0, "prior_fail_s": 5 * HOURS}
    recovery = {"inject": "at:0.5,unit=epoch,index=1", "emulate_job_s": 10 * HOURS, **costs}
    full = run(tmp_path / "full", {**recovery, "mode": "full"})
    partial = run(tmp_path / "partial", {**recovery, "mode": "partial"})
    assert full.recovery.seconds.save == pytest.approx(300 * full.recovery.saves, rel=0.5)
    assert full.recovery.seconds.load == pytest.approx(100, abs=1)
    assert full.recovery.seconds.wait == pytest.approx(50)
    assert 0 < full.recovery.seconds.lost < 6 * HOURS
    assert full.recovery.pls == 0
    assert partial.recovery.seconds.lost == 0
    assert partial.recovery.pls > 0
    assert full.recovery.emulated_job_s == 10 * HOURS


def test_a_trainer_may_fail_by_script(tmp_path: Path) -> None:
    result = run(tmp_path, {"inject": "at:0.3,unit=epoch,kind=trainer,index=1"})
    assert result.recovery.failures == 1
    assert result.recovery.pls == 0


def test_a_failure_may_come_at_the_very_start(tmp_path: Path) -> None:
    result = run(tmp_path, {"inject": "at:0", "mode": "partial"})
    assert result.recovery.failures == 1
    assert result.recovery.pls < 0.1


def test_more_failures_than_anybody_can_count_do_not_hold_up_a_job(tmp_path: Path) -> None:
    result = run(tmp_path, {"inject": "gamma:mean_s=0.1", "emulate_job_s": 1e6, "mode": "full"})
    assert result.recovery.failures > 0
