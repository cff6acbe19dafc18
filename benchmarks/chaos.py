"""The demo on three hosts while roles and hosts are killed and cables pulled, against the same run undisturbed.

    python benchmarks/chaos.py --out FOLDER [--runs 20] [--seed 0] [--picture chaos.png] [key.path=value …]
    python benchmarks/chaos.py --out FOLDER --report      prints the tables of what has been run so far

Every run has a random schedule of its own, drawn from the seed; over all runs every kind of failure comes equally
often. A role's process gets SIGKILL; a host falls silent, loses every process, and comes back empty with a fresh Ray
node some seconds later; a cable is pulled and plugged in again. A finished run is one file of FOLDER; started again,
the script goes on where it stopped. Root rights are needed.

Times are taken from outside, from the files of the run: a failure is noticed when `events.jsonl` first says something
about a role it struck, and over when `roles.json` shows a new process for each of them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, run_and_report, start_ray, train_command
from failures import KINDS, Chaos, Failure, RunFiles, schedules
from machine import table, unpaired
from testbed import RayNode, Testbed

HOSTS, EPOCHS = 3, 2
DEFAULTS = (
    *(
        "train.trainers=3",
        "embedding.servers=3",
        "cluster.dense_servers=2",
        "train.save_every_s=3",
        f"data.epochs={EPOCHS}",
    ),
    *("report.html=false", "report.tensorboard=false"),
)
NOTICED_WITHIN_S = 5.0
AUC_WITHIN = 0.002


def run(failures: Sequence[Failure], expected_s: float, overrides: Sequence[str], log: Path) -> dict[str, Any]:
    """One run on a testbed of its own.

    Returns:
        The run's figures, or why it failed in `error`, and each failure with what came of it.
    """
    with tempfile.TemporaryDirectory() as folder, Testbed(hosts=HOSTS, rate="1gbit") as testbed:
        start_ray(testbed, [RayNode()] * HOSTS)
        out = Path(folder) / "run"
        chaos = Chaos(testbed, RunFiles(out), testbed.ray_start)
        with log.open("w") as said:
            command = train_command(out, [*DEFAULTS, *overrides])
            process = testbed.run(0, command, stdout=said, stderr=subprocess.STDOUT)
            seconds = chaos.watch(process, failures, expected_s)
        figures = _figures(out, process.returncode, log)
    return figures | {"wall_s": seconds, "struck": [asdict(struck) for struck in chaos.struck], "load": load_average()}


def _figures(out: Path, status: int, log: Path) -> dict[str, Any]:
    path = out / "result.json"
    if status or not path.exists():
        said = log.read_text().strip().splitlines()
        return {"error": f"status {status}: {said[-1] if said else 'it said nothing'}"}
    result = json.loads(path.read_text())
    return {
        "auc": result["test"]["auc"],
        "train_samples": EPOCHS * result["data"]["train_samples"],
        "trained_samples": result["data"]["trained_samples"],
        "recovery": result.get("recovery"),
        "seconds": result["throughput"]["seconds"],
    }


def run_all(arguments: argparse.Namespace, kept: Cells) -> None:
    """Runs what is missing, the undisturbed runs first."""
    for number in range(arguments.undisturbed):
        _keep(kept, f"undisturbed-{number:02}", [], 0.0, arguments)
    clean = [row for row in kept.all() if not row["failures"] and "error" not in row]
    if not clean:
        sys.exit("no undisturbed run has come to its end: see the logs beside the results")
    expected_s = statistics.median(row["seconds"] for row in clean)
    for number, failures in enumerate(schedules(arguments.seed, arguments.runs, arguments.failures)):
        _keep(kept, f"run-{number:02}", failures, expected_s, arguments)


def _keep(
    kept: Cells, name: str, failures: Sequence[Failure], expected_s: float, arguments: argparse.Namespace
) -> None:
    if kept.read(name) is None:
        found = run(failures, expected_s, arguments.overrides, kept.folder / f"{name}.log")
        kept.write(name, {"name": name, "failures": [asdict(failure) for failure in failures], **found})
        print(name, json.dumps(found), file=sys.stderr, flush=True)


def runs_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run."""
    clean = _clean(rows)
    auc = statistics.mean(row["auc"] for row in clean) if clean else None
    lines = [
        (row["name"], " ".join(struck["kind"] for struck in row["struck"]) or "-", *_outcome(row, auc))
        for row in sorted(rows, key=lambda row: (bool(row["failures"]), row["name"]))
    ]
    return table(["run", "failures", "seconds", "trained", "AUC", "to undisturbed", "verdict"], lines)


def _outcome(row: Mapping[str, Any], auc: float | None) -> tuple[str, ...]:
    if "error" in row:
        return f"{row['wall_s']:.1f}", "-", "-", "-", row["error"]
    difference = row["auc"] - auc if auc is not None else 0.0
    trained = f"{row['trained_samples']:,} of {row['train_samples']:,}"
    return f"{row['wall_s']:.1f}", trained, f"{row['auc']:.4f}", f"{difference:+.4f}", verdict(row, auc) or "good"


