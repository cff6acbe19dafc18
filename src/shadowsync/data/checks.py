"""Checks that hold for every source, made off the hot path."""

import numpy as np

from shadowsync.data.batch import Batch
from shadowsync.data.rows import FileRows
from shadowsync.data.source import OpenSource, Slice
from shadowsync.errors import DataError

_LOOKED_AT = 1000  # rows
_LARGE = 1e4


def large_columns(source: OpenSource) -> str | None:
    """A sentence on dense columns whose numbers are far too large to train on, as the first rows of a file show them.

    Raises:
        DataError: one of these rows cannot be used.
    """
    if not isinstance(source, FileRows) or not source.schema.dense:
        return None
    most = source.first(_LOOKED_AT).dense.abs().amax(0).tolist() if source.rows else []
    found = [f"{name} ({value:.3g})" for name, value in zip(source.schema.dense, most, strict=True) if value > _LARGE]
    if not found:
        return None
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    remedy = (
        "scale them as the rows that the model was trained on"
        if source.for_trained
        else "list ids in data.categorical with data.hash_size, take counts with data.log_dense=true, and scale the "
        "rest to about −1 … 1"
    )
    return (
        f"dense columns with numbers beyond ±{_LARGE:,.0f}, which drown the others: {', '.join(found[:3])}{more}; "
        f"{remedy}"
    )


def largest_column(source: OpenSource) -> str | None:
    """`|price| is up to 1e+30`: the dense column with the largest number, where it is large and the files tell it.

    Raises:
        DataError: a file is gone, or was damaged.
    """
    bounds = source.dense_bounds() if isinstance(source, FileRows) else {}
    name = max(bounds, key=bounds.__getitem__, default=None)
    return None if name is None or bounds[name] <= _LARGE else f"|{name}| is up to {bounds[name]:.3g}"


def check_ids(batch: Batch, source: OpenSource, part: Slice) -> None:
    """Every id lies in its feature's `[0, rows)`.

    Raises:
        DataError: naming file, row, feature, id and what is allowed.
    """
    values = batch.ids.values.numpy().view(np.uint64)  # a negative id becomes a huge one
    offsets = None if batch.ids.offsets is None else batch.ids.offsets.numpy()
    samples = len(batch)
    for position, feature in enumerate(source.schema.features):
        bags = np.array([position, position + 1]) * samples
        start, stop = bags if offsets is None else offsets[bags]
        ids = values[start:stop]
        if ids.max(initial=0) < feature.rows:
            continue
        where = int(np.argmax(ids >= feature.rows))
        sample = where if offsets is None else int(np.searchsorted(offsets, start + where, side="right")) - 1 - bags[0]
        raise DataError(
            f"{source.place(part, int(sample))}: feature {feature.name} has id {ids.view(np.int64)[where]}, "
            f"outside of 0 … {feature.rows - 1}; raise the feature's rows, or hash it with data.hash_size"
        )
