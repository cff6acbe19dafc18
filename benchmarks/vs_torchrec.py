"""Two hosts of one core each against TorchRec's distributed trainer, over links of 10 Gbit/s, 1 Gbit/s and 100 Mbit/s.

    python benchmarks/vs_torchrec.py --out FOLDER --torchrec .venv-torchrec/bin/python [--rounds 3] [--rates 1gbit …]
    python benchmarks/vs_torchrec.py --out FOLDER --report      prints the tables of what has been run so far

Speed: the DLRM 13-512-256-64-16 / 512-256-1 with 26 tables of 200,000 × 16, Zipf ids, batch 1,024 per host, rows made
once and repeated from memory. Quality: the demo, once through, at the same sizes, batch, optimizers and learning rates.
Variants take turns, each run in a testbed of its own (see `testbed.py`); a finished run is one file of FOLDER, and the
script goes on where it stopped. `torchrec_trainer.py` says how TorchRec is installed; here it runs as it comes, in
fp32, and as fast as we could make it: the dense part in bf16 with shadowsync's own layers, all traffic in bf16. Beside
them stands the same job in one process on both cores, without a network. Root rights are needed.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clustered import WIRES, Cells, in_sentences, load_average, start_ray, train
from machine import describe, ratios, table
from namespaces import TestbedError
from testbed import RayNode, Testbed

HERE = Path(__file__).parent
RATES = ("10gbit", "1gbit", "100mbit")
TASKS: Mapping[str, tuple[str, ...]] = {
    "speed": ("data.name=synthetic", "data.table_rows=200000", "data.test_rows=0", "data.repeat_blocks=16"),
    "demo": ("data.name=completejourney",),
}
SYNC = ("aggregation.method=sync", "cluster.dense_servers=2")
"""About half of the dense part on each host: as much crosses as in a ring of two."""
OURS: Mapping[str, tuple[str, ...]] = {
    "shadowsync, fp32": ("train.precision=fp32",),
    "shadowsync, bf16": ("train.precision=bf16", *WIRES["bf16"]),
    "shadowsync, bf16, plain wire": ("train.precision=bf16",),
    "shadowsync, bf16, int4 wire": ("train.precision=bf16", *WIRES["int4, threshold"]),
    "shadowsync, bf16, auto wire": ("train.precision=bf16", *WIRES["auto"]),
    "shadowsync, sync, fp32": ("train.precision=fp32", *SYNC),
    "shadowsync, sync, bf16": ("train.precision=bf16", *SYNC, *WIRES["bf16"]),
}
HERE_ALONE: Mapping[str, tuple[str, ...]] = {
    "one process, fp32": ("train.precision=fp32",),
    "one process, bf16": ("train.precision=bf16",),
}
"""The same job with both trainers in one process on both cores, and no network."""
THEIRS: Mapping[str, tuple[str, ...]] = {
    "TorchRec, fp32": ("train.precision=fp32",),
    "TorchRec, bf16": ("--wire=bf16", "--fast-linear", "train.precision=bf16"),
}
ALL = (*OURS, *THEIRS, *HERE_ALONE)
PROBE_ROWS = 60_000
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    rate: str
    variant: str
    round: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.task} {self.rate} {self.variant} {self.round:02}".replace(",", "").replace(" ", "-")


@dataclass(frozen=True)
class Setup:
    """What all runs share.

    Attributes:
        torchrec: the Python in which TorchRec is installed.
        cluster: overrides of our runs: how roles are spread.
        seconds: about how long a run for speed trains.
    """

    torchrec: str
    cluster: tuple[str, ...]
    seconds: float


def grid(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All runs, the variants in turn."""
    for number, rate, variant in itertools.product(range(arguments.rounds), arguments.rates, arguments.variants):
        yield Cell("speed", rate, variant, number)
    for number, variant in itertools.product(range(arguments.demo_rounds), arguments.variants):
        yield Cell("demo", arguments.demo_rate, variant, number)


