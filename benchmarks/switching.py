"""Switches between gradient methods with nothing re-tuned (GBA, arXiv 2205.11048): AUC before, soon after, at the end.

    python benchmarks/switching.py --out FOLDER [--seeds 3] [--tasks demo ids synthetic] [--workers 2 4 8 16]
        [--methods async bsp hop_bs hop_bw gba] [--optimizers adagrad adam] [--picture switching.png]
    python benchmarks/switching.py --out FOLDER --study [--seeds 3]
    python benchmarks/switching.py --out FOLDER --local [--seeds 3]
    … --report      prints the table of what has been run so far

A task is trained for half an epoch synchronously, then by another method from that checkpoint with the same optimizer
state, learning rates and global batch (8,192 = 16 x 512, or 16 x `--batch`); and the other way round. The yardstick
stays synchronous. AUC is that of the test set: at the switch, after a quarter of the rest, and at the end.

The other method runs on emulated workers (`emulated`), even ones or with stragglers; its gradients get as many batches
old as there are workers. Synchronous phases run on one worker as fast as it goes: a round is the same large batch
whoever computes it. A run ends at the switch and at the quarter within a frame (50 ms), and what was under way then is
trained anew, so a switch begins with nothing under way. Staleness and examples/s are those of the other method, up to
the quarter or the switch; the speed of more than one worker is that of emulated machines.

`--study` is what the documentation shows: every method on 16 even workers, those that hold nobody up with stragglers
too; `async` and `gba` on 64, and with other models; `gba` in batches of another size than those of the synchronous
phase, of the same global one.

`--local` is that with the two ways to divide a row's gradient, by the batches of the step that contain the row and by
all (`aggregation.rows`), on four workers, so that hardly any gradient is old: in the synchronous phase 16 batches of
512, then batches of 2,048 to 64 samples.

Tasks: `demo`; `ids`, the demo without its dense columns; `synthetic`, whose best AUC is known. A cell is a line of
FOLDER/runs.jsonl; started again, the script goes on where it stopped. First halves that cells share are kept in
FOLDER/halves.
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

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, load_average
from emulated import METHODS, SYNTHETIC, auc_of, train, train_until, workers
from machine import describe, table, with_interval

from shadowsync.metrics.history import Frame

MODEL = "dlrm"
DIVIDED = "buffer"
PER_STEP = 16
"""Batches of a global step."""
BATCH = 512
STEP_MS = 10.0
"""Of an emulated step, for each worker: so two cores keep up with any number of workers, which mostly wait."""
BUSY = "share=0.25,slow=3-10,for_s=2"
TASKS = {
    "demo": ("data.history=true",),
    "ids": ("data.history=false",),
    "synthetic": SYNTHETIC,
}
COURSE = ("train.warmup_samples=200000", "train.decay=linear")
OPTIMIZERS = {
    "adagrad": ("train.optimizer=adagrad", "train.lr=0.01", "embedding.lr=0.05", *COURSE),
    "adam": ("train.optimizer=adam", "train.lr=0.004", "embedding.optimizer=adam", "embedding.lr=0.004", *COURSE),
}
"""Those of Adagrad were chosen with a look at what gba loses, too: hotter ones cost every other method more."""
MOMENTS = ("before", "quarter", "end")


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of the data.
        optimizer: of the dense part and of the rows.
        rows: to train on; None for all.
        batch: samples of a worker's batch; a global step has 16 times as many.
        step_ms: of an emulated step, for each worker.
        model: by name.
        divided: by what a row's gradient is, `aggregation.rows`.
    """

    name: str
    optimizer: str
    rows: int | None = None
    seed: int = 0
    batch: int = BATCH
    step_ms: float = STEP_MS
    model: str = MODEL
    divided: str = DIVIDED

    @property
    def title(self) -> str:
        """Of its files."""
        rows = "" if self.rows is None else f"-{self.rows}"
        batch = "" if self.batch == BATCH else f"-batch{self.batch}"
        step = "" if self.step_ms == STEP_MS else f"-step{self.step_ms:g}"
        model = "" if self.model == MODEL else f"-{self.model}"
        divided = "" if self.divided == DIVIDED else f"-{self.divided}"
        return f"{self.name}{model}{rows}{divided}{batch}{step}-{self.optimizer}-seed{self.seed}"

    def overrides(self, method: str, batch: int, others: Sequence[str] = ("train.workers=1",)) -> list[str]:
        """The configuration under a method, which takes batches of that many samples."""
        rows = [] if self.rows is None else [f"data.rows={self.rows}"]
        batches = [f"aggregation.method={method}", f"aggregation.global_batch={PER_STEP * self.batch}"]
        batches += [f"train.batch_size={batch}", f"aggregation.rows={self.divided}"]
        fixed = [f"model.name={self.model}", f"train.seed={self.seed}", "report.every_s=0.05"]
        return [*TASKS[self.name], *OPTIMIZERS[self.optimizer], *rows, *batches, *fixed, *others]


