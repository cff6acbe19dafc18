"""Switches between synchronous training and `gba` (arXiv 2205.11048) on several hosts, with nothing re-tuned.

    python benchmarks/switching_hosts.py --out FOLDER [--seeds 5] [--rate 1gbit]
    … --report      prints the table of what has been run so far

Three hosts of the testbed, a Ray node in each, train the demo once through: four trainers, two embedding and two dense
servers, a global batch of 8,192. After half of the rows the job is interrupted, as by Ctrl-C, and goes on from its
checkpoint on the same hosts by the other method. Hosts, messages and what is late are real; one trainer in four is
made 3 to 10 times slower (`train.stragglers`). AUC is of the test rows at the end, and differences to staying
synchronous are paired by seed, with an interval of 95 % (Student's t). A finished run is a line of FOLDER/runs.jsonl;
started again, the script goes on where it stopped. Root rights are needed.
"""

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, run_and_report, start_ray, train_command
from machine import by_seed, commit, difference, table, with_interval
from switching import OPTIMIZERS
from testbed import RayNode, Testbed, TestbedError

from shadowsync.report.files import read_frames

HOSTS = 3
JOB = (
    *("train.trainers=4", "embedding.servers=2", "cluster.dense_servers=2", "train.batch_size=512"),
    *("aggregation.global_batch=8192", "aggregation.rows=buffer", "report.every_s=0.05", "report.html=false"),
    *("report.tensorboard=false", *OPTIMIZERS["adagrad"]),
)
WAYS = (("sync", "sync"), ("sync", "gba"), ("gba", "sync"), ("gba", "gba"))
"""Of the first half and of the second."""
HALF_S, WHOLE_S = 300.0, 600.0


def run(testbed: Testbed, first: str, then: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run's figures."""
    slow = f"train.stragglers=share=0.25,slow=3-10,for_s=2,seed={seed}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        overrides = [*JOB, f"train.emulate_step_ms={given.step_ms:g}", slow, f"train.seed={seed}"]
        _half(testbed, train_command(out, [*overrides, f"aggregation.method={first}"]), out)
        before = len(read_frames(out))
        command = [word if word != "--out" else "--resume" for word in train_command(out, [])]
        testbed.output(0, [*command, f"aggregation.method={then}"], WHOLE_S)
        result = json.loads((out / "result.json").read_text())
        frames = read_frames(out)[before:]
    trained = result["data"]["trained_samples"]
    if trained != result["data"]["train_samples"]:
        raise TestbedError(f"{trained} of {result['data']['train_samples']} rows were trained")
    spent = frames[-1].seconds - frames[0].seconds
    figures = {"auc": result["test"]["auc"], "ne": result["test"]["ne"], "load": load_average()}
    figures |= {"eps": (frames[-1].samples - frames[0].samples) / spent, "commit": commit()}
    ages = [frame.staleness for frame in frames if frame.staleness is not None]
    dropped = (frames[-1].dropped or 0) - (frames[0].dropped or 0)
    return figures | {"staleness": statistics.fmean(ages) if ages else 0.0, "dropped": dropped}


def _half(testbed: Testbed, command: Sequence[str], out: Path) -> None:
    """Trains half of the rows, and writes a checkpoint."""
    process = testbed.run(0, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ends = time.monotonic() + HALF_S
    while process.poll() is None and not _is_half(out):
        if time.monotonic() > ends:
            raise TestbedError(f"half of the rows were not trained after {HALF_S:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=HALF_S)[0]
    if process.returncode != 130:
        raise TestbedError(f"the first half ended with {process.returncode}: {said.strip()[-600:]}")


def _is_half(out: Path) -> bool:
    frames = read_frames(out) if (out / "metrics.jsonl").exists() else []
    return bool(frames) and frames[-1].samples >= 0.5 * frames[-1].total_samples


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, seed by seed, on one testbed."""
    at = f"{given.rate}, {given.step_ms:g} ms"
    cells = [(f"{first} to {then}, seed {seed}, {at}", first, then, seed) for seed, (first, then) in _grid(given)]
    missing = [cell for cell in cells if kept.read(cell[0]) is None]
    if not missing:
        return
    with Testbed(hosts=HOSTS, rate=given.rate) as testbed:
        start_ray(testbed, [RayNode()] * HOSTS)
        for name, first, then, seed in missing:
            row = {"first": first, "then": then, "seed": seed, **run(testbed, first, then, given, seed)}
            kept.write(name, row)
            print(name, row, file=sys.stderr, flush=True)


def _grid(given: argparse.Namespace) -> Sequence[tuple[int, tuple[str, str]]]:
    return list(itertools.product(range(given.seeds), WAYS))


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each way."""
    found = by_seed(rows, lambda row: (row["first"], row["then"]))
    stayed = found.get(("sync", "sync"), {})
    lines = [
        (
            *way,
            len(runs),
            with_interval([row["auc"] for row in runs.values()]),
            difference(runs, stayed),
            with_interval([row["ne"] for row in runs.values()]),
            f"{statistics.fmean(row['staleness'] for row in runs.values()):.2f}",
            sum(row["dropped"] for row in runs.values()),
            f"{statistics.median(row['eps'] for row in runs.values()):,.0f}",
        )
        for way, runs in sorted(found.items(), key=lambda item: WAYS.index(item[0]))
    ]
    head = ["first half", "second half", "seeds", "AUC", "to sync", "NE", "staleness", "dropped"]
    return table([*head, "examples/s (these three: of the second half)"], lines)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--step-ms", type=float, default=40.0, help="of a trainer's step, at the least")
    run_and_report(parser, run_all, report)


if __name__ == "__main__":
    in_sentences(main)
