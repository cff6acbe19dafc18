"""What failures of embedding servers cost, with full and with partial recovery (CPR, arXiv 2011.02999).

    python benchmarks/partial_recovery.py --emulate --out FOLDER [--seeds 3] [--picture partial_recovery.png]
    python benchmarks/partial_recovery.py --operating --out FOLDER [--seeds 8] [--rows 500000] [--picture operating.png]
    python benchmarks/partial_recovery.py --real --out FOLDER [--seconds 300]
    … --report      prints the tables of what has been run so far

`--emulate`: the demo stands for a job of 56 h on servers that fail every 28 h (parameters below). Servers lose their
rows by script in one process, which shows what that does to the model; time is accounted for by the formulas. Failures
come from a gamma distribution, drawn anew for each seed and alike for all ways to recover; or they are late, after 45 %
and 90 % of the job, with one whole checkpoint, at the start. The demo's dense columns tell much of what its rows know,
so the loss of rows hardly shows in its AUC: all but a first table train without them (`data.history=false`).

`--operating`: the same, from the ids alone, where partial recovery is meant to work: target PLS from 0.02 to 0.2, and
exactly 1 to 40 failures at random moments, each of one server or of four at once, whose cost is told by the correlation
of PLS and AUC lost; and what priorities save of that. Differences are paired by seed, with intervals of 95 %.

`--real`: three hosts, tables of Criteo Kaggle's sizes, and every 30 s on average one of the hosts loses all processes
and memory, as where it is preempted, and comes back empty; no failures, full and partial recovery take turns, each
choosing its own interval.
Seconds are measured. Root rights are needed.

A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, start_ray, train_command
from failures import Chaos, Failure, RunFiles
from machine import commit, describe, table, with_interval
from testbed import RayNode, Testbed
from throughput import KAGGLE_ROWS

from shadowsync import Job
from shadowsync.config import load
from shadowsync.recovery.failures import struck_at_once

HOUR_S = 3600.0
JOB_S, FAIL_S, SAVE_S, LOAD_S, RESTART_S = 56 * HOUR_S, 28 * HOUR_S, 318.0, 204.0, 204.0
"""A production job. O_save and O_load + O_res are such that full recovery costs 8.35 % and partial 0.60 %, about what
the paper reports; it does not give them."""
QUIET = ("report.html=false", "report.tensorboard=false")
PRIORITIES = ("scar", "mfu", "ssu")
SHARES = (0.125, 0.25, 0.5)
"""Of the servers that fail at once."""
SERVERS, TARGETS = 8, (0.02, 0.05, 0.1, 0.2)
"""At the operating point."""
MIN_ROWS = 1000
"""Of the demo's tables: those with fewer rows are saved whole."""
HOSTS, LOST_EVERY_S, AWAY_S = 3, 30.0, 3.0
LIMIT = 8
"""A real run that takes so many times as long as it should is killed."""
REAL = (
    *("data.name=synthetic", f"data.table_rows={list(KAGGLE_ROWS)}".replace(" ", "")),
    *("data.test_rows=0", "train.trainers=3", "train.batch_size=1024", "embedding.servers=3"),
)
BELIEVED = ("recovery.prior_fail_s=30", "recovery.prior_save_s=5", "recovery.prior_restart_s=5")


