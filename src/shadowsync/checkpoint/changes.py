"""Rows that changed from one checkpoint to another, for a server that has the former and wants the latter."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.names import plain_name
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import RowSet
from shadowsync.errors import CheckpointError

WEIGHT = frozenset({"weight"})


def changed_rows(
    store: CheckpointStore, since: str, until: str | None = None, names: Collection[str] = WEIGHT
) -> Iterator[RowSet]:
    """The rows that differ between two checkpoints, as they are in the later one, in bounded chunks.

    Where `until` is a delta that builds on `since`, the rows of the deltas between them are given (each of which was
    trained, though it may have come back to its value), and nothing else is read. Otherwise, and for tables that a
    delta holds as a whole, both are compared byte by byte. Laid over `since` the result is `until`, in either case.

    Args:
        store: where both are.
        since: name of a checkpoint.
        until: name of another; None for the newest that is whole.
        names: the tensors wanted and compared; weights are enough to serve from.

    Raises:
        CheckpointError: one of them cannot be loaded, or they have different tables.
    """
    newer = store.open(until)
    between = _layers_after(newer, since)
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


def _layers_after(loaded: LoadedCheckpoint, since: str) -> int | None:
    """How many layers stand on that of `since`; None if it is none of the layers."""
    names = [plain_name(layer.name) for layer in loaded.layers]
    return len(names) - 1 - names.index(plain_name(since)) if plain_name(since) in names else None


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
        different = torch.stack([_differs(old[key], new[key]) for key in by_row]).any(0)
        if len(rows := different.nonzero().flatten()):
            tensors = {key: tensor[rows] if key in by_row else tensor for key, tensor in new.items()}
            yield RowSet(after, start, stop, rows + start, tensors)


def _differs(old: Tensor, new: Tensor) -> Tensor:
    """Which rows have other bytes, so that NaN equals itself."""
    return (old.view(len(old), -1).view(torch.uint8) != new.view(len(new), -1).view(torch.uint8)).any(1)
