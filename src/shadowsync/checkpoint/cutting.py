"""Cuts the rows of a snapshot into pieces that fit into files of bounded size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shadowsync.checkpoint.snapshot import TABLE_WIDE, Rows, RowSet
from shadowsync.checkpoint.tensors import Chunk, chunks

NUMBERS = "numbers"


@dataclass(frozen=True)
class Cut:
    """Rows small enough for one file.

    Attributes:
        table: the table's name.
        start: first row of the run that the piece speaks of.
        stop: one beyond its last row.
        rows: how many of them the piece holds.
        tensors: of those rows.
        wide: of the table as a whole.
        numbers: the rows' numbers, by the name `numbers`; nothing where all of the run are held.
        read: the parts of a tensor, by its name, that only tells its form.
    """

    table: str
    start: int
    stop: int
    rows: int
    tensors: Mapping[str, Tensor]
    wide: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    read: Callable[[str], Iterator[Tensor]] | None = None

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """Everything by its name."""
        return {**self.tensors, **self.wide, **self.numbers}

    @property
    def byte_count(self) -> int:
        """Bytes that the piece takes in its file."""
        return sum(tensor.nbytes for tensor in self.all_tensors.values())

    def key(self, name: str) -> str:
        """The tensor's name in its file."""
        return f"{self.table}[{self.start}:{self.stop}].{name}"

    def bytes_of(self, name: str) -> Iterator[Chunk]:
        """The bytes of a tensor; those of the table as a whole last, as they are none the older for it.

        Raises:
            ValueError: a source gives another number of bytes than it told.
        """
        tensor = self.all_tensors[name]
        parts = self.read(name) if tensor.is_meta and self.read is not None else iter((tensor,))
        count = 0
        for part in parts:
            count += part.nbytes
            yield from chunks(part)
        if count != tensor.nbytes:
            raise ValueError(f"{self.key(name)} came as {count} bytes in place of {tensor.nbytes}")


def by_table(tables: Sequence[Rows | RowSet], *, may_be_sets: bool) -> list[list[Rows | RowSet]]:
    """The runs of rows of each table in order of their start, every row spoken of exactly once.

    Raises:
        ValueError: a row is missing or there twice, or single rows stand where whole runs belong.
    """
    runs: dict[str, list[Rows | RowSet]] = {}
    for rows in tables:
        runs.setdefault(rows.table.name, []).append(rows)
    for name, found in runs.items():
        _check_kinds(name, found, may_be_sets)
        found.sort(key=lambda rows: rows.start)
        row = 0
        for rows in found:
            if rows.start != row or rows.table != found[0].table:
                raise ValueError(f"the snapshot does not hold row {row} of table {name} exactly once")
            row = _stop(rows)
        if row != found[0].table.rows:
            raise ValueError(f"the snapshot holds {row} of the {found[0].table.rows} rows of table {name}")
    return list(runs.values())


def cut_table(runs: Sequence[Rows | RowSet], piece_bytes: int) -> Iterator[Cut]:
    """The runs of one table, cut so that each piece fits into a file."""
    wide = {name for rows in runs for name in rows.tensors if _is_wide(rows, name)}
    for rows in runs:
        by_row = {name: tensor for name, tensor in rows.tensors.items() if name not in wide}
        if isinstance(rows, RowSet):
            by_row[NUMBERS] = rows.numbers
        count = _count(rows)
        row_bytes = sum(tensor.nbytes for tensor in by_row.values()) // max(1, count)
        step = max(1, piece_bytes // max(1, row_bytes))
        whole = {name: rows.tensors[name] for name in rows.tensors if name in wide}
        for first in range(0, max(1, count) if isinstance(rows, RowSet) else count, step):
            last = min(first + step, count)
            yield _part(rows, first, last, {name: tensor[first:last] for name, tensor in by_row.items()}, whole)


def fill(cuts: Sequence[Cut], piece_bytes: int) -> Iterator[list[Cut]]:
    """Groups of pieces that go into one file: many small tables share one."""
    group: list[Cut] = []
    taken = 0
    for cut in cuts:
        if group and taken + cut.byte_count > piece_bytes:
            yield group
            group, taken = [], 0
        group.append(cut)
        taken += cut.byte_count
    if group:
        yield group


def _part(rows: Rows | RowSet, first: int, last: int, parts: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> Cut:
    """Rows number `first … last − 1` of those held."""
    name = rows.table.name
    read = None if rows.source is None else partial(rows.source.read, first, last)
    if isinstance(rows, Rows):
        return Cut(name, rows.start + first, rows.start + last, last - first, parts, wide, read=read)
    start = int(rows.numbers[first]) if first else rows.start
    stop = int(rows.numbers[last]) if last < len(rows.numbers) else rows.stop
    tensors = {key: part for key, part in parts.items() if key != NUMBERS}
    return Cut(name, start, stop, last - first, tensors, wide, {NUMBERS: parts[NUMBERS]}, read)


def _check_kinds(name: str, found: Sequence[Rows | RowSet], may_be_sets: bool) -> None:
    sets = [rows for rows in found if isinstance(rows, RowSet)]
    if sets and not (may_be_sets and len(sets) == len(found)):
        raise ValueError(f"the snapshot holds single rows of table {name} where every row is wanted")
    for rows in sets:
        numbers = rows.numbers
        if (
            numbers.dtype != torch.int64
            or numbers.dim() != 1
            or NUMBERS in rows.tensors
            or _count(rows) != len(numbers)
        ):
            raise ValueError(f"row numbers of table {name} must be int64, one for each row")
        inside = not len(numbers) or (rows.start <= int(numbers[0]) and int(numbers[-1]) < rows.stop)
        if rows.start >= rows.stop or not inside or not bool((numbers.diff() > 0).all()):
            raise ValueError(f"row numbers of table {name} must be ascending in {rows.start} to {rows.stop - 1}")


def _is_wide(rows: Rows | RowSet, name: str) -> bool:
    return name in TABLE_WIDE or len(rows.tensors[name]) != _count(rows)


def _count(rows: Rows | RowSet) -> int:
    return len(rows.tensors["weight"])


def _stop(rows: Rows | RowSet) -> int:
    return rows.stop if isinstance(rows, RowSet) else rows.start + _count(rows)