@dataclass(frozen=True)
class Cell:
    """One run of the emulation.

    Attributes:
        way: to recover: `none` (no failure), `full`, `naive` (partial at full recovery's interval), `vanilla` (partial
            at the interval of its target), or a priority.
        servers: N.
        target_pls: that partial recovery aims at.
        share: of the servers that one failure takes.
        late: failures after 45 % and 90 % of the job, which leaves little time to learn again, and an interval as long
            as the job; else failures are drawn from the gamma distribution.
        history: with the demo's dense columns.
        failures: exactly so many, at random moments; 0 for those that `late` tells.
        rows: that are trained on; 0 for all.
    """

    way: str
    servers: int = 8
    target_pls: float = 0.1
    share: float = 0.125
    late: bool = False
    history: bool = False
    seed: int = 0
    failures: int = 0
    rows: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        task, when = "dense" if self.history else "ids", "late" if self.late else "gamma"
        if self.rows:
            when = f"{self.failures}-rows{self.rows}"
        return f"{self.way}-{task}-n{self.servers}-pls{self.target_pls:g}-share{self.share:g}-{when}-seed{self.seed}"

    def overrides(self) -> list[str]:
        """The configuration of the run."""
        servers = (f"embedding.servers={self.servers}", "embedding.sharding=row_wise")
        found = [*QUIET, f"data.history={self.history}", f"train.seed={self.seed}", *servers]
        if self.rows:
            found.append(f"data.rows={self.rows}")
        if self.way == "none":
            return found
        times = "at:0.45+0.9,unit=epoch" if self.late else f"gamma:mean_epochs={FAIL_S / JOB_S:g}"
        if self.failures:
            dice = random.Random(self.seed)
            moments = sorted(dice.uniform(0.05, 0.98) for _ in range(self.failures))
            times = f"at:{'+'.join(f'{moment:.4f}' for moment in moments)},unit=epoch"
        inject = f"{times},seed={self.seed + 1},share={self.share:g}"
        fail_s = JOB_S / self.failures if self.failures else FAIL_S
        found += [f"recovery.emulate_job_s={JOB_S:g}", f"recovery.prior_fail_s={fail_s:g}"]
        found += [f"recovery.prior_save_s={SAVE_S:g}", f"recovery.prior_load_s={LOAD_S:g}"]
        found += [f"recovery.prior_restart_s={RESTART_S:g}", f"recovery.inject={inject}"]
        return found + self._mode()

    def _mode(self) -> list[str]:
        if self.way == "full":
            return ["recovery.mode=full"]
        at_once = struck_at_once(self.share, self.servers)
        partial = ["recovery.mode=partial", f"recovery.target_pls={self.target_pls:g}"]
        partial.append(f"recovery.prior_lost_servers={at_once}")
        if self.way in PRIORITIES:
            partial += [f"recovery.priority={self.way}", f"recovery.min_rows={MIN_ROWS}"]
        if self.late or self.way == "naive":
            partial.append(f"recovery.interval_s={JOB_S if self.late else math.sqrt(2 * SAVE_S * FAIL_S):g}")
        return partial


def grid(seeds: int) -> list[Cell]:
    """Late and random failures for every seed, sweeps for one, and the first table again with the dense columns."""
    ways = ("none", "full", "naive", "vanilla", *PRIORITIES)
    swept = ("vanilla", *PRIORITIES)
    cells = [Cell("none", seed=seed) for seed in range(seeds)]
    late = [(share, way) for share in SHARES for way in swept]
    cells += [Cell(way, share=share, late=True, seed=seed) for seed in range(seeds) for share, way in late]
    cells += [Cell(way, seed=seed) for seed in range(seeds) for way in ways]
    cells += [Cell(way, servers=servers) for servers in (4, 16, 32) for way in ("none", "vanilla", "ssu")]
    cells += [Cell(way, target_pls=pls) for pls in (0.01, 0.05, 0.2) for way in ("vanilla", "ssu")]
    cells += [Cell(way, history=True, seed=seed) for seed in range(seeds) for way in ways]
    return list(dict.fromkeys(cells))


def operating_grid(seeds: int, rows: int) -> list[Cell]:
    """Failures and targets for every seed; four servers at once; and priorities."""
    one, four = 1 / SERVERS, 4 / SERVERS
    found = []
    for seed in range(seeds):
        same: dict[str, Any] = {"servers": SERVERS, "seed": seed, "rows": rows}
        found.append(Cell("none", **same))
        for failures, target in itertools.product((1, 4, 10, 40), TARGETS):
            found.append(Cell("vanilla", share=one, target_pls=target, failures=failures, **same))
        found += [Cell("vanilla", share=four, target_pls=target, failures=4, **same) for target in TARGETS]
        for way, target in itertools.product(PRIORITIES, TARGETS[1:]):
            found.append(Cell(way, share=one, target_pls=target, failures=10, **same))
    return found


def operating_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """What failures cost without priorities, how PLS and AUC lost go together, and what priorities save."""
    clean = undisturbed(rows)
    found: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if row["way"] != "none" and same_task(row) in clean:
            key = (row["way"], row["failures"], row["share"], row["target_pls"])
            found.setdefault(key, {})[row["seed"]] = row
    lost = {key: {seed: clean[same_task(row)] - row["auc"] for seed, row in by.items()} for key, by in found.items()}
    lines = [
        (
            *(key[0], key[1], round(key[2] * SERVERS), f"{key[3]:g}", len(by)),
            f"{statistics.fmean(row['pls'] for row in by.values()):.3f}",
            f"{100 * statistics.fmean(row['overhead'] for row in by.values()):.2f} %",
            with_interval(list(lost[key].values()), signed=True),
        )
        for key, by in sorted(found.items(), key=lambda item: (item[0][0] != "vanilla", *item[0]))
    ]
    header = ["way", "failures", "servers at once", "target PLS", "seeds", "PLS", "overhead", "AUC lost"]
    told = [table(header, lines)]
    plain = [key for key in found if key[0] == "vanilla"]
    # the same failures at the same interval, whatever it was to be short enough for, are one point
    points = {(*key[1:3], seed, row["pls"]): lost[key][seed] for key in plain for seed, row in found[key].items()}
    means = {
        (*key[1:3], statistics.fmean(row["pls"] for row in found[key].values())): statistics.fmean(lost[key].values())
        for key in plain
    }
    if len(means) > 2:
        each, cells = (
            statistics.correlation([key[-1] for key in pairs], list(pairs.values())) for pairs in (points, means)
        )
        told.append(
            f"r of PLS and AUC lost, without priorities: {each:.2f} of {len(points)} different runs, {cells:.2f} of "
            f"{len(means)} means"
        )
    saved = []
    for key in found:
        base = lost.get(("vanilla", *key[1:]), {})
        pairs = [base[seed] - value for seed, value in lost[key].items() if seed in base]
        if key[0] != "vanilla" and pairs:
            saved.append((key[0], f"{key[3]:g}", len(pairs), with_interval(pairs, signed=True)))
    if saved:
        told.append(table(["priority, 10 failures", "target PLS", "seeds", "AUC saved over vanilla"], sorted(saved)))
    return "\n\n".join(told)


