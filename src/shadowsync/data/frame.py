"""Turns columns of a data frame into a batch, and says which rows cannot be turned.

`B` samples, `F` categorical features, `N` dense columns, `L` ids.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.hashing import hash_strings, mix, to_rows
from shadowsync.data.rows import Problem

Mask = NDArray[np.bool_]
Finding = tuple[Mask, Callable[[int], Problem]]  # the rows that have a problem, and what to say of one

_MOST = 1e38  # of a dense value; sums and products of larger ones are beyond float32


@dataclass(frozen=True)
class Column:
    """A categorical column.

    Attributes:
        rows: ids lie in `[0, rows)`.
        hashed: values are hashed to `[1, rows)`; else they are the ids.
        text: values are strings.
        listed: a cell is a list of values.
        weights: the column of the ids' weights, lists as long as this column's.
    """

    name: str
    rows: int
    hashed: bool
    text: bool
    listed: bool
    weights: str | None


@dataclass(frozen=True)
class Layout:
    """The columns of a batch, in its order; `log_dense` asks for log(1 + max(x, 0)) of the dense ones."""

    label: str | None
    dense: tuple[str, ...]
    columns: tuple[Column, ...]
    log_dense: bool


def batch_of(frame: pl.DataFrame, layout: Layout) -> Batch | None:
    """All rows as a batch; None if any of them has a problem."""
    labels, dense = _labels(frame, layout), _dense(frame, layout)
    if labels is None or dense is None:
        return None
    listed = any(column.listed for column in layout.columns)
    ids = _bags(frame, layout) if listed else _singles(frame, layout)
    return None if ids is None else Batch(torch.from_numpy(labels), torch.from_numpy(dense), ids)


def problems(frame: pl.DataFrame, layout: Layout) -> list[Problem]:
    """The first problem of each bad row, in the order of the rows."""
    first: dict[int, Problem] = {}
    for bad, problem in _findings(frame, layout):
        for row in np.flatnonzero(bad).tolist():
            if row not in first:
                first[row] = problem(row)
    return [first[row] for row in sorted(first)]


def _labels(frame: pl.DataFrame, layout: Layout) -> NDArray[np.float32] | None:
    if layout.label is None:
        return np.zeros(len(frame), dtype=np.float32)
    labels = frame[layout.label].cast(pl.Float32).fill_null(-1).to_numpy()
    return labels.copy() if ((labels == 0) | (labels == 1)).all() else None


def _dense(frame: pl.DataFrame, layout: Layout) -> NDArray[np.float32] | None:
    dense = np.empty((len(frame), len(layout.dense)), dtype=np.float32)
    for position, name in enumerate(layout.dense):
        dense[:, position] = _numbers(frame[name]).to_numpy()
    if not (dense.max(initial=0) <= _MOST and dense.min(initial=0) >= -_MOST):  # not so either where one is no number
        return None
    return np.log1p(np.maximum(dense, 0)) if layout.log_dense else dense


def _numbers(series: pl.Series) -> pl.Series:
    return series.cast(pl.Float32).fill_null(0.0)


def _singles(frame: pl.DataFrame, layout: Layout) -> Jagged | None:
    values = np.empty((len(layout.columns), len(frame)), dtype=np.int64)
    for position, column in enumerate(layout.columns):
        ids = _ids(frame[column.name], column)
        if ids is None:
            return None
        values[position] = ids
    return Jagged(torch.from_numpy(values.ravel()), None, None, len(layout.columns), len(frame))


def _bags(frame: pl.DataFrame, layout: Layout) -> Jagged | None:
    values, lengths, weights = [], [], []
    for column in layout.columns:
        flat, counts = _flatten(frame[column.name], column.listed)
        ids, weight = _ids(flat, column), _weights(frame, column, counts)
        if ids is None or weight is None:
            return None
        values.append(ids)
        lengths.append(counts)
        weights.append(weight)
    offsets = np.zeros(len(layout.columns) * len(frame) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    weighted = any(column.weights for column in layout.columns)
    return Jagged(
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(offsets),
        torch.from_numpy(np.concatenate(weights)) if weighted else None,
        len(layout.columns),
        len(frame),
    )


def _flatten(series: pl.Series, listed: bool) -> tuple[pl.Series, NDArray[np.int64]]:
    """All values, and how many each row has; a missing list is an empty one."""
    if not listed:
        return series, np.ones(len(series), dtype=np.int64)
    counts = series.list.len().fill_null(0).to_numpy().astype(np.int64)
    return series.filter(pl.Series(counts > 0)).explode(), counts


def _weights(frame: pl.DataFrame, column: Column, counts: NDArray[np.int64]) -> NDArray[np.float32] | None:
    if column.weights is None:
        return np.ones(counts.sum(), dtype=np.float32)
    flat, weight_counts = _flatten(frame[column.weights], listed=True)
    weights = flat.cast(pl.Float32).fill_null(np.nan).to_numpy()
    return weights if (weight_counts == counts).all() and np.isfinite(weights).all() else None


def _ids(values: pl.Series, column: Column) -> NDArray[np.int64] | None:
    missing = values.is_null().to_numpy() if values.null_count() else None
    if not column.hashed:
        ids = values.to_numpy().astype(np.int64) if missing is None else None
        return ids if ids is not None and (ids.view(np.uint64) < column.rows).all() else None
    if column.text:
        hashes = hash_strings(values.cast(pl.String))
    else:
        hashes = mix(values.fill_null(0).to_numpy().astype(np.int64).view(np.uint64))
    rows = to_rows(hashes, np.uint64(column.rows))
    if missing is not None:
        rows[missing] = 0
    return rows


def _label_finding(label: pl.Series) -> Finding:
    numbers = label.cast(pl.Float32).fill_null(-1).to_numpy()
    wrong = (numbers != 0) & (numbers != 1)
    return wrong, lambda row: Problem(row, f"the label ({label.name}) is {_show(label[row])}, it must be 0 or 1")


def _findings(frame: pl.DataFrame, layout: Layout) -> Iterator[Finding]:
    """One finding for each kind of problem, whether any row has it or not."""
    if layout.label is not None:
        yield _label_finding(frame[layout.label])
    for name in layout.dense:
        yield _dense_finding(frame[name])
    for column in layout.columns:
        if not column.hashed:
            yield from _id_findings(frame, column)
        if column.weights is not None:
            yield from _weight_findings(frame, column, column.weights)


def _dense_finding(series: pl.Series) -> Finding:
    wrong = ~(np.abs(_numbers(series).to_numpy()) <= _MOST)
    allowed = f"it must be a finite number of at most {_MOST:.0e}"
    return wrong, lambda row: Problem(row, f"{series.name} is {_show(series[row])}, {allowed}")


def _id_findings(frame: pl.DataFrame, column: Column) -> Iterator[Finding]:
    flat, counts = _flatten(frame[column.name], column.listed)
    rows = np.repeat(np.arange(len(frame)), counts)
    missing = flat.is_null().to_numpy()
    hashed = f"hash the column with data.hash_size={{{column.name}: 100000}}"
    yield (
        _rows_with(missing, rows, len(frame)),
        lambda row: Problem(row, f"{column.name} has no id", f"{hashed}, which takes missing ones to row 0"),
    )
    outside = ~missing & (flat.fill_null(0).to_numpy().astype(np.int64).view(np.uint64) >= column.rows)
    ids = dict(zip(rows[outside][::-1].tolist(), flat.filter(pl.Series(outside)).to_list()[::-1], strict=True))
    allowed = f"outside of 0 … {column.rows - 1} (data.rows)"
    yield (
        _rows_with(outside, rows, len(frame)),
        lambda row: Problem(
            row, f"{column.name} has id {ids[row]}, {allowed}", f"{hashed}, or raise data.rows above its highest id"
        ),
    )


def _weight_findings(frame: pl.DataFrame, column: Column, weights: str) -> Iterator[Finding]:
    _, counts = _flatten(frame[column.name], listed=True)
    flat, weight_counts = _flatten(frame[weights], listed=True)
    yield weight_counts != counts, lambda row: Problem(row, f"{weights} and {column.name} are of different length")
    wrong = ~np.isfinite(flat.cast(pl.Float32).fill_null(np.nan).to_numpy())
    rows = np.repeat(np.arange(len(frame)), weight_counts)
    text = f"{weights} has a weight that is not a finite number"
    yield _rows_with(wrong, rows, len(frame)), lambda row: Problem(row, text)


def _rows_with(flags: Mask, rows: NDArray[np.int64], count: int) -> Mask:
    found = np.zeros(count, dtype=np.bool_)
    found[rows[flags]] = True
    return found


def _show(value: object) -> str:
    return "missing" if value is None else repr(value)
