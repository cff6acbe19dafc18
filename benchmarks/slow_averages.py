"""Averages in the background that take a while: what the work that is done meanwhile is worth, by rule and α.

    python benchmarks/slow_averages.py --out FOLDER [--seeds 5] [--seconds 0.1] [--rows 400000]
    … --report      prints the table of what has been run so far

The two tasks of `quality.py`, four trainers in one process. The network is emulated: an average comes that long after
the replicas were copied for it, some ten iterations here. `published` is ShadowSync's rule, `w_i ← (1−α) w_i + α c`;
`ours` adds `α (c − copy of w_i)`. The foreground has k set to the gap that `ours` with α = 1 had in the run of the same
task, method and seed, and no delay. A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on
where it stopped.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shadowsync.sync
from shadowsync import Job

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, run_and_report
from machine import commit, difference, table, with_interval
from quality import TASKS

shadowsync.sync.__path__.append(str(Path(__file__).parent / "averages"))

METHODS = ("ma", "bmuf")
FOREGROUND = "foreground"
WAYS = (("ours", 1.0), ("ours", 0.5), ("published", 1.0), ("published", 0.5), (FOREGROUND, 1.0))
"""Rule and α; the one whose gap the foreground has comes before it."""


def run(task: str, rows: int, seed: int, sync: Mapping[str, Any]) -> dict[str, Any]:
    """One run's figures."""
    given = TASKS[task]
    config = {
        **given,
        "data": {**given["data"], "rows": rows},
        "train": {**given.get("train", {}), "trainers": 4, "seed": seed},
        "sync": sync,
        "report": {"tensorboard": False, "html": False, "every_s": 5.0},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Job(config, out=Path(folder) / "run").run()
    assert result.test is not None
    assert result.sync is not None
    return {"commit": commit(), "auc": result.test.auc, "ne": result.test.ne, "gap": result.sync.average_gap}


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, seed by seed."""
    for seed, task, method in itertools.product(range(given.seeds), TASKS, METHODS):
        gap = 1.0
        for rule, alpha in WAYS:
            name = f"{task}, {method}, {rule}, alpha {alpha:g}, {given.seconds:g} s, {given.rows} rows, seed {seed}"
            sync: dict[str, Any] = {"method": f"slow_{method}", "seconds": given.seconds, "rule": rule}
            if rule == FOREGROUND:
                sync = {"method": method, "schedule": "every_k", "k": max(1, round(gap))}
            row = kept.read(name)
            if row is None:
                told = {"task": task, "method": method, "rule": rule, "alpha": alpha, "seed": seed}
                row = {**told, **run(task, given.rows, seed, {**sync, "alpha": alpha})}
                kept.write(name, row)
                print(name, f"AUC {row['auc']:.4f}", file=sys.stderr, flush=True)
            if (rule, alpha) == WAYS[0]:
                gap = row["gap"]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means over the seeds, and what the background is better by than the foreground."""
    found: dict[tuple[str, str, str, float], dict[int, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["task"] != "demo", row["method"] != "ma", row["seed"])):
        found.setdefault((row["task"], row["method"], row["rule"], row["alpha"]), {})[row["seed"]] = row
    lines = [
        (
            *(task, method, rule, f"{alpha:g}", f"{statistics.fmean(row['gap'] for row in runs.values()):.1f}"),
            *(with_interval([row[key] for row in runs.values()]) for key in ("auc", "ne")),
            difference(runs, found.get((task, method, FOREGROUND, 1.0), {})),
        )
        for (task, method, rule, alpha), runs in found.items()
    ]
    return table(["task", "method", "rule", "alpha", "gap", "AUC", "NE", "to the foreground"], lines)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="that an average takes")
    parser.add_argument("--rows", type=int, default=400_000)
    run_and_report(parser, run_all, report)


if __name__ == "__main__":
    main()
