"""Made clicks for the scripts beside this one, and what trains on them: the planted is learnt whatever rows come as."""

from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from shadowsync import Job

TRAIN, TEST = 3000, 600
COLUMNS: dict[str, Any] = {
    "label": "clicked",
    "columns": {"price": "dense", "user": {"kind": "hash", "rows": 1000}, "item": {"kind": "as_is", "rows": 50}},
}


def made(rows: int, seed: int) -> pl.DataFrame:
    """A user clicks on what is cheap, and on items of the kind that the user likes."""
    draw = np.random.default_rng(seed)
    user, item, price = draw.integers(0, 30, rows), draw.integers(0, 50, rows), draw.normal(size=rows)
    logit = 3.0 * (user % 2 == 0) + 1.5 * (item % 2 == 0) - price - 2.0
    clicked = (draw.logistic(size=rows) < logit).astype(np.int64)
    return pl.DataFrame({"clicked": clicked, "price": price, "user": [f"user {one}" for one in user], "item": item})


def train(files: dict[str, Any] | None = None, **rows: Any) -> None:
    """Trains a small model on files, as the section `data` names them, or on rows in memory; prints counts and AUC."""
    config = {
        "data": {**COLUMNS, **(files or {})},
        "model": {"name": "dlrm", "embedding_dim": 4, "bottom": [8], "top": [8]},
        "train": {"trainers": 1, "batch_size": 16, "lr": 0.02, "precision": "fp32"},
        "report": {"html": False, "tensorboard": False},
    }
    with TemporaryDirectory() as folder:
        result = Job(config, out=f"{folder}/run", **rows).run()
    counts, test = result.data, result.test
    assert test is not None
    rows_told = f"{counts.trained_samples} of {counts.train_samples} rows trained, {counts.test_samples} tested"
    print(f"{rows_told}: AUC {test.auc:.3f}")
