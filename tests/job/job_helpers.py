"""Small data, small jobs and a model that writes down its rows, shared by the tests of whole jobs."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shadowsync import Job, Result
from shadowsync.errors import ShadowSyncError
from shadowsync.report.files import read_events

FEATURES = ("c0", "c1", "many")
ROWS = 40
"""Rows of each embedding table."""

SMALL_DLRM = {"name": "dlrm", "bottom": [8], "top": [8]}

METHODS = [
    {"method": "none", "schedule": "background"},
    {"method": "none", "schedule": "every_k"},
    {"method": "easgd", "schedule": "background"},
    {"method": "easgd", "schedule": "every_k", "k": 1},
    {"method": "easgd", "schedule": "every_k", "k": 2, "form": "sequential"},
    {"method": "ma", "schedule": "background"},
    {"method": "ma", "schedule": "every_k", "k": 1},
    {"method": "bmuf", "schedule": "background", "max_share": 1.0},
    {"method": "bmuf", "schedule": "every_k", "k": 2, "nesterov": True},
]
"""Every method under every schedule."""


def name_of(sync: Mapping[str, Any]) -> str:
    """A test's id."""
    return "-".join(str(value) for value in sync.values())


def write_rows(path: Path, rows: int, seed: int = 0) -> Path:
    """A parquet file with a label that can be learnt, row numbers, a dense column and three categorical ones."""
    draw = np.random.default_rng(seed)
    ids = {f"c{f}": draw.integers(0, ROWS, rows) for f in range(2)}
    many = [draw.integers(0, ROWS, draw.integers(0, 4)).tolist() for _ in range(rows)]
    dense = draw.normal(size=rows).astype(np.float32)
    label = (dense + (ids["c0"] % 2) + draw.normal(size=rows) > 0.5).astype(np.int64)
    columns = {"label": label, "row": np.arange(rows, dtype=np.float32) / 1024, "x": dense, **ids}
    pl.DataFrame(columns).with_columns(pl.Series("many", many, dtype=pl.List(pl.Int64))).write_parquet(path)
    return path


def set_cells(path: Path, column: str, value: object, rows: Sequence[int], to: Path | None = None) -> Path:
    """Gives a column that value in those rows of a file, or of a copy of it."""
    cells = pl.when(pl.int_range(pl.len()).is_in(rows)).then(pl.lit(value)).otherwise(column).alias(column)
    pl.read_parquet(path).with_columns(cells).write_parquet(to or path)
    return to or path


def settings(path: Path, test_path: Path | None = None, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that trains a module of one's own on such a file in fp32, with `sections` laid over it."""
    base: dict[str, dict[str, Any]] = {
        "data": {
            "name": "parquet",
            "path": str(path),
            "dense": ["row", "x"],
            "standardise": False,
            "categorical": ["c0", "c1", "many"],
            "rows": ROWS,
            "slice_rows": 4,
        },
        "model": {"embedding_dim": 4},
        "embedding": {"servers": 1, "storage": "torch"},
        "train": {
            "trainers": 1,
            "workers": 1,
            "batch_size": 2,
            "precision": "fp32",
            "kernels": "torch",
            "warmup_samples": 0,
        },
        "sync": {"method": "none"},
        "report": {"html": False, "tensorboard": False, "every_s": 0.05},
    }
    return laid_over(base, test_path, sections)


def laid_over(
    base: Mapping[str, Mapping[str, Any]], test_path: Path | None, sections: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """`sections` over those of `base`, which has test rows where a path of them is given."""
    tested = {} if test_path is None else {"test_path": str(test_path)}
    below = {**base, "data": {**base["data"], **tested}}
    return {name: {**below.get(name, {}), **sections.get(name, {})} for name in {**below, **sections}}


def by_gradients(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The configuration with a gradient method in place of one that merges replicas."""
    others = {name: section for name, section in config.items() if name != "sync"}
    return others | {"aggregation": {"method": method, **config.get("aggregation", {})}}


def beside_own_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the layers of a configured model."""
    return {**config, "model": {"embedding_dim": config["model"]["embedding_dim"]}}


class Ledger:
    """Counts rows by their number; a model that is copied for each worker keeps writing to the same one."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self._changed = threading.Condition()

    def write(self, numbers: Tensor) -> None:
        with self._changed:
            self.rows.update((numbers * 1024).round().int().tolist())
            self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        """Waits until so many rows were written down; False if that does not happen."""
        with self._changed:
            return self._changed.wait_for(lambda: self.rows.total() >= count, timeout=120)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Witness(nn.Module):
    """A small model of a user's own that writes down the rows it is trained on."""

    def __init__(self, ledger: Ledger, dim: int = 4) -> None:
        super().__init__()
        self.ledger = ledger
        self.tower = nn.Linear(2 + 3 * dim, 1)
        with torch.no_grad():
            self.tower.weight.fill_(0.1)
            self.tower.bias.zero_()

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        if self.training:
            self.ledger.write(dense[:, 0])
        return self.tower(torch.cat([dense, *(embeddings[name] for name in ("c0", "c1", "many"))], dim=1)).squeeze(1)


def train_counted(config: dict[str, Any], out: Path, **own: Any) -> tuple[Result, Counter[int]]:
    """Trains the witness; returns the result and how often each row was trained."""
    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, **own).run()
    return result, ledger.rows


def error_of(run: Callable[[], Any]) -> ShadowSyncError:
    """What a job ends with."""
    try:
        run()
    except ShadowSyncError as error:
        return error
    raise AssertionError("nothing was raised")


def fails(run: Callable[[], Any], kind: type[ShadowSyncError], *parts: str) -> ShadowSyncError:
    """The error of that kind that it ends with, whose sentence has all the parts."""
    with pytest.raises(kind) as caught:
        run()
    assert [part for part in parts if part not in str(caught.value)] == []
    return caught.value


def checkpoints(out: Path) -> list[Path]:
    """The folders of complete checkpoints, oldest first."""
    return sorted(manifest.parent for manifest in out.glob("checkpoints/samples-*/manifest.json"))


def weights(out: Path) -> dict[str, Tensor]:
    """Everything that was trained, from the newest checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoints(out)[-1].glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(file).items() if "random" not in file.name}
    return found


def decided(out: Path) -> list[str]:
    """What the roles decided, as the run's timeline tells it; the libraries of the products apart."""
    told = [event.detail for event in read_events(out) if event.event == "decided"]
    return [detail for detail in told if not detail.startswith("computing in ")]


def result_of(out: Path) -> dict[str, Any]:
    """The content of result.json."""
    values: dict[str, Any] = json.loads((out / "result.json").read_text())
    return values
