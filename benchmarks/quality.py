"""Quality of every replica method and schedule against a single replica, on the demo and on a task that leans on the
dense part.

    python benchmarks/quality.py --out FOLDER [--tasks demo dense] [--seeds 3] [--trainers 2 4 8]

Every finished run is one line of FOLDER/runs.jsonl; started again, the script goes on where it stopped. At the end it
prints the tables and draws FOLDER/quality.png. `matched` is the foreground with k set to the average gap that the
background reached in the run of the same task, method and seed at four trainers.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shadowsync import Job

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells
from machine import describe, table

TASKS: dict[str, dict[str, Any]] = {
    "demo": {"data": {"name": "completejourney"}},
    "dense": {
        "data": {
            "name": "synthetic",
            "rows": 400_000,
            "test_rows": 100_000,
            "features": 8,
            "table_rows": 2_000,
            "dense_share": 0.9,
            "scale": 3.0,
        },
        "model": {"bottom": [256, 128], "top": [256, 128]},
        "train": {"batch_size": 128},
    },
}
METHODS = ("easgd", "ma", "bmuf")
MATCHED_AT = 4
SCHEDULES = ("background", "every_k 5", "every_k 30", "matched")


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    task: str
    trainers: int
    method: str
    schedule: str
    seed: int


def grid(tasks: list[str], trainers: list[int], seeds: int) -> Iterator[Cell]:
    """All runs; the background before the foreground that is matched to it."""
    for seed, task in itertools.product(range(seeds), tasks):
        yield Cell(task, 1, "none", "-", seed)
        for count in trainers:
            yield Cell(task, count, "none", "-", seed)
            schedules = SCHEDULES if count == MATCHED_AT else SCHEDULES[:-1]
            for method, schedule in itertools.product(METHODS, schedules):
                yield Cell(task, count, method, schedule, seed)


def configuration(cell: Cell, matched_k: int) -> dict[str, Any]:
    """The configuration of a run."""
    task = TASKS[cell.task]
    sync: dict[str, Any] = {"method": cell.method}
    if cell.schedule == "background":
        sync |= {"schedule": "background"}
    elif cell.schedule != "-":
        sync |= {"schedule": "every_k", "k": matched_k if cell.schedule == "matched" else int(cell.schedule.split()[1])}
    train = {"warmup_samples": 0, **task.get("train", {}), "trainers": cell.trainers, "seed": cell.seed}
    report = {"tensorboard": False, "html": False, "every_s": 5.0}
    return {**task, "train": train, "sync": sync, "report": report}


def run(cell: Cell, matched_k: int) -> dict[str, Any]:
    """Trains one cell and returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Job(configuration(cell, matched_k), out=Path(folder) / "run").run()
    assert result.test is not None
    assert result.sync is not None
    assert result.data.trained_samples == result.data.train_samples
    return {
        **asdict(cell),
        "auc": result.test.auc,
        "ne": result.test.ne,
        "best_auc": result.test.best_auc,
        "gap": result.sync.average_gap,
        "eps": result.throughput.eps,
        "samples": result.data.trained_samples,
    }


def run_all(cells: list[Cell], kept: Cells) -> list[dict[str, Any]]:
    """Runs what was not kept."""
    rows = []
    for number, cell in enumerate(cells):
        if (row := kept.read(str(cell))) is None:
            background = kept.read(str(replace(cell, schedule="background")))
            row = run(cell, max(1, round(background["gap"])) if background else 1)
            kept.write(str(cell), row)
            print(f"{number + 1}/{len(cells)} {cell}: AUC {row['auc']:.4f}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def spread(values: list[float]) -> str:
    """Mean and, behind it, the standard deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ±{deviation:.4f}"


def lines(task: str, rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each combination, seeds together."""
    mine = [row for row in rows if row["task"] == task]
    single = statistics.mean(row["auc"] for row in mine if row["trainers"] == 1)
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for row in mine:
        groups.setdefault((row["trainers"], row["method"], row["schedule"]), []).append(row)
    return [
        [
            str(trainers),
            method,
            schedule,
            f"{statistics.mean(row['gap'] or 0 for row in group):.1f}",
            spread([row["auc"] for row in group]),
            f"{statistics.mean(row['auc'] for row in group) - single:+.4f}",
            spread([row["ne"] for row in group]),
            f"{statistics.median(row['eps'] for row in group):,.0f}",
        ]
        for (trainers, method, schedule), group in groups.items()
    ]


def picture(tasks: list[str], rows: list[dict[str, Any]], path: Path) -> None:
    """AUC against the number of trainers, one panel per task, one line per method and schedule."""
    figure = Figure(figsize=(6.5 * len(tasks), 5), layout="constrained")
    colours = {"none": "#777777", "easgd": "#0b6bcb", "ma": "#c8552b", "bmuf": "#2e8b57"}
    styles = {"-": ":", "background": "-", "every_k 5": "--", "every_k 30": "-.", "matched": (0, (1, 1))}
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        lines: dict[tuple[str, str], dict[int, list[float]]] = {}
        for row in rows:
            if row["task"] == task:
                lines.setdefault((row["method"], row["schedule"]), {}).setdefault(row["trainers"], []).append(
                    row["auc"]
                )
        for (method, schedule), points in lines.items():
            counts = sorted(points)
            means = [statistics.mean(points[count]) for count in counts]
            label = method if schedule == "-" else f"{method}, {schedule}"
            axes.plot(counts, means, color=colours[method], linestyle=styles[schedule], marker="o", ms=4, label=label)
        axes.set(title=f"{task}: test AUC, mean over seeds", xlabel="trainers", xscale="log")
        axes.set_xticks(
            sorted({row["trainers"] for row in rows}), [str(n) for n in sorted({r["trainers"] for r in rows})]
        )
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the grid and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trainers", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    rows = run_all(list(grid(arguments.tasks, arguments.trainers, arguments.seeds)), Cells(arguments.out))
    print("\n".join(describe()))
    for task in arguments.tasks:
        best = next((row["best_auc"] for row in rows if row["task"] == task and row["best_auc"]), None)
        print(f"\n{task}: {arguments.seeds} seeds" + (f"; best reachable AUC {best:.4f}" if best else ""))
        head = ["trainers", "method", "schedule", "gap", "AUC", "to one replica", "NE", "examples/s"]
        print(table(head, lines(task, rows)))
    picture(arguments.tasks, rows, arguments.out / "quality.png")


if __name__ == "__main__":
    main()
