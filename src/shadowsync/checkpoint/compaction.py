"""A checkpoint with all that it builds on as one whole snapshot, whose rows are read only when they are written."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.tensors import DTYPES
from shadowsync.embedding.table import Rows, Table


def as_whole(loaded: LoadedCheckpoint) -> Snapshot:
    """The same state without a parent; its rows are read tensor by tensor."""
    return Snapshot(
        config=loaded.config,
        samples=loaded.samples,
        tables=tuple(rows for table in loaded.tables for rows in _runs(loaded, table)),
        dense=loaded.dense,
        position=loaded.position,
        random=loaded.random,
        extra=loaded.extra,
    )


@dataclass(frozen=True)
class _Stored:
    """The rows of a table from `start` on, as the checkpoint holds them (`RowSource`)."""

    loaded: LoadedCheckpoint
    table: str
    start: int

    def read(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        for start, stop in self.loaded.chunks(self.table, self.start + first, self.start + last):
            yield self.loaded.rows(self.table, start, stop, {name})[name]


def _runs(loaded: LoadedCheckpoint, table: Table) -> Iterator[Rows]:
    """The rows cut wherever a piece ends, as each piece has its own tensors of the table as a whole."""
    pieces = [piece for layer in loaded.layers for piece in layer.pieces.get(table.name, ())]
    first = next(piece for piece in pieces if piece.scattered is None)
    for start, stop in pairwise(sorted({0, *(piece.stop for piece in pieces)})):
        forms = {
            tensor.name: torch.empty((stop - start, *tensor.shape[1:]), dtype=DTYPES[tensor.dtype], device="meta")
            for tensor in first.tensors
        }
        wide = {tensor.name for tensor in first.wide}
        in_memory = loaded.rows(table.name, start, stop, wide) if wide else {}
        yield Rows(table, start, forms | in_memory, _Stored(loaded, table.name, start))
