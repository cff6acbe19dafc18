"""Examples per second of a whole job against a plain PyTorch loop, on DLRM 13-512-256-64-16 / 512-256-1 with 26 tables
of 200,000 × 16.

    python benchmarks/throughput.py [--rounds 5] [--batches 1024 128] [--seconds 8]
    python benchmarks/throughput.py --sync           what background synchronisation costs
    python benchmarks/throughput.py --kaggle         tables of Criteo Kaggle's sizes against the small ones

Each run is a process of its own; the variants take turns, and ratios are medians over the rounds. Both sides train on
the same rows (synthetic, Zipf 1.2, 65,536 rows made once and repeated from memory), so the AUC beside the speed is one
of data seen before: it says that both learn, not how well.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shadowsync import Job
from shadowsync.data.batch import Batch
from shadowsync.data.synthetic import Synthetic
from shadowsync.training.kernels import multiplies_bf16

sys.path.insert(0, str(Path(__file__).parent))
import plain_loop
from machine import answer_apart, describe, libraries, product_speed, product_table, ratios, table

REPEATED_BLOCKS = 16
TABLE_ROWS = 200_000
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)  # DLRM reference (arXiv 1906.00091) on Criteo Kaggle: 33,762,577 rows
JOBS: dict[str, dict[str, Any]] = {
    "fp32": {"train": {"precision": "fp32"}},
    "bf16": {"train": {"precision": "bf16"}},
    "default": {},
    "no sync": {"sync": {"method": "none"}},
    "Kaggle tables": {"data": {"table_rows": KAGGLE_ROWS}},
}
LAYERS = ((13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1))
FLOP_PER_SAMPLE = 3 * 2 * (sum(inputs * outputs for inputs, outputs in LAYERS) + 27 * 27 * 16)


@dataclass(frozen=True)
class Measured:
    """One run."""

    eps: float
    auc: float
    peak_gb: float


def measure(variant: str, batch_size: int, rows: int) -> Measured:
    """Trains in this process and returns its figures."""
    if variant == "plain loop":
        eps, auc = train_plainly(batch_size, rows, plain_loop.Shape(rows=TABLE_ROWS))
    else:
        eps, auc = train_job(JOBS[variant], batch_size, rows)
    return Measured(eps, auc, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def train_job(options: dict[str, Any], batch_size: int, rows: int) -> tuple[float, float]:
    """Examples/s and the AUC so far of a job on rows that repeat."""
    data = {"name": "synthetic", "rows": rows, "test_rows": 0, "table_rows": TABLE_ROWS, **options.get("data", {})}
    config = {
        "data": {**data, "repeat_blocks": REPEATED_BLOCKS},
        "train": {"batch_size": batch_size, **options.get("train", {})},
        "sync": options.get("sync", {}),
        "model": options.get("model", {}),
        "report": {"html": False, "tensorboard": False, "every_s": 2.0},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Job(config, out=Path(folder) / "run").run()
    assert result.train is not None
    assert result.train.auc is not None
    return result.throughput.eps, result.train.auc


def train_plainly(
    batch_size: int, rows: int, shape: plain_loop.Shape, device: str = "cpu", threads: int = 2
) -> tuple[float, float]:
    """Examples/s and the AUC so far of a plain loop on rows that repeat."""
    source = Synthetic(rows=rows, table_rows=TABLE_ROWS, repeat_blocks=REPEATED_BLOCKS).open("train", "error")
    assert source is not None
    made = [source.read(part) for part in source.slices(4096)[:REPEATED_BLOCKS]]

    def batches() -> Iterator[Batch]:
        cut = [block.narrow(at, at + batch_size) for block in made for at in range(0, len(block), batch_size)]
        for index in range(rows // batch_size):
            yield cut[index % len(cut)]

    trained = plain_loop.train(batches(), shape, threads, device=device)
    return trained.eps, trained.auc


def measure_apart(variant: str, batch_size: int, rows: int) -> Measured:
    """`measure` in a process of its own."""
    return Measured(**answer_apart(__file__, "--one", variant, str(batch_size), str(rows)))


def compare(variants: list[str], base: str, arguments: argparse.Namespace) -> None:
    """Runs the variants in turn for each batch size and prints a table."""
    for batch_size in arguments.batches:
        speeds = {v: measure_apart(v, batch_size, 40_000).eps for v in variants}  # warms the disk and finds the length
        runs: dict[str, list[Measured]] = {variant: [] for variant in variants}
        for _ in range(arguments.rounds):
            for variant in variants:
                rows = int(max(40_000, speeds[variant] * arguments.seconds))
                runs[variant].append(measure_apart(variant, batch_size, rows))
                print(batch_size, variant, runs[variant][-1], file=sys.stderr, flush=True)
        print(f"\nbatch {batch_size}, medians of {arguments.rounds} rounds\n")
        print(_table(runs, base))


def _table(runs: dict[str, list[Measured]], base: str) -> str:
    relative = ratios({variant: [m.eps for m in found] for variant, found in runs.items()}, base)
    native = multiplies_bf16("cpu")
    dtypes = {"plain loop": torch.float32, "fp32": torch.float32}
    usual = torch.bfloat16 if native else torch.float32
    peak = {
        dtype: max(product_speed(dtype, 2, library) for library in libraries(dtype))
        for dtype in (torch.float32, *([torch.bfloat16] if native else []))
    }
    rows = []
    for variant, found in runs.items():
        eps = statistics.median(m.eps for m in found)
        speed = peak[dtypes.get(variant, usual)]
        rows.append(
            (
                variant,
                f"{eps:,.0f}",
                f"{relative[variant]:.2f}",
                f"{statistics.median(m.auc for m in found):.4f}",
                f"{max(m.peak_gb for m in found):.2f}",
                f"{eps * FLOP_PER_SAMPLE / 1e9 / speed:.0%}",
            )
        )
    return table(["", "examples/s", f"over {base}", "AUC so far", "peak GiB", "of product speed"], rows)


def main() -> None:
    """Prints the machine and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 128])
    parser.add_argument("--kaggle", action="store_true")
    parser.add_argument("--sync", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        variant, batch_size, rows = arguments.one
        print(json.dumps(asdict(measure(variant, int(batch_size), int(rows)))))
        return
    print("\n".join(describe()), product_table(), sep="\n\n")
    if arguments.kaggle:
        compare(["default", "Kaggle tables"], "default", arguments)
    elif arguments.sync:
        compare(["no sync", "default"], "no sync", arguments)
    else:
        bf16 = ["bf16"] if multiplies_bf16("cpu") else []
        compare(["plain loop", "fp32", *bf16, "no sync"], "plain loop", arguments)


if __name__ == "__main__":
    main()