def measure(cell: Cell, setup: Setup, speeds: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Runs a cell.

    Args:
        cell: which.
        setup: how.
        speeds: of each rate and variant so far; the first run of each is a short one that finds it.

    Returns:
        At least `eps`, `samples`, `auc` and `ne`.
    """
    common = [*TASKS[cell.task], "train.batch_size=1024", f"train.seed={cell.round}"]
    train_it = {**dict.fromkeys(THEIRS, _train_theirs), **dict.fromkeys(HERE_ALONE, _train_here)}.get(
        cell.variant, _train_ours
    )
    if cell.task == "demo":
        return train_it(cell, setup, common)
    key = (cell.rate, cell.variant)
    if key not in speeds:
        speeds[key] = train_it(cell, setup, [*common, f"data.rows={PROBE_ROWS}"])["eps"]
    found = train_it(cell, setup, [*common, f"data.rows={int(max(PROBE_ROWS, speeds[key] * setup.seconds))}"])
    speeds[key] = found["eps"]
    return found


def _train_theirs(cell: Cell, setup: Setup, overrides: Sequence[str]) -> dict[str, Any]:
    with Testbed(hosts=2, rate=cell.rate, cores=1) as testbed, tempfile.TemporaryFile("w+") as said:
        processes = []
        for rank in (0, 1):
            place = ["--rank", str(rank), "--world", "2", "--master", testbed.hosts[0].address]
            command = [setup.torchrec, str(HERE / "torchrec_trainer.py"), *place, *THEIRS[cell.variant], *overrides]
            network = {"GLOO_SOCKET_IFNAME": "eth0"}
            processes.append(testbed.run(rank, command, env=network, stdout=subprocess.PIPE, stderr=said, text=True))
        printed, _ = processes[0].communicate(timeout=TIMEOUT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it prints nothing, and ends with the testbed at last
            processes[1].communicate(timeout=10.0)
        said.seek(0)
        if not printed.strip():
            raise TestbedError(f"{cell.variant} printed no result: {said.read().strip()[-600:]}")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _train_ours(cell: Cell, setup: Setup, overrides: Sequence[str]) -> dict[str, Any]:
    given = ["train.trainers=2", *setup.cluster, *OURS[cell.variant], *overrides]
    with tempfile.TemporaryDirectory() as folder, Testbed(hosts=2, rate=cell.rate, cores=1) as testbed:
        start_ray(testbed, [RayNode(), RayNode()])
        result = train(testbed, Path(folder) / "run", given, TIMEOUT_S)
    return _found(result)


def _train_here(cell: Cell, setup: Setup, overrides: Sequence[str]) -> dict[str, Any]:  # noqa: ARG001 as the others
    given = ["train.trainers=2", "cluster.runtime=inprocess", *HERE_ALONE[cell.variant], *overrides]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-c", "from shadowsync.cli import main; main()", "train", "--out", str(out), *given]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return _found(json.loads((out / "result.json").read_text()))


def _found(result: Mapping[str, Any]) -> dict[str, Any]:
    test = result.get("test") or {}
    return {
        "eps": result["throughput"]["eps"],
        "samples": result["data"]["trained_samples"],
        "seconds": result["throughput"]["seconds"],
        "auc": test.get("auc"),
        "ne": test.get("ne"),
        "wire": result.get("wire"),
    }


def run_all(cells: Sequence[Cell], setup: Setup, kept: Cells) -> None:
    """Runs what has not been run."""
    speeds = {(row["rate"], row["variant"]): row["eps"] for row in kept.all() if row["task"] == "speed"}
    for cell in cells:
        if kept.read(cell.name) is None:
            found = asdict(cell) | measure(cell, setup, speeds) | {"load": load_average()}
            kept.write(cell.name, found)
            print(found, file=sys.stderr, flush=True)


def speed_table(rows: Sequence[dict[str, Any]], rate: str) -> str:
    """Medians and ratios at a rate, over the rounds that every variant has been through."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["task"] == "speed" and row["rate"] == rate:
            found.setdefault(row["variant"], {})[row["round"]] = row["eps"]
    rounds = sorted(set.intersection(*(set(of) for of in found.values()))) if found else []
    if not rounds:
        return "no round is complete"
    samples = {variant: [found[variant][number] for number in rounds] for variant in ALL if variant in found}
    bases = [base for base in (*THEIRS, *HERE_ALONE) if base in samples]
    lines = [
        (variant, *_summary(eps), *(f"{ratios(samples, base)[variant]:.2f}" for base in bases))
        for variant, eps in samples.items()
    ]
    head = [f"{rate}, {len(rounds)} rounds", "examples/s", "least", "most", *(f"over {base}" for base in bases)]
    return table(head, lines)


def _summary(values: Sequence[float]) -> tuple[str, str, str]:
    return f"{statistics.median(values):,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}"


def quality_table(rows: Sequence[dict[str, Any]]) -> str:
    """The demo's test set, means over the rounds, each of a seed of its own."""
    lines = []
    for variant in ALL:
        found = [row for row in rows if row["task"] == "demo" and row["variant"] == variant]
        if found:
            means = [f"{statistics.mean(row[name] for row in found):.4f}" for name in ("auc", "ne")]
            eps = statistics.median(row["eps"] for row in found)
            lines.append((variant, len(found), f"{found[0]['samples']:,}", *means, f"{eps:,.0f}"))
    return table(["demo", "seeds", "samples", "AUC", "NE", "examples/s"], lines)


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--torchrec", default=".venv-torchrec/bin/python", help="the Python that has TorchRec")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--variants", nargs="+", default=list(ALL), choices=ALL)
    parser.add_argument("--demo-rounds", type=int, default=2)
    parser.add_argument("--demo-rate", default="1gbit")
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long each run for speed trains")
    parser.add_argument("--cluster", nargs="*", default=[], help="more overrides of our runs")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    setup = Setup(arguments.torchrec, tuple(arguments.cluster), arguments.seconds)
    kept = Cells(arguments.out)
    if not arguments.report:
        run_all(list(grid(arguments)), setup, kept)
    rows = kept.all()
    print("\n".join(describe()))
    for rate in arguments.rates:
        print("\n" + speed_table(rows, rate))
    print("\n" + quality_table(rows))


if __name__ == "__main__":
    in_sentences(main)
