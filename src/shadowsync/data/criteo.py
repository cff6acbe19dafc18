"""The Criteo display-advertising logs in their raw format (Kaggle and 1TB): tab separated, without a header.

A row is a label, 13 integers (empty: missing) and 26 hexadecimal categories (empty: missing). `B` rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.files import PANIC, File, FileOptions, FileRows, Problem, bad_ones, open_lines
from shadowsync.data.source import Feature, OpenSource, Schema, Slice, Source
from shadowsync.errors import ConfigError, DataError
from shadowsync.serving import mix, to_rows

DENSE = tuple(f"i{k}" for k in range(1, 14))
CATEGORICAL = tuple(f"c{k}" for k in range(1, 27))
_COLUMNS = ("label", *DENSE, *CATEGORICAL)
_TYPES: dict[str, type[pl.DataType]] = {
    "label": pl.Int8,
    **dict.fromkeys(DENSE, pl.Int64),
    **dict.fromkeys(CATEGORICAL, pl.String),
}
_INTEGER = re.compile(r" *[+-]?[0-9]{1,18}|")
_HEXADECIMAL = re.compile(r"\+?[0-9a-fA-F]{1,15}|")

HashSize = Annotated[int, Field(ge=2, le=1 << 32)]


@dataclass(frozen=True)
class Criteo(FileOptions, Source):
    """The Criteo logs, plain or .gz, with categories hashed while they are read.

    Dense column `iK` is `log(1 + max(x, 0))` of the K-th integer; a missing one counts as 0 (negative values occur in
    the logs and count as 0 too). Feature `cK` takes row 0 of its table for a missing category and otherwise the row
    in `[1, hash_size)` that the hash of its value says, the same in every run.
    """

    name: ClassVar[str] = "criteo"

    hash_size: Annotated[
        HashSize | tuple[HashSize, ...] | dict[str, HashSize],
        Field(description="rows per feature: one number, 26 of them, or by feature (c1 … c26); more collides less"),
    ] = 200_000

    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        sizes, files = self._sizes(), self.files(split)
        return None if files is None else OpenCriteo(files, sizes, on_bad_row)

    def described(self) -> Mapping[str, Any]:
        """Categories are the whole numbers that their digits say."""
        number = {"kind": "dense", "log": True, "standardise": False, "clip": None, "missing": "mean"}
        ids = {name: {"kind": "hash", "rows": rows} for name, rows in zip(CATEGORICAL, self._sizes(), strict=True)}
        return {"dense": dict.fromkeys(DENSE, number), "ids": ids, "fits": {}, "values": {}}

    def _sizes(self) -> tuple[int, ...]:
        sizes = self.hash_size
        if isinstance(sizes, int):
            sizes = (sizes,) * len(CATEGORICAL)
        elif isinstance(sizes, dict):
            if wrong := sorted(set(sizes) ^ set(CATEGORICAL)):
                raise ConfigError(
                    f"data.hash_size must name each of c1 … c26 once: {', '.join(wrong)} is missing or unknown"
                )
            sizes = tuple(sizes[name] for name in CATEGORICAL)
        elif len(sizes) != len(CATEGORICAL):
            raise ConfigError(f"data.hash_size holds {len(sizes)} numbers; give one, or 26")
        return sizes


class OpenCriteo(FileRows):
    """Criteo files whose lines have been counted."""

    def __init__(self, files: Sequence[File], sizes: Sequence[int], on_bad_row: Literal["error", "skip"]) -> None:
        schema = Schema(DENSE, tuple(Feature(name, rows) for name, rows in zip(CATEGORICAL, sizes, strict=True)))
        self._lines = [open_lines(file) for file in files]
        for lines in self._lines:
            if lines.count == 0:  # a .gz of nothing; a plain file of nothing was refused before
                raise DataError(f"{lines.file.path}: has no rows")
        super().__init__(schema, files, [lines.count for lines in self._lines], on_bad_row)
        self.sequential = any(lines.sequential for lines in self._lines)
        self._sizes = np.array(sizes, dtype=np.uint64)

    def read(self, part: Slice) -> Batch:
        """Parses a slice at once; only near a row that is wrong are rows looked at one by one."""
        self.check_unchanged(part)
        text = self._lines[part.file].read(part.start, part.start + part.rows)
        columns = parse(text, part.rows)
        if columns is None:
            rows = text.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
            keep = self.reject(part, find_problems(rows))
            good = [row for row, kept in zip(rows, keep, strict=True) if kept]
            columns = parse(_joined(good), len(good))
            assert columns is not None, "find_problems() must find what parse() rejects"
        labels, dense, categories = columns
        for column, size in zip(categories, self._sizes, strict=True):  # as one column fits the processor's cache
            missing = column < 0
            to_rows(mix(column.view(np.uint64)), size)  # in place
            column[missing] = 0
        ids = Jagged(torch.from_numpy(categories.ravel()), None, None, len(CATEGORICAL), len(labels))
        return Batch(torch.from_numpy(labels), torch.from_numpy(dense), ids)


Columns = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]


def parse(text: bytes, rows: int) -> Columns | None:
    """Labels `[B]`, transformed dense columns `[B, 13]` and categories `[26, B]` (−1: missing); None: a row is bad."""
    if rows == 0:
        return np.zeros(0, np.float32), np.zeros((0, len(DENSE)), np.float32), np.zeros((len(CATEGORICAL), 0), np.int64)
    if np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == ord("\t")) != rows * (len(_COLUMNS) - 1):
        return None
    try:
        frame = pl.read_csv(text, separator="\t", has_header=False, schema=_TYPES, quote_char=None)
    except (pl.exceptions.PolarsError, PANIC):
        return None
    if len(frame) != rows:
        return None
    labels = frame["label"].fill_null(-1).to_numpy()
    numbers = frame.select(pl.col(CATEGORICAL).str.to_integer(base=16, strict=False).fill_null(-1))
    categories = np.empty((len(CATEGORICAL), rows), dtype=np.int64)
    for column, name in enumerate(CATEGORICAL):
        categories[column] = numbers[name].to_numpy()
    missing = sum(frame[name].null_count() for name in CATEGORICAL)
    if np.count_nonzero(categories < 0) != missing or not np.isin(labels, (0, 1)).all():
        return None
    integers = frame.select(pl.col(DENSE).fill_null(0).clip(lower_bound=0).cast(pl.Float32))
    dense = np.empty((rows, len(DENSE)), dtype=np.float32)
    for column, name in enumerate(DENSE):
        np.log1p(integers[name].to_numpy(), out=dense[:, column])
    return labels.astype(np.float32), dense, categories


def _joined(rows: Sequence[str]) -> bytes:
    return "".join(row + "\n" for row in rows).encode()


def find_problems(rows: Sequence[str]) -> list[Problem]:
    """What is wrong with each bad row, looking only into those that cannot be parsed at once."""
    bad = bad_ones(rows, lambda some: parse(_joined(some), len(some)) is not None)
    return [Problem(row, problem(rows[row]) or "it cannot be parsed") for row in bad]


def problem(row: str) -> str | None:
    """What is wrong with it."""
    fields = row.removesuffix("\r").split("\t")
    if len(fields) != len(_COLUMNS):
        return (
            f"{len(fields)} columns where 40 are needed (label, 13 integers, 26 hexadecimal categories, tab separated)"
        )
    label, dense, categories = fields[0], fields[1:14], fields[14:]
    if label not in ("0", "1"):
        return f"the label is {label!r}, it must be 0 or 1"
    for name, value in zip(DENSE, dense, strict=True):
        if not _INTEGER.fullmatch(value):
            return f"{name} is {value!r}, it must be an integer or empty"
    for name, value in zip(CATEGORICAL, categories, strict=True):
        if not _HEXADECIMAL.fullmatch(value):
            return f"{name} is {value!r}, it must be a hexadecimal number or empty"
    return None
