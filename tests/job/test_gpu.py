"""Whole jobs whose dense part is on a GPU."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from job_helpers import SMALL_DLRM, by_gradients, name_of, settings, write_rows
from test_inference import exported_inputs
from test_sequence_jobs import DIEN, DIN, SHARED
from wrapped_models import BATCH, CASES, clicks_settings, make, weighted_data, write_clicks

from shadowsync import Job, Trained, wrap
from shadowsync.report.result import read_result

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


TOWERS: dict[str, dict[str, Any]] = {
    "dlrm": SMALL_DLRM,
    "dcn": {"name": "dcn", "deep": [8]},
    "deepfm": {"name": "deepfm", "deep": [8]},
    "wide_deep": {"name": "wide_deep", "deep": [8]},
    "mmoe": {"name": "mmoe", "experts": 2, "expert": [8], "top": [4]},
    "din": DIN,
    "dien": DIEN,
}


def near(one: Path, other: Path, **model: Any) -> None:
    """What two runs trained differs by the rounding of sums only."""
    ours, theirs = (Trained(out, **model).module.state_dict() for out in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu", "a trained model is on the processor, wherever it was trained"
        torch.testing.assert_close(
            tensor, theirs[name], rtol=1e-3, atol=1e-4, msg=lambda found, at=name: f"{at}: {found}"
        )


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("model", TOWERS)
def test_a_gpu_computes_what_the_processor_does(tmp_path: Path, model: str, optimizer: str) -> None:
    data = write_rows(tmp_path / "rows.parquet", 320)
    for device in ("cpu", "cuda"):
        # without eps the first steps of Adagrad and Adam go by a gradient's sign alone, however small
        eps = {} if optimizer == "sgd" else {"eps": 1e-2}
        train = {"batch_size": 8, "device": device, "optimizer": optimizer, **eps}
        shared = SHARED if model in ("din", "dien") else {}
        config = settings(data, data, data=shared, train=train, model={**TOWERS[model], "embedding_dim": 4})
        Job(config, out=tmp_path / device).run()
    near(tmp_path / "cpu", tmp_path / "cuda")
    found = read_result(tmp_path / "cuda").test
    assert found is not None
    again = Trained(tmp_path / "cuda").evaluate()
    assert again.logloss == pytest.approx(found.logloss, rel=1e-5)
    assert again.auc == pytest.approx(found.auc, abs=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_was_trained_there_goes_on_is_served_and_exported_on_the_processor(tmp_path: Path, precision: str) -> None:
    data = write_rows(tmp_path / "rows.parquet", 320)
    train = {"trainers": 2, "workers": 2, "batch_size": 8, "device": "cuda", "precision": precision}
    config = settings(data, data, train=train, sync={"method": "easgd"}, model={**SMALL_DLRM, "embedding_dim": 4})
    out = tmp_path / "out"
    Job(config, out=out).run()
    longer = config | {"data": config["data"] | {"epochs": 2}, "train": train | {"device": "cpu"}}
    result = Job(longer, out=out, resume=out).run()
    assert result.data.trained_samples == 640
    trained = Trained(out)
    trained.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    answer = program(*exported_inputs(pl.read_parquet(data)))
    expected = torch.from_numpy(trained.predict(data))
    torch.testing.assert_close(answer["probabilities"].detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_module_as_it_is_computes_there_what_it_does_on_the_processor(tmp_path: Path, name: str) -> None:
    clicks, given = write_clicks(tmp_path / "rows.parquet", 20 * BATCH), CASES[name][1]
    for device in ("cpu", "cuda"):
        config = clicks_settings(clicks, data=weighted_data(name), train={"device": device})
        model = make(name).to(device)  # a module that is on the GPU already is as good
        Job(config, model=wrap(model, **given), out=tmp_path / device).run()
        assert next(model.parameters()).device.type == device
    near(tmp_path / "cpu", tmp_path / "cuda", model=wrap(make(name), **given))


def test_trainers_may_be_processes_there(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 320)
    train = {"trainers": 2, "workers": 2, "batch_size": 8, "device": "cuda"}
    config = settings(data, data, train=train, sync={"method": "easgd"}, model={**SMALL_DLRM, "embedding_dim": 4})
    result = Job(config | {"cluster": {"runtime": "processes"}}, out=tmp_path / "out").run()
    assert result.data.trained_samples == 320


def test_a_resumed_job_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 320)
    sections = {"train": {"batch_size": 8, "device": "cuda"}, "model": {**SMALL_DLRM, "embedding_dim": 4}}
    twice = settings(data, data, data={"epochs": 2}, **sections)
    Job(twice, out=tmp_path / "whole").run()
    Job(settings(data, data, **sections), out=tmp_path / "half").run()
    Job(twice, out=tmp_path / "half", resume=tmp_path / "half").run()
    near(tmp_path / "whole", tmp_path / "half")
