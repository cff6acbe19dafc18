"""Two sites behind a slow link: Gaia's significance filter against a threshold that sends as many bytes.

    python benchmarks/two_sites.py --out FOLDER [--seeds 5] [--significance 0.003 0.03 0.3] [--rate 40mbit]
    … --report      prints the table of what has been run so far

Two hosts of one core each, whose links have that rate, train the demo once through, a trainer on each; replicas are
averaged in the foreground every 4 iterations, so that all average equally often; the learning rate falls to a tenth,
and with it v. First everything crosses, then what has
changed by more than `significance` of its value; for each of these a run of the same seed in which as many bytes, of
those that whole replicas would take, are the largest changes instead (`keep`). Rows and their gradients cross in int8
each time. A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped. Root
rights are needed.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, run_and_report, start_ray, train
from machine import commit, difference, table, with_interval
from testbed import RayNode, Testbed

JOB = (
    *("data.name=completejourney", "train.trainers=2", "train.workers=1", "train.batch_size=256"),
    *("train.warmup_samples=0", "train.decay=linear", "train.final_lr=0.1"),
    *("sync.method=ma", "sync.schedule=every_k", "sync.k=4"),
    *("compression.pull=int8", "compression.push=int8", "report.html=false", "report.tensorboard=false"),
)
FILTER = ("compression.dense.name=threshold", "compression.dense.select=significant")
LARGEST = ("compression.dense.name=threshold", "compression.dense.refresh=1")
"""Each message has a threshold of its own, as changes shrink with the learning rate sooner than one follows."""
TIMEOUT_S = 900.0
PLAIN = "all"
POSITIONS = 1.05


def keep_of(share: float) -> float:
    """The `keep` with which a threshold's message takes that share of a whole one: 32 bits for each element that
    crosses, and its position, whose code is a little longer than its entropy."""
    low, high = 1e-6, 1.0
    for _ in range(50):
        middle = (low * high) ** 0.5
        entropy = -middle * math.log2(middle) - (1 - middle) * math.log2(1 - middle)
        low, high = (low, middle) if middle + POSITIONS * entropy / 32 > share else (middle, high)
    return round(low, 6)


def run(testbed: Testbed, overrides: Sequence[str], rows: int, seed: int) -> dict[str, Any]:
    """One run's figures."""
    with tempfile.TemporaryDirectory() as folder:
        given = [*JOB, *overrides, f"data.rows={rows}", f"train.seed={seed}"]
        result = train(testbed, Path(folder) / "run", given, TIMEOUT_S)
    wire = result["wire"]
    return {
        "commit": commit(),
        "eps": result["throughput"]["eps"],
        "auc": result["test"]["auc"],
        "ne": result["test"]["ne"],
        "syncs": result["sync"]["count"],
        "sent": wire["bytes"]["dense"],
        "raw": wire["raw_bytes"]["dense"],
        "load": load_average(),
    }


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, on one testbed."""
    with Testbed(hosts=2, rate=given.rate, cores=1) as testbed:
        start_ray(testbed, [RayNode(), RayNode()])

        def once(way: str, of: float, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
            name = f"{way} {of:g}, seed {seed}"
            if (found := kept.read(name)) is None:
                found = {"way": way, "of": of, "seed": seed, **run(testbed, overrides, given.rows, seed)}
                kept.write(name, found)
                print(name, found, file=sys.stderr, flush=True)
            return found

        for seed in range(given.seeds):
            once(PLAIN, 0.0, seed, [])
            for of in given.significance:
                sent = once("significant", of, seed, [*FILTER, f"compression.dense.significance={of}"])
                keep = keep_of(min(0.99, sent["sent"] / sent["raw"]))
                once("largest", of, seed, [*LARGEST, f"compression.dense.keep={keep}"])


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means over the seeds; what is chosen by size beside what is significant, as much of it."""
    ways: dict[tuple[float, str], dict[int, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["of"], row["way"] == "largest", row["seed"])):
        ways.setdefault((row["of"], row["way"]), {})[row["seed"]] = row
    lines = []
    for (of, way), runs in ways.items():
        found = list(runs.values())
        other = ways.get((of, "significant"), {}) if way == "largest" else {}
        lines.append(
            (
                way if way == PLAIN else f"{way}, v = {of:g}" if way == "significant" else "as much, the largest",
                f"{statistics.fmean(row['sent'] / row['raw'] for row in found):.2%}",
                f"{statistics.fmean(row['sent'] for row in found) / 1e6:.1f}",
                f"{statistics.fmean(row['syncs'] for row in found):,.0f}",
                f"{statistics.median(row['eps'] for row in found):,.0f}",
                with_interval([row["auc"] for row in found]),
                difference(other, runs),
            )
        )
    head = ["what crosses", "of whole", "MB", "averages", "examples/s", "AUC", "significant - largest"]
    return table(head, lines)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--significance", type=float, nargs="+", default=[0.003, 0.03, 0.3])
    parser.add_argument("--rate", default="40mbit", help="of each site's link")
    parser.add_argument("--rows", type=int, default=200_000)
    run_and_report(parser, run_all, report)


if __name__ == "__main__":
    in_sentences(main)
