"""The seam between a data format and the reader, and by what data is known again."""

import bisect
import dataclasses
import hashlib
import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, cast, overload

import msgspec
import numpy as np
import polars as pl
from pydantic import Field

from shadowsync.config import Ttl
from shadowsync.data.batch import Batch
from shadowsync.data.labels import ONE_CLICK, Task
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import MemberOf

PART = 1 << 16  # bytes read at a place of a file that is looked at to know it again
_WHOLE = 1 << 20  # bytes of a file that is read as a whole for that

Pooling = Literal["sum", "mean", "none"]
"""How the vectors of one sample's ids become one; `none` keeps them apart, as a sequence in the order of the ids."""


@dataclass(frozen=True)
class Dynamic:
    """How the keys of a dynamic table get and lose their rows.

    Attributes:
        admit: look-ups after which a key gets a row; below 1 the probability that a look-up gives it one. From 2 on one
            row learns of all first look-ups what to expect of a key that is new.
        evict: by name the `eviction.Eviction` that chooses whose row a new key gets where none is free.
        ttl: a key that was not looked up for so many samples of training, or for so long by the data's own time (as
            `7d`), has lost its row; None: however long.
        unadmitted: what keys without a row look up: rows that they share, or zeros.
        pinned: keys that get a row at their first look-up and keep it.
    """

    admit: Annotated[
        float, Field(gt=0, le=255, description="look-ups after which it has a row; below 1 the probability of each")
    ] = 2
    evict: Annotated[
        str,
        MemberOf("shadowsync.embedding.eviction:Eviction"),
        Field(description="whose row a new one gets where none is free"),
    ] = "lfu"
    ttl: Annotated[
        Ttl | None,
        Field(
            description="it loses its row when not looked up for so many samples, or, as 7d, by data.time; null: never"
        ),
    ] = None
    unadmitted: Annotated[
        Literal["shared", "zeros"], Field(description="what one without a row looks up: rows they share, or zeros")
    ] = "shared"
    pinned: Annotated[tuple[int, ...], Field(description="ids that have a row at their first look-up and keep it")] = ()


@dataclass(frozen=True)
class Feature:
    """A categorical feature of a source.

    Attributes:
        rows: ids lie in `[0, rows)`; where `ids` says how they get their rows, they are any int64, and so many can have
            one at a time.
        table: the embedding table that holds its rows; None for one of its own, called like the feature.
        multi_hot: a sample may have any number of ids, zero included.
        pooling: how the table made by default pools this feature's ids of a sample.
    """

    name: str
    rows: int
    table: str | None = None
    multi_hot: bool = False
    pooling: Pooling = "sum"
    ids: Dynamic | None = None


@dataclass(frozen=True)
class Schema:
    """The columns a source yields: names of the dense columns, and the categorical features, in their order."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]


@dataclass(frozen=True)
class Slice:
    """Consecutive rows that are read at once: number `index` of its source's slices, `rows` of them from row `start` of
    file number `file` on (0 where there are none); reading yields fewer where bad rows are skipped."""

    index: int
    file: int
    start: int
    rows: int


class Slices(Sequence[Slice]):
    """Files cut into slices of `size` rows, the last one of each shorter; each is made as it is asked for."""

    def __init__(self, file_rows: Sequence[int], size: int) -> None:
        self._file_rows, self._size = file_rows, size
        self._ends = list(itertools.accumulate((rows + size - 1) // size for rows in file_rows))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slice]: ...
    def __getitem__(self, index: int | slice) -> Slice | Sequence[Slice]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[number] for number in found]
        file = bisect.bisect_right(self._ends, found)
        start = (found - (self._ends[file - 1] if file else 0)) * self._size
        return Slice(found, file, start, min(self._size, self._file_rows[file] - start))


@dataclass
class BadRows:
    """Rows left out because of `data.on_bad_row=skip`, and what was wrong with the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, messages: Sequence[str]) -> None:
        with self._lock:
            self.count += len(messages)
            fresh = [message for message in messages[:5] if message not in self.examples]
            self.examples += fresh[: 5 - len(self.examples)]


class Mark(msgspec.Struct, frozen=True):
    """A file of the data, wherever it lies, by its name without the folder, bytes and a digest of some of them; or all
    rows of a source that makes them itself, by its name, rows and a digest of what they are made from."""

    name: str
    size: int
    digest: str


