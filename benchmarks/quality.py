"""Quality of replica methods, schedules, their parameters, and of workers, on the demo and on a task that leans on the
dense part.

    python benchmarks/quality.py methods --out FOLDER [--tasks demo dense] [--seeds 5] [--rows 500000] [--picture FILE]
    python benchmarks/quality.py parameters --out FOLDER …
    python benchmarks/quality.py hogwild --out FOLDER …
    … --report      prints the tables of what has been run so far

Every finished run is one line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.

methods: 2, 4 and 8 trainers, each method in the background and in the foreground; `matched` is the foreground with k
set to the average gap that the background reached in the run of the same task, method, trainers, workers and seed. Two
and four workers are run with two trainers. parameters: of each method, with four trainers, in the background and in the
foreground every 30 iterations, beside the method's defaults; and those every 5 and 100. What is in `--beside` already
(the records of methods) is taken from there. hogwild: 1 to 16 workers of each of two trainers, whose steps are made to
last 200 ms, so that what a worker does not see of the others is what it would not on as many cores; ELP, the
parallelism in examples, is batch × workers × trainers. All warm up for as many samples, those of 16 workers by default.

Means are over seeds, differences paired by seed, each with an interval of 95 % (Student's t). A run has collapsed where
its AUC is more than 0.01 below the median of its cell.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shadowsync import Job
from shadowsync.registry import members
from shadowsync.sync.method import SyncMethod

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells
from machine import by_seed, commit, describe, difference, table, with_interval
from quality_pictures import of_hogwild, of_methods, of_parameters

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
SCHEDULES = ("background", "matched", "every_k 5", "every_k 30")
PARAMETERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "easgd": (*((f"alpha={alpha}",) for alpha in (0.05, 0.1, 0.4, 0.9)),),
    "ma": (*((f"alpha={alpha}",) for alpha in (0.25, 0.5, 0.75)),),
    "bmuf": (
        ("alpha=0.5",),
        *((f"momentum={momentum}", "eta=1.0") for momentum in (0.0, 0.25, 0.75, 0.9)),
        *(("momentum=0.5", f"eta={eta}") for eta in (0.5, 1.5)),
    ),
}
"""Beside each method's defaults: α = 0.9 / trainers; α = 1; μ = 0.5 and η = 1."""
HOGWILD: Mapping[str, Any] = {"batch_size": 256, "emulate_step_ms": 200.0, "warmup_samples": 50_000}
HOGWILD_ROWS = 200_000
COLLAPSED = 0.01


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        options: of the method.
        emulated: steps are made to last.
    """

    task: str
    rows: int
    trainers: int
    workers: int
    method: str
    schedule: str
    seed: int
    options: tuple[str, ...] = ()
    emulated: bool = False


def methods(task: str, rows: int, seed: int) -> Iterator[Cell]:
    """The background before the foreground that is matched to it."""
    yield Cell(task, rows, 1, 1, "none", "-", seed)
    for count in (2, 4, 8):
        yield Cell(task, rows, count, 1, "none", "-", seed)
        for method, schedule in itertools.product(METHODS, SCHEDULES):
            yield Cell(task, rows, count, 1, method, schedule, seed)
    for workers, method, schedule in itertools.product((2, 4), METHODS, SCHEDULES[:2]):
        yield Cell(task, rows, 2, workers, method, schedule, seed)


def parameters(task: str, rows: int, seed: int) -> Iterator[Cell]:
    """Of four trainers."""
    yield Cell(task, rows, 1, 1, "none", "-", seed)
    for method in METHODS:
        for schedule, options in itertools.product(("background", "every_k 30"), ((), *PARAMETERS[method])):
            yield Cell(task, rows, 4, 1, method, schedule, seed, options)
        for k in (5, 100):
            yield Cell(task, rows, 4, 1, method, f"every_k {k}", seed)


def hogwild(task: str, rows: int, seed: int) -> Iterator[Cell]:
    """Of two trainers."""
    for workers in (1, 2, 4, 8, 16):
        yield Cell(task, min(rows, HOGWILD_ROWS), 2, workers, "easgd", "background", seed, emulated=True)


PARTS = {
    "methods": (methods, of_methods),
    "parameters": (parameters, of_parameters),
    "hogwild": (hogwild, of_hogwild),
}
"""Cells of a task and seed, and what draws them."""


def grid(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All runs of a part, seed by seed."""
    for seed, task in itertools.product(range(arguments.seeds), arguments.tasks):
        rows = min(arguments.rows, TASKS[task]["data"].get("rows", arguments.rows))
        yield from PARTS[arguments.part][0](task, rows, seed)


def configuration(cell: Cell, matched_k: int) -> dict[str, Any]:
    """The configuration of a run."""
    task = TASKS[cell.task]
    sync: dict[str, Any] = {"method": cell.method, **{k: float(v) for k, v in (o.split("=") for o in cell.options)}}
    if cell.schedule == "background":
        sync |= {"schedule": "background"}
    elif cell.schedule != "-":
        sync |= {"schedule": "every_k", "k": matched_k if cell.schedule == "matched" else int(cell.schedule.split()[1])}
    given = {"trainers": cell.trainers, "workers": cell.workers, "seed": cell.seed}
    report = {"tensorboard": False, "html": False, "every_s": 5.0}
    train = {**task.get("train", {}), **given, **(HOGWILD if cell.emulated else {})}
    return {**task, "data": {**task["data"], "rows": cell.rows}, "train": train, "sync": sync, "report": report}


