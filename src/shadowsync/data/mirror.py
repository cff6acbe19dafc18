"""A remote parquet file, of which only what is read is fetched, and that only once.

The copy is a sparse file: as long as the remote one, with holes where nothing was fetched. So whatever reads local
parquet files reads it too, at the same speed. What is fetched are the column chunks of the wanted columns, row group by
row group, when a row of the group is first asked for. Later passes over the data fetch nothing.
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet

from shadowsync.data.files import File
from shadowsync.errors import SaveError

_TAIL = 1 << 20  # bytes fetched with the footer: most footers fit, and small files as a whole
_BLOCK = 32 << 20  # bytes of one request
_GAP = 1 << 20  # a hole that is cheaper to fetch than to make another request for
_MAGIC = b"PAR1"

pq: Any = pyarrow.parquet  # has no types

Span = tuple[int, int]


@dataclass
class _Group:
    """A row group: its rows, and the bytes that hold the wanted columns."""

    first_row: int
    stop_row: int
    spans: Sequence[Span]
    lock: threading.Lock = field(default_factory=threading.Lock)
    fetched: bool = False


class Mirror:
    """The local stand-in of a remote parquet file; may be used from several threads.

    The copy lies in the system's folder for temporary files (`TMPDIR` moves it) and vanishes with the mirror, on Linux
    even if the process is killed.

    Attributes:
        path: where to read it; the footer is there from the start, rows once they were fetched.
    """

    def __init__(self, file: File, columns: Collection[str]) -> None:
        """`columns` are those that will be read.

        Raises:
            DataError: the remote file cannot be read.
            SaveError: there is no room for the copy.
        """
        self._file = file
        self._columns = frozenset(columns)
        self._lock = threading.Lock()
        self._groups: list[_Group] | None = None
        self._handle, self.path, self.close = _temporary(self)
        self._tail = self._fetch_footer()

    def _fetch_footer(self) -> int:
        """Where what was fetched begins; a file that is none of parquet is left for its reader to refuse."""
        size = self._file.size
        with _writing(self._file):
            os.ftruncate(self._handle, size)
        begin = max(0, size - _TAIL)
        tail = self._copy(begin, size)
        footer = size - 8 - int.from_bytes(tail[-8:-4], "little")
        if tail[-4:] == _MAGIC and 0 <= footer < begin:
            self._copy(footer, begin)
            begin = footer
        return begin

    def fetch(self, start: int, rows: int) -> None:
        """Makes sure that rows `start … start + rows − 1` are there.

        Raises:
            DataError: the remote file cannot be read.
            SaveError: there is no room for the copy.
        """
        for group in self._row_groups():
            if group.first_row < start + rows and start < group.stop_row:
                self._fetch_group(group)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1`, which are fetched unless they lie in what was fetched with the footer.

        Raises:
            DataError: the remote file cannot be read.
        """
        return self._file.read(start, stop) if start < self._tail else os.pread(self._handle, stop - start, start)

    def _fetch_group(self, group: _Group) -> None:
        with group.lock:
            if group.fetched:
                return
            for begin, end in group.spans:
                for part in range(begin, min(end, self._tail), _BLOCK):
                    self._copy(part, min(part + _BLOCK, end, self._tail))
            group.fetched = True

    def _copy(self, begin: int, end: int) -> bytes:
        data = self._file.read(begin, end)
        with _writing(self._file):
            written = 0
            while written < len(data):
                written += os.pwrite(self._handle, memoryview(data)[written:], begin + written)
        return data

    def _row_groups(self) -> list[_Group]:
        with self._lock:
            if self._groups is None:
                self._groups = list(_groups(pq.read_metadata(self.path), self._columns))
            return self._groups


def _groups(metadata: Any, columns: Collection[str]) -> Iterator[_Group]:
    first_row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = (group.column(position) for position in range(group.num_columns))
        spans = [_chunk_span(chunk) for chunk in chunks if _belongs(chunk.path_in_schema, columns)]
        yield _Group(first_row, first_row + group.num_rows, _joined(spans))
        first_row += group.num_rows


def column_span(metadata: Any, column: str) -> Span | None:
    """The bytes that hold the column in the first row group; None where there is none."""
    group = metadata.row_group(0)
    chunks = (group.column(position) for position in range(group.num_columns))
    return next((_chunk_span(chunk) for chunk in chunks if _belongs(chunk.path_in_schema, (column,))), None)


def _belongs(path: str, columns: Collection[str]) -> bool:
    """`tags.list.element` belongs to column `tags`, `a.b` to column `a.b`."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _chunk_span(chunk: Any) -> Span:
    starts = [chunk.data_page_offset, chunk.dictionary_page_offset]
    begin = min(start for start in starts if start is not None)
    return begin, begin + chunk.total_compressed_size


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Ascending spans; those with little between them are one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] <= _GAP:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _temporary(owner: object) -> tuple[int, str, Any]:
    """A new empty file: its handle, a path to open it by, and what removes it, at the latest with its owner."""
    folder = tempfile.gettempdir()
    try:
        handle, name = tempfile.mkstemp(prefix="shadowsync-", suffix=".parquet", dir=folder)
    except OSError as error:
        raise SaveError(f"{folder}: a temporary file cannot be made there: {error.strerror or error}") from error
    nameless = Path(f"/proc/self/fd/{handle}")
    if nameless.exists():
        Path(name).unlink()
        return handle, str(nameless), weakref.finalize(owner, os.close, handle)
    return handle, name, weakref.finalize(owner, _remove, handle, name)


def _remove(handle: int, name: str) -> None:
    os.close(handle)
    Path(name).unlink(missing_ok=True)


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