def emulate(cell: Cell) -> dict[str, Any]:
    """Runs one."""
    with tempfile.TemporaryDirectory() as folder:
        result = Job(load(None, cell.overrides()), out=Path(folder) / "run").run()
    assert result.test is not None
    assert result.recovery is not None
    seconds = asdict_of(result.recovery.seconds)
    return {
        **asdict(cell),
        "auc": result.test.auc,
        "ne": result.test.ne,
        "eps": result.throughput.eps,
        "servers lost": result.recovery.failures,
        "commit": commit(),
        "pls": result.recovery.pls,
        "saves": result.recovery.saves,
        "interval_s": result.recovery.interval_s,
        "overhead": sum(seconds.values()) / JOB_S if cell.way != "none" else 0.0,
        "seconds": seconds,
    }


def asdict_of(seconds: Any) -> dict[str, float]:
    """Of `result.json`, by kind."""
    return {kind: getattr(seconds, kind) for kind in ("save", "load", "lost", "wait")}


def emulated_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each cell, over its seeds; AUC against the run without failures of the same seed and servers."""
    clean = undisturbed(rows)
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["history"], row["late"], row["servers"], row["target_pls"], row["share"])
        found.setdefault((*key, row["way"]), []).append(row)
    lines = []
    for (history, late, servers, target, share, way), mine in sorted(found.items(), key=lambda item: item[0][:5]):
        differences = [row["auc"] - clean[same_task(row)] for row in mine if same_task(row) in clean]
        cells = (
            f"{100 * statistics.fmean(row['overhead'] for row in mine):.2f} %",
            f"{statistics.fmean(row['pls'] for row in mine):.3f}",
            f"{statistics.fmean(row['servers lost'] for row in mine):.1f}",
            f"{statistics.fmean(row['auc'] for row in mine):.4f}",
            f"{statistics.fmean(differences):+.4f}" if differences else "-",
            f"{max(differences) - min(differences):.4f}" if len(differences) > 1 else "-",
        )
        when = ("ids and dense" if history else "ids", "late" if late else "gamma")
        lines.append((way, *when, servers, "-" if late else target, f"{100 * share:g} %", len(mine), *cells))
    header = ["way", "columns", "failures", "servers", "target PLS", "at once", "seeds", "overhead", "PLS"]
    return table([*header, "lost servers", "AUC", "to no failure", "spread"], lines)


def same_task(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run must share with the one without failures that it is compared with."""
    return row["history"], row["servers"], row["seed"], row.get("rows", 0)


def undisturbed(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], float]:
    """AUC of the runs without failures."""
    return {same_task(row): row["auc"] for row in rows if row["way"] == "none"}


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """AUC lost against PLS, a point for each run."""
    clean = undisturbed(rows)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for position, way in enumerate(("vanilla", *PRIORITIES)):
        mine = [row for row in rows if row["way"] == way and not row["history"] and same_task(row) in clean]
        lost = [clean[same_task(row)] - row["auc"] for row in mine]
        axes.plot([row["pls"] for row in mine], lost, "o", alpha=0.6, color=f"C{position}", label=way)
    axes.axhline(0.0005, color="0.6", linestyle=":")
    axes.set(xlabel="PLS of the run", ylabel="AUC lost to the run without failures, from ids alone")
    axes.legend()
    figure.savefig(path, dpi=130)


