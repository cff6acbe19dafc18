"""Checks that hold for every source, made off the hot path."""

import numpy as np

from shadowsync.data.batch import Batch
from shadowsync.data.source import OpenSource, Slice
from shadowsync.errors import DataError


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
