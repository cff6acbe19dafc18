"""Rows in and out of a server's memory while others push to it, each row with its optimizer state as of one moment."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shadowsync.embedding.optimizers import Extent, RowRule
from shadowsync.embedding.table import Rows, RowSet, span_of
from shadowsync.errors import CheckpointError
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
                if isinstance(part, range):
                    target.copy_(live[name][part.start : part.stop])
                else:
                    torch.index_select(live[name], 0, part, out=target)
    return {name: copies[name] if name in copies else tensor.clone() for name, tensor in own.tensors.items()}


def local_rows(rows: Tensor | range, start: int) -> Tensor | range:
    """Rows of a table as positions in a run of them that begins at `start`."""
    return range(rows.start - start, rows.stop - start) if isinstance(rows, range) else rows - start


def as_tensor(rows: Tensor | range) -> Tensor:
    """The numbers one by one, int64 `[K]`."""
    return torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def check_fits(own: Rows, saved: Rows | RowSet, rule: type[RowRule]) -> None:
    """Raises `CheckpointError` unless `saved` is of the table and the optimizer of the shard's rows."""
    table, there = own.table, saved.table
    if (table.rows, table.dim) != (there.rows, there.dim):
        raise CheckpointError(
            f"table {table.name} has {there.rows} rows of {there.dim} in the checkpoint and {table.rows} of "
            f"{table.dim} in this job"
        )
    if set(own.tensors) != set(saved.tensors):
        raise CheckpointError(
            f"table {table.name} was saved with {', '.join(sorted(saved.tensors))}, and "
            f"embedding.optimizer={rule.name} needs {', '.join(sorted(own.tensors))}: "
            "resume with the optimizer it was trained with"
        )
    if not isinstance(saved, RowSet):
        return
    numbers, called = saved.numbers, saved.table.name
    if numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise CheckpointError(f"row numbers of table {called} are int64 [K], not {numbers.dtype} {list(numbers.shape)}")
    if not 0 <= saved.start < saved.stop <= saved.table.rows:
        raise CheckpointError(f"table {called} has no rows {saved.start} to {saved.stop}: it has {saved.table.rows}")
    if len(numbers) and not (
        bool((numbers.diff() > 0).all()) and saved.start <= int(numbers[0]) and int(numbers[-1]) < saved.stop
    ):
        raise CheckpointError(
            f"row numbers of table {called} must be distinct, in ascending order and from {saved.start} to "
            f"{saved.stop - 1}"
        )
    wide = wide_names(rule)
    for name, target in own.tensors.items():
        form = list(target.shape if name in wide else (len(saved.numbers), *target.shape[1:]))
        if list(saved.tensors[name].shape) != form:
            raise CheckpointError(
                f"{name} of {len(saved.numbers)} rows of table {called} has the form "
                f"{list(saved.tensors[name].shape)} and not {form}"
            )


def check_covered(own: Rows, found: Sequence[Rows | RowSet]) -> None:
    """Raises `CheckpointError` for the first row of the shard that `found` lacks; takes a byte for each row."""
    covered = torch.zeros(_count(own), dtype=torch.bool)
    for saved in found:
        if isinstance(saved, RowSet):
            covered[_inside(own, saved)[1]] = True
        else:
            covered[max(0, saved.start - own.start) : max(0, saved.start + _count(saved) - own.start)] = True
    if not covered.all():
        row = own.start + int(covered.logical_not().to(torch.uint8).argmax())
        raise CheckpointError(f"row {row} of table {own.table.name} is not in the checkpoint")


def overwrite(own: Rows, saved: Rows | RowSet, rule: type[RowRule]) -> None:
    """Copies what `saved` has of the shard's rows; tensors of the table as a whole come along with any row."""
    first, beyond = span_of(saved)
    start, stop = max(own.start, first), min(own.start + _count(own), beyond)
    if start >= stop:
        return
    wide = wide_names(rule)
    for name, target in own.tensors.items():
        source = saved.tensors[name]
        if name in wide:
            target.copy_(source)
        elif isinstance(saved, RowSet):
            held, places = _inside(own, saved)
            target.index_copy_(0, places, source[held].to(target.dtype))
        else:
            target[start - own.start : stop - own.start].copy_(source[start - first : stop - first])


def held_rows(own: Rows, saved: Rows | RowSet) -> Tensor:
    """Positions in the shard of the rows that `saved` has of it, int64 `[K]`."""
    if isinstance(saved, RowSet):
        return _inside(own, saved)[1]
    start, stop = (row - own.start for row in (saved.start, saved.start + _count(saved)))
    return torch.arange(max(0, start), max(0, start, min(_count(own), stop)))


def _inside(own: Rows, saved: RowSet) -> tuple[slice, Tensor]:
    """Which of the set's rows the shard holds, and their places in it."""
    bounds = torch.tensor([own.start, own.start + _count(own)])
    first, last = torch.searchsorted(saved.numbers, bounds).tolist()
    return slice(first, last), saved.numbers[first:last] - own.start


def wide_names(rule: type[RowRule]) -> Collection[str]:
    """Names of the tensors of a table as a whole."""
    return [name for name, extent in rule.state.items() if extent is Extent.SHARD]


def _count(rows: Rows) -> int:
    return len(rows.tensors["weight"])
