"""What a checkpoint holds, as the job gives it: its rows are in memory, or read when they are written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shadowsync.embedding.table import Rows, RowSet

__all__ = ["TABLE_WIDE", "DeltaOf", "RowSet", "Rows", "Snapshot"]

TABLE_WIDE = frozenset({"step"})
"""Names of tensors of `Rows` that belong to a table as a whole: of a single row their length does not tell."""


@dataclass(frozen=True)
class DeltaOf:
    """What a snapshot that does not hold every row builds on.

    Attributes:
        parent: name of the checkpoint whose rows stand where the snapshot has none.
        complete: the snapshot has every row that changed since the parent was taken.
    """

    parent: str
    complete: bool


@dataclass(frozen=True)
class Snapshot:
    """A consistent image of a job.

    Attributes:
        config: the configuration as the user gave it.
        samples: samples trained so far; also the name of the checkpoint, so it only grows.
        tables: rows, in any cut. In a delta a table is either here as a whole (`Rows`), or of every run of its rows
            those that are to be written (`RowSet`, which may hold none).
        dense: tensors by name: `final`, what the job would be evaluated with; `center` where there is one;
            `replica.<i>.weight`, `replica.<i>.<name>` of the optimizer, `replica.<i>.buffer.<name>` of the module;
            `sync.<i>.<name>` of the sync method.
        position: the reader's position (plain JSON values).
        random: random states by name (uint8 tensors).
        extra: further plain JSON values (counts that go on after a resume).
        delta: what this one builds on; None for a whole one.
    """

    config: Mapping[str, Any]
    samples: int
    tables: tuple[Rows | RowSet, ...]
    dense: Mapping[str, Tensor]
    position: Mapping[str, Any]
    random: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    delta: DeltaOf | None = None
