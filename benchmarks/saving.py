"""What saving costs: how fast rows reach the disk, how fast training goes on meanwhile, and what following rows costs.

    python benchmarks/saving.py                   all five
    python benchmarks/saving.py disk              33.8 M rows × 16 copied from the live tables into the store, as a job
                                                  does, against the disk's own sequential speed, in turn
    python benchmarks/saving.py beside            training while one save follows the other, against training alone
    python benchmarks/saving.py trackers          training with each priority's tracker, against training without
    python benchmarks/saving.py values            bytes of a day of 24 saves of what changed, in each value of
                                                  `train.save_values`, against 24 whole ones in fp32
    python benchmarks/saving.py restores          test AUC of a run that is stopped and resumed ten times, in each of
                                                  them, against the run that never was

All on the synthetic source in this process: two workers, 26 tables of Criteo Kaggle's sizes or `--table-rows`.
The disk's speed is that of random bytes from one buffer in files of the store's size, each flushed with an `fsync`:
written directly where the file system lets one (`disk`, the faster way and the yardstick), and through the page cache.
The processor's time is the writing thread's; what the kernel does elsewhere (write-back) is not in it. Each training
run is a process of its own, the variants take turns, and ratios are medians over the rounds. Ids repeat from memory, so
the AUC beside the speed is one of data seen before: it says that all variants learn alike, not how well.

In `values` and `restores` no row is seen twice. The saves of a day hold the very same rows in each kind, and are
rewritten when a job would; bytes are those of the files, rewritten ones too, without the dense part (a few MB). In
`restores` one worker trains, so that a run which is never stopped is the same each time; each round has another seed.

    [--rounds 5] [--seconds 10] [--batch 1024] [--folder DIR of the disk] [--table-rows 200000]
    [--values fp32] for beside and trackers; [--rows] of the day, and of each of the runs that are resumed
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shadowsync import Interrupted, Job
from shadowsync.checkpoint.files import write_file
from shadowsync.checkpoint.loading import written_rows
from shadowsync.checkpoint.saver import NICENESS
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import PIECE_BYTES, CheckpointStore
from shadowsync.checkpoint.values import row_values
from shadowsync.choices import choose_all
from shadowsync.cluster.context import Own
from shadowsync.cluster.session import Session
from shadowsync.config import parse
from shadowsync.embedding.table import Rows, RowSet
from shadowsync.memory.pages import keep_freed_memory
from shadowsync.recovery_controller import Chain, rows_bytes
from shadowsync.runtime.inprocess import InProcess

sys.path.insert(0, str(Path(__file__).parent))
from machine import answer_apart, describe, ratios, table
from throughput import KAGGLE_ROWS, REPEATED_BLOCKS

CHUNK_BYTES = 4 << 20
WHOLE_EVERY = 16
TRACKERS = ("none", "all", "scar", "mfu", "ssu")
SAVERS = ("not saving", "all", "scar", "mfu", "ssu")
VALUES = ("fp32", "bf16", "int8", "int4")
SAVES = 24
"""Of a day."""
RESTORES = 10


@dataclass(frozen=True)
class Measured:
    """One training run.

    Attributes:
        eps: examples per second.
        auc: over the last window of training.
        saves: checkpoints written meanwhile.
        gb: their rows, in 10⁹ bytes.
        save_s: seconds in which one was under way.
    """

    eps: float
    auc: float
    saves: int
    gb: float
    save_s: float


def config(priority: str, arguments: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Of a session whose rows are tracked by that priority; `none` for not at all."""
    recovery = {"mode": "none"} if priority == "none" else {"mode": "partial", "priority": priority}
    return {
        "data": {
            "name": "synthetic",
            "rows": rows,
            "test_rows": 0,
            "table_rows": arguments.table_rows or KAGGLE_ROWS,
            "repeat_blocks": REPEATED_BLOCKS,
        },
        "train": {
            "batch_size": arguments.batch,
            "trainers": 1,
            "workers": 2,
            "save_values": arguments.values,
        },
        "sync": {"method": "none"},
        "recovery": recovery,
    }


@contextmanager
def session(values: dict[str, Any]) -> Iterator[Session]:
    """A session with its source."""
    parsed = parse(values)
    choices = choose_all(parsed, own_model=False)
    source = choices.source.open("train", "error")
    assert source is not None
    keep_freed_memory()
    torch.set_num_threads(1)
    with (
        closing(source),
        closing(Session(parsed, choices, Own(), source, None, None, InProcess, lambda _: nullcontext())) as made,
    ):
        yield made


