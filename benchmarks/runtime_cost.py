"""What it costs to have every role in a process of its own: the demo in one process, in forked ones, on Ray, in turn.

python benchmarks/runtime_cost.py [--rounds 5] [key.path=value …]
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, ratios, table

from shadowsync import Job
from shadowsync.config import load

RUNTIMES = ("inprocess", "processes", "ray")
QUIET = ["report.html=false", "report.tensorboard=false"]


def run(runtime: str, overrides: list[str]) -> tuple[float, float]:
    """Examples per second and AUC of one run."""
    config = load(None, [*QUIET, f"cluster.runtime={runtime}", *overrides])
    with tempfile.TemporaryDirectory() as folder:
        result = Job(config, out=Path(folder) / "run").run()
    assert result.test is not None
    return result.throughput.eps, result.test.auc or 0.0


def main() -> None:
    """Runs in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {runtime: [] for runtime in RUNTIMES}
    for number in range(arguments.rounds):
        for runtime in RUNTIMES:
            found[runtime].append(run(runtime, [f"train.seed={number}", *arguments.overrides]))
            print(runtime, found[runtime][-1], file=sys.stderr, flush=True)
    speeds = {runtime: [eps for eps, _ in runs] for runtime, runs in found.items()}
    lines = [
        (
            runtime,
            f"{statistics.median(speeds[runtime]):,.0f}",
            f"{ratios(speeds, 'inprocess')[runtime]:.2f}",
            f"{statistics.mean(auc for _, auc in found[runtime]):.4f}",
        )
        for runtime in RUNTIMES
    ]
    print("\n".join(describe()))
    print(table(["runtime", "examples/s", "over one process", "AUC"], lines))


if __name__ == "__main__":
    main()
