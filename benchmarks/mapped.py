"""Tables larger than memory: examples per second with a part of the rows in memory, over all of them in memory.

    python benchmarks/mapped.py [--gib 8] [--zipf 1.2 1.05] [--shares 0.25 0.125] [--rounds 3] [--seconds 40]
    python benchmarks/mapped.py --gib 2 --saved --beside 1 [...]               all rows come from the disk
    python benchmarks/mapped.py --gib 24 --only 0.125 --zipf 1.2 --rounds 1    more than this machine has

DLRM as in throughput.py on 26 tables of 16 floats, synthetic rows that do not repeat, batch 1,024. A row and its sum of
squares take 68 bytes. Each run is a process of its own, the variants take turns, and ratios are medians over the
rounds. What has a share in memory runs in a control group that may have so much and `--beside` GiB (for the processes,
the index of the rows, and pages of the file), where the machine lets this script make one (root); else the whole
machine's memory may hold pages of the file, and the table says so. No row is in memory when a run begins: in a new run
each is made when it is first looked up; with `--saved` a run goes on from one whose rows were saved, and reads them.

Beside it: how many pages the disk gives in a second, asked for as training asks, from a file that is not in memory, and
the examples per second that this bounds: a row that is not in memory costs the page that it is on, and the page of the
one whose place it takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shadowsync import Job
from shadowsync.memory.pages import expect_at_random, read_ahead
from shadowsync.memory.shared import unnamed_file
from shadowsync.report.files import read_frames

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, ratios, table

GIB = 1 << 30
FEATURES, ROW_BYTES = 26, 68
GROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
PAGE, ASKED = 4096, 2_000


def measure(share: float, zipf: float, rows: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Trains in this process; share 1 is all in memory."""
    start_from = first_run(arguments) if arguments.saved else None
    storage: Mapping[str, Any] = {}
    if share < 1:
        storage = {"storage": "mapped", "memory_gib": share * arguments.gib, "folder": arguments.folder}
    data = {"name": "synthetic", "rows": rows, "test_rows": 50_000, "zipf": zipf}
    config = {
        "data": {**data, "table_rows": table_rows(arguments)},
        "train": {"batch_size": 1024, "save_values": "int4"},  # one at the end, which nobody reads
        "embedding": {"servers": 1, **storage},
        "cluster": {"runtime": arguments.runtime},
        "report": {"html": False, "tensorboard": False, "every_s": 2.0},
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = Job(config, out=Path(folder) / "run", start_from=start_from).run()
        frames = read_frames(Path(folder) / "run")
    half = [frame.eps for frame in frames[len(frames) // 2 :] if frame.eps]
    found = {"eps": result.throughput.eps, "late": statistics.median(half or [0.0]), "auc": result.test.auc}
    if (stored := result.stored) is not None:
        first, last = frames[len(frames) // 2], frames[-1]
        missed = (last.stored["missed"] - first.stored["missed"]) / max(1, last.samples - first.samples)
        found |= {"missed": stored.missed / rows, "missed_late": missed, "hits": stored.hits}
        found |= {"read": stored.read_bytes / GIB, "written": stored.written_bytes / GIB}
    return found


def table_rows(arguments: argparse.Namespace) -> int:
    """Of each table."""
    return int(arguments.gib * GIB / FEATURES / ROW_BYTES)


def first_run(arguments: argparse.Namespace) -> Path:
    """The folder of a run that has saved all rows."""
    return Path(arguments.folder) / f"shadowsync-mapped-{arguments.gib:g}"


@contextmanager
def group(size: int) -> Iterator[Path | None]:
    """A control group that may have so much memory; None where none can be made."""
    for top, limit in GROUPS:
        place = Path(top) / f"shadowsync-{os.getpid()}"
        if not (Path(top) / "cgroup.procs").exists():
            continue
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            if (place / limit).exists():
                (place / limit).write_text(str(size))
                yield place
                return
        finally:
            place.rmdir()
    yield None


def apart(share: float, zipf: float, rows: int, arguments: argparse.Namespace) -> tuple[dict[str, float], bool]:
    """`measure` in a process of its own, and whether its memory was bounded."""
    words = [f"--{name}={getattr(arguments, name)}" for name in ("gib", "folder", "runtime")]
    words += ["--saved"] * arguments.saved
    command = [sys.executable, __file__, *words, "--one", str(share), str(zipf), str(rows)]
    size = int((share * arguments.gib + arguments.beside) * GIB)
    with group(size) if share < 1 else group(1 << 50) as place:

        def enter() -> None:
            if place is not None:
                (place / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=enter)
    if done.returncode:
        sys.exit(f"{share} {zipf}: {done.returncode} {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found, place is not None


def pages_per_second(folder: str) -> float:
    """Random pages of a file of 4 GiB that is not in memory."""
    size = 4 * GIB
    file = unnamed_file(Path(folder), size, "pages")
    noise = np.random.default_rng(0).bytes(1 << 24)
    handle = os.open(file.path, os.O_RDWR)
    try:
        for start in range(0, size, len(noise)):
            os.pwrite(handle, noise, start)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = file.take(size // 4, torch.float32).view(-1, PAGE // 4)
        expect_at_random(pages)
        draw, taken = torch.Generator().manual_seed(0), []
        for _ in range(20):
            asked = torch.randint(len(pages), (ASKED,), generator=draw)
            began = time.perf_counter()
            read_ahead(pages, asked)
            taken.append(time.perf_counter() - began)
    finally:
        os.close(handle)
        file.close()
    return ASKED / statistics.median(taken)


def save_all(arguments: argparse.Namespace) -> None:
    """Makes the run from which others go on."""
    data = {"name": "synthetic", "rows": 4096, "test_rows": 1, "table_rows": table_rows(arguments)}
    config = {"data": data, "report": {"html": False, "tensorboard": False}, "embedding": {"servers": 1}}
    Job(config, out=first_run(arguments)).run()


def compare(zipf: float, arguments: argparse.Namespace) -> None:
    """Runs the variants in turn and prints the table."""
    shares = [1.0, *arguments.shares] if arguments.only is None else [arguments.only]
    if arguments.saved and not first_run(arguments).exists():
        save_all(arguments)
    first, bounded = apart(shares[0], zipf, 200_000, arguments)
    rows = int(first["eps"] * arguments.seconds)
    runs: dict[str, list[dict[str, float]]] = {f"{share:g}": [] for share in shares}
    for _ in range(arguments.rounds):
        for share in shares:
            found, bounded = apart(share, zipf, rows, arguments)
            runs[f"{share:g}"].append(found)
            print(zipf, share, found, file=sys.stderr, flush=True)
    pages = pages_per_second(arguments.folder)
    base = f"{shares[0]:g}"
    relative = ratios({share: [each["eps"] for each in found] for share, found in runs.items()}, base)
    late = ratios({share: [each["late"] for each in found] for share, found in runs.items()}, base)
    lines = []
    for share, found in runs.items():
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        line = [share, f"{middle['eps']:,.0f}", f"{relative[share]:.2f}", f"{late[share]:.2f}", f"{middle['auc']:.4f}"]
        if "missed" in middle:
            bound = pages / (2 * middle["missed"])
            line += [f"{middle['missed']:.2f}, {middle['missed_late']:.2f}", f"{middle['hits']:.1%}"]
            line += [f"{middle['read']:.2f}"]
            line += [f"{middle['written']:.2f}", f"{bound:,.0f}"]
        lines.append(line + ["-"] * (10 - len(line)))
    where = "in a control group" if bounded else "pages of the file in all of the machine's memory"
    print(
        f"\nZipf {zipf}, {arguments.gib:g} GiB of rows, {rows:,} examples, {where}, medians of {arguments.rounds}; "
        f"{pages:,.0f} random pages/s of the disk\n"
    )
    header = [
        "in memory",
        "examples/s",
        "ratio",
        "2nd half",
        "test AUC",
        "missed/example, in 2nd half",
        "hits",
        "GiB read",
    ]
    print(table([*header, "GiB written", "disk's bound"], lines), flush=True)


def main() -> None:
    """Prints the machine and the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.2, 1.05])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.125])
    parser.add_argument("--only", type=float, help="this share, and nothing to compare it with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--beside", type=float, default=2.0)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--saved", action="store_true")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of a fast disk")
    arguments = parser.parse_args()
    if arguments.one:
        share, zipf, rows = arguments.one
        print(json.dumps(measure(float(share), float(zipf), int(rows), arguments)))
        return
    print("\n".join(describe()))
    for zipf in arguments.zipf:
        compare(zipf, arguments)


if __name__ == "__main__":
    main()
