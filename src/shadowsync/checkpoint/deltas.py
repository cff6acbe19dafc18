"""Rows that changed from one checkpoint to another, as files for a serving system.

OUT/                            files that are read without shadowsync
    rows-00000.safetensors …   `<table>[<start>:<stop>].numbers`, int64 [K], beside `….weight`, float32 [K, D]
    delta.json                 written last: which checkpoints, which tables, and the files with size and CRC-32
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shadowsync.checkpoint.files import open_files
from shadowsync.checkpoint.format import plain_name
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import write_tensors
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import RowSet, Table
from shadowsync.errors import CheckpointError, SaveError

FORMAT = 1
LIST = "delta.json"
FILE_BYTES = 128 << 20
_ONE_SUM = 1 << 62
WEIGHT = frozenset({"weight"})


def changed_rows(
    store: CheckpointStore, since: str, until: str | None = None, names: Collection[str] = WEIGHT
) -> Iterator[RowSet]:
    """The rows that differ between two checkpoints, as they are in the later one, in bounded chunks.

    Where `until` is a delta that builds on `since`, the rows of the deltas between them are given (each of which was
    trained, though it may have come back to its value), and nothing else is read. Otherwise, and for tables that a
    delta holds as a whole, both are compared byte by byte. Laid over `since` the result is `until`, in either case.

    `until` is None for the newest that is not damaged; `names` are the tensors wanted and compared: weights are enough
    to serve from. `CheckpointError` if one of them cannot be loaded, or they have different tables.
    """
    newer = store.open(until)
    names_of_layers = [plain_name(layer.name) for layer in newer.layers]
    between = None  # layers that stand on that of `since`, where it is one
    if plain_name(since) in names_of_layers:
        between = len(newer.layers) - 1 - names_of_layers.index(plain_name(since))
    older: LoadedCheckpoint | None = None
    for table in newer.tables:
        whole = between is None or any(layer.is_whole(table.name) for layer in newer.layers[-between:] if between)
        if whole:
            older = older or store.open(since)
            yield from _differences(older, newer, table.name, names)
        elif between:
            for start, stop in newer.chunks(table.name, 0, table.rows):
                found = newer.newer_rows(table.name, start, stop, between, names)
                if len(found.numbers):
                    yield found


def _differences(
    older: LoadedCheckpoint, newer: LoadedCheckpoint, name: str, names: Collection[str]
) -> Iterator[RowSet]:
    before, after = older.table(name), newer.table(name)
    if (before.rows, before.dim) != (after.rows, after.dim):
        raise CheckpointError(
            f"table {name} has {before.rows} rows of {before.dim} in {older.name} and {after.rows} of {after.dim} in "
            f"{newer.name}: export {newer.name} as a whole"
        )
    for start, stop in newer.chunks(name, 0, after.rows):
        old, new = (loaded.rows(name, start, stop, names) for loaded in (older, newer))
        by_row = [key for key in new if len(new[key]) == stop - start]
        # other bytes, so that NaN equals itself
        differs = [(_bytes_by_row(old[key]) != _bytes_by_row(new[key])).any(1) for key in by_row]
        different = torch.stack(differs).any(0)
        if len(rows := different.nonzero().flatten()):
            tensors = {key: tensor[rows] if key in by_row else tensor for key, tensor in new.items()}
            yield RowSet(after, start, stop, rows + start, tensors)


def _bytes_by_row(tensor: Tensor) -> Tensor:
    return tensor.view(len(tensor), -1).view(torch.uint8)


def write_delta(
    out: str, since: str, until: str, changes: Iterable[RowSet], *, file_bytes: int = FILE_BYTES
) -> dict[str, Any]:
    """Writes changed rows into the new folder `out`, which appears when it is complete; returns what `delta.json` says.

    `out` is a local path or any URL that fsspec knows (else `ConfigError`). `since` and `until` name the checkpoint
    that the changes are laid over and the one that comes out. Of the changes no more than `file_bytes` are held at a
    time, and go into one file. `SaveError` if it cannot be written, or something is there: nothing is left of it then.
    """
    root, _, folder = out.rstrip("/").rpartition("/")
    files = open_files(root or ("/" if out.startswith("/") else "."))
    try:
        if files.names(folder) or files.size(folder) is not None:
            raise SaveError(f"{out} is there already: give another folder, or remove it")
        staged = files.staging(folder)
        files.remove(staged, LIST)  # the remains of one that was cut off
        changed: dict[Table, int] = {}
        written: list[dict[str, Any]] = []
        try:
            for number, group in enumerate(_groups(changes, changed, file_bytes)):
                file, _ = write_tensors(files, staged, f"rows-{number:05d}.safetensors", group, block_bytes=_ONE_SUM)
                written.append({"name": file.name, "bytes": file.bytes, "crc32": file.crc32[0]})
            tables = [{"name": t.name, "rows": t.rows, "dim": t.dim, "changed": rows} for t, rows in changed.items()]
            listed = {"format": FORMAT, "since": since, "until": until, "tables": tables, "files": written}
            files.publish(folder, LIST, json.dumps(listed, indent=2).encode())
        except BaseException:
            for name in {staged, folder}:
                with contextlib.suppress(OSError):
                    files.remove(name, LIST)
            raise
    except OSError as error:
        raise SaveError(
            f"{out} could not be written ({error.strerror or error}): make room, or give another"
        ) from error
    return listed


def _groups(changes: Iterable[RowSet], changed: dict[Table, int], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Named tensors, as many as go into one file; counts the rows `changed`."""
    group: dict[str, Tensor] = {}
    taken = 0
    for rows in changes:
        changed[rows.table] = changed.get(rows.table, 0) + len(rows.numbers)
        key = f"{rows.table.name}[{rows.start}:{rows.stop}]"
        tensors = {"numbers": rows.numbers, **rows.tensors}
        group |= {f"{key}.{name}": tensor for name, tensor in tensors.items()}
        taken += sum(tensor.nbytes for tensor in tensors.values())
        if taken >= file_bytes:
            yield group
            group, taken = {}, 0
    if group:
        yield group
