"""The format of a checkpoint: its name, its manifest, and tensors as bytes.

A name is `samples-000000001024`, of a second one of as many samples `samples-000000001024-1`. `NAME-whole` holds what
`NAME` holds, without a parent: wherever `NAME` is asked for, it can stand in.

The manifest says what the files hold, and is checked in full before anything is read or allocated:

    {"format": 1, "crc32": of the body's bytes, "body": {…}}

A checkpoint may come from anywhere, so nothing in it is believed: sizes are compared with the files, file names
cannot leave the folder, and no pickle is involved. Format 2 adds the delta: a checkpoint with a `parent`, over whose
rows its own are laid. Format 3 adds rows in fewer bytes than float32 (`values`). A manifest is written in the first
format that has what it needs, which older versions read.

Tensors are in the safetensors layout, written in one pass from their own memory, with block checksums. The safetensors
library writes a file only as a whole and to a local path; here the header and then each tensor go out in chunks, so
that any file system takes them, no copy is made, and the checksums cost no second reading. The files are plain
safetensors files, which the library opens.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import msgspec
import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shadowsync.checkpoint.values import EXACT, RowValues, row_values
from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError
from shadowsync.registry import members

FORMAT = 3
_WHOLE_FORMAT, _DELTA_FORMAT = 1, 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 32 << 20
MAX_ENTRIES = 300_000
"""Tensors, pieces, files and tables together. A thousand tables on fifty servers have half of that; a forged manifest
of many more would take a minute to refuse."""
MAX_CONFIG_BYTES = 4 << 20
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.safetensors")
_BLOCK_BYTES = (1 << 10, 256 << 20)
NAME = re.compile(r"samples-(\d{12,18})(?:-([1-9]\d{0,5}))?(-whole)?")
STAGED = re.compile(rf"\.{NAME.pattern}\.part")
_WHOLE = "-whole"
Chunk = bytes | memoryview
CHUNK_BYTES = 4 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not what was written: torn, cut, altered, or with files missing."""


def damaged(place: str, defect: str) -> DamagedCheckpoint:
    """The error for the file or folder at `place`."""
    return DamagedCheckpoint(f"{place} {defect}: use an older checkpoint, or copy this one again")


# --- names -----------------------------------------------------------------------------------------------------------


