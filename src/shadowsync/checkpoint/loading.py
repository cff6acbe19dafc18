"""Reads a checkpoint with all that it builds on: any range of rows, each row from the newest piece that holds it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
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

    Attributes:
        name: its folder's name.
        samples: samples trained when it was taken.
        config: the configuration of the run that wrote it.
        position: the reader's position.
        extra: further values of that run.
        tables: the embedding tables.
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
        """The tensors kept for each row of a table: `weight` and the optimizer's.

        Raises:
            CheckpointError: there is no such table.
        """
        rows = self.table(table).rows
        first = next((layer.pieces[table][0] for layer in self.layers if table in layer.pieces), None)
        if first is None:
            raise CheckpointError(f"{self.name} was opened without the {rows} rows of table {table}")
        return tuple(tensor.name for tensor in first.tensors + first.wide)

    def table(self, name: str) -> Table:
        """The table of this name.

        Raises:
            CheckpointError: there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise CheckpointError(
            f"{self.name} has no table {name}; it has {', '.join(table.name for table in self.tables) or 'none'}"
        )

    def rows(self, table: str, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Rows `start … stop − 1` of a table with their optimizer state, whatever pieces hold them.

        A tensor of the table as a whole (Adam's `step`) is the largest of the pieces that speak of these rows, element
        by element: pieces of one table may have been stepped a different number of times.

        Args:
            table: its name.
            start: the first row.
            stop: one beyond the last.
            names: read only these tensors (`{"weight"}` to predict); None reads all.

        Raises:
            CheckpointError: no such table or rows, or the files are not what was written.
        """
        return self._each_row(table, start, stop, names) | self._wide(table, start, stop, names)

    def _each_row(self, table: str, start: int, stop: int, names: Collection[str] | None) -> dict[str, Tensor]:
        """The tensors that have an element for each row."""
        touched = self._touched(table, start, stop)
        base = touched[0][1].tensors
        asked = [one for one in base if names is None or one.name in names]
        found = {one.name: _empty(one.dtype, one.shape, stop - start) for one in asked}
        for layer, piece in touched:
            layer.read(piece, start, stop, found)
        return found

    def _wide(self, table: str, start: int, stop: int, names: Collection[str] | None) -> dict[str, Tensor]:
        """The tensors of the table as a whole."""
        touched = self._touched(table, start, stop)
        wide = [one.name for one in touched[0][1].wide if names is None or one.name in names]
        return {name: _furthest(touched, name) for name in wide}

    def rows_of(self, shards: Sequence[Shard], names: Collection[str] | None = None) -> Iterator[Rows]:
        """The rows of some shards in bounded chunks; nothing else is read.

        Tensors of the table as a whole come with each chunk, as `rows` gives them for the whole shard.

        Args:
            shards: of any cut.
            names: as in `rows`.

        Raises:
            CheckpointError: as `rows`.
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
        """Reads everything that was opened once and compares it with its checksums.

        Raises:
            CheckpointError: something is not what was written.
        """
        if self.shards is not None:
            for _ in self.rows_of(self.shards):
                continue
            return
        for layer in self.layers:
            layer.verify()

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
