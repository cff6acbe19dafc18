"""`kill -9` at random moments of the demo, each followed by `--resume`, against the same run undisturbed.

    python benchmarks/kills.py [--kills 10] [--seed 0] [key.path=value …]

Every run is a `shadowsync train` of its own in a process of its own. After each kill the newest checkpoint must load,
and its reader's position must agree with its name; at the end every sample must have been trained exactly once since
the checkpoint that was gone on from, and the AUC is compared.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.report.result import Result, read_result

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

SAVE_EVERY_S = 0.7
START_UP_S = 2.5


@dataclass(frozen=True)
class Kill:
    """One kill: when, and what the newest checkpoint held afterwards."""

    after_s: float
    checkpoint: str
    samples: int
    skipped: int


def command(out: Path, resume: bool, options: Sequence[str]) -> list[str]:
    """The command of a run, or of going on with it."""
    where = ["--resume", str(out)] if resume else ["--out", str(out)]
    return [sys.executable, "-c", "from shadowsync.cli import main; main()", "train", *where, *options]


def undisturbed(out: Path, options: Sequence[str]) -> tuple[Result, float]:
    """Trains without a kill; the result and the seconds it took."""
    start = time.monotonic()
    subprocess.run(command(out, False, options), check=True, stdout=subprocess.DEVNULL)
    return read_result(out), time.monotonic() - start


def kill_after(out: Path, seconds: float, options: Sequence[str]) -> Kill | None:
    """Starts or resumes the run and kills it; None if it ended before."""
    resume = bool(CheckpointStore(str(out / "checkpoints")).names())
    if not resume and out.exists():
        subprocess.run(["rm", "-rf", str(out)], check=True)  # killed before its first checkpoint: a fresh start
    process = subprocess.Popen(command(out, resume, options), stdout=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return inspect(out, seconds)
    if process.returncode:
        sys.exit(f"a run ended with status {process.returncode}")
    return None


def inspect(out: Path, seconds: float) -> Kill:
    """Loads the newest checkpoint after a kill, every byte of it."""
    store = CheckpointStore(str(out / "checkpoints"))
    if not store.names():
        return Kill(seconds, "none yet", 0, 0)
    loaded = store.load()
    trained = loaded.extra["recorder"]["total"]["samples"]
    if trained != loaded.samples:
        sys.exit(f"{loaded.name} counts {trained} samples")
    return Kill(seconds, loaded.name, loaded.samples, len(loaded.skipped))


def main() -> None:
    """Prints each kill and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    options = [f"train.save_every_s={SAVE_EVERY_S}", *arguments.options]
    moments = random.Random(arguments.seed)
    print("\n".join(describe()))
    with tempfile.TemporaryDirectory() as folder:
        clean, seconds = undisturbed(Path(folder) / "clean", options)
        kills: list[Kill] = []
        while len(kills) < arguments.kills:
            share = (seconds - START_UP_S) / arguments.kills
            found = kill_after(Path(folder) / "killed", START_UP_S + moments.uniform(0.2, 1.8) * share, options)
            if found is None:
                break
            kills.append(found)
        out = Path(folder) / "killed"
        resume = ["--resume", str(out)] if CheckpointStore(str(out / "checkpoints")).names() else ["--out", str(out)]
        if not (out / "result.json").exists():
            last = [sys.executable, "-c", "from shadowsync.cli import main; main()", "train", *resume, *options]
            subprocess.run(last, check=True, stdout=subprocess.DEVNULL)
        killed = read_result(out)
    print(f"\n{len(kills)} kills\n")
    rows = [(f"{kill.after_s:.2f}", kill.checkpoint, f"{kill.samples:,}", kill.skipped) for kill in kills]
    print(table(["killed after s", "newest checkpoint", "samples", "damaged"], rows), "\n")
    print(table(["", "trained", "test AUC", "test NE"], [_row("undisturbed", clean), _row("killed", killed)]))


def _row(name: str, result: Result) -> tuple[str, str, str, str]:
    assert result.test is not None
    trained = f"{result.data.trained_samples:,} of {result.data.train_samples:,}"
    return name, trained, f"{result.test.auc:.4f}", f"{result.test.ne:.4f}"


if __name__ == "__main__":
    main()
