"""Writes the files of one checkpoint, each of bounded size."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from shadowsync.recovery.cutting import Cut, by_table, cut_table, fill
from shadowsync.recovery.files import Chunk, Files
from shadowsync.recovery.manifest import FileEntry, Group, Manifest, Piece, Scattered, TableEntry, TensorEntry, raw_json
from shadowsync.recovery.snapshot import Rows, RowSet, Snapshot
from shadowsync.recovery.tensors import BlockSums, Placed, chunks, place

BLOCK_BYTES = 4 << 20
Read = Callable[[Cut, str], Iterator[Chunk]]
"""The bytes of a tensor of a piece, by its name there."""


def from_memory(piece: Cut, name: str) -> Iterator[Chunk]:
    """The bytes of a tensor that is in memory."""
    return chunks(piece.all_tensors[name])


class SnapshotWriter:
    """Writes the files of one snapshot into a folder.

    Args:
        files: where to.
        folder: where in it.
        piece_bytes: no file of rows grows beyond this, but for a single row that is wider.
        read: the bytes of the rows' tensors; in place of those in memory when the snapshot's only tell their form.
    """

    def __init__(self, files: Files, folder: str, piece_bytes: int, read: Read = from_memory) -> None:
        self._read = read
        self._files = files
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._written: list[FileEntry] = []

    def write(self, snapshot: Snapshot, version: int | None = None) -> Manifest:
        """Writes everything but the manifest, which it returns.

        Args:
            snapshot: what to write.
            version: samples trained when the rows were copied; None for the snapshot's.

        Raises:
            OSError: what the file system raised.
            ValueError: the snapshot does not hold every row of its tables exactly once, or holds what no checkpoint
                can.
        """
        config, position, extra = (raw_json(what, getattr(snapshot, what)) for what in ("config", "position", "extra"))
        tables = by_table(snapshot.tables, may_be_sets=snapshot.delta is not None)
        cuts = [cut for table in tables for cut in cut_table(table, self._piece_bytes)]
        pieces = [
            piece
            for number, group in enumerate(fill(cuts, self._piece_bytes))
            for piece in self._write_rows(
                f"rows-{number:05d}.safetensors", group, snapshot.samples if version is None else version
            )
        ]
        return Manifest(
            samples=snapshot.samples,
            config=config,
            position=position,
            extra=extra,
            tables=tuple(_entry(rows[0]) for rows in tables),
            pieces=tuple(pieces),
            dense=self._write_group("dense.safetensors", snapshot.dense),
            random=self._write_group("random.safetensors", snapshot.random),
            block_bytes=BLOCK_BYTES,
            files=tuple(self._written),
            parent=None if snapshot.delta is None else snapshot.delta.parent,
        )

    def _write_rows(self, name: str, cuts: Sequence[Cut], version: int) -> Iterator[Piece]:
        parts = {cut.key(tensor): (cut, tensor) for cut in cuts for tensor in cut.all_tensors}
        tensors = [(key, cut.all_tensors[tensor]) for key, (cut, tensor) in parts.items()]
        placed = self._write_tensors(name, tensors, lambda one: self._read(*parts[one.name]))
        for cut in cuts:
            rows, wide, numbers = (
                tuple(_tensor_entry(key, placed[cut.key(key)]) for key in found)
                for found in (cut.tensors, cut.wide, cut.numbers)
            )
            scattered = Scattered(cut.stop, numbers[0]) if numbers else None
            yield Piece(cut.table, cut.start, cut.rows, version, name, rows, wide, scattered)

    def _write_group(self, name: str, tensors: Mapping[str, Tensor]) -> Group:
        placed = self._write_tensors(name, list(tensors.items()), lambda one: chunks(one.tensor))
        return Group(name, tuple(_tensor_entry(key, placed[key]) for key in tensors))

    def _write_tensors(
        self, name: str, tensors: Sequence[tuple[str, Tensor]], read: Callable[[Placed], Iterator[Chunk]]
    ) -> dict[str, Placed]:
        head, placed = place(tensors)
        sums = BlockSums(BLOCK_BYTES)
        self._files.write(f"{self._folder}/{name}", _summed(sums, _stream(head, placed, read)))
        self._written.append(FileEntry(name, sums.total_bytes, tuple(sums.sums)))
        return {one.name: one for one in placed}


def _stream(head: bytes, placed: Sequence[Placed], read: Callable[[Placed], Iterator[Chunk]]) -> Iterator[Chunk]:
    yield head
    for one in placed:
        yield from read(one)


def _summed(sums: BlockSums, stream: Iterator[Chunk]) -> Iterator[Chunk]:
    for chunk in stream:
        sums.add(chunk)
        yield chunk


def _entry(rows: Rows | RowSet) -> TableEntry:
    table = rows.table
    return TableEntry(table.name, table.rows, table.dim, table.features, table.pooling)


def _tensor_entry(name: str, placed: Placed) -> TensorEntry:
    return TensorEntry(name, placed.dtype, tuple(placed.tensor.shape), placed.offset)