def real(mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One run on three hosts, of which one is lost now and then."""
    with tempfile.TemporaryDirectory() as folder, Testbed(hosts=HOSTS, rate="10gbit") as testbed:
        start_ray(testbed, [RayNode()] * HOSTS)
        out = Path(folder) / "run"
        rows = int(seconds * 30_000)
        log = Path(folder) / "log"
        with log.open("w") as said:
            recovery = [f"recovery.mode={mode}", *(() if mode == "none" else BELIEVED)]
            command = train_command(out, [*QUIET, *REAL, f"data.rows={rows}", *recovery])
            process = testbed.run(0, command, stdout=said, stderr=subprocess.STDOUT)
            chaos = Chaos(testbed, RunFiles(out), testbed.ray_start, silent=False)
            failures = [] if mode == "none" else lost_hosts(number, seconds)
            chaos.watch(process, failures, seconds, LIMIT * seconds)
        lost = len(chaos.struck)
        if process.returncode or not (out / "result.json").exists():
            return {"error": f"status {process.returncode}: {log.read_text()[-500:]}", "hosts lost": lost}
        found = json.loads((out / "result.json").read_text())
    return {
        "hosts lost": lost,
        "struck": [asdict(struck) for struck in chaos.struck],
        "recovery": found["recovery"],
        "ne": found["train"]["ne_lifetime"],
        "auc": found["train"]["auc"],
        "seconds": found["throughput"]["seconds"],
        "samples": found["data"]["trained_samples"],
        "load": load_average(),
    }


def lost_hosts(number: int, seconds: float) -> list[Failure]:
    """One every `LOST_EVERY_S` on average, for longer than a run takes; its node comes back soon, empty."""
    dice, at, failures = random.Random(number), 0.0, []
    while at < LIMIT * seconds:
        at += dice.gammavariate(4.0, LOST_EVERY_S / 4)
        failures.append(Failure(at / seconds, "host", dice.random(), AWAY_S))
    return failures


def real_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds by kind, side by side, and how much longer than without failures it took."""
    clean = [row["seconds"] for row in rows if row["name"].startswith("none") and "error" not in row]
    undisturbed_s = statistics.median(clean) if clean else None
    lines = []
    for row in rows:
        if "error" in row:
            lines.append((row["name"], row["hosts lost"], *["-"] * 9))
            continue
        spent = row["recovery"]["seconds"]
        lines.append(
            (
                row["name"],
                row["hosts lost"],
                f"{row['seconds']:.0f}",
                *(f"{spent[kind]:.1f}" for kind in ("save", "load", "lost", "wait")),
                "-" if undisturbed_s is None else f"{row['seconds'] - undisturbed_s:+.0f}",
                f"{row['samples'] / row['seconds']:,.0f}",
                f"{row['recovery']['pls']:.4f}",
                f"{row['ne']:.4f}",
            )
        )
    header = [
        "run",
        "hosts lost",
        "seconds",
        "save s",
        "load s",
        "lost s",
        "wait s",
        "longer by s",
        "examples/s",
        "PLS",
        "NE",
    ]
    return table(header, lines)


def run_emulated(arguments: argparse.Namespace) -> None:
    """Runs what is missing of the grid, and prints."""
    run_cells(grid(arguments.seeds or 3), emulated_table, arguments)


def run_operating(arguments: argparse.Namespace) -> None:
    """As `run_emulated`, at the operating point."""
    run_cells(operating_grid(arguments.seeds or 8, arguments.rows), operating_tables, arguments)


def run_cells(
    cells: Sequence[Cell], tables: Callable[[Sequence[Mapping[str, Any]]], str], arguments: argparse.Namespace
) -> None:
    """Runs what is missing of them, and prints."""
    kept = Cells(arguments.out)
    for cell in [] if arguments.report else cells:
        if kept.read(cell.name) is None:
            kept.write(cell.name, emulate(cell))
            print(cell.name, kept.read(cell.name), file=sys.stderr, flush=True)
    rows = [row for cell in cells if (row := kept.read(cell.name)) is not None]
    print(tables(rows))
    if arguments.picture is not None:
        picture(rows, arguments.picture)


def run_real(arguments: argparse.Namespace) -> None:
    """Runs what is missing, in turn, and prints."""
    kept = Cells(arguments.out)
    names = [
        (f"{mode}-{number}", mode, number)
        for number in range(arguments.seeds or 3)
        for mode in ("none", "partial", "full")
    ]
    for name, mode, number in [] if arguments.report else names:
        if kept.read(name) is None:
            kept.write(name, {"name": name, **real(mode, number, arguments.seconds)})
            print(name, kept.read(name), file=sys.stderr, flush=True)
    print(real_table([row for name, *_ in names if (row := kept.read(name)) is not None]))


def main() -> None:
    """Runs and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--emulate", dest="run", action="store_const", const=run_emulated)
    what.add_argument("--operating", dest="run", action="store_const", const=run_operating)
    what.add_argument("--real", dest="run", action="store_const", const=run_real)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, help="3, at the operating point 8")
    parser.add_argument("--rows", type=int, default=500_000, help="of the demo at the operating point")
    parser.add_argument("--seconds", type=float, default=300.0, help="about how long an undisturbed real run trains")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    print("\n".join(describe()), end="\n\n")
    arguments.run(arguments)


if __name__ == "__main__":
    in_sentences(main)
