"""A whole job counts the dead units of the network that it trained, a user's own or a configured one."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from job_helpers import SMALL_DLRM, settings, write_rows
from rich.console import Console
from torch import Tensor, nn

import shadowsync.inference
from shadowsync import Job


class Half(nn.Module):
    """Three of four hidden units never see the light."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        with torch.no_grad():
            self.tower[0].bias.copy_(torch.tensor([100.0, -100.0, -100.0, -100.0]))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.tower(dense).squeeze(1) + embeddings["c0"].sum(dim=1)
        return logits


def test_a_module_of_ones_own_is_looked_into(tmp_path: Path) -> None:
    data, test = write_rows(tmp_path / "rows.parquet", 24), write_rows(tmp_path / "test.parquet", 30, 1)
    config = settings(data, test, train={"trainers": 2, "lr": 1e-4})
    with (tmp_path / "shown").open("w") as file:
        result = Job(config, model=Half(), out=tmp_path / "out").run(Console(file=file, width=100))
    assert json.loads((tmp_path / "out" / "result.json").read_text())["units"] == {
        "rows": 30,
        "sizes": {"tower.1": 4},
        "dead": {"tower.1": 0.75},
    }
    assert result.units is not None
    sentence = (
        "warning: dead units: 3 of 4 of tower.1 were 0 on all 30 test rows looked at: lower train.lr (it is 0.0001) or "
        "raise train.warmup_samples (0)\n"
    )
    assert sentence in (tmp_path / "shown").read_text()


def test_of_many_test_rows_some_are_looked_at_from_begin_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadowsync.inference, "BATCH_SIZE", 4)
    monkeypatch.setattr(shadowsync.inference, "WATCHED_ROWS", 20)
    data, test = write_rows(tmp_path / "rows.parquet", 8), write_rows(tmp_path / "test.parquet", 58, 1)
    result = Job(settings(data, test) | {"model": SMALL_DLRM}, out=tmp_path / "out").run()
    assert result.units.rows == 20, "every third batch of four"
    assert result.units.sizes == {"bottom.1": 8, "bottom.3": 16, "top.1": 8}
    assert result.test is not None


def test_without_test_rows_nothing_is_said(tmp_path: Path) -> None:
    result = Job(settings(write_rows(tmp_path / "rows.parquet", 8)) | {"model": SMALL_DLRM}, out=tmp_path / "o").run()
    assert result.units is None
    assert "units" not in json.loads((tmp_path / "o" / "result.json").read_text())
