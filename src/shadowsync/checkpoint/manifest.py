"""The manifest of a checkpoint: what its files hold, checked in full before anything is read or allocated.

    {"format": 1, "crc32": of the body's bytes, "body": {…}}

A checkpoint may come from anywhere, so nothing in it is believed: sizes are compared with the files, file names
cannot leave the folder, and no pickle is involved.

Format 2 adds the delta: a checkpoint with a `parent`, over whose rows its own are laid. A manifest without any of that
is still written as format 1, which older versions read.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import msgspec
from isal.isal_zlib import crc32

from shadowsync.checkpoint.parents import NAME
from shadowsync.checkpoint.tensors import DTYPES
from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError

FORMAT = 2
_WHOLE_FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 32 << 20
MAX_ENTRIES = 300_000
"""Tensors, pieces, files and tables together. A thousand tables on fifty servers have half of that; a forged manifest
of many more would take a minute to refuse."""
MAX_CONFIG_BYTES = 4 << 20
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.safetensors")
_BLOCK_BYTES = (1 << 10, 256 << 20)


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not what was written: torn, cut, altered, or with files missing."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a file: `offset` is the position of its first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def byte_count(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class Scattered(msgspec.Struct, frozen=True):
    """Which rows of a run a piece of a delta holds; the others are as in the parent.

    Attributes:
        stop: one beyond the last row of the run, which begins at the piece's `start`.
        numbers: of the rows, distinct and ascending, int64 `[rows]`.
    """

    stop: int
    numbers: TensorEntry


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows `start … start + rows − 1` of a table, or `rows` rows of a longer run.

    Attributes:
        version: samples trained when these rows were copied.
        tensors: of first dimension `rows`.
        wide: tensors of the table as a whole, as they stood with these rows.
        scattered: which rows these are, if not all of the run.
    """

    table: str
    start: int
    rows: int
    version: int
    file: str
    tensors: tuple[TensorEntry, ...]
    wide: tuple[TensorEntry, ...] = ()
    scattered: Scattered | None = None

    @property
    def stop(self) -> int:
        """One beyond the last row that the piece speaks of."""
        return self.start + self.rows if self.scattered is None else self.scattered.stop

    @property
    def all_tensors(self) -> tuple[TensorEntry, ...]:
        return self.tensors + self.wide + (() if self.scattered is None else (self.scattered.numbers,))

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it speaks of any of the rows `start … stop − 1`."""
        return self.start < stop and start < self.stop


class Group(msgspec.Struct, frozen=True):
    """A file of tensors that are always read together."""

    file: str
    tensors: tuple[TensorEntry, ...]


class FileEntry(msgspec.Struct, frozen=True):
    """A file with its size and the CRC-32 of each of its blocks."""

    name: str
    bytes: int
    crc32: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything about a checkpoint but its tensors. `config`, `position` and `extra` are plain JSON.

    Attributes:
        parent: the checkpoint whose rows stand where this one has none; None for a whole one.
        exact: laid over its parent no row is older than `samples` (rows that were copied beside training may be some
            steps newer); else some are.
    """

    samples: int
    config: msgspec.Raw
    position: msgspec.Raw
    extra: msgspec.Raw
    tables: tuple[Table, ...]
    pieces: tuple[Piece, ...]
    dense: Group
    random: Group
    block_bytes: int
    files: tuple[FileEntry, ...]
    parent: str | None = None
    exact: bool = True


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    crc32: int
    body: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    format: int