def snapshot(
    made: Session, rows: Sequence[Rows | RowSet], parent: str | None = None, complete: bool = True
) -> Snapshot:
    """The rows alone: the dense part is a few MB."""
    return Snapshot({}, made.reader.trained, tuple(rows), {}, {}, {}, {}, parent, complete)


def byte_count(rows: Sequence[Rows | RowSet]) -> int:
    """Of rows and their numbers."""
    numbers = sum(part.numbers.nbytes for part in rows if isinstance(part, RowSet))
    return numbers + sum(tensor.nbytes for part in rows for tensor in part.tensors.values())


# --- the disk --------------------------------------------------------------------------------------------------------


def write_cached(path: Path, chunks: Iterable[memoryview]) -> None:
    """Writes and flushes a file through the page cache."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def write_plainly(folder: Path, size: int, write: Callable[[Path, Iterable[memoryview]], None]) -> None:
    """Writes so many bytes in files and chunks of the store's sizes."""
    chunk = memoryview(os.urandom(CHUNK_BYTES))
    for number, start in enumerate(range(0, size, PIECE_BYTES)):
        stop = min(start + PIECE_BYTES, size)
        write(folder / f"plain-{number}", (chunk[: stop - at] for at in range(start, stop, CHUNK_BYTES)))


def save_all(made: Session, root: Path) -> None:
    """A whole checkpoint of the live tables."""
    CheckpointStore(str(root)).save(snapshot(made, made.rows_beside()))


def measure_disk(arguments: argparse.Namespace) -> None:
    """Whole checkpoints of all tables in turn with plain files of as many bytes."""
    speeds: dict[str, list[float]] = {"disk": [], "page cache": [], "save": []}
    cpu: dict[str, list[float]] = {what: [] for what in speeds}
    with (
        session(config("all", arguments, arguments.batch)) as made,
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
    ):
        size = byte_count(made.rows_beside())
        ways: dict[str, Callable[[Path], None]] = {
            "disk": lambda folder: write_plainly(folder, size, write_file),
            "page cache": lambda folder: write_plainly(folder, size, write_cached),
            "save": lambda folder: save_all(made, folder),
        }
        for number in range(arguments.rounds):
            for what, way in ways.items():
                folder = Path(name) / f"{what}-{number}"
                folder.mkdir()
                began, began_cpu = time.perf_counter(), time.thread_time()
                way(folder)
                speeds[what].append(size / (time.perf_counter() - began) / 1e9)
                cpu[what].append((time.thread_time() - began_cpu) / size * 1e9)
                remove(folder)
            print({what: round(found[-1], 3) for what, found in speeds.items()}, file=sys.stderr, flush=True)
    relative = ratios(speeds, "disk")
    lines = [
        (what, statistics.median(found), f"{relative[what]:.0%}", f"{statistics.median(cpu[what]):.3f}")
        for what, found in speeds.items()
    ]
    print(f"\nwhole checkpoints of {size / 1e9:.2f} GB, medians of {arguments.rounds} rounds\n")
    print(table(["", "GB/s", "over the disk", "CPU s/GB"], lines))


