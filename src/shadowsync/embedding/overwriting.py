"""Puts saved rows over those of a shard, runs of rows as well as single ones; nothing that does not fit is written.

`K` rows that are saved, `D` their width.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shadowsync.embedding.optimizers import Extent, RowRule
from shadowsync.embedding.table import Rows, RowSet
from shadowsync.errors import CheckpointError


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
    if isinstance(saved, RowSet):
        _check_numbers(saved)
        _check_forms(own, saved, wide_names(rule))


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
    if isinstance(saved, RowSet):
        _overwrite_set(own, saved, wide_names(rule))
    else:
        _overwrite_run(own, saved)


def held_rows(own: Rows, saved: Rows | RowSet) -> Tensor:
    """Positions in the shard of the rows that `saved` has of it, int64 `[K]`."""
    if isinstance(saved, RowSet):
        return _inside(own, saved)[1]
    start, stop = (row - own.start for row in (saved.start, saved.start + _count(saved)))
    return torch.arange(max(0, start), max(0, start, min(_count(own), stop)))


def _overwrite_run(own: Rows, saved: Rows) -> None:
    start = max(own.start, saved.start)
    stop = min(own.start + _count(own), saved.start + _count(saved))
    if start >= stop:
        return
    for name, target in own.tensors.items():
        source = saved.tensors[name]
        if len(source) == _count(saved) and len(target) == _count(own):
            target[start - own.start : stop - own.start].copy_(source[start - saved.start : stop - saved.start])
        else:
            target.copy_(source)


def _overwrite_set(own: Rows, saved: RowSet, wide: Collection[str]) -> None:
    if max(own.start, saved.start) >= min(own.start + _count(own), saved.stop):
        return
    held, places = _inside(own, saved)
    for name, target in own.tensors.items():
        source = saved.tensors[name]
        if name in wide:
            target.copy_(source)
        else:
            target.index_copy_(0, places, source[held].to(target.dtype))


def _inside(own: Rows, saved: RowSet) -> tuple[slice, Tensor]:
    """Which of the set's rows the shard holds, and their places in it."""
    bounds = torch.tensor([own.start, own.start + _count(own)])
    first, last = torch.searchsorted(saved.numbers, bounds).tolist()
    return slice(first, last), saved.numbers[first:last] - own.start


def _check_numbers(saved: RowSet) -> None:
    numbers, name = saved.numbers, saved.table.name
    if numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise CheckpointError(f"row numbers of table {name} are int64 [K], not {numbers.dtype} {list(numbers.shape)}")
    if not 0 <= saved.start < saved.stop <= saved.table.rows:
        raise CheckpointError(f"table {name} has no rows {saved.start} to {saved.stop}: it has {saved.table.rows}")
    if len(numbers) and not (
        bool((numbers.diff() > 0).all()) and saved.start <= int(numbers[0]) and int(numbers[-1]) < saved.stop
    ):
        raise CheckpointError(
            f"row numbers of table {name} must be distinct, in ascending order and from {saved.start} to "
            f"{saved.stop - 1}"
        )


def _check_forms(own: Rows, saved: RowSet, wide: Collection[str]) -> None:
    for name, target in own.tensors.items():
        form = list(target.shape if name in wide else (len(saved.numbers), *target.shape[1:]))
        if list(saved.tensors[name].shape) != form:
            raise CheckpointError(
                f"{name} of {len(saved.numbers)} rows of table {saved.table.name} has the form "
                f"{list(saved.tensors[name].shape)} and not {form}"
            )


def wide_names(rule: type[RowRule]) -> Collection[str]:
    """Names of the tensors of a table as a whole."""
    return [name for name, extent in rule.state.items() if extent is Extent.SHARD]


def _count(rows: Rows) -> int:
    return len(rows.tensors["weight"])
