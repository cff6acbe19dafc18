"""What stragglers cost every gradient method, and whether `auto` finds the better one (GBA, arXiv 2205.11048).

    python benchmarks/stragglers.py --out FOLDER [--seeds 3] [--seconds 60] [--step-ms 100]
        [--methods sync gba …] [--picture out.png]
    python benchmarks/stragglers.py --out FOLDER --study [--seeds 3]
    … --report      prints the tables of what has been run so far

Eight emulated workers (`emulated`) train the demo for so many seconds. In a `busy` cluster a quarter of them is 3 to 10
times slower at a time, for a twelfth of the run on average: five seconds of a minute stand for the minutes of a shared
cluster. In a `changing` one that is so in the second third of the run only, the rest is even. The examples/s are those
of emulated machines; where all workers begin at once, as in synchronous rounds, they share the cores of this one, so
short steps cost `sync` more than as many machines would. The test AUC beside them is that after these seconds, so a
faster method has seen more. Speeds against others are paired by seed, with an interval of 95 % (Student's t).

`--study` is what the documentation shows: every method in a busy cluster; `sync`, `async` and `gba` in an even one, so
that one sees what the emulation itself costs `sync`; and `sync`, `gba` and `auto` in a changing one with batches of
400 ms over 240 s, where that is little.

A cell is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.
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
from emulated import METHODS, auc_of, train_until, workers
from machine import describe, table, with_interval

from shadowsync.metrics.history import Frame

WORKERS, BATCH = 8, 256
SLOW = "share=0.25,slow=3-10"
CLUSTERS = ("even", "busy", "changing")


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        cluster: `even`, `busy` or `changing`.
        method: of the gradients.
        seconds: that it trains.
        step_ms: of an emulated step.
    """

    cluster: str
    method: str
    seconds: float
    step_ms: float
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.cluster}-{self.method}-{self.seconds:g}s-{self.step_ms:g}ms-seed{self.seed}"

    def overrides(self) -> list[str]:
        """The configuration of the run."""
        third, spell = self.seconds / 3, f"{SLOW},for_s={max(0.1, self.seconds / 12):g},seed={self.seed}"
        slow = {"even": None, "busy": spell, "changing": f"{spell},from_s={third:g},until_s={2 * third:g}"}
        return [
            "data.epochs=1000",
            f"train.batch_size={BATCH}",
            f"train.seed={self.seed}",
            f"aggregation.method={self.method}",
            f"aggregation.global_batch={WORKERS * BATCH}",
            "aggregation.rows=buffer",
            "report.every_s=0.1",
            *workers(WORKERS, self.step_ms, slow[self.cluster]),
        ]


def study(seeds: int) -> Iterator[Cell]:
    """Seed by seed."""
    for seed in range(seeds):
        yield from (Cell("busy", method, 60.0, 100.0, seed) for method in (*METHODS, "auto"))
        yield from (Cell("even", method, 60.0, 100.0, seed) for method in ("sync", "async", "gba"))
        yield from (Cell("changing", method, 240.0, 400.0, seed) for method in ("sync", "gba", "auto"))


