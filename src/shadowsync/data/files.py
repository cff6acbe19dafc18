"""Files named by the user, by bytes or by lines: paths, lists and globs on any file system that fsspec knows.

A text file, plain or compressed with gzip, is read by line without reading it whole into memory. Opening makes one pass
that counts the lines. Every 256th line's position is kept (8 bytes each); a .gz also keeps the decompressor's state
about every 32 MB, so that reading can start near any line instead of at the file's beginning.
"""

import glob
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast
from urllib.parse import unquote

import fsspec.core
import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.source import PART, BadRows, Mark, OpenSource, Schema, Slice, Source, digest
from shadowsync.errors import DataError, ShadowSyncError
from shadowsync.places import redacted

_url_to_fs: Any = fsspec.core.url_to_fs  # has no types
T = TypeVar("T")

_BLOCK = 8 << 20  # bytes of one request when a remote file is read through: few enough requests, little memory
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0)  # before a request is made again; together longer than a usual outage
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ShadowSyncError)
PANIC = pl.exceptions.PanicException
"""How polars ends on bytes that it did not expect; no `Exception`, so that who catches those lets it pass."""
_STRIDE = 256
_CHUNK = 4 << 20
_GZIP_CHUNK = 1 << 18
_RESTART = 32 << 20
_GZIP_WBITS = 31
_LOOKED_AT = 1000  # rows
_LARGE = 1e4  # of a dense number
_PACKAGES = {"smbclient": "smbprotocol", "libarchive": "libarchive-c"}  # those called otherwise than their module


