"""What old gradients cost `gba` (arXiv 2205.11048): where its tolerance helps, and what makes up for a delay of one
step at the beginning of a job.

    python benchmarks/delays.py tolerance --out FOLDER [--seeds 3] [--rows 655360]
    python benchmarks/delays.py beginning --out FOLDER …
    … --report      prints the table of what has been run so far

Both train from scratch on 16 emulated workers (`emulated`), 16 batches of 512 in a global step, 80 steps in all, and
are compared with synchronous training by the same recipe and seed; intervals are of 95 % (Student's t).

tolerance: half of the workers is 10 to 30 times slower throughout, so that their gradients come 5 to 15 steps late, by
the usual recipe and by one whose rates are three times as high, warm up for a quarter as long and never fall. Over the
tolerances ι; ∞ is `bsp`, which takes gradients however old they are.

beginning: workers are even, so that each gradient is one step old. Over warm-ups, rates, and a beginning of so many
synchronous steps; staleness is over the whole run, those steps too.

A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, load_average
from emulated import SYNTHETIC, train, train_until, workers
from machine import by_seed, describe, difference, table, with_interval

WORKERS, BATCH, STEP_MS = 16, 512, 160.0
"""Steps last as long as it takes two cores to compute one of each worker."""
TASKS: Mapping[str, tuple[str, ...]] = {"demo": (), "synthetic": SYNTHETIC}
SLOW = f"index={'+'.join(map(str, range(0, WORKERS, 2)))},slow=10-30"


@dataclass(frozen=True)
class Recipe:
    """How fast is learnt.

    Attributes:
        times: the learning rates to the usual ones.
        warmup: samples in which they rise.
        decay: as `train.decay`.
    """

    times: float = 1.0
    warmup: int = 200_000
    decay: str = "linear"

    def overrides(self) -> list[str]:
        """Of the configuration."""
        rates = f"train.lr={0.01 * self.times:g}", f"embedding.lr={0.05 * self.times:g}"
        return [*rates, f"train.warmup_samples={self.warmup}", f"train.decay={self.decay}"]


USUAL, HIGH = Recipe(), Recipe(times=3.0, warmup=50_000, decay="none")
RECIPES: Mapping[str, Recipe] = {
    "usual": USUAL,
    "high": HIGH,
    "warm-up halved": Recipe(warmup=100_000),
    "warm-up doubled": Recipe(warmup=400_000),
    "rates halved": Recipe(times=0.5),
    "rates doubled": Recipe(times=2.0),
}
TOLERANCES = (0, 1, 2, 4, 8)


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        method: of the gradients.
        tolerance: of `gba`; None for the default, and for other methods.
        slow: half of the workers is.
        first: global steps that are synchronous at the beginning.
    """

    task: str
    rows: int
    seed: int
    method: str
    recipe: str
    tolerance: int | None = None
    slow: bool = False
    first: int = 0

    def overrides(self, method: str) -> list[str]:
        """The configuration under that method; synchronous training is the same on one worker."""
        count, own = (1, ()) if method == "sync" else (WORKERS, self._own())
        emulated = workers(count, STEP_MS, f"{SLOW},seed={self.seed}" if self.slow else None)
        batches = (
            *(f"aggregation.global_batch={WORKERS * BATCH}", f"train.batch_size={BATCH}"),
            "aggregation.rows=buffer",
        )
        data = *TASKS[self.task], f"data.rows={self.rows}", f"train.seed={self.seed}", "report.every_s=0.05"
        return [*data, *RECIPES[self.recipe].overrides(), f"aggregation.method={method}", *batches, *own, *emulated]

    def _own(self) -> tuple[str, ...]:
        return () if self.tolerance is None else (f"aggregation.tolerance={self.tolerance}",)


def tolerance(task: str, rows: int, seed: int) -> Iterator[Cell]:
    """Synchronous training first."""
    for recipe in ("usual", "high"):
        yield Cell(task, rows, seed, "sync", recipe)
        yield from (Cell(task, rows, seed, "gba", recipe, steps, slow=True) for steps in TOLERANCES)
        yield Cell(task, rows, seed, "bsp", recipe, slow=True)


def beginning(task: str, rows: int, seed: int) -> Iterator[Cell]:
    """Every recipe by both methods, and the usual one after a synchronous beginning."""
    recipes = [name for name in RECIPES if name != "high"]
    yield from (Cell(task, rows, seed, method, recipe) for recipe in recipes for method in ("sync", "gba"))
    yield from (Cell(task, rows, seed, "gba", "usual", first=steps) for steps in (10, 20, 40))


PARTS = {"tolerance": tolerance, "beginning": beginning}


def run(cell: Cell) -> dict[str, Any]:
    """Trains one."""
    with tempfile.TemporaryDirectory() as folder:
        out, overrides = Path(folder) / "run", cell.overrides(cell.method)
        if cell.first:
            began = cell.first * WORKERS * BATCH
            train_until(lambda frame: frame.samples >= began, cell.overrides("sync"), out)
        result = train(overrides, out, resume=out if cell.first else None)
    assert result.test is not None
    assert result.aggregation is not None
    done = result.aggregation
    figures = {"auc": result.test.auc, "ne": result.test.ne, "eps": result.throughput.eps, "load": load_average()}
    ages = {"staleness": done.mean_staleness, "max_staleness": done.max_staleness}
    return {**asdict(cell), **figures, **ages, "dropped": done.dropped * BATCH / cell.rows}


Way = tuple[str, str, str, str]
"""Task, recipe, method, and what else."""


def way_of(row: Mapping[str, Any]) -> Way:
    """What a run has in common with those of other seeds."""
    late = "∞" if row["method"] == "bsp" else "default" if row["tolerance"] is None else str(row["tolerance"])
    own = "-" if row["method"] == "sync" else f"{row['first']} steps of sync, then" if row["first"] else f"ι = {late}"
    return row["task"], row["recipe"], row["method"], own


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each way, in the order of the runs."""
    found, lines = by_seed(rows, way_of), []
    for way, runs in found.items():
        mine = list(runs.values())
        usual, same = (found.get((way[0], recipe, "sync", "-"), {}) for recipe in ("usual", way[1]))
        means = {key: statistics.fmean(row[key] for row in mine) for key in ("staleness", "dropped", "eps")}
        lines.append(
            (
                *(*way, len(mine), with_interval([row["auc"] for row in mine])),
                *(difference(runs, same), difference(runs, usual), with_interval([row["ne"] for row in mine])),
                *(f"{means['staleness']:.1f}", max(row["max_staleness"] for row in mine)),
                *(f"{100 * means['dropped']:.1f} %", "-" if way[2] == "sync" else f"{means['eps']:,.0f}"),
            )
        )
    head = ["task", "recipe", "method", "tolerance", "seeds", "AUC", "to sync of its recipe", "to sync, usual recipe"]
    return table([*head, "NE", "mean staleness", "oldest", "dropped", "emulated examples/s"], lines)


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=655_360, help="to train on")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    kept, grid = Cells(given.out), itertools.product(range(given.seeds), given.tasks)
    cells = [cell for seed, task in grid for cell in PARTS[given.part](task, given.rows, seed)]
    if not given.report:
        kept.run_missing(cells, str, run)
    rows = kept.those(map(str, cells))
    print("\n".join(describe()), report(rows), sep="\n\n")


if __name__ == "__main__":
    main()
