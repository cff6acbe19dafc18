"""`kill -9` of single roles of a job of processes on one machine: how soon each is back, and what was lost.

    python benchmarks/restarts.py [--kills 12] [--seed 0] [key.path=value …]

One job of two trainers; every three to five seconds the process of a role, taken in turn, is killed (the one that
stands ready takes a second or two to load what it needs, and a kill in between waits for that). Seconds count from the
kill to the word that the role is at work again. At the end every row must have been trained exactly once, and the AUC
is compared with that of the same job undisturbed.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from shadowsync import Job, Result
from shadowsync.config import load
from shadowsync.report.files import read_events

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

ROLES = ("trainer-0", "embedding-0", "trainer-1", "dense-0", "reader-0")
QUIET = ["report.html=false", "report.tensorboard=false", "cluster.runtime=processes"]


def train(out: Path, options: list[str]) -> Result:
    """One run."""
    return Job(load(None, [*QUIET, *options]), out=out).run()


def back_again(out: Path, role: str, since: int) -> bool:
    """The role is at work again, by what was told after so many events."""
    return any(event.role == role and event.event == "restored" for event in read_events(out)[since:])


def kill(out: Path, role: str) -> float | None:
    """Kills the role's process; seconds until another one is at work, None if the job was over before."""
    places = json.loads((out / "roles.json").read_text())
    since, began = len(read_events(out)), time.monotonic()
    os.kill(places[role]["pid"], signal.SIGKILL)
    while not back_again(out, role, since):
        if (out / "result.json").exists() or time.monotonic() > began + 60:
            return None
        time.sleep(0.01)
    return time.monotonic() - began


def disturb(out: Path, kills: int, seed: int, found: dict[str, list[float]]) -> None:
    """Kills one role after the other while the job trains."""
    pauses = random.Random(seed)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.05)
    for number in range(kills):
        time.sleep(3 + 2 * pauses.random())
        role = ROLES[number % len(ROLES)]
        if (seconds := kill(out, role)) is None:
            return
        found[role].append(seconds)


def main() -> None:
    """Runs the job with kills and without, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {role: [] for role in ROLES}
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = train(Path(folder, "undisturbed"), arguments.overrides)
        out = Path(folder, "killed")
        killing = threading.Thread(target=disturb, args=(out, arguments.kills, arguments.seed, found))
        killing.start()
        killed = train(out, arguments.overrides)
        killing.join()
    print("\n".join(describe()))
    lines = [
        (role, str(len(seconds)), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}")
        for role, seconds in found.items()
        if seconds
    ]
    print(table(["role", "kills", "back after (median, s)", "longest"], lines))
    wanted = killed.data.train_samples * int(killed.config["data"]["epochs"])
    print(f"rows trained: {killed.data.trained_samples:,} of {wanted:,}")
    assert killed.test is not None
    assert undisturbed.test is not None
    print(f"test AUC: {killed.test.auc:.4f}, undisturbed {undisturbed.test.auc:.4f}")


if __name__ == "__main__":
    main()