def run(cell: Cell, matched_k: int) -> dict[str, Any]:
    """Trains one cell and returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Job(configuration(cell, matched_k), out=Path(folder) / "run").run()
    assert result.test is not None
    assert result.sync is not None
    assert result.data.trained_samples == result.data.train_samples
    return {
        **asdict(cell),
        "commit": commit(),
        "auc": result.test.auc,
        "ne": result.test.ne,
        "best_auc": result.test.best_auc,
        "gap": result.sync.average_gap,
        "eps": result.throughput.eps,
        "samples": result.data.trained_samples,
    }


def matched_k(cell: Cell, gap: float) -> int:
    """With which the foreground has that gap, in iterations of a trainer. A worker counts its own; those of a trainer
    exchange one by one where there is a centre, else all at once."""
    collective = members("shadowsync.sync", SyncMethod)[cell.method].collective
    return max(1, round(gap / cell.workers if collective else gap))


def kept_of(cell: Cell, places: Sequence[Cells]) -> dict[str, Any] | None:
    """The result from the first place that has it."""
    return next((row for place in places if (row := place.read(str(cell))) is not None), None)


def run_all(cells: Sequence[Cell], places: Sequence[Cells]) -> None:
    """Runs what was not kept anywhere, and keeps it in the first place."""
    kept = places[0]
    for number, cell in enumerate(cells):
        if kept_of(cell, places) is None:
            background = kept.read(str(replace(cell, schedule="background")))
            row = run(cell, matched_k(cell, background["gap"]) if background else 1)
            kept.write(str(cell), row)
            print(f"{number + 1}/{len(cells)} {cell}: AUC {row['auc']:.4f}", file=sys.stderr, flush=True)


Way = tuple[int, int, str, str, str]
"""Trainers, workers, method, schedule and options."""


def way_of(row: Mapping[str, Any]) -> Way:
    """What a run has in common with those of other seeds."""
    return (row["trainers"], row["workers"], row["method"], row["schedule"], " ".join(row["options"]))


def line(way: Way, found: Mapping[Way, Mapping[int, Mapping[str, Any]]], bases: Sequence[Way]) -> list[str]:
    """Of the table of all ways, with the distance to each of some."""
    runs, (trainers, workers, *names) = found[way], way
    aucs = [row["auc"] for row in runs.values()]
    return [
        *(str(trainers), str(workers), *names, f"{statistics.mean(r['gap'] or 0 for r in runs.values()):.1f}"),
        *(with_interval(aucs), f"{min(aucs):.4f}", *(difference(runs, found.get(base, {})) for base in bases)),
        with_interval([row["ne"] for row in runs.values()]),
        str(sum(auc < statistics.median(aucs) - COLLAPSED for auc in aucs)) if len(aucs) > 2 else "-",
    ]


def show(part: str, task: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """All ways, and what the background is better by than the foreground of the same gap."""
    found = by_seed(rows, way_of)
    best = next((row["best_auc"] for row in rows if row["best_auc"]), None)
    counts = [len(runs) for runs in found.values()]
    several = f"{max(counts)} seeds" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} seeds"
    print(f"\n{task}: {rows[0]['rows']:,} rows, {several}" + (f"; best reachable AUC {best:.4f}" if best else ""))
    if part == "hogwild":
        print(hogwild_table(found))
        return
    single, ways = (1, 1, "none", "-", ""), sorted(found)
    head = ["trainers", "workers", "method", "schedule", "options", "gap", "AUC", "worst", "to one replica"]
    with_options = any(way[4] for way in ways)
    defaults = {way: [single, *([(*way[:4], "")] if with_options else [])] for way in ways}
    rest = [*(["to the defaults"] if with_options else []), "NE", "collapsed"]
    print(table([*head, *rest], [line(way, found, defaults[way]) for way in ways]))
    pairs = [
        (str(way[0]), str(way[1]), way[2], difference(found[way], found[(*way[:3], "matched", "")]))
        for way in ways
        if way[3] == "background" and (*way[:3], "matched", "") in found
    ]
    if pairs:
        print(f"\n{task}: background over the foreground of the same gap")
        print(table(["trainers", "workers", "method", "AUC"], pairs))


def hogwild_table(found: Mapping[Way, Mapping[int, Mapping[str, Any]]]) -> str:
    """Speed and quality over the parallelism."""
    ways = sorted(found.items())
    one = next((runs for way, runs in ways if way[1] == 1), {})
    rates = {way: statistics.median(row["eps"] for row in runs.values()) for way, runs in ways}
    lines = [
        (
            *(str(way[1]), f"{HOGWILD['batch_size'] * way[0] * way[1]:,}", f"{rates[way]:,.0f}"),
            f"{rates[way] / (way[1] * rates[ways[0][0]]):.2f}",
            with_interval([row["auc"] for row in runs.values()]),
            difference(runs, one),
        )
        for way, runs in ways
    ]
    return table(["workers of a trainer", "ELP", "examples/s, emulated", "of linear", "AUC", "to one worker"], lines)


def main() -> None:
    """Runs the grid and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=500_000, help="of a task, at most")
    parser.add_argument("--picture", type=Path, help="of the part")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="folders of other runs to take cells from")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    cells, places = list(grid(arguments)), [Cells(folder) for folder in (arguments.out, *arguments.beside)]
    if not arguments.report:
        run_all(cells, places)
    rows = [row for cell in cells if (row := kept_of(cell, places)) is not None]
    print("\n".join(describe()))
    tasks = [task for task in arguments.tasks if any(row["task"] == task for row in rows)]
    for task in tasks:
        show(arguments.part, task, [row for row in rows if row["task"] == task])
    if arguments.picture and tasks:
        PARTS[arguments.part][1](tasks, rows, arguments.picture)


if __name__ == "__main__":
    main()
