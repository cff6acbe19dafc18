"""Reads a checkpoint with all that it builds on: any range of rows, each row from the newest piece that holds it.

Manifests and sizes are compared before a row is read, and each byte is checked in the pass that reads it.
"""

import contextlib
import json
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.format import (
    DTYPES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    Piece,
    RowTensor,
    TensorEntry,
    bytes_of,
    damaged,
    decode,
    kinds_in,
    order,
    whole_name,
)
from shadowsync.checkpoint.values import row_values
from shadowsync.embedding.table import Rows, RowSet, Shard, Table
from shadowsync.errors import CheckpointError

KEPT_BLOCKS = 4
"""More lets more tensors of a table be read side by side, a run of rows at a time, without reading a block twice."""
CHUNK_BYTES = 4 << 20
"""Of the rows that are read at once; small, since they go on to their server in one message."""


class Layer:
    """The pieces of one checkpoint that are needed to load another, and the files that hold them, of the right sizes.

    Files are read block by block, each block compared with its checksum. A block in the midst of which a range ended
    is kept for the next range, and so is a file's last block, in which small tensors lie together. Any thread may read.
    What is gone, too short or not what was written is a `DamagedCheckpoint`; if the file system fails, that is another
    `CheckpointError`.

    Attributes:
        exact: as in the manifest.
        pieces: by table, in the order of their rows; tables without any are absent.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        manifest: Manifest,
        pieces: Mapping[str, Sequence[Piece]],
        needed: Collection[str],
    ) -> None:
        """`needed` are the files that may be read."""
        self.name, self.samples, self.exact, self.pieces = name, manifest.samples, manifest.exact, pieces
        self._files, self._block_bytes = files, manifest.block_bytes
        self._entries = {entry.name: entry for entry in manifest.files if entry.name in needed}
        self._kept: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()
        self._last = threading.local()  # several servers may read at once, each from a piece of its own
        for entry in self._entries.values():
            size = files.guarded(f"{name}/{entry.name}", files.size)
            if size is None:
                raise self._damaged(entry.name, "is missing")
            if size != entry.bytes:
                raise self._damaged(entry.name, f"has {size} bytes where the manifest says {entry.bytes}")

    @property
    def byte_count(self) -> int:
        """Of its rows in memory."""
        return sum(tensor.memory_bytes for found in self.pieces.values() for one in found for tensor in one.all_tensors)

    def is_whole(self, table: str) -> bool:
        return table in self.pieces and self.pieces[table][0].scattered is None

    def touched(self, table: str, start: int, stop: int) -> list[Piece]:
        pieces = self.pieces.get(table, ())
        first = bisect_right(pieces, start, key=lambda piece: piece.stop)
        return list(pieces[first : bisect_left(pieces, stop, key=lambda piece: piece.start)])

    def numbers(self, piece: Piece, start: int, stop: int) -> tuple[int, Tensor]:
        """The rows of `start … stop − 1` that a scattered piece holds, and how many it holds before them."""
        numbers = self._numbers(piece)
        first, last = torch.searchsorted(numbers, torch.tensor([start, stop])).tolist()
        return first, numbers[first:last]

    def read(
        self,
        piece: Piece,
        start: int,
        stop: int,
        found: Mapping[str, Tensor],
        places: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Lays the piece's share of rows `start … stop − 1` over what was found so far, of the tensors in `found`.

        `places` tells from row numbers to positions in `found`; None where its first row is row `start`.
        """
        wanted = [tensor for tensor in piece.tensors if tensor.name in found]
        if piece.scattered is None:
            first, last = max(start, piece.start), min(stop, piece.stop)
            for tensor in wanted:
                self._read_from(piece, tensor, first - piece.start, found[tensor.name][first - start : last - start])
            return
        skip, numbers = self.numbers(piece, start, stop)
        where = numbers - start if places is None else places(numbers)
        for tensor in wanted:
            part = torch.empty((len(numbers), *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])
            self._read_from(piece, tensor, skip, part)
            found[tensor.name].index_copy_(0, where, part)

    def wide(self, piece: Piece, name: str) -> Tensor:
        """The tensor `name` of the table as a whole, as it stood with the piece's rows."""
        return self.read_tensor(piece.file, next(tensor for tensor in piece.wide if tensor.name == name))

    def verify(self) -> None:
        """Reads everything that is needed of it once, in bounded memory, and compares it with its checksums."""
        for entry in self._entries.values():
            for index in range(len(entry.crc32)):
                self._block(entry, index)
        for piece in (one for pieces in self.pieces.values() for one in pieces if one.scattered is not None):
            self._numbers(piece)

    def _read_from(self, piece: Piece, tensor: RowTensor, skip: int, target: Tensor) -> None:
        """Fills `target` with the tensor's rows after the first `skip`."""
        if not len(target):
            return
        row_bytes, kind = tensor.byte_count // piece.rows, row_values(tensor.values)
        stored = target if kind is None else torch.empty((len(target), row_bytes), dtype=torch.uint8)
        self._read_into(piece.file, tensor.offset + skip * row_bytes, bytes_of(stored))
        if kind is not None:
            kind.decode(stored, tensor.squares, target.view(len(target), -1))

    def _numbers(self, piece: Piece) -> Tensor:
        """All row numbers of a piece; those of the last one asked for in this thread are kept."""
        last: tuple[Piece, Tensor] | None = getattr(self._last, "read", None)
        if last is not None and last[0] is piece:
            return last[1]
        assert piece.scattered is not None
        numbers = self.read_tensor(piece.file, piece.scattered.numbers).to(torch.int64)
        inside = not len(numbers) or (piece.start <= int(numbers[0]) and int(numbers[-1]) < piece.stop)
        if not inside or not bool((numbers[1:] > numbers[:-1]).all()):
            raise self._damaged(piece.file, f"has impossible row numbers for table {piece.table}")
        self._last.read = (piece, numbers)
        return numbers

    def read_tensor(self, file: str, entry: TensorEntry) -> Tensor:
        tensor = torch.empty(math.prod(entry.shape), dtype=DTYPES[entry.dtype])
        self._read_into(file, entry.offset, bytes_of(tensor))
        return tensor.view(entry.shape)

    def _read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` from byte `offset` of a file."""
        entry, done = self._entries[name], 0
        while done < len(target):
            index, skip = divmod(offset + done, self._block_bytes)
            with self._lock:
                content = self._kept.pop((name, index), None)
            content = content or self._block(entry, index)
            part = memoryview(content)[skip : skip + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            if skip + len(part) < len(content) or index == len(entry.crc32) - 1:
                with self._lock:
                    self._kept[name, index] = content
                    if len(self._kept) > KEPT_BLOCKS:
                        del self._kept[next(iter(self._kept))]

    def _block(self, entry: FileEntry, index: int) -> bytes:
        start = index * self._block_bytes
        stop = min(start + self._block_bytes, entry.bytes)
        content = self._files.guarded(f"{self.name}/{entry.name}", lambda path: self._files.read(path, start, stop))
        if len(content) != stop - start:
            raise self._damaged(entry.name, f"ends before byte {stop} of {entry.bytes}")
        if crc32(content) != entry.crc32[index]:
            raise self._damaged(entry.name, f"is not what was written (bytes {start} to {stop})")
        return content

    def _damaged(self, file: str, defect: str) -> DamagedCheckpoint:
        return damaged(self._files.place(f"{self.name}/{file}"), defect)


@dataclass(frozen=True, eq=False)
class LoadedCheckpoint:
    """A checkpoint that was opened: small parts are in memory, rows are read when asked for.

    Its methods raise `CheckpointError` for what it has not or was not opened with, and if a file is not what was
    written.

    Attributes:
        config: of the run that wrote it, with the reader's `position` and further values (`extra`).
        dense: flat tensors of the dense part by name, beside the `random` states; empty where only shards were opened.
        skipped: one sentence for each newer checkpoint that could not be loaded: what was lost, and why; one if some
            rows of this one are older than the rest, and one if rows are held in fewer bytes than float32 takes.
        layers: this checkpoint and what it builds on, from the whole one on.
        shards: the only rows that can be asked for; None for all.
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
    layers: tuple[Layer, ...]
    shards: tuple[Shard, ...] | None = None

    @property
    def exact(self) -> bool:
        """Whether no row is older than `samples`; else some are, as priority saving leaves them.

        Either way rows that were copied beside training may be some steps newer.
        """
        return all(layer.exact for layer in self.layers)

    @property
    def oldest(self) -> int:
        """No row is older than this many samples."""
        versions = [piece.version for pieces in self.layers[0].pieces.values() for piece in pieces]
        exact = [layer.samples for layer in self.layers if layer.exact]
        return self.samples if self.exact else max(exact, default=min(versions, default=self.samples))

    def tensor_names(self, table: str) -> tuple[str, ...]:
        """The tensors kept for each row of a table: `weight` and the optimizer's."""
        rows = self.table(table).rows
        first = next((layer.pieces[table][0] for layer in self.layers if table in layer.pieces), None)
        if first is None:
            raise CheckpointError(f"{self.name} was opened without the {rows} rows of table {table}")
        return tuple(tensor.name for tensor in first.tensors + first.wide)

    def table(self, name: str) -> Table:
        by_name = {table.name: table for table in self.tables}
        if name not in by_name:
            raise CheckpointError(f"{self.name} has no table {name}; it has {', '.join(by_name) or 'none'}")
        return by_name[name]

    def rows(self, table: str, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Rows `start … stop − 1` of a table with their optimizer state, whatever pieces hold them.

        A tensor of the table as a whole (Adam's `step`) is the largest of the pieces that speak of these rows, element
        by element: pieces of one table may have been stepped a different number of times.

        `names` are the tensors to read (`{"weight"}` to predict), None for all.
        """
        touched = self._touched(table, start, stop)
        return _each_row(touched, start, stop, names) | _wide(touched, names)

    def rows_of(self, shards: Sequence[Shard], names: Collection[str] | None = None) -> Iterator[Rows]:
        """The rows of some shards in bounded chunks; nothing else is read.

        Tensors of the table as a whole come with each chunk, as `rows` gives them for the whole shard.
        """
        for shard in shards:
            name = shard.table.name
            wide = _wide(self._touched(name, shard.start, shard.stop), names)
            for start, stop in self.chunks(name, shard.start, shard.stop):
                yield Rows(shard.table, start, _each_row(self._touched(name, start, stop), start, stop, names) | wide)

    def chunks(self, table: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows of a table that take about `CHUNK_BYTES` each."""
        _, piece = self._touched(table, start, stop)[0]
        step = max(1, CHUNK_BYTES // sum(_empty(one, 1).nbytes for one in piece.tensors))
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def newer_rows(self, table: str, start: int, stop: int, layers: int, names: Collection[str]) -> RowSet:
        """Those of rows `start … stop − 1` that the newest `layers` layers hold, none of which has the table whole."""
        touched = [(layer, piece) for layer in self.layers[-layers:] for piece in layer.touched(table, start, stop)]
        numbers = torch.unique(torch.cat([layer.numbers(piece, start, stop)[1] for layer, piece in touched]))
        found = {one.name: _empty(one, len(numbers)) for one in touched[0][1].tensors if one.name in names}
        for layer, piece in touched:
            layer.read(piece, start, stop, found, lambda rows: torch.searchsorted(numbers, rows))
        return RowSet(self.table(table), start, stop, numbers, found | _wide(touched, names))

    def dense_tensor(self, name: str, elements: int) -> Tensor:
        """The dense tensor `name`; one of another number of elements is another model's."""
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
        """Reads everything that was opened once and compares it with its checksums."""
        if self.shards is None:
            for layer in self.layers:
                layer.verify()
        else:
            for _ in self.rows_of(self.shards):
                continue

    def _touched(self, table: str, start: int, stop: int) -> list[tuple[Layer, Piece]]:
        """The pieces that speak of these rows, from the oldest on."""
        total = self.table(table).rows
        if not 0 <= start < stop <= total:
            raise CheckpointError(f"{self.name} has no rows {start} to {stop} of table {table}: it has {total} rows")
        found = [(layer, piece) for layer in self.layers for piece in layer.touched(table, start, stop)]
        run = [piece for _, piece in found if piece.scattered is None]
        whole = run and run[0].start <= start and stop <= run[-1].stop
        if not whole or any(before.stop != after.start for before, after in pairwise(run)):
            raise CheckpointError(f"{self.name} was opened without rows {start} to {stop} of table {table}")
        return found


_Touched = Sequence[tuple[Layer, Piece]]


def _each_row(touched: _Touched, start: int, stop: int, names: Collection[str] | None) -> dict[str, Tensor]:
    asked = [one for one in touched[0][1].tensors if names is None or one.name in names]
    found = {one.name: _empty(one, stop - start) for one in asked}
    for layer, piece in touched:
        layer.read(piece, start, stop, found)
    return found


def _wide(touched: _Touched, names: Collection[str] | None) -> dict[str, Tensor]:
    asked = [one.name for one in touched[0][1].wide if names is None or one.name in names]
    return {name: torch.stack([layer.wide(piece, name) for layer, piece in touched]).amax(0) for name in asked}


def _empty(tensor: TensorEntry, rows: int) -> Tensor:
    return torch.empty((rows, *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])


# --- opening ---------------------------------------------------------------------------------------------------------


def is_complete(files: Files, name: str) -> bool:
    """Whether the folder `name` is a checkpoint, and not the remains of a save."""
    return files.guarded(f"{name}/{MANIFEST}", files.size) is not None


def standing(files: Files, name: str, prefer_whole: bool = True) -> str:
    """Who holds the state called `name`: where it is there both as saved and rewritten as a whole, the latter."""
    names = (whole_name(name), name) if prefer_whole else (name, whole_name(name))
    return next((one for one in names if is_complete(files, one)), name)


def read_manifest(files: Files, name: str) -> Manifest:
    """The manifest of a checkpoint; raises as `open_checkpoint`."""
    path = f"{name}/{MANIFEST}"
    size = files.guarded(path, files.size)
    if size is None:
        raise damaged(files.place(path), "is missing")
    if size > MAX_MANIFEST_BYTES:
        raise damaged(files.place(path), f"has {size} bytes, more than any manifest")
    content = files.guarded(path, lambda where: files.read(where, 0, size))
    return decode(content, files.place(path))


def open_checkpoint(
    files: Files, name: str, shards: Sequence[Shard] | None, prefer_whole: bool = True
) -> LoadedCheckpoint:
    """Reads the manifests of a checkpoint and of what it builds on, compares all sizes, reads the small parts.

    With `shards` only what their rows need, without the dense part. `prefer_whole` as in `standing`.

    Raises:
        DamagedCheckpoint: it is not as it was written.
        CheckpointError: it is of a newer format, or the file system fails.
    """

    def is_wanted(piece: Piece) -> bool:
        return shards is None or any(
            piece.table == shard.table.name and piece.start < shard.stop and shard.start < piece.stop
            for shard in shards
        )

    chain = list(_manifests(files, name, prefer_whole))
    newest, place = chain[0][1], files.place(f"{name}/{MANIFEST}")
    layers, hidden = [], set[str]()
    for at, manifest in chain:
        pieces: dict[str, list[Piece]] = {}
        for piece in sorted(manifest.pieces, key=lambda piece: piece.start):
            if piece.table not in hidden and is_wanted(piece):
                pieces.setdefault(piece.table, []).append(piece)
        if (defect := table_difference(manifest, newest, pieces)) is not None:
            raise damaged(files.place(f"{at}/{MANIFEST}"), f"has {defect} than what builds on it")
        hidden |= {piece.table for piece in manifest.pieces if piece.scattered is None}
        needed = {piece.file for found in pieces.values() for piece in found}
        layers.append(Layer(files, at, manifest, pieces, needed))
    small: list[dict[str, Tensor]] = [{}, {}]
    if shards is None:
        groups = (newest.dense, newest.random)
        layer = Layer(files, name, newest, {}, {group.file for group in groups})
        layer.verify()
        small = [{one.name: layer.read_tensor(group.file, one) for one in group.tensors} for group in groups]
    loaded = LoadedCheckpoint(
        name=name,
        samples=newest.samples,
        config=_plain(newest.config, place),
        position=_plain(newest.position, place),
        extra=_plain(newest.extra, place),
        tables=newest.tables,
        dense=small[0],
        random=small[1],
        skipped=(),
        layers=tuple(reversed(layers)),
        shards=None if shards is None else tuple(shards),
    )
    told = []
    if not loaded.exact:
        told.append(
            f"{name} holds some rows as of its {loaded.samples} samples and others as of earlier ones, down to "
            f"{loaded.oldest}, because only part of them was saved each time: what those learned in between is lost"
        )
    if kinds_in(piece for layer in layers for found in layer.pieces.values() for piece in found):
        told.append(
            f"{name} holds rows rounded (train.save_values), so they are close to what they were when it was saved, "
            "and not the same"
        )
    return replace(loaded, skipped=tuple(told))


def _manifests(files: Files, name: str, prefer_whole: bool) -> Iterator[tuple[str, Manifest]]:
    while True:
        manifest = read_manifest(files, name)
        yield name, manifest
        if manifest.parent is None:
            return
        parent = standing(files, manifest.parent, prefer_whole)
        if order(parent) >= order(name):
            raise damaged(files.place(f"{name}/{MANIFEST}"), f"builds on {parent}, which is newer")
        name = parent


def table_difference(parent: Manifest, child: Manifest, names: Iterable[str]) -> str | None:
    """What differs in the tables `names`, as `another table X` or `other tensors in table X`; None if nothing does."""
    sizes = [{table.name: (table.rows, table.dim) for table in manifest.tables} for manifest in (parent, child)]
    firsts = [{piece.table: piece for piece in reversed(manifest.pieces)} for manifest in (parent, child)]
    for name in names:
        if sizes[0].get(name) != sizes[1].get(name):
            return f"another table {name}"
        there, here = (first[name].form if name in first else None for first in firsts)
        if there != here:
            return f"other tensors in table {name}"
    return None


def _plain(raw: msgspec.Raw, place: str) -> dict[str, Any]:
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise damaged(place, f"holds what is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(place, f"holds a {type(value).__name__} where an object belongs")
    return value


# --- what was just written -------------------------------------------------------------------------------------------


Written = Callable[[Table, Tensor | range], Tensor]
"""The weights of rows of a table as a checkpoint that was just written gives them back, float32 `[K, D]`.

The rows are a run, or single ones in ascending order, int64 `[K]`: all that the save holds between the first and the
last of them.
"""


@contextlib.contextmanager
def written_rows(opened: Callable[[], AbstractContextManager[LoadedCheckpoint]]) -> Iterator[Written]:
    """`Written` of what `opened` opens, which happens when the first rows are asked for; any threads may ask.

    `Written` raises `CheckpointError` if it cannot be read, or does not hold the rows.
    """
    lock = threading.Lock()
    found: list[LoadedCheckpoint] = []
    with contextlib.ExitStack() as stack:

        def written(table: Table, rows: Tensor | range) -> Tensor:
            if not len(rows):
                return torch.zeros(0, table.dim)
            with lock:
                if not found:
                    found.append(stack.enter_context(opened()))
            loaded, start, stop = found[0], int(rows[0]), int(rows[-1]) + 1
            if isinstance(rows, range):
                return loaded.rows(table.name, start, stop, {"weight"})["weight"]
            newer = loaded.newer_rows(table.name, start, stop, 1, {"weight"})
            if not torch.equal(newer.numbers, rows):
                raise CheckpointError(f"{loaded.name} does not hold the rows of table {table.name} that were saved")
            return newer.tensors["weight"]

        yield written
