"""Dynamic tables against hashing into as many rows: test AUC, speed, and their rows after kills and moves.

    python benchmarks/dynamic_ids.py quality [--seeds 3] [--shares 1.0 0.5 0.25 0.1] [--tasks demo stream]
    python benchmarks/dynamic_ids.py speed [--rounds 5] [--batch 1024]
    python benchmarks/dynamic_ids.py moves [--kills 10]
    python benchmarks/dynamic_ids.py roles [--kills 10]

quality: the demo's ids without its counts of the past, and a stream in the order of time, in which new items keep
arriving and old ones are shown no more; the test rows come after the others. Each feature of many ids has rows for a
share of its distinct training ids: hashed (`hash`), or for those that come often (`lfu`) or lately (`lru`). `own` is a
table with a row for each. speed: 26 features in turn with 200,000 rows each, dynamic with room for all ids, and dynamic
with 4,096 rows that they fight for; nearly all ids of a job of some seconds are new in its first half, as they are in
the first minutes of a long one. moves: a job whose ids compete for rows is killed with `kill -9` again and again and
goes on in another number of servers each time; whose row each is, how often it was looked up, and its numbers are
compared with those of a job that nobody disturbed. roles: single processes of such a job are killed while it trains; no
key may have two rows, none may be where it is not looked up, and where there is room for all of them every id of the
training rows has its row.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from shadowsync import Job, Trained
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.data.completejourney import CompleteJourney
from shadowsync.embedding.keys import KEY_BYTES, LOWEST, NOBODY, hashes_of, salt_of, sets_of
from shadowsync.embedding.table import WAYS
from shadowsync.report.files import read_events, read_frames

sys.path.insert(0, str(Path(__file__).parent))
from machine import answer_apart, describe, ratios, table
from throughput import REPEATED_BLOCKS, TABLE_ROWS

QUIET = {"report": {"html": False, "tensorboard": False, "every_s": 0.5}}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "own": {"kind": "as_is"},
    "hash": {"kind": "hash"},
    "lfu": {"kind": "dynamic", "evict": "lfu"},
    "lru": {"kind": "dynamic", "evict": "lru"},
    "lfu, from the 1st look-up on": {"kind": "dynamic", "evict": "lfu", "admit": 1},
}
MANY = 1_000  # distinct ids of a feature that is made smaller


# --- quality ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Training and test rows in files; `rows` of each feature if every id has its own, and the rest of the options."""

    folder: Path
    rows: Mapping[str, int]
    options: Mapping[str, Any]

    def distinct(self) -> dict[str, int]:
        """Ids of the training rows, of each feature that has many."""
        seen = pl.scan_parquet(self.folder / "train.parquet").select(pl.col(list(self.rows)).explode().n_unique())
        return {name: count for name, (count,) in seen.collect().to_dict().items() if count >= MANY}


def demo(_: Path) -> Task:
    """The demo, of which a model gets the ids alone."""
    source = CompleteJourney(history=False)
    assert source.open("train", "error") is not None  # is prepared
    columns = json.loads((source.folder() / "manifest.json").read_text())["columns"]
    rows = {name: size for name, size in columns["rows"].items() if name != "recent_categories"}
    return Task(source.folder(), rows, {})


def stream(folder: Path, rows: int = 600_000, alive: int = 4_000, items: int = 40_000) -> Task:
    """Clicks of 5,000 users on items of which some are shown at a time, popular ones more often."""
    draw = np.random.default_rng(0)
    user_like, item_like = draw.normal(0, 1.0, 5_000), draw.normal(0, 1.5, items)
    user = np.minimum(draw.zipf(1.2, rows) - 1, 4_999)
    first = np.arange(rows) * (items - alive) // rows
    item = first + draw.permutation(alive)[np.minimum(draw.zipf(1.1, rows) - 1, alive - 1)] % alive
    popular = draw.permutation(items)
    item = popular[np.minimum(item, items - 1)]  # numbers say nothing about age
    label = (user_like[user] + item_like[item] - 1 + draw.logistic(size=rows) > 0).astype(np.int64)
    frame = pl.DataFrame({"label": label, "user": user, "item": item})
    cut = rows * 9 // 10
    frame[:cut].write_parquet(folder / "train.parquet", row_group_size=16_384)
    frame[cut:].write_parquet(folder / "test.parquet", row_group_size=16_384)
    return Task(folder, {"user": 5_000, "item": items}, {"shuffle": "within=8192"})


