"""Cuts a snapshot into files of bounded size and writes them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowsync.recovery.files import Chunk, Files
from shadowsync.recovery.manifest import FileEntry, Group, Manifest, Piece, TableEntry, TensorEntry, raw_json
from shadowsync.recovery.snapshot import TABLE_WIDE, Rows, Snapshot
from shadowsync.recovery.tensors import BlockSums, Placed, chunks, place

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class _Cut:
    """Rows small enough for one file."""

    table: str
    start: int
    rows: int
    tensors: Mapping[str, Tensor]
    wide: Mapping[str, Tensor]

    @property
    def byte_count(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.wide.values()))

    def key(self, name: str) -> str:
        """The tensor's name in its file."""
        return f"{self.table}[{self.start}:{self.start + self.rows}].{name}"


class SnapshotWriter:
    """Writes the files of one snapshot into a folder.

    Args:
        files: where to.
        folder: where in it.
        piece_bytes: no file of rows grows beyond this, but for a single row that is wider.
    """

    def __init__(self, files: Files, folder: str, piece_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._written: list[FileEntry] = []

    def write(self, snapshot: Snapshot) -> Manifest:
        """Writes everything but the manifest, which it returns.

        Raises:
            OSError: what the file system raised.
            ValueError: the snapshot does not hold every row of its tables exactly once, or holds what no checkpoint
                can.
        """
        config, position, extra = (raw_json(what, getattr(snapshot, what)) for what in ("config", "position", "extra"))
        cuts = [cut for table in _by_table(snapshot.tables) for cut in _cut(table, self._piece_bytes)]
        pieces = [
            piece
            for number, group in enumerate(_fill(cuts, self._piece_bytes))
            for piece in self._write_rows(f"rows-{number:05d}.safetensors", group, snapshot.samples)
        ]
        return Manifest(
            samples=snapshot.samples,
            config=config,
            position=position,
            extra=extra,
            tables=tuple(_entry(rows[0]) for rows in _by_table(snapshot.tables)),
            pieces=tuple(pieces),
            dense=self._write_group("dense.safetensors", snapshot.dense),
            random=self._write_group("random.safetensors", snapshot.random),
            block_bytes=BLOCK_BYTES,
            files=tuple(self._written),
        )

    def _write_rows(self, name: str, cuts: Sequence[_Cut], version: int) -> Iterator[Piece]:
        tensors = [(cut.key(key), tensor) for cut in cuts for key, tensor in {**cut.tensors, **cut.wide}.items()]
        placed = self._write_tensors(name, tensors)
        for cut in cuts:
            yield Piece(
                cut.table,
                cut.start,
                cut.rows,
                version,
                name,
                tuple(_tensor_entry(key, placed[cut.key(key)]) for key in cut.tensors),
                tuple(_tensor_entry(key, placed[cut.key(key)]) for key in cut.wide),
            )

    def _write_group(self, name: str, tensors: Mapping[str, Tensor]) -> Group:
        placed = self._write_tensors(name, list(tensors.items()))
        return Group(name, tuple(_tensor_entry(key, placed[key]) for key in tensors))

    def _write_tensors(self, name: str, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Placed]:
        head, placed = place(tensors)
        sums = BlockSums(BLOCK_BYTES)
        self._files.write(f"{self._folder}/{name}", _stream(head, placed, sums))
        self._written.append(FileEntry(name, sums.total_bytes, tuple(sums.sums)))
        return {one.name: one for one in placed}


def _stream(head: bytes, placed: Sequence[Placed], sums: BlockSums) -> Iterator[Chunk]:
    sums.add(head)
    yield head
    for one in placed:
        for chunk in chunks(one.tensor):
            sums.add(chunk)
            yield chunk


def _by_table(tables: Sequence[Rows]) -> list[list[Rows]]:
    """The runs of rows of each table in order of their start, every row exactly once."""
    runs: dict[str, list[Rows]] = {}
    for rows in tables:
        runs.setdefault(rows.table.name, []).append(rows)
    for name, found in runs.items():
        found.sort(key=lambda rows: rows.start)
        row = 0
        for rows in found:
            if rows.start != row or rows.table != found[0].table:
                raise ValueError(f"the snapshot does not hold row {row} of table {name} exactly once")
            row += len(rows.tensors["weight"])
        if row != found[0].table.rows:
            raise ValueError(f"the snapshot holds {row} of the {found[0].table.rows} rows of table {name}")
    return list(runs.values())


def _cut(runs: Sequence[Rows], piece_bytes: int) -> Iterator[_Cut]:
    """The runs of one table, cut so that each piece fits into a file."""
    wide = {name for rows in runs for name in rows.tensors if _is_wide(rows, name)}
    for rows in runs:
        by_row = {name: tensor for name, tensor in rows.tensors.items() if name not in wide}
        whole = {name: rows.tensors[name] for name in rows.tensors if name in wide}
        count = len(rows.tensors["weight"])
        row_bytes = sum(tensor.nbytes for tensor in by_row.values()) // count
        step = max(1, piece_bytes // max(1, row_bytes))
        for first in range(0, count, step):
            last = min(first + step, count)
            parts = {name: tensor[first:last] for name, tensor in by_row.items()}
            yield _Cut(rows.table.name, rows.start + first, last - first, parts, whole)


def _is_wide(rows: Rows, name: str) -> bool:
    return name in TABLE_WIDE or len(rows.tensors[name]) != len(rows.tensors["weight"])


def _fill(cuts: Sequence[_Cut], piece_bytes: int) -> Iterator[list[_Cut]]:
    """Groups of pieces that go into one file: many small tables share one."""
    group: list[_Cut] = []
    taken = 0
    for cut in cuts:
        if group and taken + cut.byte_count > piece_bytes:
            yield group
            group, taken = [], 0
        group.append(cut)
        taken += cut.byte_count
    if group:
        yield group


def _entry(rows: Rows) -> TableEntry:
    table = rows.table
    return TableEntry(table.name, table.rows, table.dim, table.features, table.pooling)


def _tensor_entry(name: str, placed: Placed) -> TensorEntry:
    return TensorEntry(name, placed.dtype, tuple(placed.tensor.shape), placed.offset)