@dataclass(frozen=True)
class File:
    """A file that exists and is not empty: its `path` as shown in messages, its `key` on its file system, its bytes,
    and the names and values of folders such as `day=2024-01-01` that it was found in."""

    path: str
    key: str
    size: int
    filesystem: Any
    partitions: tuple[tuple[str, str], ...] = ()

    @property
    def local(self) -> bool:
        """It lies on this machine, at `key`; else it is read by ranges of bytes, with patience."""
        return _is_local(self.filesystem)

    def stamp(self) -> tuple[int, int] | None:
        """Size and time of the last change as they are now; None where the file is not on this machine."""
        if not self.local:
            return None
        with reading(self.path):
            found = Path(self.key).stat()
        return found.st_size, found.st_mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1`; raises `DataError` if the file cannot be read, or is shorter now."""
        with reading(self.path):
            if self.local:
                with self.filesystem.open(self.key, "rb") as stream:
                    stream.seek(start)
                    data: bytes = stream.read(stop - start)
            else:
                data = patiently(lambda: self.filesystem.cat_file(self.key, start=start, end=stop))
        if len(data) > stop - start:
            raise DataError(f"{self.path}: the server does not give parts of a file; copy it to this machine first")
        if len(data) < stop - start:
            raise DataError(f"{self.path}: ends at byte {start + len(data)}, it was cut while it was being read")
        return data

    def chunks(self, size: int, start: int = 0) -> Iterator[bytes]:
        """Everything from byte `start` on, `size` bytes at a time."""
        if self.local:
            with reading(self.path), self.filesystem.open(self.key, "rb") as stream:
                stream.seek(start)
                while chunk := stream.read(size):
                    yield chunk
            return
        with ThreadPoolExecutor(1, "fetch") as pool:  # fetches the next block while the one before it is used
            coming = None
            for begin in (*range(start, self.size, _BLOCK), None):
                block = b"" if coming is None else coming.result()
                if begin is not None:
                    coming = pool.submit(self.read, begin, min(begin + _BLOCK, self.size))
                yield from (block[first : first + size] for first in range(0, len(block), size))


def resolve(key: str, paths: str | Sequence[str], endings: tuple[str, ...] = ()) -> tuple[File, ...]:
    """The files meant by a path, a glob or a list of either, local or URLs such as `s3://bucket/day_*.gz`; those of a
    glob in the order of their names. A folder stands for its files of those `endings`, also in folders such as
    `day=2024-01-01` in it. Messages name the configuration `key`."""
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise DataError(f"{key} names no file: give a path, a glob or a list of paths")
    return tuple(file for pattern in patterns for file in _expand(key, pattern, endings))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns errors of file systems and parsers, whatever class each gives them, into `DataError`s that name `path`."""
    try:
        yield
    except ShadowSyncError:
        raise
    except FileNotFoundError as error:
        if isinstance(error.__cause__, OSError):  # what fsspec makes of a server that cannot be reached
            raise DataError(f"{path}: cannot be read: {_reason(error.__cause__)}") from error
        raise DataError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder; name its files, for instance {path.rstrip('/')}/*") from error
    except PANIC as error:
        raise DataError(f"{path}: cannot be read: it is damaged, or was changed while it was being read") from error
    except Exception as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}") from error


def patiently(fetch: Callable[[], bytes]) -> bytes:
    """What `fetch` returns or raises; a request that fails for a reason that may pass is made again, for about 20 s."""
    for pause_s in _PAUSES_S:
        try:
            return fetch()
        except _LASTING:
            raise
        except Exception:
            time.sleep(pause_s)
    return fetch()


def _expand(key: str, pattern: str, endings: tuple[str, ...]) -> Iterator[File]:
    shown = redacted(pattern)
    try:
        filesystem, inner = _url_to_fs(pattern)
    except ImportError as error:
        cause = error.__cause__ or error.__context__ or error
        module = (getattr(cause, "name", None) or "fsspec").partition(".")[0]
        package = _PACKAGES.get(module, module)
        raise DataError(f"{key}={shown}: needs a package that is not installed: pip install {package}") from error
    except Exception as error:  # each file system has its own kinds
        raise DataError(f"{key}={shown}: {_reason(error)}") from error
    with reading(shown):
        if not glob.has_magic(inner) or filesystem.exists(inner):
            found = filesystem.info(inner)
            if endings and found["type"] == "directory":
                yield from _in_folder(filesystem, shown, inner, endings)
            else:
                yield _file(filesystem, inner, found, shown)
            return
        matches = sorted(match for match in filesystem.glob(inner) if not filesystem.isdir(match))
        if not matches:
            raise DataError(f"{key}={shown}: no file matches")
        named = len(list(itertools.takewhile(lambda part: not glob.has_magic(part), inner.split("/"))))
        for match in matches:
            folders = match.split("/")[named:-1]
            yield replace(_file(filesystem, match, filesystem.info(match)), partitions=_partitions(folders))


def _in_folder(filesystem: Any, pattern: str, folder: str, endings: tuple[str, ...]) -> Iterator[File]:
    """The files of a folder and of folders such as `day=1` in it, in the order of their names; folders that are called
    otherwise are not looked into."""
    listed = filesystem.ls(folder, detail=True)
    if any(entry["type"] == "directory" and "=" in _last(entry["name"].rstrip("/")) for entry in listed):
        listed = filesystem.find(folder, detail=True).values()
    above = len(folder.rstrip("/").split("/"))
    found = False
    for entry in sorted(listed, key=lambda entry: str(entry["name"])):
        *folders, name = entry["name"].split("/")[above:] or [""]
        hidden = name[:1] in (".", "_") or not all("=" in part for part in folders)
        if entry["type"] == "file" and name.endswith(endings) and not hidden:
            found = True
            file = _file(filesystem, entry["name"], filesystem.info(entry["name"]))
            yield replace(file, partitions=_partitions(folders))
    if not found:
        some = f"{pattern.rstrip('/')}/*/*{endings[0]}"
        raise DataError(
            f"{pattern}: is a folder without files that end in {' or '.join(endings)}; name files, for instance {some}"
        )