# a fifth of the items that are shown while the test rows are made have come after the training rows
TASKS: Mapping[str, Callable[[Path], Task]] = {"demo": demo, "stream": partial(stream, alive=8_000, items=24_000)}


def train(task: Task, kind: str, share: float, seed: int, out: Path) -> float:
    """The test AUC."""
    columns: dict[str, Any] = {name: {"kind": "as_is", "rows": rows} for name, rows in task.rows.items()}
    for name, count in task.distinct().items():
        size = {"own": "rows", "hash": "rows"}.get(kind, "capacity")
        columns[name] = {**KINDS[kind], size: task.rows[name] if kind == "own" else max(16, int(share * count))}
    path = {"path": str(task.folder / "train.parquet"), "test_path": str(task.folder / "test.parquet")}
    config = {
        "data": {"name": "parquet", **path, "columns": columns, **task.options},
        "train": {"trainers": 1, "workers": 1, "seed": seed},
        "sync": {"method": "none"},
        **QUIET,
    }
    result = Job(config, out=out).run()
    assert result.test is not None
    assert result.test.auc is not None
    return result.test.auc


def quality(arguments: argparse.Namespace) -> None:
    """Prints a table per task."""
    for name in arguments.tasks:
        found: dict[tuple[str, float], list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            task = TASKS[name](Path(folder))
            runs = [("own", 1.0), *((kind, share) for share in arguments.shares for kind in list(KINDS)[1:])]
            for seed in range(arguments.seeds):
                for kind, share in runs:
                    auc = train(task, kind, share, seed, Path(folder, f"{kind} {share} {seed}"))
                    found.setdefault((kind, share), []).append(auc)
                    print(name, kind, share, seed, f"{auc:.4f}", file=sys.stderr, flush=True)
            distinct = task.distinct()
        print(f"\n{name}: made smaller: " + ", ".join(f"{key} ({count:,} ids)" for key, count in distinct.items()))
        own = found["own", 1.0]
        print(f"test AUC with a row for each id: {statistics.mean(own):.4f}; means of {arguments.seeds} seeds, and the")
        print("least and most by which a seed is above the same one hashed\n")
        lines = []
        for share in arguments.shares:
            cells = [f"{share:.0%}", f"{statistics.mean(found['hash', share]):.4f}"]
            for kind in list(KINDS)[2:]:
                over = [one - other for one, other in zip(found[kind, share], found["hash", share], strict=True)]
                cells.append(f"{statistics.mean(found[kind, share]):.4f} ({min(over):+.4f} … {max(over):+.4f})")
            lines.append(cells)
        print(table(["rows of the ids", *list(KINDS)[1:]], lines))


# --- speed -----------------------------------------------------------------------------------------------------------

SIZES: Mapping[str, Mapping[str, Any]] = {
    "fixed": {"rows": TABLE_ROWS},
    "dynamic": {"ids": "dynamic", "capacity": TABLE_ROWS},
    "dynamic, from the 1st look-up on": {"ids": "dynamic", "capacity": TABLE_ROWS, "admit": 1},
    "dynamic, full": {"ids": "dynamic", "capacity": 4_096},
}


def measure(variant: str, batch: int, rows: int) -> dict[str, float]:
    """Examples/s and the AUC so far of a job on rows that repeat, as in throughput.py; ids that came and went."""
    repeated = {"table_rows": TABLE_ROWS, "repeat_blocks": REPEATED_BLOCKS}
    names = [f"c{number}" for number in range(1, 27)]
    config = {
        "data": {"name": "synthetic", "rows": rows, "test_rows": 0, **repeated},
        "embedding": {"tables": [{"name": name, "features": [name], "dim": 16, **SIZES[variant]} for name in names]},
        "train": {"batch_size": batch},
        **QUIET,
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Job(config, out=Path(folder) / "run").run()
        frames = [(frame.seconds, frame.samples) for frame in read_frames(Path(folder) / "run")]
    assert result.train is not None
    assert result.train.auc is not None
    keys = result.keys
    told = {} if keys is None else {"keys": keys.keys, "evicted": keys.evicted}
    half = next((frame for frame in frames[:-1] if frame[1] >= rows / 2), (0.0, 0))  # all of it, where it is that short
    late = (frames[-1][1] - half[1]) / (frames[-1][0] - half[0])
    return {"eps": result.throughput.eps, "late": late, "auc": result.train.auc, **told}


def speed(arguments: argparse.Namespace) -> None:
    """Prints the table."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in SIZES}
    for number in range(arguments.rounds + 1):
        for variant in SIZES:
            rows = 40_000 if not number else int(runs["fixed"][0]["eps"] * arguments.seconds)
            found = answer_apart(__file__, "one", variant, str(arguments.batch), str(rows))
            runs[variant].append(found)
            print(variant, found, file=sys.stderr, flush=True)
    measured = {variant: found[1:] for variant, found in runs.items()}  # the first found the length
    relative, late = (
        ratios({variant: [each[name] for each in found] for variant, found in measured.items()}, "fixed")
        for name in ("eps", "late")
    )
    both = ["of fixed", "of the second half", "of fixed"]
    header = ["tables", "examples/s", *both, "AUC of rows seen before", "ids with a row", "evicted"]
    lines = []
    for variant, found in measured.items():
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        last = [f"{middle[name]:,.0f}" if name in middle else "-" for name in ("keys", "evicted")]
        first = [f"{middle['eps']:,.0f}", f"{relative[variant]:.2f}"]
        second = [f"{middle['late']:,.0f}", f"{late[variant]:.2f}"]
        lines.append([variant, *first, *second, f"{middle['auc']:.4f}", *last])
    print(f"\nbatch {arguments.batch:,}, medians of {arguments.rounds} rounds; beside a row {KEY_BYTES} bytes\n")
    print(table(header, lines))


# --- whose row each is -----------------------------------------------------------------------------------------------

TIGHT = {"user": 2_000, "item": 4_000}


def owners(out: Path) -> dict[str, dict[int, bytes]]:
    """Of each table, each key with all that is kept of its row; says what is wrong with them."""
    found: dict[str, dict[int, bytes]] = {}
    for rows in Trained(out).server.state():
        keys = rows.tensors["key"].numpy() ^ NOBODY
        taken = np.flatnonzero(keys >= LOWEST)
        doubled = len(taken) - len(np.unique(keys[taken]))
        sets = sets_of(hashes_of(keys[taken], salt_of(rows.table.name)), rows.table.rows // WAYS)
        lost = int((taken // WAYS != sets).sum())
        if doubled or lost:
            print(f"{rows.table.name}: {doubled} keys have two rows, {lost} are where nobody looks")
        kept = [tensor[taken].contiguous().numpy() for name, tensor in rows.tensors.items() if len(tensor) > 1]
        found[rows.table.name] = {
            int(keys[row]): b"".join(tensor[at].tobytes() for tensor in kept) for at, row in enumerate(taken)
        }
    return found


def job(task: Task, capacities: Mapping[str, int], evict: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A job whose ids get rows of their own, as long as there are any."""
    columns = {name: {"kind": "dynamic", "capacity": rows, "evict": evict} for name, rows in capacities.items()}
    path = {"path": str(task.folder / "train.parquet"), "test_path": str(task.folder / "test.parquet")}
    base: dict[str, Any] = {
        "data": {"name": "parquet", **path, "columns": columns, **task.options},
        "train": {"trainers": 1, "workers": 1, "batch_size": 256, "save_every_s": 0.5},
        "sync": {"method": "none"},
        **QUIET,
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def moves(arguments: argparse.Namespace) -> None:
    """Kills the job and goes on in other servers."""
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        task = stream(Path(folder))
        for evict in ("lfu", "lru"):
            # kernels are timed when a job starts, and two do not round alike
            config = job(task, TIGHT, evict, train={"precision": "fp32", "kernels": "torch"})
            began = time.monotonic()
            whole, out = Path(folder, f"{evict} whole"), Path(folder, evict)
            result = Job(config, out=whole).run()
            length, kills = time.monotonic() - began, 0
            while not (out / "result.json").exists():
                config["embedding"] = {"servers": draw.randint(1, 8)}
                process = start(config, out)
                if kills < arguments.kills:
                    kills += stopped(process, out, draw.uniform(0.03, 0.1) * length)
                elif process.wait():
                    sys.exit("the job ended with an error")
            first, second = owners(whole), owners(out)
            lost = sum(len(keys.keys() - second[name].keys()) for name, keys in first.items())
            more = sum(len(keys.keys() - first[name].keys()) for name, keys in second.items())
            other = sum(keys[key] != second[name].get(key, keys[key]) for name, keys in first.items() for key in keys)
            assert result.keys is not None
            print(f"{evict}: {kills} kills, each followed by other servers; {result.keys} undisturbed")
            print(f"    ids lost {lost}, ids too many {more}, rows of the same id that differ {other}")


def start(config: Mapping[str, Any], out: Path) -> "subprocess.Popen[bytes]":
    """The job, or what is left of it, in a process of its own."""
    words = [sys.executable, __file__, "run", str(out), json.dumps(config)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stopped(process: "subprocess.Popen[bytes]", out: Path, seconds: float) -> bool:
    """Whether it was killed, so many seconds after a checkpoint more than it began with; otherwise it has ended."""
    before = CheckpointStore(str(out / "checkpoints")).names()
    while process.poll() is None and CheckpointStore(str(out / "checkpoints")).names() == before:
        time.sleep(0.02)
    time.sleep(seconds)
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


def go_on(out: Path, config: dict[str, Any]) -> None:
    """Runs the job, from its newest checkpoint on if there is one."""
    if CheckpointStore(str(out / "checkpoints")).names():
        Job(config, out=out, resume=out).run()
    else:
        Job(config, out=out).run()


def roles(arguments: argparse.Namespace) -> None:
    """Kills processes of the job while it trains."""
    with tempfile.TemporaryDirectory() as folder:
        task = stream(Path(folder))
        train = {"trainers": 2, "save_every_s": 2.0}
        sections = {"train": train, "cluster": {"runtime": "processes"}, "embedding": {"servers": 2}}
        for name, sizes in (("room for all", {"user": 20_000, "item": 160_000}), ("few rows", TIGHT)):
            out, struck = Path(folder, name), [0]
            config = job(task, sizes, "lfu", sync={"method": "easgd"}, **sections)
            config["data"] |= {"epochs": 4}
            killing = threading.Thread(target=strike, args=(out, arguments.kills, arguments.seed, struck))
            killing.start()
            result = Job(config, out=out).run()
            killing.join()
            found = owners(out)
            print(f"{name}: {struck[0]} processes killed, {result.keys}; rows trained {result.data.trained_samples:,}")
            rows = pl.read_parquet(task.folder / "train.parquet")
            for column, keys in found.items() if name == "room for all" else ():
                missing = len(set(rows[column].unique().to_list()) - keys.keys())
                print(f"    {column}: {len(keys):,} ids have a row, of those of the training rows {missing} have none")


def strike(out: Path, kills: int, seed: int, struck: list[int]) -> None:
    """Kills a trainer or an embedding server now and then, once those before are at work again."""
    draw = random.Random(seed)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.05)
    for _ in range(kills):
        time.sleep(draw.uniform(1, 2))
        role = draw.choice(["trainer-0", "trainer-1", "embedding-0", "embedding-1"])
        since = len(read_events(out))
        os.kill(json.loads((out / "roles.json").read_text())[role]["pid"], signal.SIGKILL)
        while not any(event.role == role and event.event == "restored" for event in read_events(out)[since:]):
            if (out / "result.json").exists():
                return
            time.sleep(0.02)
        struck[0] += 1


def main() -> None:
    """Runs the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    given = parts.add_parser("quality")
    given.add_argument("--seeds", type=int, default=3)
    given.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1])
    given.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    given = parts.add_parser("speed")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--batch", type=int, default=1024)
    given.add_argument("--seconds", type=float, default=8.0)
    for name in ("moves", "roles"):
        given = parts.add_parser(name)
        given.add_argument("--kills", type=int, default=10)
        given.add_argument("--seed", type=int, default=0)
    given = parts.add_parser("one", help=argparse.SUPPRESS)
    given.add_argument("words", nargs=3)
    given = parts.add_parser("run", help=argparse.SUPPRESS)
    given.add_argument("words", nargs=2)
    arguments = parser.parse_args()
    if arguments.part == "one":
        variant, batch, rows = arguments.words
        print(json.dumps(measure(variant, int(batch), int(rows))))
    elif arguments.part == "run":
        go_on(Path(arguments.words[0]), json.loads(arguments.words[1]))
    else:
        print("\n".join(describe()))
        {"quality": quality, "speed": speed, "moves": moves, "roles": roles}[arguments.part](arguments)


if __name__ == "__main__":
    main()
