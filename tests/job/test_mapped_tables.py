"""Whole jobs whose rows are on disk: as with all rows in memory, resumed, moved, killed, evaluated, refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import SMALL_DLRM, fails, settings, write_rows
from test_dynamic_tables import TIGHT, job, owners, write_log
from torch import Tensor

from shadowsync import Job, Trained
from shadowsync.errors import ConfigError
from shadowsync.memory.shared import can_share
from shadowsync.report.files import read_frames

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name, as Linux has them")
BYTES = 1500 / 2**30
"""Of three tables of 40 rows, 41 rows."""
MAPPED = {"storage": "mapped", "memory_gib": BYTES, "lr": 0.1}
TORCH = {"storage": "torch", "lr": 0.1}
PROCESSES = pytest.mark.skipif(not can_share(), reason="processes have memory in common on Linux only")


def config_of(folder: Path, embedding: dict[str, Any], **sections: Any) -> dict[str, Any]:
    data = write_rows(folder / "rows.parquet", 400)
    train = {"trainers": 1, "batch_size": 4, **sections.pop("train", {})}
    sync = {"method": "easgd", "schedule": "every_k", "k": 1}
    return settings(data, data, model=SMALL_DLRM, embedding=embedding, train=train, **{"sync": sync, **sections})


def rows_of(trained: Trained) -> dict[str, Tensor]:
    """Weights and state of each table, in one piece."""
    found = {}
    for index, rows in enumerate(trained.server.state()):
        copied = trained.server.copy_rows(index, range(rows.table.rows))
        found |= {f"{rows.table.name} {name}": tensor for name, tensor in copied.items()}
    return found


def assert_alike(one: Path, other: Path) -> None:
    """But for the rounding of sums in another order."""
    first, second = rows_of(Trained(one)), rows_of(Trained(other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[name], rtol=1e-4, atol=1e-5, msg=lambda found, n=name: f"{n}: {found}"
        )


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("runtime", ["inprocess", pytest.param("processes", marks=PROCESSES)])
def test_a_job_equals_one_with_all_rows_in_memory(
    tmp_path: Path, runtime: str, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, embedding in (("mapped", MAPPED), ("torch", TORCH)):
        given = {**embedding, "optimizer": optimizer, "servers": 2}
        cluster = {"runtime": runtime if name == "mapped" else "inprocess"}
        result = Job(config_of(tmp_path, given, cluster=cluster), out=tmp_path / name).run()
        assert (result.stored is not None) == (name == "mapped")
        if result.stored is not None:
            assert result.stored.rows == 120
            assert 0 < result.stored.slots < 100
            assert result.stored.missed > 120
            assert result.stored.read_bytes > 0
            assert result.stored.written_bytes > 0
            assert 0 < result.stored.hits < 1
            assert "of rows in memory" in capsys.readouterr().err
            assert read_frames(tmp_path / name)[-1].stored["rows"] == 120
    assert_alike(tmp_path / "mapped", tmp_path / "torch")


def test_a_run_goes_on_in_another_number_of_servers_and_another_storage(tmp_path: Path) -> None:
    twice = {"epochs": 2}
    Job(config_of(tmp_path, TORCH, data=twice), out=tmp_path / "whole").run()
    for first, second in ((MAPPED, TORCH), (TORCH, MAPPED), (MAPPED, MAPPED)):
        out = tmp_path / f"{first['storage']} {second['storage']}"
        Job(config_of(tmp_path, first), out=out).run()
        Job(config_of(tmp_path, {**second, "servers": 3}, data=twice), out=out, resume=out).run()
        assert_alike(out, tmp_path / "whole")


@pytest.mark.parametrize("priority", ["all", "mfu", "scar"])
def test_a_lost_server_takes_its_rows_from_what_was_saved(tmp_path: Path, priority: str) -> None:
    by_priority = {} if priority == "all" else {"priority": priority, "share": 0.5, "min_rows": 1}
    recovery = {"mode": "partial", "inject": "at:0.7,unit=epoch,index=1", "interval_s": 0.05, **by_priority}
    config = config_of(tmp_path, {**MAPPED, "servers": 2}, recovery=recovery, train={"emulate_step_ms": 4.0})
    result = Job(config, out=tmp_path / "out").run()
    assert result.recovery.failures == 1
    assert result.recovery.saves > 1
    assert 0 <= result.recovery.pls < 0.5
    rows = rows_of(Trained(tmp_path / "out"))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in rows.values())


@pytest.mark.parametrize("method", [{"sync": {"method": "ma"}}, {"aggregation": {"method": "gba"}}], ids=str)
def test_dynamic_tables_may_lie_there_too(tmp_path: Path, method: dict[str, Any]) -> None:
    logs = write_log(tmp_path / "train.parquet", 1200), write_log(tmp_path / "test.parquet", 400, 1)
    embedding = {"storage": "mapped", "memory_gib": 1200 / 2**30, "servers": 2}
    config = job(logs, TIGHT, embedding={**embedding, "lr": 0.1})
    config["train"] = {**config["train"], "trainers": 2}
    config = {name: section for name, section in config.items() if name != "sync"} | method
    result = Job(config, out=tmp_path / "out").run()
    assert result.keys is not None
    assert result.stored is not None
    assert result.keys.evicted > 20
    assert result.stored.missed > 96 > result.stored.slots
    owners(Trained(tmp_path / "out"))


def test_with_one_worker_dynamic_tables_are_as_in_memory(tmp_path: Path) -> None:
    logs = write_log(tmp_path / "train.parquet", 1200), write_log(tmp_path / "test.parquet", 400, 1)
    for name, embedding in (("mapped", {**MAPPED, "memory_gib": 1200 / 2**30}), ("torch", TORCH)):
        Job(job(logs, TIGHT, embedding=embedding), out=tmp_path / name).run()
    first, second = (Trained(tmp_path / name) for name in ("mapped", "torch"))
    assert owners(first) == owners(second)
    assert_alike(tmp_path / "mapped", tmp_path / "torch")


def test_what_has_no_effect_or_no_room_is_one_sentence(tmp_path: Path) -> None:
    def start(embedding: dict[str, Any], **sections: Any) -> None:
        Job(config_of(tmp_path, embedding, **sections), out=tmp_path / "out").run()

    for given in ({"memory_gib": 1.0}, {"folder": "/tmp"}):
        fails(lambda given=given: start({**TORCH, **given}), ConfigError, "no effect with embedding.storage=torch")  # type: ignore[misc]
    missing = str(tmp_path / "missing")
    fails(lambda: start({**MAPPED, "folder": missing}), ConfigError, "missing, which cannot be made")
    fails(lambda: start({**MAPPED, "memory_gib": 1e-7}), ConfigError, "the index of its 120 rows")
    cluster = {"runtime": "processes", "server_memory_gib": BYTES / 2}
    fails(lambda: start(MAPPED, cluster=cluster), ConfigError, "is more than cluster.server_memory_gib")
    fails(lambda: start({**MAPPED, "memory_gib": 0}), ConfigError, "memory_gib")
