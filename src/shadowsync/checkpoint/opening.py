"""Opens a checkpoint with everything that it builds on: manifests and sizes are compared before a row is read."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from shadowsync.checkpoint.blocks import BlockReader, guarded
from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.layers import Layer, pieces_by_table
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, Piece, damaged, decode, form
from shadowsync.checkpoint.names import order, whole_name
from shadowsync.embedding.table import Shard


def read_manifest(files: Files, name: str) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: it is not what was written.
        CheckpointError: it is of a newer format, or the file system failed.
    """
    path = f"{name}/{MANIFEST}"
    size = guarded(files, path, files.size)
    if size is None:
        raise damaged(files.place(path), "is missing")
    if size > MAX_MANIFEST_BYTES:
        raise damaged(files.place(path), f"has {size} bytes, more than any manifest")
    content = guarded(files, path, lambda where: files.read(where, 0, size))
    return decode(content, files.place(path))


def open_checkpoint(
    files: Files, name: str, shards: Sequence[Shard] | None = None, *, prefer_whole: bool = True
) -> LoadedCheckpoint:
    """Opens the checkpoint in folder `name`: reads the manifests, compares all sizes, reads the small parts.

    Args:
        files: where the checkpoints are.
        name: of one of them.
        shards: open only what their rows need, without the dense part.
        prefer_whole: where a state is there both as it was saved and rewritten as a whole, read the latter.

    Raises:
        DamagedCheckpoint: it, or something that it builds on, is not what was written.
        CheckpointError: it is of a newer format, or the file system failed.
    """
    chain = list(_manifests(files, name, prefer_whole))
    newest = chain[0][1]
    layers, hidden = [], set[str]()
    for at, manifest in chain:
        pieces = pieces_by_table([p for p in manifest.pieces if p.table not in hidden and _is_wanted(p, shards)])
        _check_same_tables(files.place(f"{at}/{MANIFEST}"), manifest, newest, pieces)
        hidden |= {piece.table for piece in manifest.pieces if piece.scattered is None}
        layers.append(_layer(files, at, manifest, pieces))
    dense, random = _small_parts(files, name, newest) if shards is None else ({}, {})
    place = files.place(f"{name}/{MANIFEST}")
    return LoadedCheckpoint(
        name=name,
        samples=newest.samples,
        config=_plain(newest.config, place),
        position=_plain(newest.position, place),
        extra=_plain(newest.extra, place),
        tables=tuple(entry.table() for entry in newest.tables),
        dense=dense,
        random=random,
        skipped=(),
        layers=tuple(reversed(layers)),
        shards=None if shards is None else tuple(shards),
    )


def _manifests(files: Files, name: str, prefer_whole: bool) -> Iterator[tuple[str, Manifest]]:
    """The checkpoint and what it builds on, newest first."""
    while True:
        manifest = read_manifest(files, name)
        yield name, manifest
        if manifest.parent is None:
            return
        parent = standing(files, manifest.parent, prefer_whole)
        if order(parent) >= order(name):
            raise damaged(files.place(f"{name}/{MANIFEST}"), f"builds on {parent}, which is newer")
        name = parent


def standing(files: Files, name: str, prefer_whole: bool = True) -> str:
    """Who holds the state called `name`."""
    names = dict.fromkeys((whole_name(name), name) if prefer_whole else (name, whole_name(name)))
    there = (one for one in names if guarded(files, f"{one}/{MANIFEST}", files.size) is not None)
    return next(there, name)


def _is_wanted(piece: Piece, shards: Sequence[Shard] | None) -> bool:
    return shards is None or any(
        piece.table == shard.table.name and piece.overlaps(shard.start, shard.stop) for shard in shards
    )


def _layer(files: Files, name: str, manifest: Manifest, pieces: Mapping[str, tuple[Piece, ...]]) -> Layer:
    needed = {piece.file for found in pieces.values() for piece in found}
    entries = [entry for entry in manifest.files if entry.name in needed]
    reader = BlockReader(files, name, entries, manifest.block_bytes)
    reader.check_sizes()
    return Layer(name, manifest.samples, manifest.exact, pieces, reader)


def _small_parts(files: Files, name: str, manifest: Manifest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The dense part and the random states."""
    groups = manifest.dense, manifest.random
    entries = [entry for entry in manifest.files if entry.name in {group.file for group in groups}]
    reader = BlockReader(files, name, entries, manifest.block_bytes)
    reader.check_sizes()
    reader.check_content()
    dense, random = (reader.read_group(group) for group in groups)
    return dense, random


def _check_same_tables(
    place: str, manifest: Manifest, newest: Manifest, pieces: Mapping[str, tuple[Piece, ...]]
) -> None:
    """Raises `DamagedCheckpoint` if what is built upon has other tables, or other tensors for their rows."""
    defect = table_difference(manifest, newest, pieces)
    if defect is not None:
        raise damaged(place, f"has {defect} than what builds on it")


def table_difference(parent: Manifest, child: Manifest, names: Iterable[str]) -> str | None:
    """What differs in the tables `names`, as `another table X` or `other tensors in table X`; None if nothing does."""
    for name in names:
        if _size(parent, name) != _size(child, name):
            return f"another table {name}"
        if _form(parent, name) != _form(child, name):
            return f"other tensors in table {name}"
    return None


def _size(manifest: Manifest, name: str) -> tuple[int, int] | None:
    return next(((entry.rows, entry.dim) for entry in manifest.tables if entry.name == name), None)


def _form(manifest: Manifest, name: str) -> Any:
    return next((form(piece) for piece in manifest.pieces if piece.table == name), None)


def _plain(raw: msgspec.Raw, place: str) -> dict[str, Any]:
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise damaged(place, f"holds what is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(place, f"holds a {type(value).__name__} where an object belongs")
    return value
