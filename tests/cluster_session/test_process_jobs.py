"""Whole jobs whose roles are processes of this machine: what is killed is replaced, and what it held outlives it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_jobs import cluster_settings
from job_helpers import SMALL_DLRM, by_gradients, settings, write_rows
from killed_jobs import EPOCHS, ROWS, run_and_kill

from shadowsync import Job, Trained
from shadowsync.errors import ConfigError


def killed_settings(data: Path, **sections: Any) -> dict[str, Any]:
    return cluster_settings(
        data,
        data,
        data={"slice_rows": 16, "epochs": EPOCHS},
        model={"name": "dlrm", "bottom": [64], "top": [64]},
        train={"trainers": 2, "batch_size": 4, "emulate_step_ms": 5.0, "save_every_s": 0.5},
        cluster={"runtime": "processes"},
        **sections,
    )


@pytest.mark.parametrize("storage", [{"storage": "torch"}, {"storage": "mapped", "memory_gib": 1000 / 2**30}], ids=str)
def test_who_is_killed_loses_nothing_that_others_share(tmp_path: Path, storage: dict[str, Any]) -> None:
    """Rows, those on disk as well, and the central copy lie in memory that outlives their servers: nobody goes back,
    and nothing is loaded."""
    data, roles = write_rows(tmp_path / "rows.parquet", ROWS), ("embedding-1", "trainer-0", "dense-0", "reader-0")
    config = killed_settings(data, embedding={"servers": 2, **storage}, sync={"method": "easgd"})
    result = run_and_kill(config, tmp_path / "out", *roles)
    assert result.recovery.mode == "none"
    assert result.recovery.seconds.lost == 0
    assert result.recovery.seconds.load < 0.1, "nothing was loaded"


@pytest.mark.parametrize(
    ("trainers", "sync"), [(2, {"method": "ma"}), (3, {"method": "ds_sync", "group": 2})], ids=["ma", "ds_sync"]
)
def test_averages_survive_the_trainer_that_makes_them_for_the_others(
    tmp_path: Path, trainers: int, sync: dict[str, Any]
) -> None:
    """Its replica is in memory that the others read."""
    data = write_rows(tmp_path / "rows.parquet", ROWS)
    config = killed_settings(data, sync={**sync, "schedule": "every_k", "k": 10})
    config["train"]["trainers"] = trainers
    result = run_and_kill(config, tmp_path / "out", "trainer-0")
    assert result.sync.average_gap < 20
    assert result.wire.bytes["dense"] > 0, "as if each trainer were on a machine of its own"


def test_gradient_methods_survive_a_killed_trainer_and_a_killed_dense_server(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", ROWS)
    config = by_gradients(killed_settings(data, aggregation={"global_batch": 16}), "gba")
    result = run_and_kill(config, tmp_path / "out", "trainer-1", "dense-0")
    assert result.aggregation is not None
    assert result.aggregation.global_steps >= ROWS * EPOCHS // 16


def test_processes_compute_what_one_process_does(tmp_path: Path) -> None:
    """One trainer that synchronises with a central copy in every step leaves nothing to chance."""
    data = write_rows(tmp_path / "rows.parquet", 200)
    rows = {}
    for runtime in ("inprocess", "processes"):
        config = settings(
            data,
            model=SMALL_DLRM,
            train={"trainers": 1, "batch_size": 8},
            embedding={"servers": 2},
            sync={"method": "easgd", "schedule": "every_k", "k": 1},
            cluster={"runtime": runtime},
        )
        Job(config, out=tmp_path / runtime).run()
        trained = Trained(tmp_path / runtime)
        rows[runtime] = [part.tensors["weight"].clone() for part in trained.server.state()]
    for there, here in zip(rows["processes"], rows["inprocess"], strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)


@pytest.mark.parametrize("key", ["trainer_cpus", "placement", "address"])
def test_what_only_a_cluster_has_is_refused(tmp_path: Path, key: str) -> None:
    given = {"trainer_cpus": 2.0, "placement": "apart", "address": "auto"}
    data = write_rows(tmp_path / "rows.parquet", 20)
    with pytest.raises(ConfigError, match=f"cluster.{key} has no effect on one machine: set cluster.runtime=ray"):
        Job(settings(data, cluster={"runtime": "processes", key: given[key]}), out=tmp_path / "out")
