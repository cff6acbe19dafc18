"""Latency of an exported model on raw rows, by their number: preparing them (numpy) and the model itself (torch).

    python benchmarks/serving.py [--rows 100000] [--requests 1000] [--threads 1]

A job trains DLRM on rows made up here: 13 numbers with gaps, 26 text columns of skewed frequencies (hashed, two as a
vocabulary), a list of texts and a date in buckets. The model is exported, loaded by `shadowsync.serving`, and asked for
rows of the test set as lists of Python values, as a server has them. Its AUC stands beside that of `evaluate`.
"""

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from shadowsync import Job, Trained, serving
from shadowsync.metrics.quality import evaluate_scores

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

SIZES = (1, 10, 100, 1000)
TEXTS = [f"c{number}" for number in range(26)]
NUMBERS = [f"i{number}" for number in range(13)]
COLUMNS: dict[str, Any] = {
    **{name: {"kind": "dense", "log": True} for name in NUMBERS},
    **{name: {"kind": "hash", "rows": 100_000} for name in TEXTS},
    **dict.fromkeys(TEXTS[:2], "vocabulary"),
    "seen": {"kind": "hash", "rows": 100_000},
    "day": {"kind": "buckets", "count": 10},
}


def main() -> None:
    """Trains, exports, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=1000, help="of each size; a tenth of them of 1,000 rows")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each call of the model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, test, evaluated = trained(Path(folder), given.rows)
    torch.set_num_threads(given.threads)
    print("\n".join(describe()))
    scores = torch.from_numpy(model.score(test.to_dict(as_series=False)))
    auc = evaluate_scores(scores.logit(), test["label"].cast(pl.Float32).to_torch()).auc
    print(f"AUC of {len(test):,} test rows: {auc:.6f} exported, {evaluated:.6f} by evaluate")
    print(f"{given.requests:,} requests of each size, {given.threads} thread(s)\n")
    header = ["rows", *(f"{part} {which}" for part in ("preparing", "model", "both") for which in ("p50", "p99"))]
    print("milliseconds\n" + table(header, [measured(model, test, size, given.requests) for size in SIZES]))


def trained(folder: Path, rows: int) -> tuple[serving.Model, pl.DataFrame, float]:
    """The exported model, the test rows, and their AUC by `evaluate`."""
    test = made_up(max(rows // 10, 2 * max(SIZES)), 1)
    made_up(rows, 0).write_parquet(folder / "train.parquet")
    test.write_parquet(folder / "test.parquet")
    data = {"path": f"{folder}/train.parquet", "test_path": f"{folder}/test.parquet", "columns": COLUMNS}
    Job({"data": data, "model": {"name": "dlrm"}, "report": {"html": False}}, out=folder / "run").run()
    run = Trained(folder / "run")
    run.export(folder / "model.pt2")
    auc = run.evaluate().auc
    assert auc is not None
    return serving.load(str(folder / "model.pt2")), test, auc


def made_up(rows: int, seed: int) -> pl.DataFrame:
    """Labels hang on the first text column and the first number."""
    draw = np.random.default_rng(seed)
    words = draw.zipf(1.2, (len(TEXTS) + 1, rows)) % 50_000
    numbers = draw.lognormal(3, 2, (len(NUMBERS), rows))
    logit = np.where(words[0] % 3 == 0, 1.5, -1.5) + np.log(numbers[0]) - 3
    columns: dict[str, Any] = {"label": draw.random(rows) < 1 / (1 + np.exp(-logit))}
    for name, values in zip(NUMBERS, numbers, strict=True):
        columns[name] = pl.Series(
            [None if gone else value for gone, value in zip(draw.random(rows) < 0.1, values, strict=True)]
        )
    columns |= {
        name: [f"{word * 2654435761 % 2**32:08x}" for word in some] for name, some in zip(TEXTS, words, strict=False)
    }
    columns["seen"] = [[f"item {word}"] * (word % 4) for word in words[-1]]
    first = datetime.date(2026, 1, 1)
    columns["day"] = [first + datetime.timedelta(days=int(day)) for day in draw.integers(0, 60, rows)]
    return pl.DataFrame(columns)


def measured(model: serving.Model, test: pl.DataFrame, size: int, requests: int) -> list[object]:
    """Milliseconds of preparing, of the model, and of both."""
    prepared, answered = [], []
    for number in range(max(requests // 10, 10) if size == max(SIZES) else requests):
        rows = test.slice(number * size % (len(test) - size), size).to_dict(as_series=False)
        start = time.perf_counter()
        inputs = model.prepare(rows)
        middle = time.perf_counter()
        model.run(inputs)
        prepared.append(middle - start)
        answered.append(time.perf_counter() - middle)
    both = np.add(prepared, answered)
    return [size, *(float(np.quantile(each, q)) * 1000 for each in (prepared, answered, both) for q in (0.5, 0.99))]


if __name__ == "__main__":
    main()
