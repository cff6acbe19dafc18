"""Rows per second on ONE core from files to ready batches: counting lines, parsing, hashing, shuffling, cutting.

    python benchmarks/reader.py [--data train.tsv.gz] [--rows 400000] [--batch-size 1024] [--rounds 7]

The rows are those of a raw Criteo file, repeated, or without `--data` made up in its shape. They are read as plain
text, as .gz, as parquet written by `shadowsync data`, and as parquet of the columns as they lie (`raw`), where 13
integers are standardised and 26 columns of text are hashed; the formats take turns, and the figures are medians. The
measuring process runs on one core, with one thread each in torch and polars; rows per CPU second are what it would
read if nothing else ran on that core.
"""

import argparse
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import torch

from shadowsync.data.criteo import CATEGORICAL, DENSE, Criteo
from shadowsync.data.fitting import learn
from shadowsync.data.parquet import Parquet
from shadowsync.data.reader import Reader, ReaderOptions
from shadowsync.data.source import Source
from shadowsync.data.tables import OpenTable
from shadowsync.data.writer import write_parquet

sys.path.insert(0, str(Path(__file__).parent))
from machine import alternate, describe, table

HASH_SIZE = 200_000
TARGETS = {"tsv": 400_000, "tsv.gz": None, "parquet": 1_500_000, "raw": 1_000_000}
HEADER = ["format", "rows/s (median)", "range", "rows per CPU second", "target"]


def main() -> None:
    """Pins a child process to one core; the child measures."""
    options = parse_arguments()
    if options.child:
        measure(options)
        return
    core = min(os.sched_getaffinity(0))
    pinned = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    subprocess.run(command, env=pinned, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a raw Criteo file, plain or .gz")
    parser.add_argument("--rows", type=int, default=400_000, help="rows to read (230 bytes each)")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Writes the files, reads each once per round, prints the table."""
    torch.set_num_threads(1)
    cpu_seconds: dict[str, list[float]] = {name: [] for name in TARGETS}
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder), options)
        jobs = {name: job(source, options, cpu_seconds[name]) for name, source in sources.items()}
        seconds = alternate(jobs, options.rounds)
    print("\n".join(describe()))
    print(f"{options.rows:,} rows, batches of {options.batch_size:,}, {options.rounds} rounds, one core\n")
    print(table(HEADER, [row(name, options.rows, seconds[name], cpu_seconds[name]) for name in seconds]))


def row(name: str, rows: int, seconds: Sequence[float], cpu_seconds: Sequence[float]) -> list[str]:
    """A format's line of the table."""
    rates = [rows / second for second in seconds]
    per_cpu = statistics.median(rows / second for second in cpu_seconds)
    target = TARGETS[name]
    spread = f"{min(rates):,.0f} … {max(rates):,.0f}"
    return [name, f"{statistics.median(rates):,.0f}", spread, f"{per_cpu:,.0f}", f"{target:,}" if target else "-"]


def make_sources(folder: Path, options: argparse.Namespace) -> dict[str, Source]:
    """The same rows in each format."""
    text = repeated(options.data, options.rows) if options.data else made_up(options.rows)
    plain, compressed, parquet, lying = (folder / f"rows.{name}" for name in TARGETS)
    plain.write_bytes(text)
    compressed.write_bytes(gzip.compress(text, 6))
    raw = Criteo(path=str(plain), hash_size=HASH_SIZE)
    opened = raw.open("train", "error")
    assert opened is not None
    write_parquet(opened, parquet)
    types = {"label": pl.Int8, **dict.fromkeys(DENSE, pl.Int64), **dict.fromkeys(CATEGORICAL, pl.String)}
    pl.read_csv(plain, separator="\t", has_header=False, schema=types).write_parquet(lying)
    columns = Parquet(path=str(lying), dense=DENSE, categorical=CATEGORICAL, hash_size=HASH_SIZE)
    unread = columns.open("train", "error")
    assert isinstance(unread, OpenTable)
    return {
        "tsv": raw,
        "tsv.gz": Criteo(path=str(compressed), hash_size=HASH_SIZE),
        "parquet": Parquet(path=str(parquet), dense=DENSE, categorical=CATEGORICAL, rows=HASH_SIZE),
        "raw": columns.with_learnt(learn(columns.kinds, {}, unread)),
    }


def job(source: Source, options: argparse.Namespace, cpu_seconds: list[float]) -> Callable[[], None]:
    """Opens the source, takes every batch of one shuffled epoch and checks that none is missing."""
    slice_rows = max(options.batch_size, 8192 // options.batch_size * options.batch_size)

    def read() -> None:
        start = time.process_time()
        opened = source.open("train", "error")
        assert opened is not None
        reader = Reader(opened, ReaderOptions(options.batch_size, slice_rows))
        feed = reader.feed(0)
        while (leased := feed.next()) is not None:
            feed.done(leased)
        reader.close()
        cpu_seconds.append(time.process_time() - start)
        if reader.trained != options.rows:
            raise SystemExit(f"{reader.trained} rows were read, {options.rows} are there")

    return read


def repeated(path: Path, rows: int) -> bytes:
    """The lines of a file, again and again."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).splitlines(keepends=True)
    return b"".join((lines * (rows // len(lines) + 1))[:rows])


def made_up(rows: int) -> bytes:
    """Lines of Criteo's shape: skewed integers and categories, one value in eight missing."""
    generator = np.random.default_rng(0)
    distinct = min(rows, 20_000)
    numbers = generator.geometric(0.02, (distinct, len(DENSE)))
    words = generator.zipf(1.3, (distinct, len(CATEGORICAL))) * 0x9E3779B1 % (1 << 32)
    missing = generator.random((distinct, len(DENSE) + len(CATEGORICAL))) < 1 / 8
    lines = []
    for row in range(distinct):
        cells = [*map(str, numbers[row]), *(f"{word:08x}" for word in words[row])]
        kept = ["" if gone else cell for cell, gone in zip(cells, missing[row], strict=True)]
        lines.append("\t".join([str(row % 4 // 3), *kept]).encode() + b"\n")
    return b"".join((lines * (rows // distinct + 1))[:rows])


if __name__ == "__main__":
    main()