def verdict(row: Mapping[str, Any], auc: float | None) -> str | None:
    """What is wrong with a run; None if nothing is."""
    if "error" in row:
        return str(row["error"])
    if row["trained_samples"] != row["train_samples"]:
        return "samples are lost or were trained twice"
    if auc is not None and abs(row["auc"] - auc) > AUC_WITHIN:
        return f"the AUC differs by more than {AUC_WITHIN:g}"
    if len(row["struck"]) < len(row["failures"]):
        return "it ended before every failure could strike"
    # what strikes during the evaluation need not be noticed: nobody may need the victims any more
    struck = [failure for failure in row["struck"] if failure["victims"] and failure["at_s"] < row["seconds"]]
    if unseen := [failure["target"] for failure in struck if failure["noticed_s"] is None]:
        return f"the loss of {unseen[0]} was never noticed"
    late = [failure["target"] for failure in struck if failure["noticed_s"] > NOTICED_WITHIN_S]
    return f"the loss of {late[0]} was noticed after more than {NOTICED_WITHIN_S:g} s" if late else None


def kinds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each kind of failure cost, in seconds: medians, and the longest."""
    struck = [failure for row in rows for failure in row["struck"]]
    lines, lost = [], lost_seconds(rows)
    for kind in KINDS:
        found = [failure for failure in struck if failure["kind"] == kind]
        times = [[f[name] for f in found if f[name] is not None] for name in ("noticed_s", "back_s")]
        cells = [f"{statistics.median(of):.1f} ({max(of):.1f})" if of else "-" for of in times]
        lines.append((kind, len(found), *cells, f"{lost[kind]:.1f}" if kind in lost else "-"))
    return table(["failure", "times", "noticed after s", "back after s", "lost s"], lines)


def lost_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a failure of each kind makes a run longer by than an undisturbed one: the numbers that fit best (least
    squares), as runs have several."""
    clean = [row["wall_s"] for row in _clean(rows)]
    mine = [row for row in rows if "error" not in row and row["struck"]]
    kinds = [kind for kind in KINDS if any(kind == struck["kind"] for row in mine for struck in row["struck"])]
    if not clean or not mine:
        return {}
    times = [[sum(struck["kind"] == kind for struck in row["struck"]) for kind in kinds] for row in mine]
    longer = [row["wall_s"] - statistics.median(clean) for row in mine]
    fitted = np.linalg.lstsq(np.array(times, float), np.array(longer))[0]
    return dict(zip(kinds, fitted.tolist(), strict=True))


def against_undisturbed(rows: Sequence[Mapping[str, Any]]) -> str:
    """How far the AUC of the disturbed runs is from that of the others, with an interval of 95 % (Welch's)."""
    clean = [row["auc"] for row in _clean(rows)]
    struck = [row["auc"] for row in rows if "error" not in row and row["failures"]]
    if not clean or not struck:
        return "no disturbed run beside an undisturbed one"
    others = f"the mean of {len(clean)} others ({min(clean):.4f} to {max(clean):.4f})"
    return f"AUC of {len(struck)} disturbed runs to {others}: {unpaired(struck, clean)}"


def _clean(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if not row["failures"] and "error" not in row]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """All tables."""
    return "\n\n".join((runs_table(rows), against_undisturbed(rows), kinds_table(rows)))


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws when each failure struck, how long until it was noticed, and until all was back."""
    figure = Figure(figsize=(9, 0.6 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shown = sorted(rows, key=lambda row: str(row["name"]), reverse=True)
    for place, row in enumerate(shown):
        axes.barh(place, row["wall_s"], color="0.9" if "error" not in row else "mistyrose", height=0.8)
        for struck in row["struck"]:
            colour = f"C{KINDS.index(struck['kind'])}"
            axes.barh(place, struck["back_s"] or 0.0, left=struck["at_s"], color=colour, alpha=0.5, height=0.5)
            axes.plot(struck["at_s"], place, marker="x", color=colour)
    for position, kind in enumerate(KINDS):
        axes.plot([], [], marker="x", linestyle="", color=f"C{position}", label=kind)
    axes.set(xlabel="seconds since the first samples; bars: until a new process was there", yticks=range(len(shown)))
    axes.set_yticklabels([row["name"] for row in shown], fontsize=7)
    axes.legend(fontsize=7, loc="lower right", ncols=len(KINDS))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs what is missing and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--failures", type=int, default=2, help="in each run")
    parser.add_argument("--undisturbed", type=int, default=3, help="runs without any, to compare with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of every run")
    run_and_report(parser, run_all, report, picture)


if __name__ == "__main__":
    in_sentences(main)