def remove(folder: Path) -> None:
    """A folder with all that is in it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


# --- training --------------------------------------------------------------------------------------------------------


class Saver:
    """Saves one checkpoint after the other in a thread of its own: a whole one, then deltas, and so on."""

    def __init__(self, made: Session, store: CheckpointStore) -> None:
        self.saves, self.bytes, self.seconds = 0, 0, 0.0
        self._made, self._store = made, store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Saver":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        torch.set_num_threads(1)
        parent: str | None = None
        while not self._ended.is_set():
            began = time.perf_counter()
            whole = parent is None or self.saves % WHOLE_EVERY == 0
            rows = self._made.rows_beside() if whole else self._made.changed_rows(self.saves % 8 == 0)
            exact = self._made.choices.recovery.priority == "all"
            parent = name = self._store.save(snapshot(self._made, rows, None if whole else parent, whole or exact))
            with written_rows(partial(self._store.opened, name)) as written:
                self._made.rows_saved(rows, written)
            self.saves += 1
            self.bytes += byte_count(rows)
            self.seconds += time.perf_counter() - began


def train(made: Session) -> None:
    """To the end."""
    made.start()
    while made.alive():
        made.reap()
        made.ended.wait(0.25)
        made.ended.clear()
    made.finish()


def measure_training(variant: str, saving: bool, rows: int, arguments: argparse.Namespace) -> Measured:
    """Trains in this process; `variant` is a priority, or none."""
    with session(config(variant, arguments, rows)) as made, tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        with made.recorder:
            if saving:
                store = CheckpointStore(str(Path(name) / "store"), values=row_values(arguments.values))
                with Saver(made, store) as saver:
                    train(made)
                saves, size, seconds = saver.saves, saver.bytes, saver.seconds
            else:
                train(made)
                saves, size, seconds = 0, 0, 0.0
        frame = made.recorder.frame(made.counts(saves), made.wire_totals(), made.aggregation, ended=True)
        auc = frame.auc if frame.auc is not None else float("nan")
        return Measured(made.recorder.speed().eps, auc, saves, size / 1e9, seconds)


def measure_apart(variant: str, saving: bool, rows: int, arguments: argparse.Namespace) -> Measured:
    """`measure_training` in a process of its own."""
    words = ["--one", variant, str(int(saving)), str(rows), "--batch", str(arguments.batch)]
    words += ["--folder", arguments.folder] if arguments.folder else []
    words += ["--table-rows", str(arguments.table_rows)] if arguments.table_rows else []
    words += ["--values", arguments.values]
    return Measured(**answer_apart(__file__, *words))


def compare(
    title: str, variants: Sequence[str], measure: Callable[[str, int], Measured], arguments: argparse.Namespace
) -> None:
    """Runs the variants in turn and prints a table; the first one is the base."""
    base = variants[0]
    speed = measure(base, 20_000).eps  # warms the disk and finds the length
    rows = int(max(20_000, speed * arguments.seconds))
    runs: dict[str, list[Measured]] = {variant: [] for variant in variants}
    for _ in range(arguments.rounds):
        for variant in variants:
            runs[variant].append(measure(variant, rows))
            print(variant, runs[variant][-1], file=sys.stderr, flush=True)
    relative = ratios({variant: [m.eps for m in found] for variant, found in runs.items()}, base)
    lines = [
        (
            variant,
            f"{statistics.median(m.eps for m in found):,.0f}",
            f"{relative[variant]:.3f}",
            f"{statistics.median(m.auc for m in found):.4f}",
            f"{statistics.mean(m.saves for m in found):.1f}",
            f"{statistics.mean(m.gb for m in found):.2f}",
            f"{statistics.mean(m.save_s for m in found):.1f}",
        )
        for variant, found in runs.items()
    ]
    print(f"\n{title}, batch {arguments.batch}, {rows:,} samples, medians of {arguments.rounds} rounds\n")
    print(table(["", "examples/s", f"over {base}", "AUC so far", "saves", "GB", "s saving"], lines))


def measure_beside(arguments: argparse.Namespace) -> None:
    """Training while it is saved, by each priority, over training with the same tracker that is not saved."""
    for priority in arguments.priorities:
        variants = ("not saving", "saving")
        compare(
            f"saving without pause, priority {priority}",
            variants,
            lambda variant, rows, p=priority: measure_apart(p, variant == "saving", rows, arguments),
            arguments,
        )


def measure_trackers(arguments: argparse.Namespace) -> None:
    """Training with each tracker, nothing saved."""
    compare("trackers", TRACKERS, lambda variant, rows: measure_apart(variant, False, rows, arguments), arguments)


# --- rows in fewer bytes ---------------------------------------------------------------------------------------------


def unseen(priority: str, arguments: argparse.Namespace, rows: int, **data: Any) -> dict[str, Any]:
    """As `config`, without a row that comes again."""
    values = config(priority, arguments, rows)
    return {**values, "data": {**values["data"], "repeat_blocks": 0, **data}}


def wait_for(made: Session, samples: int) -> None:
    """Until so many are trained."""
    while made.alive() and made.reader.trained < samples:
        made.reap()
        made.ended.wait(0.02)
        made.ended.clear()


def measure_values(arguments: argparse.Namespace) -> None:
    """A day of saves of what changed, in each kind; the first is of all rows, and long chains are rewritten."""
    rows = arguments.rows or 2_400_000
    written, whole, chain = dict.fromkeys(VALUES, 0), 0, Chain()
    with (
        session(unseen("all", arguments, rows)) as made,
        made.recorder,
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
    ):
        stores = {kind: CheckpointStore(f"{name}/{kind}", 1, row_values(kind)) for kind in VALUES}
        parents: dict[str, str | None] = dict.fromkeys(VALUES)

        def size_of(kind: str, checkpoint: str) -> int:
            return sum(path.stat().st_size for path in (Path(name) / kind / checkpoint).iterdir())

        made.start()
        for number in range(1, SAVES + 1):
            wait_for(made, rows * number // SAVES)
            with made.standing_still():
                parts: Sequence[Rows | RowSet] = made.changed_rows(end_of_round=True)
                delta = number > 1 and chain.takes(rows_bytes(parts))
                parts = parts if delta else made.rows_beside()
                for kind, store in stores.items():
                    parents[kind] = saved = store.save(snapshot(made, parts, parents[kind] if delta else None))
                    written[kind] += size_of(kind, saved)
                whole = whole or written["fp32"]
                (chain.delta if delta else chain.whole)(rows_bytes(parts))
                with written_rows(partial(stores["fp32"].opened, parents["fp32"])) as read:
                    made.rows_saved(parts, read)
                if chain.is_long:
                    for kind, store in stores.items():
                        parents[kind] = saved = store.compact(parents[kind] or "")
                        written[kind] += size_of(kind, saved)
                    chain.rewritten()
            print(f"save {number}", {kind: size / 1e9 for kind, size in written.items()}, file=sys.stderr, flush=True)
        made.finish()
    ways = {"fp32, whole each time": SAVES * whole, **{f"{kind}, what changed": size for kind, size in written.items()}}
    lines = [(way, f"{size / 1e9:.3f}", f"{SAVES * whole / size:.1f}") for way, size in ways.items()]
    print(f"\na day of {SAVES} saves, one each {rows // SAVES:,} samples\n")
    print(table(["", "GB", "times fewer"], lines))


def stopping(after: int, batch: int) -> Callable[[int, int], None]:
    """Called before each step: asks the run to stop when so many samples are trained by its one worker."""
    asked = threading.Event()

    def look(_: int, iteration: int) -> None:
        if iteration * batch >= after and not asked.is_set():
            asked.set()
            signal.raise_signal(signal.SIGTERM)

    return look


def auc_of(values: str, restores: int, seed: int, arguments: argparse.Namespace) -> float:
    """Test AUC of a run that was stopped and resumed so many times."""
    rows = arguments.rows or 1_000_000
    given = unseen("none", arguments, rows, test_rows=400_000, table_rows=arguments.table_rows or 100_000)
    # kernels are timed when a job starts, and two do not round alike
    exact = {"precision": "fp32", "kernels": "torch"}
    given["train"] |= {"workers": 1, "seed": seed, "save_values": values, **exact}
    given |= {"cluster": {"runtime": "inprocess"}, "report": {"html": False, "tensorboard": False}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        out, resume, trained = Path(name) / "run", None, 0
        for number in range(1, restores + 1):
            stop = stopping(rows * number // (restores + 1) - trained, arguments.batch)
            try:
                Job(given, out=out, resume=resume, failures=stop).run(progress=False)
            except Interrupted:
                resume, trained = out, CheckpointStore(str(out / "checkpoints")).open().samples
            else:
                sys.exit(f"the run ended before it was stopped {number} times: give more --rows")
        result = Job(given, out=out, resume=resume).run(progress=False)
    assert result.test is not None
    assert result.test.auc is not None
    return result.test.auc


def measure_restores(arguments: argparse.Namespace) -> None:
    """Ten resumes in each kind against none; those in fp32 show what the resumes alone do."""
    ways = {"never": ("fp32", 0), **{f"{RESTORES} times, {kind}": (kind, RESTORES) for kind in VALUES}}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(arguments.rounds):
        for way, (kind, restores) in ways.items():
            found[way].append(auc_of(kind, restores, seed, arguments))
            print(seed, way, found[way][-1], file=sys.stderr, flush=True)
    lines = []
    for way, aucs in found.items():
        apart = [auc - never for auc, never in zip(aucs, found["never"], strict=True)]
        lines.append((way, f"{statistics.mean(aucs):.5f}", f"{statistics.mean(apart):+.5f}", f"{min(apart):+.5f}"))
    print(f"\nstopped and resumed, {arguments.rounds} seeds\n")
    print(table(["", "test AUC", "over never", "worst"], lines))


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "disk": measure_disk,
    "beside": measure_beside,
    "trackers": measure_trackers,
    "values": measure_values,
    "restores": measure_restores,
}


def main() -> None:
    """Prints the machine and what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--folder")
    parser.add_argument("--table-rows", type=int)
    parser.add_argument("--values", choices=VALUES, default="fp32")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--priorities", nargs="+", default=["all", "mfu"], choices=TRACKERS[1:])
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if arguments.one:
        variant, saving, rows = arguments.one
        print(json.dumps(asdict(measure_training(variant, bool(int(saving)), int(rows), arguments))))
        return
    print("\n".join(describe()))
    for part in arguments.parts or PARTS:
        PARTS[part](arguments)


if __name__ == "__main__":
    main()
