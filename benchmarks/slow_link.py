"""One trainer among many behind a link ten times slower: what it costs the others, averaged together or in groups.

    python benchmarks/slow_link.py --out FOLDER [--trainers 16] [--rate 60mbit] [--slower 10] [--seeds 3] …
    … --report      prints the table of what has been run so far

Trainers are emulated and links real, as in `scaling.py`, and steps differ as there: trainers on hosts with as much
link for each as `--rate`, and the last trainer on a host of its own, whose link is as fast or that many times slower.
Averages cross among trainers, the elastic exchange goes through a dense server. MA averages trainers of a host in its
memory first, DS-Sync's groups are of trainers wherever they are. Gaps are means over trainers; under the elastic
exchange that of the slow one alone grows, which a mean over sixteen hides. What is left of the figures with even links
is paired by seed, with an interval of 95 % (Student's t). A finished run is a line of FOLDER/runs.jsonl; started again,
the script goes on where it stopped. Root rights are needed.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shadowsync.report.files import read_frames

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, run_and_report, start_ray, train
from machine import by_seed, commit, table, with_interval
from namespaces import bits_per_second
from scaling import BATCH, PLACES, TASK, apart, layout, steady_rate, synchronised
from testbed import RayNode, Testbed

METHODS: Mapping[str, tuple[str, int]] = {
    "MA, background": ("ma", 0),
    "DS-Sync, background": ("ds_sync", 0),
    "EASGD, background": ("easgd", 0),
    "MA every 5": ("ma", 5),
    "DS-Sync every 5": ("ds_sync", 5),
}
"""The method, and in the foreground after how many iterations."""


def run(testbed: Testbed, method: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run's figures."""
    name, k = METHODS[method]
    overrides = [
        *(*TASK, *synchronised(name, k), f"data.rows={given.trainers * given.steps * BATCH}"),
        *(f"train.trainers={given.trainers}", f"train.batch_size={BATCH}", f"train.emulate_step_ms={given.step_ms:g}"),
        *("cluster.dense_servers=1", *PLACES),
        *(f"train.seed={seed}", apart(given.step_ms, k + 1)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = train(testbed, out, overrides, timeout_s=900.0)
        points = [(frame.seconds, frame.samples) for frame in read_frames(out)]
    return {
        "commit": commit(),
        "eps": steady_rate(points, result["data"]["train_samples"]) or result["throughput"]["eps"],
        "gap": result["sync"]["average_gap"],
        "auc": result["test"]["auc"],
        "load": load_average(),
    }


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, seed by seed, on one testbed for each speed of the link."""
    for seed, slower in itertools.product(range(given.seeds), (1.0, given.slower)):
        missing = [method for method in METHODS if kept.read(name_of(method, slower, seed, given)) is None]
        if not missing:
            continue
        nodes, links = layout(given.trainers - 1, dense_servers=1)
        nodes = [*nodes, RayNode(cpus=1, resources={"trainer": 1000})]
        with Testbed(hosts=len(nodes), rate=None) as testbed:
            for host, multiple in enumerate([*links, 1 / slower]):
                kilobits = bits_per_second(given.rate) * multiple / 1e3
                testbed.rate(host, f"{kilobits:.0f}kbit" if multiple else None)
            start_ray(testbed, nodes)
            for method in missing:
                row = {"method": method, "slower": slower, "seed": seed, **run(testbed, method, seed, given)}
                kept.write(name_of(method, slower, seed, given), row)
                print(row, file=sys.stderr, flush=True)


def name_of(method: str, slower: float, seed: int, given: argparse.Namespace) -> str:
    """Of a run."""
    trainers = f"{given.trainers} x {given.steps} steps of {given.step_ms:g} ms, {given.rate}"
    return f"{method}, link {slower:g} times slower, seed {seed}, {trainers}"


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each method and link, and what is left of the figures with even links."""
    found, lines = by_seed(rows, lambda row: (row["method"], row["slower"])), []
    for method, slower in sorted(found, key=lambda way: (list(METHODS).index(way[0]), way[1])):
        runs, even = found[method, slower], found.get((method, 1.0), {})
        both = sorted(runs.keys() & even.keys())
        left = {key: [runs[seed][key] / even[seed][key] for seed in both] for key in ("eps", "gap")}
        of_even = {key: with_interval(ratios, digits=2) if ratios else "-" for key, ratios in left.items()}
        mean = {key: statistics.fmean(row[key] for row in runs.values()) for key in ("eps", "gap", "load")}
        link = "even" if slower == 1 else f"1/{slower:g}"
        speed, gap = (f"{mean['eps']:,.0f}", of_even["eps"]), (f"{mean['gap']:.1f}", of_even["gap"])
        auc = with_interval([row["auc"] for row in runs.values()])
        lines.append((method, link, len(runs), *speed, *gap, auc, f"{mean['load']:.1f}"))
    return table(["method", "one link", "seeds", "examples/s", "of even", "sync gap", "of even", "AUC", "load"], lines)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=16)
    parser.add_argument("--rate", default="60mbit", help="of each trainer's link")
    parser.add_argument("--slower", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=1000.0, help="of an emulated step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of each trainer")
    run_and_report(parser, run_all, report)


if __name__ == "__main__":
    in_sentences(main)
