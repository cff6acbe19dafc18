"""Averages of a part of the parameters, one part after the other, against a threshold that sends as many bytes.

    python benchmarks/partial_averages.py --out FOLDER [--seeds 5] [--parts 10 30] [--rows 200000]
    … --report      prints the table of what has been run so far

The two tasks of `quality.py`, batches of 128, four trainers in one process, model averaging in the foreground after
every iteration (390 times), so that all send equally often and every part several times; and in the background, as
often as it comes, where what is averaged is late, too. `keep` is what makes a threshold with its positions as long as a
part without. A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import shadowsync.compression
from shadowsync import Job

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, run_and_report
from machine import commit, difference, table, with_interval
from quality import TASKS
from two_sites import keep_of

shadowsync.compression.__path__.append(str(Path(__file__).parent / "codecs"))

PLAIN = "all of it"
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "foreground": {"schedule": "every_k", "k": 1},
    "background": {"schedule": "background"},
}


def ways(parts: Sequence[int]) -> Iterator[tuple[str, int, Any]]:
    """Names, numbers of parts and codecs."""
    yield PLAIN, 1, "plain"
    for count in parts:
        yield "a part", count, {"name": "partial", "parts": count}
        yield "the largest", count, {"name": "threshold", "keep": keep_of(1 / count), "refresh": 1}


def run(task: str, rows: int, seed: int, schedule: str, codec: Any) -> dict[str, Any]:
    """One run's figures."""
    given = TASKS[task]
    config = {
        **given,
        "data": {**given["data"], "rows": rows},
        "train": {"trainers": 4, "workers": 1, "batch_size": 128, "seed": seed},
        "cluster": {"runtime": "inprocess"},
        "sync": {"method": "ma", **SCHEDULES[schedule]},
        "compression": {"dense": codec},
        "report": {"tensorboard": False, "html": False, "every_s": 5.0},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Job(config, out=Path(folder) / "run").run()
    assert result.test is not None
    return {
        "commit": commit(),
        "auc": result.test.auc,
        "ne": result.test.ne,
        "sent": result.wire.bytes["dense"],
        "gap": result.sync.average_gap,
    }


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, seed by seed."""
    for seed, task, schedule in itertools.product(range(given.seeds), TASKS, SCHEDULES):
        for way, parts, codec in ways(given.parts):
            name = f"{task}, {way} of {parts}, {'background, ' if schedule == 'background' else ''}seed {seed}"
            if kept.read(name) is None:
                told = {"task": task, "schedule": schedule, "way": way, "parts": parts, "seed": seed}
                kept.write(name, {**told, **run(task, given.rows, seed, schedule, codec)})
                print(name, file=sys.stderr, flush=True)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means over the seeds, and by how much a part is above the largest."""
    found: dict[tuple[str, str, int, str], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        key = row["task"], row.get("schedule", "foreground"), row["parts"], row["way"]
        found.setdefault(key, {})[row["seed"]] = row
    lines = []
    for key, runs in sorted(
        found.items(), key=lambda item: (item[0][0] != "demo", item[0][1] == "background", *item[0])
    ):
        task, schedule, parts, way = key
        other = found.get((*key[:3], "the largest"), {}) if way == "a part" else {}
        lines.append(
            (
                *(task, schedule, way if parts == 1 else f"{way}, 1/{parts}"),
                f"{statistics.fmean(row['sent'] for row in runs.values()) / 1e6:.1f}",
                f"{statistics.fmean(row.get('gap', 1.0) for row in runs.values()):.1f}",  # after every iteration: 1
                *(with_interval([row[key] for row in runs.values()]) for key in ("auc", "ne")),
                difference(runs, other),
            )
        )
    return table(["task", "schedule", "what crosses", "MB", "gap", "AUC", "NE", "a part - the largest"], lines)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--rows", type=int, default=200_000)
    run_and_report(parser, run_all, report)


if __name__ == "__main__":
    main()
