"""Changed rows as files that a serving system reads without shadowsync.

OUT/
    rows-00000.safetensors …   `<table>[<start>:<stop>].numbers`, int64 [K], beside `….weight`, float32 [K, D]
    delta.json                 written last: which checkpoints, which tables, and the files with size and CRC-32
"""

import contextlib
from collections.abc import Iterable, Iterator

import msgspec
from torch import Tensor

from shadowsync.checkpoint.files import Files, open_files
from shadowsync.checkpoint.tensors import BlockSums, Chunk, chunks, place
from shadowsync.embedding.table import RowSet
from shadowsync.errors import SaveError

FORMAT = 1
LIST = "delta.json"
FILE_BYTES = 128 << 20
_ONE_SUM = 1 << 62


class TableChange(msgspec.Struct):
    """A table, and how many of its rows changed."""

    name: str
    rows: int
    dim: int
    changed: int


class FileOfRows(msgspec.Struct, frozen=True):
    """A file, with its size and the CRC-32 of its bytes."""

    name: str
    bytes: int
    crc32: int


class DeltaList(msgspec.Struct, frozen=True):
    """What `delta.json` says."""

    format: int
    since: str
    until: str
    tables: tuple[TableChange, ...]
    files: tuple[FileOfRows, ...]


def write_delta(
    out: str, since: str, until: str, changes: Iterable[RowSet], *, file_bytes: int = FILE_BYTES
) -> DeltaList:
    """Writes changed rows into the new folder `out`, which appears when it is complete.

    Args:
        out: a local path or any URL that fsspec knows; nothing may be there.
        since: name of the checkpoint that the changes are laid over.
        until: name of the one that comes out.
        changes: from `changed_rows`; no more than `file_bytes` of them are held at a time.
        file_bytes: a file of more rows is begun at this size.

    Returns:
        what was written.

    Raises:
        ConfigError: fsspec does not know the URL.
        SaveError: it cannot be written, or there is something. Nothing is left of it then.
    """
    root, _, folder = out.rstrip("/").rpartition("/")
    files = open_files(root or ("/" if out.startswith("/") else "."))
    try:
        if files.names(folder) or files.size(folder) is not None:
            raise SaveError(f"{out} is there already: give another folder, or remove it")
        return _write(files, folder, _Head(since, until), changes, file_bytes)
    except OSError as error:
        raise SaveError(
            f"{out} could not be written ({error.strerror or error}): make room, or give another"
        ) from error


class _Head(msgspec.Struct, frozen=True):
    since: str
    until: str


def _write(files: Files, folder: str, head: _Head, changes: Iterable[RowSet], file_bytes: int) -> DeltaList:
    staged = files.staging(folder)
    files.remove(staged, LIST)  # the remains of one that was cut off
    tables: dict[str, TableChange] = {}
    try:
        written = tuple(
            _write_file(files, staged, f"rows-{number:05d}.safetensors", group)
            for number, group in enumerate(_groups(_counted(changes, tables), file_bytes))
        )
        made = DeltaList(FORMAT, head.since, head.until, tuple(tables.values()), written)
        files.publish(folder, LIST, msgspec.json.format(msgspec.json.encode(made)))
    except BaseException:
        for name in {staged, folder}:
            with contextlib.suppress(OSError):
                files.remove(name, LIST)
        raise
    return made


def _counted(changes: Iterable[RowSet], tables: dict[str, TableChange]) -> Iterator[RowSet]:
    for rows in changes:
        table = rows.table
        entry = tables.setdefault(table.name, TableChange(table.name, table.rows, table.dim, 0))
        entry.changed += len(rows.numbers)
        yield rows


def _groups(changes: Iterable[RowSet], file_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Named tensors, as many as go into one file."""
    group: list[tuple[str, Tensor]] = []
    taken = 0
    for rows in changes:
        key = f"{rows.table.name}[{rows.start}:{rows.stop}]"
        tensors = {"numbers": rows.numbers, **rows.tensors}
        group += [(f"{key}.{name}", tensor) for name, tensor in tensors.items()]
        taken += sum(tensor.nbytes for tensor in tensors.values())
        if taken >= file_bytes:
            yield group
            group, taken = [], 0
    if group:
        yield group


def _write_file(files: Files, folder: str, name: str, tensors: list[tuple[str, Tensor]]) -> FileOfRows:
    head, placed = place(tensors)
    sums = BlockSums(_ONE_SUM)

    def stream() -> Iterator[Chunk]:
        sums.add(head)
        yield head
        for one in placed:
            for chunk in chunks(one.tensor):
                sums.add(chunk)
                yield chunk

    files.write(f"{folder}/{name}", stream())
    return FileOfRows(name, sums.total_bytes, sums.sums[0])