def order(name: str) -> tuple[int, int, bool]:
    """Sorts names from the oldest on: samples, number among those of as many samples, rewritten as a whole."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0), match[3] is not None


def new_name(samples: int, number: int) -> str:
    """The name of a new checkpoint, the `number`-th of so many samples."""
    return f"samples-{samples:012d}" + (f"-{number}" if number else "")


def whole_name(name: str) -> str:
    """The name of the checkpoint that holds the same as a whole."""
    return name if name.endswith(_WHOLE) else name + _WHOLE


def plain_name(name: str) -> str:
    """The name under which the state was saved first."""
    return name.removesuffix(_WHOLE)


# --- the manifest ----------------------------------------------------------------------------------------------------


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a file: `offset` is the position of its first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def memory_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def byte_count(self) -> int:
        """In the file."""
        return self.memory_bytes


class RowTensor(TensorEntry, frozen=True, omit_defaults=True):
    """A tensor of rows: dtype and shape are those in memory, the file holds each row in bytes as `values` has it.

    Attributes:
        values: name of the `RowValues`; `fp32` for rows as they are.
        squares: as `RowValues` has it.
    """

    values: str = EXACT
    squares: bool = False

    @property
    def byte_count(self) -> int:
        if (kind := row_values(self.values)) is None:
            return self.memory_bytes
        return prod(self.shape[:1]) * kind.row_bytes(prod(self.shape[1:]))


class Scattered(msgspec.Struct, frozen=True):
    """Which rows of a run a piece of a delta holds; the others are as in the parent.

    `stop` is one beyond the last row of the run, which begins at the piece's `start`; the `numbers` of the rows are
    distinct and ascending, int64 or int32 `[rows]`.
    """

    stop: int
    numbers: TensorEntry


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows `start … start + rows − 1` of a table, or, if `scattered`, `rows` rows of a longer run.

    Attributes:
        version: samples trained when these rows were copied.
        tensors: of first dimension `rows`.
        wide: tensors of the table as a whole, as they stood with these rows.
    """

    table: str
    start: int
    rows: int
    version: int
    file: str
    tensors: tuple[RowTensor, ...]
    wide: tuple[TensorEntry, ...] = ()
    scattered: Scattered | None = None

    @property
    def stop(self) -> int:
        return self.start + self.rows if self.scattered is None else self.scattered.stop

    @property
    def all_tensors(self) -> tuple[TensorEntry, ...]:
        return self.tensors + self.wide + (() if self.scattered is None else (self.scattered.numbers,))

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be alike in all pieces of a table, those of a parent included, in whatever values they hold it."""
        rows = tuple(sorted((tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in self.tensors))
        return rows, tuple(sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in self.wide))


class TensorGroup(msgspec.Struct, frozen=True):
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
    dense: TensorGroup
    random: TensorGroup
    block_bytes: int
    files: tuple[FileEntry, ...]
    parent: str | None = None
    exact: bool = True


class _Version(msgspec.Struct, frozen=True):
    format: int


class _Envelope(_Version, frozen=True):
    crc32: int
    body: msgspec.Raw


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
    exact = _WHOLE_FORMAT if manifest.parent is None and manifest.exact else _DELTA_FORMAT
    number = FORMAT if kinds_in(manifest.pieces) else exact
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
    if (kinds := kinds_in(manifest.pieces)) and (unknown := kinds - {*members("shadowsync.checkpoint", RowValues)}):
        raise CheckpointError(
            f"{place} holds rows in {min(unknown)!r}, which this shadowsync does not know: install the shadowsync that "
            "wrote it, or a newer one"
        )
    for defect in _defects(manifest):
        raise damaged(place, defect)
    if kinds and version < FORMAT:  # a version that takes them for float32 would read it
        raise damaged(place, f"has format {version}, which has no rows in {min(kinds)}")
    return manifest


def kinds_in(pieces: Iterable[Piece]) -> set[str]:
    """The `RowValues` by name in which rows are held that are not as they were."""
    return {tensor.values for piece in pieces for tensor in piece.tensors} - {EXACT}


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
    for group in (manifest.dense, manifest.random, *(TensorGroup(p.file, p.all_tensors) for p in manifest.pieces)):
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
        if len({piece.form for piece in found}) > 1:
            yield f"holds different tensors for different rows of table {table.name}"
        if len({piece.scattered is None for piece in found}) > 1:
            yield f"holds table {table.name} half as a whole and half as single rows"


def _piece_defects(table: Table, piece: Piece) -> Iterator[str]:
    names = [tensor.name for tensor in piece.tensors + piece.wide]
    if len(set(names)) < len(names):
        yield f"lists a tensor of table {table.name} twice"
    if any(tensor.shape[:1] != (piece.rows,) for tensor in piece.tensors):
        yield f"gives a tensor of table {table.name} another number of rows than its piece"
    numbers = piece.scattered and piece.scattered.numbers
    if numbers and (numbers.dtype not in ("I64", "I32") or numbers.shape != (piece.rows,)):
        yield f"holds no int32 or int64 numbers of {piece.rows} rows of table {table.name}"
    if any(tensor.values != EXACT and (tensor.dtype != "F32" or 0 in tensor.shape[1:]) for tensor in piece.tensors):
        yield f"holds in fewer bytes what is no float32 in table {table.name}"
    weights = [(t.dtype, t.shape) for t in piece.tensors if t.name == "weight"]
    if weights != [("F32", (piece.rows, table.dim))] or table.dim < 1:
        yield f"holds no float32 rows of width {table.dim} for table {table.name}"


# --- tensors ---------------------------------------------------------------------------------------------------------


def place(tensors: Sequence[tuple[str, Tensor]], late: Collection[str] = ()) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file, and at which byte of it each tensor begins, in the order of the file.

    Tensors of wider elements come first, so that each stands at a multiple of its element's width. Those named in
    `late` come behind all others; where they are of wider elements they stand in their place if the others all have
    elements of one width. `ValueError` if two tensors have one name, or a dtype has no code.
    """
    if len({name for name, _ in tensors}) < len(tensors):
        raise ValueError(f"names of tensors are not unique: {', '.join(name for name, _ in tensors)}")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    widths: dict[str, int] = {}
    stop = 0
    for name, tensor in sorted(tensors, key=lambda item: (item[0] in late, -item[1].element_size())):
        if tensor.dtype not in CODES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}, which checkpoints do not hold")
        begins[name], widths[name] = stop, tensor.element_size()
        stop += tensor.nbytes
        offsets = [begins[name], stop]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    fits = (n for n in range(8) if not any((len(text) + n + begins[name]) % widths[name] for name in begins))
    text += b" " * next(fits, -len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in views of at most `CHUNK_BYTES`."""
    view = bytes_of(tensor.detach().cpu().contiguous())
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    """Writable view of the bytes of a contiguous CPU tensor."""
    if not tensor.numel():  # numpy's empty arrays come with a stride that torch does not view as bytes
        return memoryview(bytearray())
    return tensor.flatten().view(torch.uint8).numpy().data