class OpenSource(ABC):
    """A source opened for reading. `read` may be called from several threads at once, in any order of slices.

    Attributes:
        rows: in one pass, bad ones included.
        file_rows: those of each file, which slices do not cross; empty where there are no files.
        sequential: reading slices out of order is slow (compressed text), so the reader keeps the file's order.
        labelled: the rows have labels; else `read` gives zeros, which are good for predictions only.
        best_auc: the highest AUC any model can reach on this data, where that is known (synthetic), else None.
        settled: options of the source that were left open and that the rows have decided: a run stores them.
    """

    schema: Schema
    rows: int
    file_rows: Sequence[int] = ()
    bad_rows: BadRows
    sequential: bool = False
    labelled: bool = True
    best_auc: float | None = None
    settled: Mapping[str, Any] = MappingProxyType({})

    def slices(self, rows_per_slice: int) -> Sequence[Slice]:
        """Cuts the data into slices of at most `rows_per_slice` rows, in order, without overlap or gap."""
        return Slices(self.file_rows or (self.rows,), rows_per_slice)

    def limit(self, rows: int) -> None:
        """Only the first `rows` rows are read."""
        self.file_rows = tuple(np.diff(np.minimum(np.cumsum([0, *self.file_rows]), rows)).tolist())
        self.rows = min(self.rows, rows)

    @abstractmethod
    def read(self, part: Slice) -> Batch:
        """All good rows of a slice, in the order of the file.

        Raises `DataError` for a row that cannot be used, with its `place`, unless bad rows are skipped.
        """

    def dropped(self, part: Slice) -> Collection[int]:
        """Which rows of a slice that was read were left out, counted from 0."""
        return ()

    def column(self, name: str, part: Slice, key: str) -> pl.Series:
        """A column of all rows of a slice, bad ones too, as the data holds it.

        Raises:
            ConfigError: these rows have no columns by name; `key` of the configuration asked for one.
            DataError: there is none of that name.
        """
        raise ConfigError(f"{key}={name}: these rows have no columns by name: give fraction or last without a column")

    def kept_column(self, name: str, part: Slice, key: str) -> pl.Series:
        """As `column`, of what `read` gave of a slice."""
        given, dropped = self.column(name, part, key), self.dropped(part)
        return given.filter(~pl.int_range(len(given), eager=True).is_in(list(dropped))) if dropped else given

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

    def described(self) -> Mapping[str, Any] | None:
        """What becomes of its columns, as `serving.Transforms` takes it, with the values of vocabularies; None: rows
        are dense numbers and ids already."""
        return None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What is learnt of the labels."""
        return ONE_CLICK

    @abstractmethod
    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """Opens the training or the test rows; None if this source has no test rows. Raises `DataError` for a file that
        is missing, empty or of the wrong schema, and `MissingExtra` where the source needs a package."""


def settled(source: Source, opened: OpenSource) -> Source:
    """The source with what was left open and its opened training rows have decided."""
    options: Any = source
    return cast("Source", dataclasses.replace(options, **opened.settled)) if opened.settled else source


def check_ids(batch: Batch, source: OpenSource, part: Slice) -> None:
    """Raises `DataError` unless every id lies in its feature's `[0, rows)`."""
    values = batch.ids.values.numpy().view(np.uint64)  # a negative id becomes a huge one
    offsets = None if batch.ids.offsets is None else batch.ids.offsets.numpy()
    samples = len(batch)
    for position, feature in enumerate(source.schema.features):
        bags = np.array([position, position + 1]) * samples
        start, stop = bags if offsets is None else offsets[bags]
        ids = values[start:stop]
        if feature.ids is not None or ids.max(initial=0) < feature.rows:
            continue
        where = int(np.argmax(ids >= feature.rows))
        sample = where if offsets is None else int(np.searchsorted(offsets, start + where, side="right")) - 1 - bags[0]
        raise DataError(
            f"{source.place(part, int(sample))}: feature {feature.name} has id {ids.view(np.int64)[where]}, "
            f"outside of 0 … {feature.rows - 1}; raise the feature's rows, or hash it with data.hash_size"
        )


def digest(size: int, spans: Iterable[tuple[int, int]], read: Callable[[int, int], bytes]) -> str:
    """Of the bytes in `spans` of a file of `size` bytes; of all bytes where the file is small."""
    found = hashlib.sha256()
    for start, stop in [(0, size)] if size <= _WHOLE else spans:
        found.update(read(start, stop))
    return found.hexdigest()[:16]


def mark_of_options(source: Any, rows: int, without: Collection[str] = ()) -> Mark:
    """Of rows that a source's options decide, `without` those that do not matter to the training rows.

    Options at their defaults do not count, so that there may be new ones.
    """
    options = [(option, getattr(source, option.name)) for option in dataclasses.fields(source)]
    given = {option.name: value for option, value in options if option.name not in without and value != option.default}
    told = json.dumps(given, sort_keys=True, default=str)
    return Mark(f"data.name={source.name}", rows, hashlib.sha256(told.encode()).hexdigest()[:16])


def summary(marks: Sequence[Mark]) -> str:
    """One short word for all of them, by which a user may name this very data."""
    return hashlib.sha256(msgspec.json.encode(marks)).hexdigest()[:12]
