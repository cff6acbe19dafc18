"""How long a step holds Python's interpreter lock, and so how far threads of one process, or processes, can go.

    pip install gilknocker
    python benchmarks/interpreter_lock.py [--batches 1024 512 128] [key.path=value …]

One trainer with one worker on the demo: in one process with everybody else, and as processes. `gilknocker` asks for
the lock of the trainer's process and of the driver's again and again and tells which share of the time somebody had it;
over the steps meanwhile, that is the time of the lock per step. (In one process it is that of all roles together.)

The speed-ups for more cores are derived, not measured, and are upper bounds, as memory and caches are left out: n cores
make n times what one makes, until a lock is held all the time. Threads share one lock; processes have one each, and all
of them need a little of the driver's.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clustered import in_sentences
from machine import describe, table

from shadowsync import Job
from shadowsync.config import load

ONE = ("train.trainers=1", "train.workers=1", "report.html=false", "report.tensorboard=false", "report.every_s=0.5")
CORES = (8, 16, 32, 64)
WARM = 200
"""Steps before the first look."""


def knocker() -> Any:
    """Not started; ends the script where it is not installed."""
    try:
        from gilknocker import KnockKnock  # noqa: PLC0415 for this script only
    except ImportError as error:
        sys.exit(f"this needs gilknocker ({error}): pip install gilknocker")
    return KnockKnock(polling_interval_micros=100, sampling_interval_micros=1_000, sleeping_interval_micros=1_000)


class Looks:
    """Called before each step of the trainer, wherever that is: what its process' lock does between two of them.

    `file` gets the share of the time and the steps' seconds, anew in every hundredth step.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._knocker: Any = None
        self._began = 0.0

    def __call__(self, rank: int, iteration: int) -> None:
        if iteration == WARM:
            self._knocker, self._began = knocker(), time.perf_counter()
            self._knocker.start()
        elif iteration > WARM and iteration % 100 == 0:
            seconds = (time.perf_counter() - self._began) / (iteration - WARM)
            self._file.write_text(f"{self._knocker.contention_metric} {seconds}")


@dataclass(frozen=True)
class Found:
    """Of one job: seconds of a step, and of the locks during it; the AUC that it reached."""

    step_s: float
    trainer_s: float
    driver_s: float
    auc: float


def run(runtime: str, batch: int, overrides: Sequence[str]) -> Found:
    """One job."""
    own = [*ONE, f"cluster.runtime={runtime}", f"train.batch_size={batch}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        file, driver = Path(folder) / "lock", knocker()
        driver.start()
        seen: list[float] = []

        def look(_: Any) -> None:
            if len(seen) == 2:
                driver.reset_contention_metric()
            seen.append(driver.contention_metric)

        result = Job(load(None, own), out=Path(folder) / "run", failures=Looks(file)).run(on_frame=look)
        driver.stop()
        share, step_s = map(float, file.read_text().split())
    assert result.test is not None
    near = runtime == "inprocess"
    return Found(step_s, share * step_s, share * step_s if near else seen[-2] * step_s, result.test.auc or 0.0)


def speed_up(cores: int, found: Found, threads: bool) -> float:
    """Upper bound of what so many cores make of one."""
    lock_s = found.trainer_s if threads else found.driver_s
    return min(cores, found.step_s / lock_s)


def main() -> None:
    """Runs and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 512, 128])
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    measured, derived = [], []
    for batch in arguments.batches:
        for runtime in ("inprocess", "processes"):
            found = run(runtime, batch, arguments.overrides)
            print(batch, runtime, found, file=sys.stderr, flush=True)
            locks = (found.trainer_s, *(() if runtime == "inprocess" else (found.driver_s,)))
            micros = [f"{1e6 * lock_s:,.0f}" for lock_s in locks]
            measured.append((str(batch), runtime, f"{1e3 * found.step_s:.2f}", *micros, *[""] * (2 - len(micros)),
                             f"{locks[0] / found.step_s:.1%}", f"{found.auc:.4f}"))  # fmt: skip
            bounds = [f"{speed_up(cores, found, runtime == 'inprocess'):.1f}" for cores in CORES]
            derived.append((str(batch), "threads" if runtime == "inprocess" else "processes", *bounds))
    print("\n".join(describe()))
    print(f"lock per step, measured; threads here: {threading.active_count()}")
    header = ["batch", "runtime", "step ms", "trainer's lock µs", "driver's lock µs", "of the step", "AUC"]
    print(table(header, measured))
    print("times the speed of one core, at the most; derived from the above")
    print(table(["batch", "workers are", *(f"{cores} cores" for cores in CORES)], derived))


if __name__ == "__main__":
    in_sentences(main)
