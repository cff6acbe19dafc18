"""Reads a checkpoint: any range of rows from whatever pieces hold it, each byte checked in the pass that reads it."""

import json
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError
from shadowsync.recovery.files import Files
from shadowsync.recovery.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Group,
    Manifest,
    Piece,
    TensorEntry,
    damaged,
    decode,
)
from shadowsync.recovery.tensors import DTYPES, bytes_of

T = TypeVar("T")


class BlockReader:
    """Reads byte ranges of a checkpoint's files, block by block, each block compared with its checksum."""

    def __init__(self, files: Files, folder: str, manifest: Manifest) -> None:
        self._files = files
        self._folder = folder
        self._block_bytes = manifest.block_bytes
        self._entries = {entry.name: entry for entry in manifest.files}
        self._last: tuple[str, int, bytes] = ("", -1, b"")

    def place(self, name: str) -> str:
        """A file's whole path, for messages."""
        return self._files.place(f"{self._folder}/{name}")

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` from byte `offset` of a file.

        Raises:
            DamagedCheckpoint: the file is gone, too short, or not what was written.
            CheckpointError: the file system failed.
        """
        done = 0
        while done < len(target):
            index, skip = divmod(offset + done, self._block_bytes)
            block = memoryview(self._block(self._entries[name], index))[skip : skip + len(target) - done]
            target[done : done + len(block)] = block
            done += len(block)

    def check_sizes(self) -> None:
        """Compares every file's size with the manifest's."""
        for entry in self._entries.values():
            size = self._guard(entry.name, self._files.size)
            if size is None:
                raise damaged(self.place(entry.name), "is missing")
            if size != entry.bytes:
                raise damaged(self.place(entry.name), f"has {size} bytes where the manifest says {entry.bytes}")

    def check_content(self) -> None:
        """Reads every file once and compares it with its checksums, in bounded memory."""
        for entry in self._entries.values():
            for index in range(len(entry.crc32)):
                self._block(entry, index)

    def _block(self, entry: FileEntry, index: int) -> bytes:
        name, last_index, content = self._last
        if (name, last_index) == (entry.name, index):
            return content
        start = index * self._block_bytes
        stop = min(start + self._block_bytes, entry.bytes)
        content = self._guard(entry.name, lambda path: self._files.read(path, start, stop))
        if len(content) != stop - start:
            raise damaged(self.place(entry.name), f"ends before byte {stop} of {entry.bytes}")
        if zlib.crc32(content) != entry.crc32[index]:
            raise damaged(self.place(entry.name), f"is not what was written (bytes {start} to {stop})")
        self._last = (entry.name, index, content)
        return content

    def _guard(self, name: str, read: Callable[[str], T]) -> T:
        return guarded(self._files, f"{self._folder}/{name}", read)


def guarded(files: Files, path: str, read: Callable[[str], T]) -> T:
    """`read(path)`, with the file system's errors as a `CheckpointError`."""
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(files.place(path), "is missing") from error
    except OSError as error:
        raise CheckpointError(f"{files.place(path)} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, eq=False)
class LoadedCheckpoint:
    """A checkpoint that was opened: small parts are in memory, rows are read when asked for.

    Attributes:
        name: its folder's name.
        samples: samples trained when it was taken.
        config: the configuration of the run that wrote it.
        position: the reader's position.
        extra: further values of that run.
        tables: the embedding tables.
        dense: flat tensors of the dense part by name.
        random: random states by name.
        skipped: one sentence for each newer checkpoint that could not be loaded: what was lost, and why.
    """

    name: str
    samples: int
    config: dict[str, Any]
    position: dict[str, Any]
    extra: dict[str, Any]
    tables: tuple[Table, ...]
    dense: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    skipped: tuple[str, ...]
    pieces: Mapping[str, tuple[Piece, ...]]
    reader: BlockReader

    def tensor_names(self, table: str) -> tuple[str, ...]:
        """The tensors kept for each row of a table: `weight` and the optimizer's.

        Raises:
            CheckpointError: there is no such table.
        """
        first = self._pieces(table)[0]
        return tuple(tensor.name for tensor in first.tensors + first.wide)

    def rows(self, table: str, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Rows `start … stop − 1` of a table with their optimizer state, whatever pieces hold them.

        A tensor of the table as a whole (Adam's `step`) is the largest of the pieces that hold these rows, element by
        element: pieces of one table may have been stepped a different number of times.

        Args:
            table: its name.
            start: the first row.
            stop: one beyond the last.
            names: read only these tensors (`{"weight"}` to predict); None reads all.

        Raises:
            CheckpointError: no such table or rows, or the files are not what was written.
        """
        pieces = self._pieces(table)
        total = pieces[-1].start + pieces[-1].rows
        if not 0 <= start < stop <= total:
            raise CheckpointError(f"{self.name} has no rows {start} to {stop} of table {table}: it has {total} rows")
        touched = [piece for piece in pieces if piece.start < stop and start < piece.start + piece.rows]
        asked = self.tensor_names(table) if names is None else names
        found = {tensor.name: _empty(tensor, stop - start) for tensor in touched[0].tensors if tensor.name in asked}
        for piece in touched:
            self._read_rows(piece, start, stop, found)
        for tensor in touched[0].wide:
            if tensor.name in asked:
                states = [_read_tensor(self.reader, piece.file, _named(piece.wide, tensor.name)) for piece in touched]
                found[tensor.name] = torch.stack(states).amax(0)
        return found

    def dense_tensor(self, name: str, elements: int) -> Tensor:
        """The dense tensor `name`.

        Raises:
            CheckpointError: there is none, or it has another number of elements, so it is another model's.
        """
        if name not in self.dense:
            known = ", ".join(self.dense) or "none"
            raise CheckpointError(f"{self.name} has no dense tensor {name} (it has {known}): it is of another model")
        tensor = self.dense[name]
        if tensor.numel() != elements:
            raise CheckpointError(
                f"{self.name}: dense tensor {name} has {tensor.numel()} elements where this model has {elements}: "
                "configure the model that the checkpoint was trained with"
            )
        return tensor

    def verify(self) -> None:
        """Reads everything once and compares it with its checksums.

        Raises:
            CheckpointError: something is not what was written.
        """
        self.reader.check_content()

    def _pieces(self, table: str) -> tuple[Piece, ...]:
        if table not in self.pieces:
            known = ", ".join(self.pieces) or "none"
            raise CheckpointError(f"{self.name} has no table {table}; it has {known}")
        return self.pieces[table]

    def _read_rows(self, piece: Piece, start: int, stop: int, found: Mapping[str, Tensor]) -> None:
        first, last = max(start, piece.start), min(stop, piece.start + piece.rows)
        for tensor in (one for one in piece.tensors if one.name in found):
            row_bytes = tensor.byte_count // piece.rows
            target = bytes_of(found[tensor.name][first - start : last - start])
            self.reader.read_into(piece.file, tensor.offset + (first - piece.start) * row_bytes, target)


def open_checkpoint(files: Files, name: str) -> LoadedCheckpoint:
    """Opens the checkpoint in folder `name`: reads the manifest, compares all sizes, reads the small parts.

    Raises:
        DamagedCheckpoint: it is not what was written.
        CheckpointError: it is of a newer format, or the file system failed.
    """
    manifest = _read_manifest(files, name)
    reader = BlockReader(files, name, manifest)
    reader.check_sizes()
    place = files.place(f"{name}/{MANIFEST}")
    pieces = {table.name: _pieces_of(manifest, table.name) for table in manifest.tables}
    return LoadedCheckpoint(
        name=name,
        samples=manifest.samples,
        config=_plain(manifest.config, place),
        position=_plain(manifest.position, place),
        extra=_plain(manifest.extra, place),
        tables=tuple(entry.table() for entry in manifest.tables),
        dense=_read_group(reader, manifest.dense),
        random=_read_group(reader, manifest.random),
        skipped=(),
        pieces=pieces,
        reader=reader,
    )


def _read_manifest(files: Files, name: str) -> Manifest:
    path = f"{name}/{MANIFEST}"
    size = guarded(files, path, files.size)
    if size is None:
        raise damaged(files.place(path), "is missing")
    if size > MAX_MANIFEST_BYTES:
        raise damaged(files.place(path), f"has {size} bytes, more than any manifest")
    content = guarded(files, path, lambda where: files.read(where, 0, size))
    return decode(content, files.place(path))


def _plain(raw: msgspec.Raw, place: str) -> dict[str, Any]:
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise damaged(place, f"holds what is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(place, f"holds a {type(value).__name__} where an object belongs")
    return value


def _pieces_of(manifest: Manifest, table: str) -> tuple[Piece, ...]:
    return tuple(sorted((piece for piece in manifest.pieces if piece.table == table), key=lambda piece: piece.start))


def _read_group(reader: BlockReader, group: Group) -> dict[str, Tensor]:
    return {tensor.name: _read_tensor(reader, group.file, tensor) for tensor in group.tensors}


def _read_tensor(reader: BlockReader, file: str, entry: TensorEntry) -> Tensor:
    tensor = torch.empty(math.prod(entry.shape), dtype=DTYPES[entry.dtype])
    reader.read_into(file, entry.offset, bytes_of(tensor))
    return tensor.view(entry.shape)


def _empty(tensor: TensorEntry, rows: int) -> Tensor:
    return torch.empty((rows, *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])


def _named(tensors: Sequence[TensorEntry], name: str) -> TensorEntry:
    return next(tensor for tensor in tensors if tensor.name == name)
