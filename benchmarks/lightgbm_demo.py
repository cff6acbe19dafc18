"""LightGBM and a job on growing parts of the demo: quality and time, one machine.

    pip install lightgbm
    python benchmarks/lightgbm_demo.py [--rows 50000 200000 all] [--seeds 2]

Both stop early by AUC on the same tenth of the rows, which is drawn by their place, and are tested on the same weeks.
`trees` gets the dense columns, counts of what was bought before; `trees, ids` the ids, too, as categories of LightGBM's
own (one id per sample; `recent_categories` is a list, which it cannot take). `job` is shadowsync as it comes, with
both; `job, no counts` and `trees, ids, no counts` have no dense columns (`data.history=false`), as where nobody has
made such counts. Seconds are those of training and of the validations in it: of LightGBM with the binning of its
columns, of the job without its start.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import torch
from numpy.typing import NDArray

from shadowsync import Job
from shadowsync.choices import choose_all
from shadowsync.config import parse
from shadowsync.data.reader import batches
from shadowsync.data.source import OpenSource
from shadowsync.data.splits import PARTS, open_parts
from shadowsync.metrics.quality import evaluate_scores
from shadowsync.report.result import cores

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

WAYS = ("job", "trees", "trees, ids", "job, no counts", "trees, ids, no counts")
PATIENCE = 20
"""Trees that do not raise the AUC of the validation, after which there are no more; 2,000 at most."""


def data_of(way: str, rows: str) -> dict[str, Any]:
    """The `data` section."""
    bounded = {} if rows == "all" else {"rows": int(rows)}
    return {"name": "completejourney", "valid": {"fraction": 0.1}, "history": "no counts" not in way, **bounded}


def matrix(source: OpenSource, ids: bool) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """Dense columns, and ids of features that have one per sample, side by side; labels; which columns are ids."""
    single = [place for place, feature in enumerate(source.schema.features) if ids and not feature.multi_hot]
    columns, labels = [], []
    for batch in batches(source, 8192):
        chosen = batch.ids.select(single).values.view(len(single), len(batch)).T.float()
        columns.append(torch.cat([batch.dense, chosen], dim=1).numpy())
        labels.append(batch.labels.numpy())
    first = len(source.schema.dense)
    return np.concatenate(columns), np.concatenate(labels), list(range(first, first + len(single)))


def trees(way: str, rows: str, seed: int) -> tuple[float | None, float, int]:
    """Test AUC, seconds, trees."""
    config = parse({"data": data_of(way, rows)})
    parts = open_parts(choose_all(config, own_model=False).source, config.data, *PARTS)
    found = {name: matrix(part, "ids" in way) for name, part in parts.items()}
    (columns, labels, ids), began = found["train"], time.perf_counter()
    train = lightgbm.Dataset(columns, labels, categorical_feature=ids)
    valid = lightgbm.Dataset(found["valid"][0], found["valid"][1], reference=train)
    settings = {"objective": "binary", "metric": "auc", "learning_rate": 0.1, "num_leaves": 127, "seed": seed,
                "num_threads": cores(), "verbosity": -1}  # fmt: skip
    stopping = [lightgbm.early_stopping(PATIENCE, verbose=False)]
    booster = lightgbm.train(settings, train, 2000, valid_sets=[valid], callbacks=stopping)
    seconds = time.perf_counter() - began
    logits = torch.from_numpy(booster.predict(found["test"][0], raw_score=True))
    return evaluate_scores(logits, torch.from_numpy(found["test"][1])).auc, seconds, booster.best_iteration


def job(way: str, rows: str, seed: int) -> tuple[float | None, float, int]:
    """Test AUC, seconds, samples after which it was best."""
    train = {"seed": seed, "patience": 2, "validate_every": 300_000 if rows == "all" else max(1, int(rows) // 4)}
    values = {
        "data": {**data_of(way, rows), "epochs": 3},
        "train": train,
        "report": {"html": False, "tensorboard": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Job(values, out=Path(folder) / "run").run()
    assert result.test is not None
    assert result.validation is not None
    return result.test.auc, result.throughput.seconds, result.validation.best_samples


def main() -> None:
    """Runs all ways in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["50000", "200000", "all"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    lines = []
    for rows, way in itertools.product(given.rows, given.ways):
        runs = [(job if way.startswith("job") else trees)(way, rows, seed) for seed in range(given.seeds)]
        aucs = [auc for auc, *_ in runs if auc is not None]
        seconds, best = (statistics.median(run[place] for run in runs) for place in (1, 2))
        lines.append(
            (
                way,
                rows,
                f"{statistics.fmean(aucs):.4f}",
                f"{max(aucs) - min(aucs):.4f}",
                f"{seconds:.1f}",
                f"{best:,.0f}",
            )
        )
        print(*lines[-1], file=sys.stderr, flush=True)
    print("\n".join([*describe(), f"lightgbm: {lightgbm.__version__}"]), end="\n\n")
    print(table(["way", "rows", "test AUC", "spread", "seconds", "best after (samples, or trees)"], lines))


if __name__ == "__main__":
    main()
