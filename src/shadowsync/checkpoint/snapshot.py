"""What a checkpoint holds as the job gives it, and how it is written: cut into files of bounded size."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from isal.isal_zlib import crc32
from msgspec.structs import replace
from torch import Tensor

from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.format import (
    CODES,
    Chunk,
    FileEntry,
    Manifest,
    Piece,
    RowTensor,
    Scattered,
    TensorEntry,
    TensorGroup,
    chunks,
    place,
    raw_json,
)
from shadowsync.checkpoint.values import CHUNK, SQUARES, RowValues, row_width
from shadowsync.embedding.messages import id_type
from shadowsync.embedding.table import Rows, RowSet
from shadowsync.errors import ShadowSyncError

BLOCK_BYTES = 4 << 20
NUMBERS = "numbers"
TABLE_WIDE = frozenset({"step"})
"""Names of tensors of `Rows` that belong to a table as a whole: of a single row their length does not tell."""


class GivenUp(ShadowSyncError):
    """What was being written was given up, because somebody cannot wait for it."""


@dataclass(frozen=True)
class Snapshot:
    """A consistent image of a job; its rows are in memory, or read when they are written.

    Attributes:
        config: as the user gave it; like `position` (of the reader) and `extra` plain JSON values.
        samples: trained so far; also the name of the checkpoint, so it only grows.
        tables: rows, in any cut. In a delta a table is either here as a whole (`Rows`), or of every run of its rows
            those that are to be written (`RowSet`, which may hold none).
        dense: tensors by name: `final`, what the job would be evaluated with; `center` where there is one;
            `replica.<i>.weight`, `replica.<i>.<name>` of the optimizer, `replica.<i>.buffer.<name>` of the module;
            `sync.<i>.<name>` of the sync method.
        random: random states by name (uint8 tensors).
        parent: of a delta, the checkpoint whose rows stand where it has none; None for a whole one.
        complete: it has every row that changed since the parent was taken.
    """

    config: Mapping[str, Any]
    samples: int
    tables: tuple[Rows | RowSet, ...]
    dense: Mapping[str, Tensor]
    position: Mapping[str, Any]
    random: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    parent: str | None = None
    complete: bool = True


def write_snapshot(
    files: Files,
    folder: str,
    snapshot: Snapshot,
    version: int,
    piece_bytes: int,
    given_up: Callable[[], bool],
    values: RowValues | None = None,
) -> Manifest:
    """Writes everything but the manifest, which it returns; rows that are not in memory are read in their turn.

    They were copied after `version` samples, and are written in `values`, None for float32. No file of rows has more
    than `piece_bytes` of them, as they are in memory, but for a single row that is wider. `given_up` is asked before
    each chunk.

    Raises:
        OSError: what the file system raised.
        ValueError: the snapshot does not hold every row of its tables exactly once, or holds what no checkpoint can.
        CheckpointError, RunError: what a source of rows raised.
        GivenUp: nobody wants it any more.
    """
    config, position, extra = (raw_json(what, getattr(snapshot, what)) for what in ("config", "position", "extra"))
    write = partial(write_tensors, files, folder, block_bytes=BLOCK_BYTES, given_up=given_up)
    written: list[FileEntry] = []
    tables = _by_table(snapshot.tables, may_be_sets=snapshot.parent is not None)
    cuts = [cut for table in tables for cut in _cut_table(table, piece_bytes, values)]
    pieces: list[Piece] = []
    for group in _fill(cuts, piece_bytes):
        name = f"rows-{len(written):05d}.safetensors"
        rows_tensors = {cut.key(key): cut.in_file(key) for cut in group for key in cut.all_tensors}
        late = {cut.key(key) for cut in group for key in (*cut.wide, *cut.numbers)}
        read = {cut.key(key): partial(cut.bytes_of, key) for cut in group for key in cut.all_tensors}
        file, entries = write(name, rows_tensors, read=read, late=late)
        written.append(file)
        for cut in group:
            rows = tuple(cut.entry(key, entries[cut.key(key)].offset) for key in cut.tensors)
            wide, numbers = (
                tuple(replace(entries[cut.key(key)], name=key) for key in found) for found in (cut.wide, cut.numbers)
            )
            scattered = Scattered(cut.stop, numbers[0]) if numbers else None
            pieces.append(Piece(cut.table, cut.start, cut.rows, version, name, rows, wide, scattered))
    small: list[TensorGroup] = []
    for name, tensors in (("dense.safetensors", snapshot.dense), ("random.safetensors", snapshot.random)):
        file, entries = write(name, tensors)
        written.append(file)
        small.append(TensorGroup(name, tuple(entries.values())))
    return Manifest(
        samples=snapshot.samples,
        config=config,
        position=position,
        extra=extra,
        tables=tuple(rows[0].table for rows in tables),
        pieces=tuple(pieces),
        dense=small[0],
        random=small[1],
        block_bytes=BLOCK_BYTES,
        files=tuple(written),
        parent=snapshot.parent,
    )


def write_tensors(
    files: Files,
    folder: str,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    read: Mapping[str, Callable[[], Iterator[Chunk]]] | None = None,
    late: Collection[str] = (),
    block_bytes: int,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """Writes a safetensors file; its entry, and one for each tensor.

    `read` gives the bytes by the tensors' names, where they are not in memory; `late` as in `place`; if `given_up` says
    so before a chunk, it ends with `GivenUp`.
    """
    head, offsets = place(list(tensors.items()), late)
    sums: list[int] = []  # of the blocks, so that a reader can check exactly what it reads, be it one row
    total = 0

    def stream() -> Iterator[Chunk]:
        nonlocal total
        parts = (chunks(tensors[key]) if read is None else read[key]() for key in offsets)
        for chunk in itertools.chain([head], *parts):
            if given_up():
                raise GivenUp(f"{folder} was given up while it was written")
            view = memoryview(chunk)
            while view:
                used = total % block_bytes
                part = view[: block_bytes - used]
                if used == 0:
                    sums.append(0)
                sums[-1] = crc32(part, sums[-1])
                total, view = total + len(part), view[len(part) :]
            yield chunk

    files.write(f"{folder}/{name}", stream())
    entries = {n: TensorEntry(n, CODES[t.dtype], tuple(t.shape), offsets[n]) for n, t in tensors.items()}
    return FileEntry(name, total, tuple(sums)), entries


# --- cutting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """Rows small enough for one file: `rows` of the run `start … stop − 1` of a table.

    Attributes:
        wide: tensors of the table as a whole.
        numbers: the rows' numbers, by the name `numbers`; nothing where all of the run are held.
        read: the parts of a tensor, by its name, that only tells its form.
        kinds: how tensors of the rows are written, by their names; as they are where there is none.
    """

    table: str
    start: int
    stop: int
    rows: int
    tensors: Mapping[str, Tensor]
    wide: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    read: Callable[[str], Iterator[Tensor]] | None = None
    kinds: Mapping[str, RowValues] = field(default_factory=dict)

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        return {**self.tensors, **self.wide, **self.numbers}

    def key(self, name: str) -> str:
        return f"{self.table}[{self.start}:{self.stop}].{name}"

    def entry(self, name: str, offset: int) -> RowTensor:
        """Of a tensor of the rows."""
        tensor, kind = self.tensors[name], self.kinds.get(name)
        entry = RowTensor(name, CODES[tensor.dtype], tuple(tensor.shape), offset)
        return entry if kind is None else replace(entry, values=kind.name, squares=name in SQUARES)

    def in_file(self, name: str) -> Tensor:
        """A tensor in the form that its bytes have in the file."""
        tensor, kind = self.all_tensors[name], self.kinds.get(name)
        if kind is None:
            return tensor
        return torch.empty((len(tensor), kind.row_bytes(row_width(tensor))), dtype=torch.uint8, device="meta")

    def bytes_of(self, name: str) -> Iterator[Chunk]:
        """The bytes of a tensor; `ValueError` if its source gives another number of them than it told."""
        tensor, kind = self.all_tensors[name], self.kinds.get(name)
        parts = self.read(name) if tensor.is_meta and self.read is not None else iter((tensor,))
        count = 0
        for part in parts:
            count += part.nbytes
            yield from chunks(part) if kind is None else _encoded(part, kind, name in SQUARES)
        if count != tensor.nbytes:
            raise ValueError(f"{self.key(name)} came as {count} bytes in place of {tensor.nbytes}")


def _encoded(rows: Tensor, kind: RowValues, squares: bool) -> Iterator[Chunk]:
    width = row_width(rows)
    for part in torch.split(rows.detach(), max(1, CHUNK // width)):
        yield from chunks(kind.encode(part.reshape(len(part), width).contiguous(), squares))


def _by_table(tables: Sequence[Rows | RowSet], *, may_be_sets: bool) -> list[list[Rows | RowSet]]:
    """The runs of rows of each table in order of their start, every row spoken of exactly once; else `ValueError`."""
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
            row = rows.stop
        if row != found[0].table.rows:
            raise ValueError(f"the snapshot holds {row} of the {found[0].table.rows} rows of table {name}")
    return list(runs.values())


def _check_kinds(name: str, found: Sequence[Rows | RowSet], may_be_sets: bool) -> None:
    sets = [rows for rows in found if isinstance(rows, RowSet)]
    if sets and not (may_be_sets and len(sets) == len(found)):
        raise ValueError(f"the snapshot holds single rows of table {name} where every row is wanted")
    for rows in sets:
        numbers, count = rows.numbers, len(rows.tensors["weight"])
        if numbers.dtype != torch.int64 or numbers.dim() != 1 or NUMBERS in rows.tensors or count != len(numbers):
            raise ValueError(f"row numbers of table {name} must be int64, one for each row")
        inside = not len(numbers) or (rows.start <= int(numbers[0]) and int(numbers[-1]) < rows.stop)
        if rows.start >= rows.stop or not inside or not bool((numbers.diff() > 0).all()):
            raise ValueError(f"row numbers of table {name} must be ascending in {rows.start} to {rows.stop - 1}")


def _cut_table(runs: Sequence[Rows | RowSet], piece_bytes: int, values: RowValues | None) -> Iterator[_Cut]:
    """The runs of one table, cut so that each piece fits into a file."""
    counts = [len(rows.tensors["weight"]) for rows in runs]
    wide_names = {
        name
        for rows, count in zip(runs, counts, strict=True)
        for name, tensor in rows.tensors.items()
        if name in TABLE_WIDE or len(tensor) != count
    }
    for rows, count in zip(runs, counts, strict=True):
        numbers = rows.numbers if isinstance(rows, RowSet) else None
        wide = {name: tensor for name, tensor in rows.tensors.items() if name in wide_names}
        by_row = {name: tensor for name, tensor in rows.tensors.items() if name not in wide_names}
        floats = {name: row_width(tensor) for name, tensor in by_row.items() if tensor.dtype == torch.float32}
        kinds = {} if values is None else {name: values.of_width(width) for name, width in floats.items()}
        all_bytes = sum(tensor.nbytes for tensor in by_row.values()) + (0 if numbers is None else numbers.nbytes)
        step = max(1, piece_bytes // max(1, all_bytes // max(1, count)))
        for first in range(0, count if numbers is None else max(1, count), step):
            last = min(first + step, count)
            parts = {name: tensor[first:last] for name, tensor in by_row.items()}
            read = None if rows.source is None else partial(rows.source, first, last)
            if numbers is None:
                start, stop, own = rows.start + first, rows.start + last, {}
            else:
                start = int(numbers[first]) if first else rows.start
                stop = int(numbers[last]) if last < count else rows.stop
                own = {NUMBERS: numbers[first:last].to(torch.int64 if values is None else id_type(rows.table.rows))}
            yield _Cut(rows.table.name, start, stop, last - first, parts, wide, own, read, kinds)


def _fill(cuts: Sequence[_Cut], piece_bytes: int) -> Iterator[list[_Cut]]:
    """Groups of pieces that go into one file: many small tables share one."""
    group: list[_Cut] = []
    taken = 0
    for cut in cuts:
        size = sum(tensor.nbytes for tensor in cut.all_tensors.values())
        if group and taken + size > piece_bytes:
            yield group
            group, taken = [], 0
        group.append(cut)
        taken += size
    if group:
        yield group
