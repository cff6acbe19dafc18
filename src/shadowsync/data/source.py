"""The seam between a data format and the reader."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shadowsync.data.batch import Batch
from shadowsync.data.fingerprint import Mark

Pooling = Literal["sum", "mean", "none"]
"""How the vectors of one sample's ids become one; `none` keeps them apart, as a sequence in the order of the ids."""


@dataclass(frozen=True)
class Feature:
    """A categorical feature of a source.

    Attributes:
        name: the feature's name; a model receives its pooled vector, or its sequence of vectors, under this name.
        rows: ids lie in `[0, rows)`.
        table: the embedding table that holds its rows; None for one of its own, called like the feature.
        multi_hot: a sample may have any number of ids, zero included.
        pooling: how the table made by default pools this feature's ids of a sample.
    """

    name: str
    rows: int
    table: str | None = None
    multi_hot: bool = False
    pooling: Pooling = "sum"


@dataclass(frozen=True)
class Schema:
    """The columns a source yields: names of the dense columns, and the categorical features, in their order."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]


@dataclass(frozen=True)
class Slice:
    """A run of consecutive rows that is read at once.

    Attributes:
        index: position among the slices of its source, from 0.
        file: position of the file among the source's files (0 where there are none).
        start: first row within that file, from 0.
        rows: how many rows; reading may yield fewer where bad rows are skipped, never more.
    """

    index: int
    file: int
    start: int
    rows: int


@dataclass
class BadRows:
    """Rows left out because of `data.on_bad_row=skip`, and what was wrong with the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, messages: Sequence[str]) -> None:
        """Counts one row per message and keeps the first few messages; may be called from several threads."""
        with self._lock:
            self.count += len(messages)
            fresh = [message for message in messages[:5] if message not in self.examples]
            self.examples += fresh[: 5 - len(self.examples)]


class OpenSource(ABC):
    """A source opened for reading. `read` may be called from several threads at once, in any order of slices.

    Attributes:
        schema: the columns.
        rows: rows in one pass, bad ones included.
        bad_rows: rows skipped so far.
        sequential: reading slices out of order is slow (compressed text), so the reader keeps the file's order.
        labelled: the rows have labels; else `read` gives zeros, which are good for predictions only.
        best_auc: the highest AUC any model can reach on this data, where that is known (synthetic), else None.
    """

    schema: Schema
    rows: int
    bad_rows: BadRows
    sequential: bool = False
    labelled: bool = True
    best_auc: float | None = None

    @abstractmethod
    def slices(self, rows_per_slice: int) -> Sequence[Slice]:
        """Cuts the data into slices of at most `rows_per_slice` rows, in order, without overlap or gap.

        Raises:
            DataError: if there is nothing to read.
        """

    @abstractmethod
    def read(self, part: Slice) -> Batch:
        """All good rows of a slice, in the order of the file.

        Raises:
            DataError: for a row that cannot be used, with its file and row number (from 1), unless bad rows are
                skipped.
        """

    @abstractmethod
    def place(self, part: Slice, row: int) -> str:
        """Where row `row` of what `read(part)` gave comes from, for messages: `file, row 17`."""

    def marks(self) -> tuple[Mark, ...]:
        """By what this data is known again; empty where that cannot be said."""
        return ()

    def close(self) -> None:  # noqa: B027 (nothing to do is the common case)
        """Lets go of open files."""


class Source(ABC):
    """A kind of data with its options (the dataclass fields of the member); opened for training or for the test."""

    name: ClassVar[str]

    @abstractmethod
    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """Opens the training or the test rows; None if this source has no test rows.

        Raises:
            DataError: a file is missing, empty or of the wrong schema.
            MissingExtra: the source needs a package that is not installed.
        """
