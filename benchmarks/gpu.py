"""Examples per second with the dense part on a GPU against the same job on the processor, and against a plain PyTorch
loop that has everything, tables too, on the GPU.

    python benchmarks/gpu.py [--rounds 3] [--batches 1024 4096] [--rows 400000] [--models DLRM wide]

Each run is a process of its own, and the variants take turns. "DLRM" is the model of `throughput.py`, "wide" has a top
tower of 2048-2048-1024, for which a GPU is worth while. As there, both sides train on the same 65,536 rows again and
again, so that the AUC says that they learn and not how well.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import plain_loop
import throughput
from machine import answer_apart, describe, medians, ratios, table

TOPS = {"DLRM": (512, 256), "wide": (2048, 2048, 1024)}
TRAINERS: dict[str, dict[str, Any]] = {
    "job, processor": {"trainers": 1, "workers": 2},
    "job, GPU": {"trainers": 1, "workers": 2, "device": "cuda"},
    "job, GPU, 4 workers": {"trainers": 1, "workers": 4, "device": "cuda"},
    "job, GPU, 2 trainers": {"trainers": 2, "workers": 2, "device": "cuda"},
}
PLAIN = {"plain loop, processor": "cpu", "plain loop, GPU": "cuda"}


def measure(model: str, variant: str, batch_size: int, rows: int) -> tuple[float, float]:
    """Examples/s and the AUC so far of one run in this process."""
    if variant in PLAIN:
        shape = plain_loop.Shape(rows=throughput.TABLE_ROWS, top=TOPS[model])
        return throughput.train_plainly(batch_size, rows, shape, PLAIN[variant], torch.get_num_threads())
    return throughput.train_job({"model": {"top": TOPS[model]}, "train": TRAINERS[variant]}, batch_size, rows)


def main() -> None:
    """Prints the machine, the GPU and a table for each model and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--models", nargs="+", default=list(TOPS), choices=list(TOPS))
    arguments = parser.parse_args()
    if arguments.one:
        model, variant, batch_size, rows = arguments.one
        print(json.dumps(measure(model, variant, int(batch_size), int(rows))))
        return
    if not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use: run it where there is one, with a build of torch for CUDA")
    print("\n".join(describe()), f"gpu: {torch.cuda.get_device_name()}", sep="\n")
    for model in arguments.models:
        for batch_size in arguments.batches:
            compare(model, batch_size, arguments)


def compare(model: str, batch_size: int, arguments: argparse.Namespace) -> None:
    """Runs the variants in turn and prints their medians."""
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in (*PLAIN, *TRAINERS)}
    for _ in range(arguments.rounds):
        for variant, runs in found.items():
            runs.append(answer_apart(__file__, "--one", model, variant, str(batch_size), str(arguments.rows)))
            print(model, batch_size, variant, *runs[-1], file=sys.stderr, flush=True)
    eps, auc = ({variant: [run[at] for run in runs] for variant, runs in found.items()} for at in (0, 1))
    speed, quality, over = medians(eps), medians(auc), ratios(eps, "job, processor")
    rows = [(v, f"{speed[v]:,.0f}", f"{over[v]:.2f}", f"{quality[v]:.4f}") for v in found]
    print(f"\n{model}, batch {batch_size}, medians of {arguments.rounds} rounds\n")
    print(table(["", "examples/s", "over the job on the processor", "AUC so far"], rows), flush=True)


if __name__ == "__main__":
    main()
