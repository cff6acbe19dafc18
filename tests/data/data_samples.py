"""Small data made on the spot for the tests of sources and reader."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.source import BadRows, Feature, OpenSource, Schema, Slice


def criteo_row(number: int) -> str:
    """A row that can be told from others by i1 = its number; some values are missing, some negative."""
    generator = np.random.default_rng(number)
    dense = [str(number), *(str(value) for value in generator.integers(-3, 5000, 12))]
    categories = [f"{value:08x}" for value in generator.integers(0, 1 << 32, 26)]
    if number % 3 == 0:
        dense[4], categories[7] = "", ""
    return "\t".join([str(number % 2), *dense, *categories])


def write_criteo(path: Path, rows: Sequence[str]) -> Path:
    path.write_text("".join(row + "\n" for row in rows))
    return path


class CountedRows(OpenSource):
    """Rows whose dense value and id is their own number; every `bad`th is bad and skipped."""

    def __init__(self, rows: int, bad: int = 0) -> None:
        self.schema = Schema(("number",), (Feature("id", max(rows, 1)),))
        self.rows = rows
        self.bad = bad
        self.bad_rows = BadRows()
        self.reads: list[int] = []
        self._lock = threading.Lock()

    def read(self, part: Slice) -> Batch:
        with self._lock:
            self.reads.append(part.index)
        numbers = [n for n in range(part.start, part.start + part.rows) if not self.is_bad(n)]
        ids = torch.tensor(numbers, dtype=torch.int64)
        return Batch(ids.float() % 2, ids.float()[:, None], Jagged(ids, None, None, 1, len(ids)))

    def is_bad(self, number: int) -> bool:
        return self.bad > 0 and number % self.bad == 0

    def good(self) -> list[int]:
        return [n for n in range(self.rows) if not self.is_bad(n)]

    def place(self, part: Slice, row: int) -> str:
        return f"counted, row {part.start + row + 1}"


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.labels, right.labels)
        and torch.equal(left.dense, right.dense)
        and torch.equal(left.ids.values, right.ids.values)
        and torch.equal(left.ids.bag_offsets(), right.ids.bag_offsets())
    )
