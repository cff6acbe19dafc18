"""Any parquet table whose columns the configuration names.

Of a remote file only what is read is fetched, and that only once, into a sparse file here: as long as the remote one,
with holes where nothing was fetched. So whatever reads local parquet files reads it too, at the same speed. What is
fetched are the column chunks of the wanted columns, row group by row group, when a row of the group is first asked for.
Later passes over the data fetch nothing.
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import polars as pl
import pyarrow.parquet

from shadowsync.data.files import PANIC, File, Problem, reading
from shadowsync.data.folders import Found
from shadowsync.data.source import PART, digest
from shadowsync.data.tables import TableFile, TableSource
from shadowsync.errors import DataError, SaveError

_TAIL = 1 << 20  # bytes fetched with the footer: most footers fit, and small files as a whole
_BLOCK = 32 << 20  # bytes of one request
_GAP = 1 << 20  # a hole that is cheaper to fetch than to make another request for
_MAGIC = b"PAR1"

pq: Any = pyarrow.parquet  # has no types

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Parquet(TableSource):
    """Parquet files with a label, dense and categorical columns.

    A categorical column holds integers or strings, or lists of either (multi-hot, empty lists allowed). With
    `hash_size` its values are hashed to `[1, hash_size)` and a missing one takes row 0; without, integers are used as
    they are and must lie in `[0, rows)`. A missing dense value counts as the mean, or as 0 where columns are not
    standardised.
    """

    name: ClassVar[str] = "parquet"
    endings: ClassVar[tuple[str, ...]] = (".parquet",)

    def opened(self, files: Sequence[Found]) -> tuple[Self, Sequence[TableFile]]:
        return self, [ParquetFile(file, folders) for file, folders in files]


class ParquetFile(TableFile):
    """A parquet file, here or through a mirror."""

    def __init__(self, file: File, folders: Mapping[str, pl.Series]) -> None:
        self.mirror = None if file.local else Mirror(file)
        self.path = file.key if self.mirror is None else self.mirror.path
        # a path that looks like a pattern is a name, as it was resolved before
        self._scan = pl.scan_parquet(self.path, glob=False, hive_partitioning=False)
        with _decoding(file.path, "is not a parquet file, or was cut"):
            super().__init__(file, self._scan.collect_schema(), folders)

    def rows(self) -> int:
        with reading(self.file.path):
            count = int(self._scan.select(pl.len()).collect().item())
        if count == 0:
            raise DataError(f"{self.file.path}: has no rows")
        return count

    def read(self, start: int, rows: int, columns: Sequence[str]) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """Decodes the pages that hold those rows."""
        if self.mirror is not None:
            self.mirror.fetch(start, rows, columns)
        with _decoding(self.file.path, f"row {start + 1} and those after cannot be decoded"):
            return self._scan.select(columns).slice(start, rows).collect(), ()

    def largest(self, columns: Collection[str]) -> Mapping[str, float]:
        """As the footer tells."""
        largest: dict[str, float] = {}
        wanted = [name for name in columns if name in self.own and self.own[name].is_numeric()]
        with reading(self.file.path):
            metadata = pq.read_metadata(self.path)
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            names = enumerate(groups[0].column(number).path_in_schema for number in range(metadata.num_columns))
            for number, name in [pair for pair in names if pair[1] in wanted]:
                for chunk in (group.column(number) for group in groups):
                    if chunk.is_stats_set and chunk.statistics.has_min_max:
                        bounds = abs(float(chunk.statistics.min)), abs(float(chunk.statistics.max))
                        largest[name] = max(*bounds, largest.get(name, 0.0))
        return largest

    def digest(self, column: str | None) -> str:
        """Of the footer, which has sizes and bounds of all columns, and of the first values of `column`, the label,
        which hardly show there.

        Not of the file's other bytes, unless it is small.
        """
        size = self.file.size
        with reading(self.file.path):
            metadata = pq.read_metadata(self.path)
            spans = [(size - 8 - metadata.serialized_size, size)]
            values = [] if column is None else _spans(metadata.row_group(0), (column,))
        if values:
            spans.append((values[0][0], min(values[0][1], values[0][0] + PART)))
        return digest(size, spans, self.file.read if self.mirror is None else self.mirror.read)

    def close(self) -> None:
        if self.mirror is not None:
            self.mirror.close()


@contextmanager
def _decoding(path: str, what: str) -> Iterator[None]:
    """As `reading`, with `what` before polars' own words."""
    with reading(path):
        try:
            yield
        except PANIC as error:
            raise DataError(f"{path}: {what}: it is damaged, or was changed while it was being read") from error
        except pl.exceptions.PolarsError as error:
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{path}: {what}: {words}") from error