def run(cell: Cell) -> dict[str, Any]:
    """Trains one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        frames = train_until(lambda frame: frame.seconds >= cell.seconds, cell.overrides(), out)
        auc = auc_of(out)
    ends = [cell.seconds * part / 3 for part in range(4)]
    last = frames[-1]
    return {
        **asdict(cell),
        "eps": rate(frames, 0, cell.seconds),
        "eps_by_third": [rate(frames, start, end) for start, end in itertools.pairwise(ends)],
        "auc": auc,
        "ne": last.ne_window,
        "samples": last.samples,
        "steps": last.global_steps,
        "dropped": last.dropped,
        "switches": switches(frames),
        "curve": curve(frames, cell.seconds / 30),
        "load": load_average(),
    }


def rate(frames: Sequence[Frame], start: float, end: float) -> float:
    """Examples per second in a stretch of time."""
    inside = [frame for frame in frames if start <= frame.seconds <= end]
    if not inside:
        return 0.0
    first, last = inside[0], inside[-1]
    return (last.samples - first.samples) / max(1e-9, last.seconds - first.seconds)


def switches(frames: Sequence[Frame]) -> list[tuple[float, str | None]]:
    """When which mode began."""
    pairs = [(None, frames[0]), *itertools.pairwise(frames)]
    return [
        (frame.seconds, frame.aggregation_mode)
        for before, frame in pairs
        if before is None or before.aggregation_mode != frame.aggregation_mode
    ]


def curve(frames: Sequence[Frame], every_s: float) -> list[tuple[float, float]]:
    """Seconds and examples per second, averaged over so much time each."""
    stretches = itertools.groupby(frames, key=lambda frame: int(frame.seconds / every_s))
    ends = [list(stretch)[-1] for _, stretch in stretches]
    return [
        (b.seconds, (b.samples - a.samples) / (b.seconds - a.seconds))
        for a, b in itertools.pairwise(ends)
        if b.seconds > a.seconds
    ]


def result_table(rows: Sequence[Mapping[str, Any]], cluster: str) -> str:
    """A line for each method, over its seeds; speeds against synchronous training with the same seed."""
    mine = [row for row in rows if row["cluster"] == cluster]
    lines = []
    for method in dict.fromkeys(row["method"] for row in mine):
        own = [row for row in mine if row["method"] == method]
        thirds = zip(*(row["eps_by_third"] for row in own), strict=True)
        lines.append(
            (
                *(method, len(own), f"{statistics.fmean(row['eps'] for row in own):,.0f}"),
                *(ratio(mine, own, [base]) for base in ("sync", "async")),
                ratio(mine, own, ["sync", "gba"]),
                *(f"{statistics.fmean(third):,.0f}" for third in thirds),
                f"{statistics.fmean(row['auc'] for row in own):.4f}",
                f"{statistics.fmean(row['ne'] for row in own):.4f}",
                f"{statistics.fmean(row['dropped'] or 0 for row in own):.0f}",
                f"{statistics.fmean(len(row['switches']) - 1 for row in own):.1f}",
            )
        )
    header = [
        cluster,
        "seeds",
        "emulated examples/s",
        "to sync",
        "to async",
        "to the better",
        "1st third",
        "2nd",
        "3rd",
    ]
    return table([*header, "AUC", "NE", "dropped", "switches"], lines)


def ratio(rows: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], bases: Sequence[str]) -> str:
    """The mean, over the seeds, of the speed to that of the fastest of other methods, with its interval."""
    speeds = {(row["method"], row["seed"]): row["eps"] for row in rows}
    known = [row for row in own if all((base, row["seed"]) in speeds for base in bases)]
    if not known:
        return "-"
    each = [row["eps"] / max(speeds[base, row["seed"]] for base in bases) for row in known]
    return with_interval(each, digits=2)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speeds of a busy cluster as bars, and those over a changing one as lines."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    busy = [row for row in rows if row["cluster"] == "busy"]
    for method in dict.fromkeys(row["method"] for row in busy):
        bars.bar(method, statistics.fmean(row["eps"] for row in busy if row["method"] == method), color="C0")
    bars.set(ylabel="emulated examples/s", title="a quarter of the workers slow at a time")
    changing = [row for row in rows if row["cluster"] == "changing" and row["seed"] == 0]
    for position, row in enumerate(changing):
        whole = [point for point in row["curve"] if point[0] <= row["seconds"]]
        lines.plot(*zip(*whole, strict=True), color=f"C{position}", label=row["method"])
    lines.set(xlabel="seconds", ylabel="emulated examples/s", title="even, busy, even")
    if changing:
        lines.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=100.0, help="short ones make real work on few cores visible")
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, "auto"), default=[*METHODS, "auto"])
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=["busy", "changing"])
    parser.add_argument("--study", action="store_true", help="what the documentation shows, instead of a grid")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    print("\n".join(describe()))
    kept = Cells(given.out)
    order = itertools.product(range(given.seeds), given.clusters, given.methods)
    cells = [Cell(cluster, method, given.seconds, given.step_ms, seed) for seed, cluster, method in order]
    cells = list(study(given.seeds)) if given.study else cells
    if not given.report:
        kept.run_missing(cells, lambda cell: cell.name, run)
    rows = kept.those(cell.name for cell in cells)
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        print(f"\n{result_table(rows, cluster)}")
    if given.picture is not None and rows:
        picture(rows, given.picture)


if __name__ == "__main__":
    main()
