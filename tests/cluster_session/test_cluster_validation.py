"""Jobs whose roles are behind wires: they stop for validations at the same rows, and all hear of new learning rates."""

from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import Cluster, Killing, cluster_settings
from job_helpers import SMALL_DLRM, by_gradients, write_rows

from shadowsync import Job
from shadowsync.report.files import read_frames

FAMILIES: dict[str, dict[str, Any]] = {
    "easgd": {"sync": {"method": "easgd"}},
    "ma": {"sync": {"method": "ma", "schedule": "every_k", "k": 2}},
    "gba": {"aggregation": {"method": "gba"}},
}


def validated(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """Of 160 training rows, every 50 rows; nothing is ever better by so much, so that rates fall each time."""
    data = write_rows(tmp_path / "rows.parquet", 200)
    train = {"trainers": 2, "batch_size": 4, "min_delta": 10.0, "validate_every": 50, "plateau_patience": 1}
    config = cluster_settings(
        data,
        data={"slice_rows": 8, "epochs": 2, "valid": {"last": 40}},
        model=SMALL_DLRM,
        train={**train, **sections.pop("train", {})},
        **{name: section for name, section in sections.items() if name != "aggregation"},
    )
    return by_gradients(config, sections["aggregation"]["method"]) if "aggregation" in sections else config


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.usefixtures("cluster")
def test_validations_come_at_their_rows_and_learning_rates_fall(tmp_path: Path, family: dict[str, Any]) -> None:
    result = Job(validated(tmp_path, **family), out=tmp_path / "out").run()
    frames = {f.samples: f for f in read_frames(tmp_path / "out") if f.valid_samples == f.samples}
    assert [*frames] == [50, 100, 150, 200, 250, 300, 320]
    rates = [frame.learning_rates["rows"] for frame in frames.values()]
    assert rates == pytest.approx([rates[0] * 0.5**number for number in range(7)])
    assert (result.data.trained_samples, result.validation.best_samples) == (320, 50)


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("role", ["trainer-1", "embedding-0"])
def test_deaths_change_nothing_about_when_is_validated(tmp_path: Path, cluster: Cluster, mode: str, role: str) -> None:
    config = validated(
        tmp_path,
        train={"save_every_s": 0.05},
        recovery={"mode": mode, "interval_s": 0.05},
        embedding={"servers": 2},
        sync={"method": "easgd"},
    )
    result = Job(config, out=tmp_path / "out", failures=Killing(cluster, [role], iteration=17)).run()
    assert result.recovery.failures >= 1
    assert result.data.trained_samples == 320
    assert result.validation.validations == 7
    assert result.validation.lr_scale == pytest.approx(0.5**6)