@dataclass
class _Group:
    """A row group: its rows, what the footer says of it, and those of its columns that are here."""

    first_row: int
    stop_row: int
    metadata: Any
    fetched: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Mirror:
    """The local stand-in of a remote parquet file; may be used from several threads.

    The copy lies in the system's folder for temporary files (`TMPDIR` moves it) and vanishes with the mirror, on Linux
    even if the process is killed.

    It is read at `path`, where the footer is from the start, and rows once they were fetched. Raises `SaveError` if
    there is no room for the copy.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._groups: list[_Group] = []
        nameless = Path("/proc/self/fd").exists()
        make: Any = tempfile.TemporaryFile if nameless else tempfile.NamedTemporaryFile
        try:
            copy = make(prefix="shadowsync-", suffix=".parquet", buffering=0)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise SaveError(f"{folder}: a temporary file cannot be made there: {error.strerror or error}") from error
        self._handle = copy.fileno()
        self.path = f"/proc/self/fd/{self._handle}" if nameless else copy.name
        self.close = weakref.finalize(self, copy.close)
        with _writing(file):
            os.ftruncate(self._handle, file.size)
        # where what was fetched begins; a file that is none of parquet is left for its reader to refuse
        self._tail = max(0, file.size - _TAIL)
        tail = self._copy(self._tail, file.size)
        footer = file.size - 8 - int.from_bytes(tail[-8:-4], "little")
        if tail[-4:] == _MAGIC and 0 <= footer < self._tail:
            self._copy(footer, self._tail)
            self._tail = footer

    def fetch(self, start: int, rows: int, columns: Collection[str]) -> None:
        """Makes sure that those columns of rows `start … start + rows − 1` are there; raises as the class."""
        with self._lock:
            if not self._groups:
                metadata, stop = pq.read_metadata(self.path), 0
                for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
                    first, stop = stop, stop + group.num_rows
                    self._groups.append(_Group(first, stop, group))
        for group in self._groups:
            if group.first_row < start + rows and start < group.stop_row:
                with group.lock:
                    if missing := {*columns} - group.fetched:
                        for begin, end in _joined(_spans(group.metadata, missing)):
                            for part in range(begin, min(end, self._tail), _BLOCK):
                                self._copy(part, min(part + _BLOCK, end, self._tail))
                        group.fetched |= missing

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1`, which are fetched unless they lie in what was fetched with the footer."""
        return self._file.read(start, stop) if start < self._tail else os.pread(self._handle, stop - start, start)

    def _copy(self, begin: int, end: int) -> bytes:
        data = self._file.read(begin, end)
        with _writing(self._file):
            written = 0
            while written < len(data):
                written += os.pwrite(self._handle, memoryview(data)[written:], begin + written)
        return data


def _spans(group: Any, columns: Collection[str]) -> list[Span]:
    """The bytes of a row group that hold those columns; `tags.list.element` belongs to `tags`, `a.b` to `a.b`."""
    spans = []
    for chunk in (group.column(number) for number in range(group.num_columns)):
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            starts = [chunk.data_page_offset, chunk.dictionary_page_offset]
            begin = min(start for start in starts if start is not None)
            spans.append((begin, begin + chunk.total_compressed_size))
    return spans


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Ascending spans; those with little between them are one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] <= _GAP:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


@contextmanager
def _writing(file: File) -> Iterator[None]:
    """Turns the refusal of this machine to hold the copy into a `SaveError`."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{tempfile.gettempdir()}: has no room for what is read of {file.path}: {error.strerror or error}; "
            "point TMPDIR to a larger disk"
        ) from error
