"""Tables that a job has learnt of, for tests of several folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from shadowsync import registry
from shadowsync.data.fitting import Learnt, learn
from shadowsync.data.parquet import Parquet
from shadowsync.data.tables import OpenTable


def opened(
    path: Path, frame: Mapping[str, Any] | pl.DataFrame, learnt: Learnt | None = None, **options: Any
) -> OpenTable:
    """The frame as a file that has been learnt of, or of which a model has `learnt`."""
    table = pl.DataFrame(frame, strict=False)
    if "label" not in table.columns:
        table = table.with_columns(pl.int_range(pl.len()).mod(2).alias("label"))
    table.write_parquet(path)
    source = registry.build(Parquet, {"path": str(path), **options}, "data")
    return open_again(source, learnt)


def open_again(source: Parquet, learnt: Learnt | None = None) -> OpenTable:
    """With what was learnt, of the source's own rows if no model had."""
    if learnt is None:
        unread = source.open("train", "error")
        assert isinstance(unread, OpenTable)
        learnt = learn(source.kinds, source.tables, unread)
    found = source.with_learnt(learnt).open("train", "error")
    assert isinstance(found, OpenTable)
    return found