@dataclass(frozen=True)
class Cell:
    """One switch.

    Attributes:
        task: what is trained.
        method: the one that is not synchronous; `sync` stays synchronous.
        workers: emulated, of that method.
        busy: some of them are slow at a time.
        back: from that method to synchronous training, instead of the other way.
        batch: samples of a batch under that method; None for as many as in the synchronous phase.
    """

    task: Task
    method: str
    workers: int = 1
    busy: bool = False
    back: bool = False
    batch: int | None = None

    @property
    def name(self) -> str:
        """Of its file."""
        way = f"{self.method}-to-sync" if self.back else f"sync-to-{self.method}"
        batch = "" if self.batch is None else f"-local{self.batch}"
        return f"{self.task.title}-{way}-w{self.workers}{batch}{'-busy' if self.busy else ''}"

    @property
    def samples(self) -> int:
        """Of a batch under the method that is not synchronous."""
        return self.batch or self.task.batch

    def overrides(self) -> list[str]:
        """The configuration of the part that is not synchronous."""
        slow = f"{BUSY},seed={self.task.seed}" if self.busy else None
        step_ms = self.task.step_ms * self.workers * self.samples / self.task.batch
        return self.task.overrides(self.method, self.samples, workers(self.workers, step_ms, slow))


def grid(given: argparse.Namespace) -> list[Cell]:
    """Staying synchronous first, then every switch."""
    names = itertools.product(range(given.seeds), given.tasks, given.optimizers)
    batch, step_ms = given.batch, given.step_ms
    tasks = [Task(name, optimizer, given.rows, seed, batch, step_ms) for seed, name, optimizer in names]
    cells = [Cell(task, "sync") for task in tasks]
    settings = itertools.product(tasks, given.methods, given.workers, (False, True), (False, True))
    return cells + [Cell(*setting) for setting in settings]


def study(seeds: int, rows: int | None) -> Iterator[Cell]:
    """Seed by seed."""
    for seed in range(seeds):
        tasks = [Task(name, "adagrad", rows, seed) for name in ("demo", "synthetic")]
        models = [Task("demo", "adagrad", rows, seed, model=model) for model in ("deepfm", "dien", "youtube_dnn")]
        yield from (Cell(task, "sync") for task in (*tasks, *models))
        for task, back in itertools.product(tasks, (False, True)):
            yield from (Cell(task, method, 16, back=back) for method in METHODS[1:])
            yield from (Cell(task, method, 16, busy=True, back=back) for method in ("async", "hop_bw", "gba"))
            yield from (Cell(task, method, 64, back=back) for method in ("async", "gba"))
            yield from (Cell(task, "gba", count, back=back, batch=batch) for count, batch in ((16, 128), (4, 2048)))
        for task, back in itertools.product(models, (False, True)):
            yield from (Cell(task, method, 16, back=back) for method in ("async", "gba"))


def local(seeds: int, rows: int | None) -> Iterator[Cell]:
    """Seed by seed."""
    for seed, name, divided in itertools.product(range(seeds), ("demo", "synthetic"), ("containing", "buffer")):
        task = Task(name, "adagrad", rows, seed, divided=divided)
        yield Cell(task, "sync")
        yield from (Cell(task, "gba", 4, batch=batch) for batch in (2048, 512, 128, 64))


def run(cell: Cell, halves: Path) -> dict[str, Any]:
    """Trains one."""
    with tempfile.TemporaryDirectory() as folder:
        rest = Path(folder) / "rest"
        after = cell.task.overrides("sync", cell.task.batch) if cell.back else cell.overrides()
        half = Path(folder) / "half" if cell.back else shared_half(cell.task, halves)
        watched = train_until(_half, cell.overrides(), half) if cell.back else []
        leg = train_until(lambda frame: frame.samples >= 0.625 * frame.total_samples, after, rest, half)
        quarter = auc_of(rest)
        result = train(after, rest, resume=rest)
        before = auc_of(half)
    assert result.test is not None
    assert result.aggregation is not None
    done, own = result.aggregation, watched or leg
    trained = own[-1].samples - own[0].samples
    ages = [frame.staleness for frame in own if frame.staleness is not None]
    return {
        **asdict(cell),
        "before": before,
        "quarter": quarter,
        "end": result.test.auc,
        "best": result.test.best_auc,
        "eps": trained / max(1e-9, own[-1].seconds - own[0].seconds),
        "staleness": statistics.fmean(ages) if ages else 0.0,
        "max_staleness": done.max_staleness,
        "dropped": ((own[-1].dropped or 0) - (own[0].dropped or 0)) * cell.samples / max(1, trained),
        "load": load_average(),
    }


