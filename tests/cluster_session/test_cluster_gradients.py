"""Whole jobs under gradient methods whose roles are reached through the wire only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_jobs import cluster_settings
from job_helpers import (
    checkpoints,
    result_of,
    train_counted,
    write_rows,
)
from safetensors.torch import load_file

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.registry import members

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]
METHODS = sorted(members("shadowsync.aggregation", Aggregation))
ROWS, EPOCHS = 400, 2


def gradient_settings(path: Path, method: str, test_path: Path | None = None, **sections: Any) -> dict[str, Any]:
    config = cluster_settings(path, test_path or path, **sections)
    del config["sync"]
    config["aggregation"] = {"method": method, **dict(sections.get("aggregation", {}))}
    return config


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Everything that was trained, from the newest checkpoint."""
    found = {}
    for file in sorted(checkpoints(out)[-1].glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(file).items() if "random" not in file.name}
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prefetch", [None, 3], ids=["default", "ahead"])
def test_every_row_is_trained_once(tmp_path: Path, method: str, prefetch: int | None) -> None:
    data = write_rows(tmp_path / "rows.parquet", 101)
    config = gradient_settings(
        data,
        method,
        train={"trainers": 3, "workers": 2, "prefetch": prefetch},
        data={"epochs": 2},
        embedding={"servers": 2},
    )
    result, rows = train_counted(config, tmp_path / "out")
    assert rows == dict.fromkeys(range(101), 2)
    assert result.data.trained_samples == 202
    assert result.sync is None
    assert result.aggregation is not None
    assert result.aggregation.global_steps > 0
    assert result_of(tmp_path / "out")["aggregation"]["dropped"] == result.aggregation.dropped
    assert result.recovery.failures == 0
    assert result.wire.bytes["dense"] > 0