def raw_json(what: str, value: Any) -> msgspec.Raw:
    """`value` as JSON; `ValueError` if it is not made of plain JSON values (an infinite number, say)."""
    try:
        return msgspec.Raw(json.dumps(value, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the {what} of a checkpoint must be plain JSON values: {error}") from error


def encode(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file; `CheckpointError` if they would be more than `decode` reads."""
    if (defect := _excess(manifest)) is not None:
        raise CheckpointError(f"the manifest {defect}, more than can be read again")
    body = msgspec.json.encode(manifest)
    number = _WHOLE_FORMAT if manifest.parent is None and manifest.exact else FORMAT
    content = msgspec.json.encode(_Envelope(number, crc32(body), msgspec.Raw(body)))
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"the manifest has {len(content)} bytes, more than can be read again")
    return content


def decode(content: bytes, place: str) -> Manifest:
    """The manifest in `content`, its inner consistency checked (not yet compared with the files).

    Raises:
        DamagedCheckpoint: it is not what was written.
        CheckpointError: a newer shadowsync wrote it.
    """
    try:
        version = msgspec.json.decode(content, type=_Version).format
        if version > FORMAT:
            raise CheckpointError(
                f"{place} has format {version} and this shadowsync reads up to {FORMAT}: install the shadowsync that "
                "wrote it, or a newer one"
            )
        envelope = msgspec.json.decode(content, type=_Envelope)
        if version < 1 or crc32(envelope.body) != envelope.crc32:
            raise damaged(place, "does not match its own checksum")
        manifest = msgspec.json.decode(envelope.body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(place, f"is not a manifest ({error})") from error
    for defect in _defects(manifest):
        raise damaged(place, defect)
    return manifest


def damaged(place: str, defect: str) -> DamagedCheckpoint:
    """The error for the file or folder at `place`."""
    return DamagedCheckpoint(f"{place} {defect}: use an older checkpoint, or copy this one again")


def form(piece: Piece) -> tuple[Any, ...]:
    """What must be alike in all pieces of a table, those of a parent included."""
    rows = tuple(sorted((tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in piece.tensors))
    return rows, tuple(sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in piece.wide))


# --- what contradicts itself, as endings of a sentence ---------------------------------------------------------------


def _excess(manifest: Manifest) -> str | None:
    """What a manifest has more of than any has; found at once, before the rest is read."""
    if len(bytes(manifest.config)) > MAX_CONFIG_BYTES:
        return f"has a configuration of {len(bytes(manifest.config))} bytes"
    groups = [manifest.dense.tensors, manifest.random.tensors]
    entries = sum(map(len, [manifest.files, manifest.tables, manifest.pieces, *groups]))
    entries += sum(len(piece.tensors) + len(piece.wide) for piece in manifest.pieces[:MAX_ENTRIES])
    return f"has {entries} entries" if entries > MAX_ENTRIES else None


def _defects(manifest: Manifest) -> Iterator[str]:
    if (excess := _excess(manifest)) is not None:
        yield f"{excess}, more than any manifest"
        return
    if manifest.samples < 0 or not _BLOCK_BYTES[0] <= manifest.block_bytes <= _BLOCK_BYTES[1]:
        yield f"has samples {manifest.samples} and blocks of {manifest.block_bytes} bytes"
    files = {entry.name: entry for entry in manifest.files}
    if len(files) < len(manifest.files):
        yield "lists a file twice"
    for entry in manifest.files:
        if not _FILE_NAME.fullmatch(entry.name):
            yield f"lists a file of the name {entry.name!r}, which no checkpoint has"
        if entry.bytes < 0 or -(-entry.bytes // max(manifest.block_bytes, 1)) != len(entry.crc32):
            yield f"has {len(entry.crc32)} checksums for the {entry.bytes} bytes of {entry.name}"
    used: dict[str, list[TensorEntry]] = {name: [] for name in files}
    for small in (manifest.dense, manifest.random):
        if len({tensor.name for tensor in small.tensors}) < len(small.tensors):
            yield f"lists a tensor of {small.file} twice"
    for group in (manifest.dense, manifest.random, *(Group(p.file, p.all_tensors) for p in manifest.pieces)):
        if group.file not in files:
            yield f"speaks of a file {group.file!r} that it does not list"
            return
        used[group.file].extend(group.tensors)
    for name, tensors in used.items():
        yield from _layout_defects(files[name], tensors)
    yield from _table_defects(manifest)


def _layout_defects(file: FileEntry, tensors: Sequence[TensorEntry]) -> Iterator[str]:
    """Tensors must lie inside their file without overlap: so a small file can never ask for a large allocation."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES or len(tensor.shape) > 8 or min(tensor.shape, default=1) < 0 or tensor.offset < 8:
            yield f"gives tensor {tensor.name!r} an impossible form"
            return
    spans = sorted((tensor.offset, tensor.offset + tensor.byte_count) for tensor in tensors)
    if any(before[1] > after[0] for before, after in pairwise(spans)):
        yield f"lets tensors of {file.name} overlap"
    if spans and max(stop for _, stop in spans) > file.bytes:
        yield f"lets tensors reach beyond the end of {file.name}"


def _table_defects(manifest: Manifest) -> Iterator[str]:
    if manifest.parent is not None and not NAME.fullmatch(manifest.parent):
        yield f"builds on {manifest.parent!r}, which is no checkpoint's name"
    pieces: dict[str, list[Piece]] = {table.name: [] for table in manifest.tables}
    if len(pieces) < len(manifest.tables):
        yield "lists a table twice"
    for piece in manifest.pieces:
        if piece.table not in pieces:
            yield f"has rows of a table {piece.table!r} that it does not list"
            return
        pieces[piece.table].append(piece)
    for table in manifest.tables:
        found = sorted(pieces[table.name], key=lambda piece: piece.start)
        if manifest.parent is None and any(piece.scattered for piece in found):
            yield f"holds single rows of table {table.name} and names no parent for the others"
        row = 0
        for piece in found:
            if piece.start != row or piece.stop <= row or not 0 <= piece.rows <= piece.stop - piece.start:
                yield f"does not hold row {row} of table {table.name} exactly once"
                return
            row = piece.stop
            yield from _piece_defects(table, piece)
        if row != table.rows or row == 0:
            yield f"holds {row} of the {table.rows} rows of table {table.name}"
        if len(set(map(form, found))) > 1:
            yield f"holds different tensors for different rows of table {table.name}"
        if len({piece.scattered is None for piece in found}) > 1:
            yield f"holds table {table.name} half as a whole and half as single rows"


def _piece_defects(table: Table, piece: Piece) -> Iterator[str]:
    names = [tensor.name for tensor in piece.tensors + piece.wide]
    if len(set(names)) < len(names):
        yield f"lists a tensor of table {table.name} twice"
    if any(tensor.shape[:1] != (piece.rows,) for tensor in piece.tensors):
        yield f"gives a tensor of table {table.name} another number of rows than its piece"
    if piece.scattered and (piece.scattered.numbers.dtype, piece.scattered.numbers.shape) != ("I64", (piece.rows,)):
        yield f"holds no int64 numbers of {piece.rows} rows of table {table.name}"
    weights = [(t.dtype, t.shape) for t in piece.tensors if t.name == "weight"]
    if weights != [("F32", (piece.rows, table.dim))] or table.dim < 1:
        yield f"holds no float32 rows of width {table.dim} for table {table.name}"