def shared_half(task: Task, halves: Path) -> Path:
    """The first half of the task, synchronous; trained once."""
    kept = halves / task.title
    if not kept.exists():
        halves.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=halves) as folder:
            train_until(_half, task.overrides("sync", task.batch), Path(folder) / "half")
            (Path(folder) / "half").rename(kept)
    return kept


def _half(frame: Frame) -> bool:
    return frame.samples >= 0.5 * frame.total_samples


def same_task(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run must share with the one that stays synchronous."""
    task = row["task"]
    return tuple(task[part] for part in ("name", "model", "optimizer", "rows", "seed", "batch", "divided"))


def against_sync(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what they gain over staying synchronous, at the end and a quarter on, where that was run."""
    stayed = {same_task(row): row for row in rows if row["method"] == "sync"}
    found = [(row, stayed[same_task(row)]) for row in rows if same_task(row) in stayed]
    return [{**row, "gains": {moment: row[moment] - base[moment] for moment in MOMENTS[1:]}} for row, base in found]


def result_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each kind of switch, over its seeds; the distance to staying synchronous is paired by seed."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in against_sync(rows):
        task = row["task"]
        of = task["name"], task["model"], task["optimizer"], task["divided"]
        key = (*of, row["back"], row["workers"], row["batch"] or task["batch"], row["busy"], row["method"])
        found.setdefault(key, []).append(row)
    lines = [
        (
            f"{method} to sync" if back else f"sync to {method}",
            *(name, model, optimizer, divided, f"{workers_} x {batch:,}", "busy" if busy else "even", len(mine)),
            *(f"{statistics.fmean(row[moment] for row in mine):.4f}" for moment in MOMENTS),
            *(with_interval([row["gains"][moment] for row in mine], signed=True) for moment in MOMENTS[1:]),
            f"{min(row['gains']['end'] for row in mine):+.4f}",
            f"{statistics.fmean(row['staleness'] for row in mine):.1f}",
            f"{statistics.fmean(100 * row['dropped'] for row in mine):.1f} %",
            f"{statistics.fmean(row['eps'] for row in mine):,.0f}",
        )
        for (name, model, optimizer, divided, back, workers_, batch, busy, method), mine in sorted(found.items())
    ]
    header = ["switch", "task", "model", "optimizer", "rows by", "workers", "cluster", "seeds", "AUC before"]
    after = ["a quarter on", "end", "quarter to sync", "end to sync", "worst"]
    return table([*header, *after, "staleness", "dropped", "examples/s"], lines)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """AUC at the three moments, a panel for each task and direction, a line for each run, dashed where workers are more
    than the batches of a step, dotted where some are slow at a time; with the first model, in batches of one size."""
    rows = [row for row in rows if row["task"]["model"] == MODEL and row["batch"] is None]
    rows = [row for row in rows if row["task"]["divided"] == DIVIDED]
    panels = sorted({(row["task"]["name"], row["task"]["optimizer"], row["back"]) for row in rows})
    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, optimizer, back) in zip(every, panels, strict=True):
        mine = [row for row in rows if (row["task"]["name"], row["task"]["optimizer"]) == (name, optimizer)]
        for position, method in enumerate(METHODS):
            own = [row for row in mine if row["method"] == method and (method == "sync" or row["back"] == back)]
            for number, row in enumerate(own):
                style = "--" if row["workers"] > PER_STEP else ":" if row["busy"] else "-"
                label = method if number == 0 else None
                course = [row[moment] for moment in MOMENTS]
                axes.plot(MOMENTS, course, f"o{style}", color=f"C{position}", alpha=0.6, label=label)
        axes.set(title=f"{name}, {optimizer}: {'back to sync' if back else 'away from sync'}", ylabel="test AUC")
        axes.legend()
    figure.suptitle(f"dashed: more than {PER_STEP} workers; dotted: stragglers")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adagrad"])
    parser.add_argument("--methods", nargs="+", choices=METHODS[1:], default=list(METHODS[1:]))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--rows", type=int, help="to train on; all of them if it is left out")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a worker's batch, 16 of them in a step")
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help="of an emulated step, for each worker")
    parser.add_argument("--study", action="store_true", help="what the documentation shows, instead of a grid")
    parser.add_argument("--local", action="store_true", help="batches of other sizes, rows divided in two ways")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    print("\n".join(describe()))
    fixed = study if given.study else local if given.local else None
    kept, cells = Cells(given.out), grid(given) if fixed is None else list(fixed(given.seeds, given.rows))
    if not given.report:
        kept.run_missing(cells, lambda cell: cell.name, lambda cell: run(cell, given.out / "halves"))
    rows = kept.those(cell.name for cell in cells)
    print("\n" + result_table(rows))
    if given.picture is not None and rows:
        picture(rows, given.picture)


if __name__ == "__main__":
    main()
