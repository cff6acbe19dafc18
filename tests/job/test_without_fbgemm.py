"""Where FBGEMM is missing, as on processors and Pythons that have no wheel of it, the torch storage does everything."""

import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from job_helpers import SMALL_DLRM, fails, settings, write_rows
from test_inference import exported_inputs
from test_threshold_jobs import interrupt

from shadowsync import Job, Trained
from shadowsync.errors import MissingExtra


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    return write_rows(tmp_path / "train.parquet", 300, 0), write_rows(tmp_path / "test.parquet", 120, 1)


@pytest.fixture
def without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)


def job_config(data: tuple[Path, Path], **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": SMALL_DLRM,
        "embedding": {"storage": "auto", "servers": 3},
        "train": {"trainers": 2, "workers": 2},
        "sync": {"method": "easgd"},
        "compression": {"pull": "int8", "push": "bf16"},
    }
    return settings(*data, **(base | sections))


def test_a_job_is_trained_resumed_evaluated_predicted_and_exported(
    tmp_path: Path, data: tuple[Path, Path], without_fbgemm: None
) -> None:
    out, config = tmp_path / "out", job_config(data)
    interrupt(config, out, iteration=5)
    result = Job(config, out=out, resume=out).run()
    assert result.config["embedding"]["storage"] == "torch"
    assert result.data.trained_samples == 300
    trained = Trained(out)
    assert trained.evaluate().auc == result.test.auc
    assert trained.predict(data[1], tmp_path / "predictions.parquet") == 120
    trained.export(tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    answer = loaded(*exported_inputs(pl.read_parquet(data[1])))
    expected = pl.read_parquet(tmp_path / "predictions.parquet")["logit"].to_torch()
    torch.testing.assert_close(answer["logits"].detach(), expected, rtol=1e-6, atol=1e-6)


def test_a_run_with_fbgemm_goes_on_and_is_evaluated_without_it(
    tmp_path: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fbgemm_gpu", reason="install the extra to leave it out: pip install 'shadowsync[fbgemm]'")
    out, config = tmp_path / "out", job_config(data)
    interrupt(config, out, iteration=5)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    result = Job(config, out=out, resume=out).run()
    assert result.data.trained_samples == 300
    assert Trained(out).evaluate().auc == result.test.auc


def test_fbgemm_asked_for_and_missing_is_one_sentence_with_the_command(
    tmp_path: Path, data: tuple[Path, Path], without_fbgemm: None
) -> None:
    fails(
        Job(job_config(data, embedding={"storage": "fbgemm"}), out=tmp_path / "out").run,
        MissingExtra,
        "pip install 'shadowsync[fbgemm]'",
    )
    assert not (tmp_path / "out" / "result.json").exists()