def _partitions(folders: Sequence[str]) -> tuple[tuple[str, str], ...]:
    split = (unquote(part).partition("=") for part in folders if "=" in part)
    return tuple((name, value) for name, _, value in split)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _file(filesystem: Any, key: str, information: Mapping[str, Any], path: str | None = None) -> File:
    """With a path as the user wrote it, or one that is made from its key."""
    if path is None:
        path = key if _is_local(filesystem) else redacted(str(filesystem.unstrip_protocol(key)))
    if information["type"] == "directory":
        with reading(path):
            raise IsADirectoryError
    if information["size"] is None:
        raise DataError(f"{path}: the server does not say how long it is; copy it to this machine first")
    if information["size"] == 0:
        raise DataError(f"{path}: the file is empty")
    return File(path, key, information["size"], filesystem)


def _is_local(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _reason(error: Exception) -> str:
    """The system's words for it, on one line; the name of its class where it has none."""
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


@dataclass(frozen=True)
class Problem:
    """What is wrong with a row, counted from 0 within its slice, and what to do about it."""

    row: int
    text: str
    remedy: str = "mend it, or leave such rows out with data.on_bad_row=skip"


def bad_ones(rows: Sequence[T], parses: Callable[[Sequence[T]], bool], start: int = 0) -> Iterator[int]:
    """Those that cannot be parsed, from number `start` on, found by halving."""
    if parses(rows):
        return
    if len(rows) == 1:
        yield start
        return
    half = len(rows) // 2
    yield from bad_ones(rows[:half], parses, start)
    yield from bad_ones(rows[half:], parses, start + half)


@dataclass(frozen=True)
class FileOptions:
    """Where the rows of a source of files are.

    Attributes:
        endings: of the names of such files: those that a folder stands for, and by which `data.name` may be left out.
    """

    endings: ClassVar[tuple[str, ...]] = ()

    path: Annotated[
        str | tuple[str, ...], Field(description="training rows: a file, a glob or a list, any URL of fsspec")
    ]
    test_path: Annotated[str | tuple[str, ...] | None, Field(description="test rows, likewise; None: no test")] = None

    def files(self, split: Literal["train", "test"]) -> tuple[File, ...] | None:
        """As `resolve`; None if there are no test rows."""
        key, paths = ("data.path", self.path) if split == "train" else ("data.test_path", self.test_path)
        return None if paths is None else resolve(key, paths, self.endings)

    def at(self, path: str | tuple[str, ...]) -> Source:
        """The same columns of other files, without test rows."""
        return cast("Source", replace(self, path=path, test_path=None))


class FileRows(OpenSource):
    """An opened source whose rows lie in files.

    Attributes:
        own_mark: stands for the marks of the files.
        for_trained: the rows are for a model that is trained, so that options of the data cannot be changed any more.
    """

    for_trained: bool = False
    own_mark: Mark | None = None

    def __init__(
        self, schema: Schema, files: Sequence[File], file_rows: Sequence[int], on_bad_row: Literal["error", "skip"]
    ) -> None:
        self.schema = schema
        self.files = tuple(files)
        self.file_rows = tuple(file_rows)
        self.rows = sum(file_rows)
        self.bad_rows = BadRows()
        self.on_bad_row = on_bad_row
        self._dropped: dict[tuple[int, int, int], set[int]] = {}
        self._marks = [self._mark(number) if file.local else None for number, file in enumerate(self.files)]
        self._stamps = [file.stamp() for file in self.files]

    def place(self, part: Slice, row: int) -> str:
        """`path, row N`, counted from 1 in the file; rows that were skipped count."""
        dropped = self.dropped(part)
        kept = [position for position in range(part.rows) if position not in dropped]
        return f"{self.files[part.file].path}, row {part.start + kept[row] + 1}"

    def dropped(self, part: Slice) -> Collection[int]:
        return self._dropped.get((part.file, part.start, part.rows), ())

    def dense_bounds(self) -> Mapping[str, float]:
        """The largest |x| of dense columns, of those of which the files tell it without being read through."""
        return {}

    def digest(self, file: int) -> str:
        """Of those bytes of a file that tell it from others: the first and the last, where a format knows no better."""
        size = self.files[file].size
        return digest(size, [(0, min(PART, size)), (max(0, size - PART), size)], self.files[file].read)

    def marks(self) -> tuple[Mark, ...]:
        """One for each file; those of files elsewhere cost a request or two each, once."""
        if self.own_mark is not None:
            return (self.own_mark,)
        self._marks = [mark or self._mark(number) for number, mark in enumerate(self._marks)]
        return tuple(mark for mark in self._marks if mark is not None)

    def _mark(self, number: int) -> Mark:
        file = self.files[number]
        return Mark(_last(file.path), file.size, self.digest(number))

    def check_unchanged(self, part: Slice) -> None:
        """Raises `DataError` if the slice's file is not the one that was opened; a new time alone says nothing."""
        file, stamp = self.files[part.file], self.files[part.file].stamp()
        if stamp == self._stamps[part.file]:
            return
        if stamp is None or stamp[0] != file.size or self._mark(part.file) != self._marks[part.file]:
            raise DataError(
                f"{file.path}: was changed while it was being read (row {part.start + 1} was next): leave the files of "
                "a job as they are until it has ended"
            )
        self._stamps[part.file] = stamp

    def reject(self, part: Slice, problems: Sequence[Problem]) -> NDArray[np.bool_]:
        """Raises for the first problem, or counts all of them and returns which rows of the slice to keep."""
        texts = [f"{self.files[part.file].path}, row {part.start + p.row + 1}: {p.text}" for p in problems]
        if self.on_bad_row == "error":
            trained = "mend it, or take such rows out of the file, as the model is trained already"
            raise DataError(f"{texts[0]}; {trained if self.for_trained else problems[0].remedy}")
        self.bad_rows.add(texts)
        keep = np.ones(part.rows, dtype=np.bool_)
        keep[[problem.row for problem in problems]] = False
        self._dropped[part.file, part.start, part.rows] = {problem.row for problem in problems}
        return keep


def large_columns(source: OpenSource) -> str | None:
    """A sentence on dense columns whose numbers are far too large to train on, as the first rows of a file show."""
    if not isinstance(source, FileRows) or not source.schema.dense or not source.rows:
        return None
    dense = source.read(Slice(0, 0, 0, min(_LOOKED_AT, source.file_rows[0]))).dense
    most = dense.abs().amax(0).tolist() if len(dense) else [0.0] * len(source.schema.dense)
    found = [f"{name} ({value:.3g})" for name, value in zip(source.schema.dense, most, strict=True) if value > _LARGE]
    if not found:
        return None
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    remedy = (
        "scale them as the rows that the model was trained on"
        if source.for_trained
        else "list ids in data.categorical with data.hash_size, take counts with data.log_dense=true, and have the "
        "rest scaled by data.standardise=true"
    )
    return (
        f"dense columns with numbers beyond ±{_LARGE:,.0f}, which drown the others: {', '.join(found[:3])}{more}; "
        f"{remedy}"
    )


def largest_column(source: OpenSource) -> str | None:
    """`|price| is up to 1e+30`: the dense column with the largest number, where it is large and the files tell it."""
    bounds = source.dense_bounds() if isinstance(source, FileRows) else {}
    name = max(bounds, key=bounds.__getitem__, default=None)
    return None if name is None or bounds[name] <= _LARGE else f"|{name}| is up to {bounds[name]:.3g}"


class Lines:
    """The lines of a text file; `read` may be called from several threads. A last one without a line break counts."""

    sequential = False

    def __init__(self, file: File) -> None:
        self.file = file
        lines, size, last = 0, 0, b"\n"
        marks = [np.zeros(1, dtype=np.int64)]  # positions of every `_STRIDE`th line and of the end
        for chunk in self._chunks():
            breaks = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            marks.append(breaks[-(lines + 1) % _STRIDE :: _STRIDE] + size + 1)
            lines, size, last = lines + len(breaks), size + len(chunk), chunk[-1:] or last
        starts = np.concatenate(marks)
        self.count = lines + (last != b"\n")
        self._marks = starts if starts[-1] == size else np.append(starts, size)

    def read(self, start: int, stop: int) -> bytes:
        """Lines `start … stop − 1`, with their line breaks."""
        first, last = start // _STRIDE, -(-stop // _STRIDE)
        block = self._range(int(self._marks[first]), int(self._marks[min(last, len(self._marks) - 1)]))
        before, wanted = start - first * _STRIDE, stop - start
        if before == 0 and (stop % _STRIDE == 0 or stop == self.count):
            return block
        breaks = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        begin = breaks[before - 1] + 1 if before else 0
        end = breaks[before + wanted - 1] + 1 if before + wanted <= len(breaks) else len(block)
        return block[begin:end]

    def _chunks(self) -> Iterator[bytes]:
        """The whole text, piece by piece."""
        return self.file.chunks(_CHUNK)

    def _range(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1` of the text."""
        return self.file.read(start, stop)


@dataclass(frozen=True)
class _Restart:
    """A point from which decompression can go on."""

    text_byte: int
    file_byte: int
    decompressor: Any


class GzipLines(Lines):
    """Lines of a .gz, of one member or several; opening raises `DataError` if it is damaged or ends too early."""

    sequential = True
    _held: bytes
    _held_from: int

    def __init__(self, file: File) -> None:
        self._restarts = [_Restart(0, 0, zlib.decompressobj(_GZIP_WBITS))]
        self._lock = threading.Lock()
        super().__init__(file)
        self._rewind(self._restarts[0])

    def _chunks(self) -> Iterator[bytes]:
        lines, text_byte = 0, 0
        try:
            for chunk, file_byte, decompressor in self._decompress(self._restarts[0]):
                yield chunk
                lines += chunk.count(b"\n")
                text_byte += len(chunk)
                if text_byte - self._restarts[-1].text_byte >= _RESTART:
                    self._restarts.append(_Restart(text_byte, file_byte, decompressor.copy()))
        except (zlib.error, EOFError) as error:
            what = "it was cut" if isinstance(error, EOFError) else f"it is damaged ({error})"
            raise DataError(
                f"{self.file.path}: the gzip stream ends in row {lines + 1}: {what}; fetch it anew"
            ) from error

    def _range(self, start: int, stop: int) -> bytes:
        with self._lock:
            nearest = max((r for r in self._restarts if r.text_byte <= start), key=lambda r: r.text_byte)
            position = self._held_from + len(self._held)
            if start < self._held_from or nearest.text_byte > position:
                self._rewind(nearest)
                position = nearest.text_byte
            pieces = [self._held]
            while position < stop:
                try:
                    chunk, _, _ = next(self._stream)
                except (StopIteration, zlib.error, EOFError) as error:
                    raise DataError(f"{self.file.path}: was changed while it was being read") from error
                position += len(chunk)
                pieces = [*pieces, chunk] if position > start else [chunk]
            text = b"".join(pieces)
            begin = position - len(text)
            # for the next lines, which are read from a mark on that may be the one before their first
            self._held_from = max(begin, int(self._marks[np.searchsorted(self._marks, stop) - 1]))
            self._held = text[self._held_from - begin :]
            return text[start - begin : stop - begin]

    def _rewind(self, restart: _Restart) -> None:
        self._stream = self._decompress(restart)
        self._held, self._held_from = b"", restart.text_byte

    def _decompress(self, restart: _Restart) -> Iterator[tuple[bytes, int, Any]]:
        """Text, and where in the file the decompressor then stands."""
        decompressor, file_byte = restart.decompressor.copy(), restart.file_byte
        for compressed in self.file.chunks(_GZIP_CHUNK, restart.file_byte):
            file_byte += len(compressed)
            text = decompressor.decompress(compressed)
            while decompressor.eof and decompressor.unused_data.strip(b"\0"):
                member = decompressor.unused_data
                decompressor = zlib.decompressobj(_GZIP_WBITS)
                text += decompressor.decompress(member)
            yield text, file_byte, decompressor
        if not decompressor.eof:
            raise EOFError


def open_lines(file: File) -> Lines:
    """A file that begins like a .gz is read as one, whatever its name."""
    compressed = file.read(0, min(2, file.size)) == b"\x1f\x8b"
    return GzipLines(file) if compressed or file.path.endswith(".gz") else Lines(file)
