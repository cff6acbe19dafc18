"""Whole jobs whose dense part is on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import by_gradients, name_of, settings, write_rows

from shadowsync import Job

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run it where there is one, with a build of torch for CUDA"
)
FEW = {"name": "threshold", "keep": 0.5}
EASGD, MA, BMUF = ({"method": method, "schedule": "background"} for method in ("easgd", "ma", "bmuf"))
EACH_STEP = {"schedule": "every_k", "k": 1}


@pytest.mark.parametrize(
    ("method", "codec"),
    [
        *((EASGD, codec) for codec in ("plain", "int8", FEW)),
        *((MA, codec) for codec in ("plain", "bf16", FEW)),
        *((BMUF, codec) for codec in ("plain", FEW)),
        (EASGD | EACH_STEP, FEW),
        (MA | EACH_STEP, "int8"),
        (BMUF | EACH_STEP | {"k": 2, "nesterov": True}, "bf16"),
        *(({"method": "sync"}, codec) for codec in ("plain", FEW)),
        *(({"method": "gba"}, codec) for codec in ("bf16", "int8")),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else value,
)
def test_it_trains_to_the_end(tmp_path: Path, method: dict[str, Any], codec: Any) -> None:
    data = write_rows(tmp_path / "rows.parquet", 96)
    train = {"trainers": 2, "workers": 2, "batch_size": 8, "device": "cuda"}
    config = settings(data, data, sync=method, train=train, compression={"dense": codec})
    if "schedule" not in method:
        config = by_gradients(config, method["method"])
    result = Job(config, out=tmp_path / "out").run()
    assert result.data.trained_samples == 96
    assert 0 < result.test.logloss < 10
