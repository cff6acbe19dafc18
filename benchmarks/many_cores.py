"""More trainers than this machine has cores: does the speed grow with them, and what does a batch cost which role?

    python benchmarks/many_cores.py [--trainers 1 2 4 8 16 32 64] [--runtime processes] [--step-ms 400] [key.path=value]

Computing is emulated (`train.emulate_compute=false`: a step waits instead), so that trainers need hardly any of the two
cores; rows are pulled and pushed, read, leased, exchanged and reported as ever. The speed of one trainer is measured in
the same run of the script; what grows in proportion is linear. Processor time is what the system counts for each
process between the second and the last look at it, over the batches trained meanwhile.

The last column is derived, not measured: with a step of `--step-ms` that really computed, so much of it would be what
is not the trainer's own.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shadowsync import Job
from shadowsync.config import load
from shadowsync.metrics.history import Frame

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

TASK = (
    "data.name=synthetic",
    "data.features=12",
    "data.table_rows=20000",
    "data.test_rows=1000",
    "data.slice_rows=4096",
    "train.batch_size=512",
    "train.emulate_compute=false",
    "train.warmup_samples=0",
    "report.html=false",
    "report.tensorboard=false",
    "report.every_s=0.5",
)
STEPS = 60
"""Of each trainer."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Looks:
    """Processor seconds of each role, and samples, at the first and the last line of the history that counts.

    Attributes:
        out: folder of the run.
        batch: samples of a batch.
    """

    out: Path
    batch: int
    seen: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def __call__(self, frame: Frame) -> None:
        """Looks, once training is under way."""
        if frame.samples:
            self.seen.append((frame.samples, self._seconds()))

    def _seconds(self) -> Mapping[str, float]:
        file = self.out / "roles.json"
        places = json.loads(file.read_text()) if file.exists() else {}
        found = {"driver": seconds_of(os.getpid())}
        for role, place in places.items():
            kind = role.rpartition("-")[0]
            found[kind] = found.get(kind, 0.0) + seconds_of(place["pid"])
        return found

    def per_batch_us(self) -> dict[str, float]:
        """By kind of role, all of that kind together."""
        (first, before), (last, after) = self.seen[1], self.seen[-1]
        batches = (last - first) / self.batch
        return {kind: 1e6 * (seconds - before.get(kind, 0.0)) / batches for kind, seconds in after.items()}


def seconds_of(pid: int) -> float:
    """Processor time of a process so far; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def run(trainers: int, runtime: str, step_ms: float, overrides: Sequence[str]) -> tuple[float, dict[str, float], float]:
    """Examples/s, microseconds of processor per batch and role, and AUC."""
    rows = trainers * STEPS * 512
    options = [f"data.rows={rows}", f"train.trainers={trainers}", f"train.emulate_step_ms={step_ms}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        config = load(None, [*TASK, f"cluster.runtime={runtime}", *options, *overrides])
        looks = Looks(out, config.train.batch_size)
        result = Job(config, out=out).run(on_frame=looks)
        assert result.test is not None
        return result.throughput.eps, looks.per_batch_us(), result.test.auc or 0.0


def main() -> None:
    """Runs each number of trainers and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--runtime", default="processes")
    parser.add_argument("--step-ms", type=float, default=400.0)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found = {}
    for trainers in arguments.trainers:
        found[trainers] = run(trainers, arguments.runtime, arguments.step_ms, arguments.overrides)
        print(trainers, found[trainers], file=sys.stderr, flush=True)
    first = min(found)
    one = found[first][0] / first
    kinds = ("trainer", "driver", "reader", "embedding", "dense")
    lines = []
    for trainers, (eps, costs, _) in found.items():
        others = sum(us for kind, us in costs.items() if kind != "trainer")
        share = others / (1e3 * arguments.step_ms)
        costed = [f"{costs.get(kind, 0.0):,.0f}" for kind in kinds]
        lines.append((str(trainers), f"{eps:,.0f}", f"{eps / (one * trainers):.3f}", *costed, f"{share:.2%}"))
    print("\n".join(describe()))
    print(f"runtime: {arguments.runtime}, steps of {arguments.step_ms:g} ms, threads here: {threading.active_count()}")
    print(table(["trainers", "examples/s", "of linear", *(f"{kind} µs" for kind in kinds), "others (derived)"], lines))
    print("computing is emulated, so that nothing is learnt: no AUC")


if __name__ == "__main__":
    main()
