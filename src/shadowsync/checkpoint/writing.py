"""Writes the files of one checkpoint, each of bounded size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from shadowsync.checkpoint.cutting import Cut, by_table, cut_table, fill
from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.manifest import (
    FileEntry,
    Group,
    Manifest,
    Piece,
    Scattered,
    TableEntry,
    TensorEntry,
    raw_json,
)
from shadowsync.checkpoint.snapshot import Rows, RowSet, Snapshot
from shadowsync.checkpoint.tensors import BlockSums, Chunk, Placed, chunks, place
from shadowsync.errors import ShadowSyncError

BLOCK_BYTES = 4 << 20


class GivenUp(ShadowSyncError):
    """What was being written was given up, because somebody cannot wait for it."""


class SnapshotWriter:
    """Writes the files of one snapshot into a folder; rows that are not in memory are read in their turn.

    Args:
        files: where to.
        folder: where in it.
        piece_bytes: no file of rows grows beyond this, but for a single row that is wider.
        given_up: asked before each chunk; true ends it with `GivenUp`.
    """

    def __init__(self, files: Files, folder: str, piece_bytes: int, given_up: Callable[[], bool]) -> None:
        self._given_up = given_up
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
            CheckpointError, RunError: what a source of rows raised.
            GivenUp: nobody wants it any more.
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
        tensors = [(cut.key(key), tensor) for cut in cuts for key, tensor in cut.all_tensors.items()]
        late = {cut.key(key) for cut in cuts for key in (*cut.wide, *cut.numbers)}
        read = {cut.key(key): partial(cut.bytes_of, key) for cut in cuts for key in cut.all_tensors}
        placed = self._write_tensors(name, *place(tensors, late), lambda one: read[one.name]())
        for cut in cuts:
            rows, wide, numbers = (
                tuple(_tensor_entry(key, placed[cut.key(key)]) for key in found)
                for found in (cut.tensors, cut.wide, cut.numbers)
            )
            scattered = Scattered(cut.stop, numbers[0]) if numbers else None
            yield Piece(cut.table, cut.start, cut.rows, version, name, rows, wide, scattered)

    def _write_group(self, name: str, tensors: Mapping[str, Tensor]) -> Group:
        placed = self._write_tensors(name, *place(list(tensors.items())), lambda one: chunks(one.tensor))
        return Group(name, tuple(_tensor_entry(key, placed[key]) for key in tensors))

    def _write_tensors(
        self, name: str, head: bytes, placed: Sequence[Placed], read: Callable[[Placed], Iterator[Chunk]]
    ) -> dict[str, Placed]:
        sums = BlockSums(BLOCK_BYTES)
        self._files.write(f"{self._folder}/{name}", self._while_wanted(_summed(sums, _stream(head, placed, read))))
        self._written.append(FileEntry(name, sums.total_bytes, tuple(sums.sums)))
        return {one.name: one for one in placed}

    def _while_wanted(self, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in stream:
            if self._given_up():
                raise GivenUp(f"{self._folder} was given up while it was written")
            yield chunk


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
