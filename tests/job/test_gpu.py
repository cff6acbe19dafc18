"""Whole jobs whose dense part is on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import METHODS, name_of, settings, write_rows
from test_gradient_methods import gradient_settings

from shadowsync import Job

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a GPU: run it where there is one, with a build of torch for CUDA",
    ),
]
CODECS = ["plain", "bf16", "int8", {"name": "threshold", "keep": 0.5}]


def check(config: dict[str, Any], out: Path) -> None:
    """Trains to the end."""
    result = Job(config, out=out).run()
    assert result.data.trained_samples == 96
    assert 0 < result.test.logloss < 10


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("sync", [sync for sync in METHODS[2:] if "form" not in sync], ids=name_of)
def test_replicas_on_a_gpu(tmp_path: Path, sync: dict[str, Any], codec: Any) -> None:
    data, train = write_rows(tmp_path / "rows.parquet", 96), {"trainers": 2, "workers": 2, "device": "cuda"}
    check(settings(data, data, sync=sync, train=train, compression={"dense": codec}), tmp_path / "out")


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("method", ["sync", "gba"])
def test_gradients_from_a_gpu(tmp_path: Path, method: str, codec: Any) -> None:
    data, sections = write_rows(tmp_path / "rows.parquet", 96), {"train": {"batch_size": 8, "device": "cuda"}}
    config = gradient_settings(data, method, **sections, compression={"dense": codec})
    config["data"]["test_path"] = str(data)
    check(config, tmp_path / "out")
