"""Copies rows out of a server's memory while others push to it, each row with its optimizer state as of one moment."""

from collections.abc import Collection

import torch
from torch import Tensor

from shadowsync.embedding.table import Rows
from shadowsync.memory.shared import Gate

CHUNK_BYTES = 16 << 20
"""Copied in one turn; more makes pushes wait longer, less makes a copy wait for more pushes."""


def copy_rows(own: Rows, rows: Tensor | range, wide: Collection[str], gate: Gate) -> dict[str, Tensor]:
    """Copies of a shard's rows, in turns of `CHUNK_BYTES` at most (one row at least) of which pushes keep out.

    Args:
        own: live views of the shard.
        rows: their positions in it, int64 `[K]`.
        wide: tensors that belong to the table as a whole; they are copied last, so none is behind a row.
        gate: of the pushes.
    """
    live = {name: tensor for name, tensor in own.tensors.items() if name not in wide}
    copies = {name: tensor.new_empty((len(rows), *tensor.shape[1:])) for name, tensor in live.items()}
    row_bytes = sum(tensor[:1].nbytes for tensor in live.values())
    step = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        targets = {name: copy[first : first + len(part)] for name, copy in copies.items()}
        with gate.alone():
            for name, target in targets.items():
                _take(live[name], part, target)
    return {name: copies[name] if name in copies else tensor.clone() for name, tensor in own.tensors.items()}


def _take(tensor: Tensor, rows: Tensor | range, target: Tensor) -> None:
    if isinstance(rows, range):
        target.copy_(tensor[rows.start : rows.stop])
    else:
        torch.index_select(tensor, 0, rows, out=target)


def local_rows(rows: Tensor | range, start: int) -> Tensor | range:
    """Rows of a table as positions in a run of them that begins at `start`."""
    return range(rows.start - start, rows.stop - start) if isinstance(rows, range) else rows - start


def as_tensor(rows: Tensor | range) -> Tensor:
    """The numbers one by one, int64 `[K]`."""
    return torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
