"""A checkpoint with all that it builds on as one whole snapshot, whose rows are read only when they are written."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from shadowsync.embedding.table import Rows, Table
from shadowsync.recovery.cutting import Cut
from shadowsync.recovery.files import Chunk
from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.recovery.snapshot import Snapshot
from shadowsync.recovery.tensors import DTYPES, chunks


def as_whole(loaded: LoadedCheckpoint) -> Snapshot:
    """The same state without a parent. Tensors of rows tell their form only; their bytes come from `rows_from`."""
    return Snapshot(
        config=loaded.config,
        samples=loaded.samples,
        tables=tuple(rows for table in loaded.tables for rows in _runs(loaded, table)),
        dense=loaded.dense,
        position=loaded.position,
        random=loaded.random,
        extra=loaded.extra,
    )


def rows_from(loaded: LoadedCheckpoint, cut: Cut, name: str) -> Iterator[Chunk]:
    """The bytes of a tensor of some rows, read from the checkpoint in chunks."""
    if name in cut.wide:
        yield from chunks(cut.wide[name])
        return
    for start, stop in loaded.chunks(cut.table, cut.start, cut.stop):
        yield from chunks(loaded.rows(cut.table, start, stop, {name})[name])


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
        yield Rows(table, start, forms | (loaded.rows(table.name, start, stop, wide) if wide else {}))
