"""Files named by the user, by bytes or by lines: paths, lists and globs on any file system that fsspec knows.

A text file, plain or compressed with gzip, is read by line without reading it whole into memory. Opening makes one pass
that counts the lines. Every 256th line's position is kept (8 bytes each); a .gz also keeps the decompressor's state
about every 32 MB, so that reading can start near any line instead of at the file's beginning.
"""

import glob
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec.core
import numpy as np
import polars as pl

from shadowsync.errors import DataError, ShadowSyncError
from shadowsync.places import redacted

_url_to_fs: Any = fsspec.core.url_to_fs  # has no types

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
_PACKAGES = {"smbclient": "smbprotocol", "libarchive": "libarchive-c"}  # those called otherwise than their module


@dataclass(frozen=True)
class File:
    """A file that exists and is not empty.

    Attributes:
        path: as shown in messages.
        key: its path on `filesystem`.
        size: bytes.
    """

    path: str
    key: str
    size: int
    filesystem: Any

    @property
    def local(self) -> bool:
        """It lies on this machine, at `key`; else it is read by ranges of bytes, with patience."""
        return _is_local(self.filesystem)

    @property
    def name(self) -> str:
        """Without its folder."""
        return self.path.rpartition("/")[2]

    def stamp(self) -> tuple[int, int] | None:
        """Size and time of the last change as they are now; None where the file is not on this machine.

        Raises:
            DataError: it is gone.
        """
        if not self.local:
            return None
        with reading(self.path):
            found = Path(self.key).stat()
        return found.st_size, found.st_mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1`.

        Raises:
            DataError: the file cannot be read, or is shorter now.
        """
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


def resolve(key: str, paths: str | Sequence[str], suffix: str | None = None) -> tuple[File, ...]:
    """The files meant by a path, a glob or a list of either; those of a glob in the order of their names.

    Args:
        key: the configuration key that holds `paths`, for messages.
        paths: local paths or URLs such as `s3://bucket/day_*.gz`.
        suffix: a folder stands for its files of this suffix; None: for nothing.

    Raises:
        DataError: a file is missing, empty or a folder, or a glob matches nothing.
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise DataError(f"{key} names no file: give a path, a glob or a list of paths")
    return tuple(file for pattern in patterns for file in _expand(key, pattern, suffix))


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
    """What `fetch` returns; a request that fails for a reason that may pass is made again, for about 20 s.

    Raises:
        Exception: what the last attempt raised.
    """
    for pause_s in _PAUSES_S:
        try:
            return fetch()
        except _LASTING:
            raise
        except Exception:
            time.sleep(pause_s)
    return fetch()


def _expand(key: str, pattern: str, suffix: str | None) -> Iterator[File]:
    shown = redacted(pattern)
    filesystem, inner = _open_filesystem(f"{key}={shown}", pattern)
    with reading(shown):
        if not glob.has_magic(inner) or filesystem.exists(inner):
            found = filesystem.info(inner)
            if suffix is not None and found["type"] == "directory":
                yield from _in_folder(filesystem, shown, inner, suffix)
            else:
                yield _file(filesystem, shown, inner, found)
            return
        matches = sorted(match for match in filesystem.glob(inner) if not filesystem.isdir(match))
        if not matches:
            raise DataError(f"{key}={shown}: no file matches")
        for match in matches:
            yield _file(filesystem, _shown(filesystem, match), match, filesystem.info(match))


def _in_folder(filesystem: Any, pattern: str, folder: str, suffix: str) -> Iterator[File]:
    """The files of a folder, in the order of their names; folders in it are not looked into."""
    inside = sorted((entry["name"].rstrip("/"), entry["type"]) for entry in filesystem.ls(folder, detail=True))
    names = [name for name, kind in inside if kind == "file" and name.endswith(suffix) and _last(name)[0] not in "._"]
    if not names:
        parts = [_last(name) for name, kind in inside if kind == "directory"]
        hive = next((part for part in parts if "=" in part), None)
        some = f"{pattern.rstrip('/')}/{hive or '*'}/*{suffix}"
        if hive is not None:
            raise DataError(
                f"{pattern}: is divided into folders such as {hive}, whose columns are not read yet: name the files, "
                f"for instance {some}, and write {hive.partition('=')[0]!r} into them if the model needs it"
            )
        raise DataError(f"{pattern}: is a folder without files that end in {suffix}; name files, for instance {some}")
    for name in names:
        yield _file(filesystem, _shown(filesystem, name), name, filesystem.info(name))


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _shown(filesystem: Any, key: str) -> str:
    return key if _is_local(filesystem) else redacted(str(filesystem.unstrip_protocol(key)))


def _open_filesystem(place: str, pattern: str) -> tuple[Any, str]:
    try:
        filesystem, inner = _url_to_fs(pattern)
    except ImportError as error:
        cause = error.__cause__ or error.__context__ or error
        module = (getattr(cause, "name", None) or "fsspec").partition(".")[0]
        package = _PACKAGES.get(module, module)
        raise DataError(f"{place}: needs a package that is not installed: pip install {package}") from error
    except Exception as error:  # each file system has its own kinds
        raise DataError(f"{place}: {_reason(error)}") from error
    return filesystem, inner


def _file(filesystem: Any, path: str, key: str, information: Mapping[str, Any]) -> File:
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


class Lines(ABC):
    """The lines of a text file; `read` may be called from several threads.

    Attributes:
        count: how many lines; a last one without a line break counts.
    """

    sequential: bool

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
        """Lines `start … stop − 1`, with their line breaks.

        Raises:
            DataError: the file cannot be read any more.
        """
        first, last = start // _STRIDE, -(-stop // _STRIDE)
        block = self._range(int(self._marks[first]), int(self._marks[min(last, len(self._marks) - 1)]))
        before, wanted = start - first * _STRIDE, stop - start
        if before == 0 and (stop % _STRIDE == 0 or stop == self.count):
            return block
        breaks = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        begin = breaks[before - 1] + 1 if before else 0
        end = breaks[before + wanted - 1] + 1 if before + wanted <= len(breaks) else len(block)
        return block[begin:end]

    @abstractmethod
    def _chunks(self) -> Iterator[bytes]:
        """The whole text, piece by piece."""

    @abstractmethod
    def _range(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1` of the text."""


class PlainLines(Lines):
    """Lines of an uncompressed file."""

    sequential = False

    def _chunks(self) -> Iterator[bytes]:
        return self.file.chunks(_CHUNK)

    def _range(self, start: int, stop: int) -> bytes:
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
            self._held = text[stop - begin :]  # for the next lines
            self._held_from = stop
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
    return GzipLines(file) if compressed or file.path.endswith(".gz") else PlainLines(file)
