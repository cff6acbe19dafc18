"""Reads a checkpoint with all that it builds on: any range of rows, each row from the newest piece that holds it."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shadowsync.checkpoint.layers import Layer
from shadowsync.checkpoint.manifest import Piece
from shadowsync.checkpoint.tensors import DTYPES
from shadowsync.embedding.table import Rows, RowSet, Shard, Table
from shadowsync.errors import CheckpointError

CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class LoadedCheckpoint:
    """A checkpoint that was opened: small parts are in memory, rows are read when asked for.

    Its methods raise `CheckpointError` for what it has not or was not opened with, and if a file is not what was
    written.

    Attributes:
        samples: trained when it was taken.
        config: of the run that wrote it, with the reader's `position` and further values (`extra`).
        dense: flat tensors of the dense part by name; empty where only shards were opened.
        random: random states by name; empty where only shards were opened.
        skipped: one sentence for each newer checkpoint that could not be loaded: what was lost, and why; and one if
            some rows of this one are older than the rest.
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
        return self._each_row(table, start, stop, names) | self._wide(table, start, stop, names)

    def _each_row(self, table: str, start: int, stop: int, names: Collection[str] | None) -> dict[str, Tensor]:
        touched = self._touched(table, start, stop)
        asked = [one for one in touched[0][1].tensors if names is None or one.name in names]
        found = {one.name: _empty(one.dtype, one.shape, stop - start) for one in asked}
        for layer, piece in touched:
            layer.read(piece, start, stop, found)
        return found

    def _wide(self, table: str, start: int, stop: int, names: Collection[str] | None) -> dict[str, Tensor]:
        touched = self._touched(table, start, stop)
        wide = [one.name for one in touched[0][1].wide if names is None or one.name in names]
        return {name: _furthest(touched, name) for name in wide}

    def rows_of(self, shards: Sequence[Shard], names: Collection[str] | None = None) -> Iterator[Rows]:
        """The rows of some shards in bounded chunks; nothing else is read.

        Tensors of the table as a whole come with each chunk, as `rows` gives them for the whole shard.
        """
        for shard in shards:
            name = shard.table.name
            wide = self._wide(name, shard.start, shard.stop, names)
            for start, stop in self.chunks(name, shard.start, shard.stop):
                yield Rows(shard.table, start, self._each_row(name, start, stop, names) | wide)

    def chunks(self, table: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows of a table that take about `CHUNK_BYTES` each."""
        _, piece = self._touched(table, start, stop)[0]
        bytes_of_row = sum(_empty(one.dtype, one.shape, 1).nbytes for one in piece.tensors)
        step = max(1, CHUNK_BYTES // bytes_of_row)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def newer_rows(self, table: str, start: int, stop: int, layers: int, names: Collection[str]) -> RowSet:
        """Those of rows `start … stop − 1` that the newest `layers` layers hold, none of which has the table whole."""
        touched = [(layer, piece) for layer in self.layers[-layers:] for piece in layer.touched(table, start, stop)]
        numbers = torch.unique(torch.cat([layer.numbers(piece, start, stop)[1] for layer, piece in touched]))
        first = touched[0][1]
        found = {one.name: _empty(one.dtype, one.shape, len(numbers)) for one in first.tensors if one.name in names}
        for layer, piece in touched:
            layer.read(piece, start, stop, found, lambda rows: torch.searchsorted(numbers, rows))
        found |= {one.name: _furthest(touched, one.name) for one in first.wide if one.name in names}
        return RowSet(self.table(table), start, stop, numbers, found)

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


def _furthest(touched: Sequence[tuple[Layer, Piece]], name: str) -> Tensor:
    return torch.stack([layer.wide(piece, name) for layer, piece in touched]).amax(0)


def _empty(dtype: str, shape: Sequence[int], rows: int) -> Tensor:
    return torch.empty((rows, *shape[1:]), dtype=DTYPES[dtype])


Written = Callable[[Table, Tensor | range], Tensor]
"""The weights of rows of a table as a checkpoint that was just written holds them, float32 `[K, D]`.

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
