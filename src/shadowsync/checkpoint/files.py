"""The few file operations that checkpoints need, on a local folder or on any other fsspec file system.

Paths are relative to a root and use `/`. Errors are `OSError`s, whatever the file system raised.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from shadowsync.checkpoint.format import Chunk, damaged
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.memory.pages import HUGE_PAGE_BYTES, zeros
from shadowsync.places import redacted

T = TypeVar("T")

BUFFER_BYTES = 4 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux
_NO_FOLDER_FSYNC = (errno.EINVAL, errno.ENOTSUP)
_kept = threading.local()


class Files(ABC):
    """A folder of checkpoints, at `root` as the user wrote it.

    A file or a folder is there as a whole or not at all, so that nothing half-written shows.
    """

    root: str

    def place(self, path: str) -> str:
        return f"{self.root.rstrip('/')}/{path}"

    def guarded(self, path: str, read: Callable[[str], T]) -> T:
        """`read(path)`, with the file system's errors as a `CheckpointError`."""
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise damaged(self.place(path), "is missing") from error
        except OSError as error:
            raise CheckpointError(f"{self.place(path)} cannot be read: {error.strerror or error}") from error

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """In no particular order; none where there is no such folder."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """None where there is no such file."""

    @abstractmethod
    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1` of a file, fewer where it ends before."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Writes a file, made durable where the file system can; its folder is made if need be."""

    @abstractmethod
    def staging(self, folder: str) -> str:
        """Where the files of a new `folder` are to be written before `publish`."""

    @abstractmethod
    def publish(self, folder: str, last: str, content: bytes) -> None:
        """Adds the file `last`, without which a folder is not complete, and gives the staged folder its name."""

    @abstractmethod
    def remove(self, folder: str, first: str) -> None:
        """Removes a folder, the file `first` before all others, so that a half-removed folder is not complete."""


class LocalFiles(Files):
    """A folder of this machine: a new folder is written under another name, flushed to the disk and renamed."""

    def __init__(self, root: str, path: Path) -> None:
        self.root = root
        self._path = path

    def names(self, folder: str = "") -> list[str]:
        try:
            return [entry.name for entry in (self._path / folder).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        try:
            return (self._path / path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str, start: int, stop: int) -> bytes:
        with (self._path / path).open("rb", buffering=0) as file:
            file.seek(start)
            parts: list[bytes] = []
            while start < stop and (part := file.read(stop - start)):
                parts.append(part)
                start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        target = self._path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, chunks)

    def staging(self, folder: str) -> str:
        return f".{folder}.part"

    def publish(self, folder: str, last: str, content: bytes) -> None:
        staged = self.staging(folder)
        self.write(f"{staged}/{last}", [content])
        _flush_folder(self._path / staged)
        (self._path / staged).rename(self._path / folder)
        _flush_folder(self._path)

    def remove(self, folder: str, first: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._path / folder / first).unlink()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path / folder)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Libraries of remote file systems raise errors of their own: those become `OSError`s."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {_first_line(error)}") from error


class RemoteFiles(Files):
    """Any other fsspec file system: files go to their place at once, and the one that makes a folder complete last."""

    def __init__(self, root: str, filesystem: Any, path: str) -> None:
        self.root = root
        self._filesystem = filesystem
        self._path = path.rstrip("/")

    @_as_os_error()
    def names(self, folder: str = "") -> list[str]:
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.ls(self._full(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in found]

    @_as_os_error()
    def size(self, path: str) -> int | None:
        try:
            info = self._filesystem.info(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    @_as_os_error()
    def read(self, path: str, start: int, stop: int) -> bytes:
        return bytes(self._filesystem.cat_file(self._full(path), start=start, end=stop))

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        full = self._full(path)
        with _as_os_error():
            self._filesystem.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            file = self._filesystem.open(full, "wb")
        try:
            for chunk in chunks:
                with _as_os_error():
                    file.write(chunk)
        except BaseException:
            with contextlib.suppress(Exception):  # of no interest any more
                file.close()
            raise
        with _as_os_error():
            file.close()

    def staging(self, folder: str) -> str:
        return folder

    @_as_os_error()
    def publish(self, folder: str, last: str, content: bytes) -> None:
        temporary, final = self._full(f"{folder}/{last}.part"), self._full(f"{folder}/{last}")
        self._filesystem.pipe_file(temporary, content)
        self._filesystem.mv(temporary, final)

    @_as_os_error()
    def remove(self, folder: str, first: str) -> None:
        for path in (f"{folder}/{first}", folder):
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm(self._full(path), recursive=path == folder)

    def _full(self, path: str) -> str:
        return f"{self._path}/{path}" if path else self._path


def open_files(root: str) -> Files:
    """The files below `root`, a local path or a URL; nothing is made yet. `ConfigError` if fsspec does not know it."""
    try:
        filesystem, path = url_to_fs(root)  # type: ignore[no-untyped-call]
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"{redacted(root)}: checkpoints cannot be kept there: {_first_line(error)}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalFiles(root, Path(path))
    return RemoteFiles(redacted(root), filesystem, path)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _flush_folder(path: Path) -> None:
    """Makes renames inside a folder durable, where its file system knows how."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, chunks: Iterable[Chunk]) -> None:
    """Writes and flushes a file, past the page cache where its file system lets one. What `chunks` raises passes.

    A checkpoint is written once and read seldom. Through the page cache each of its bytes costs the kernel a page,
    which it then has to write back and reclaim; the processor's time for that is taken from training. Written directly
    from one aligned buffer, which is used again and again, the disk fetches the bytes itself. What does not fill the
    buffer, as small files, goes the ordinary way.
    """
    buffer, filled, direct = _buffer(), 0, _O_DIRECT != 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            source, used = np.frombuffer(chunk, np.uint8), 0
            while used < len(source):
                count = min(len(source) - used, BUFFER_BYTES - filled)
                buffer[filled : filled + count] = source[used : used + count]
                used, filled = used + count, filled + count
                if filled == BUFFER_BYTES:
                    done = _write_directly(file.fileno(), buffer.data) if direct else 0
                    direct = done > 0
                    _write_all(file.fileno(), buffer.data[done:])  # a disk that is about to be full, or refuses
                    filled = 0
        _write_all(file.fileno(), buffer[:filled].data)
        os.fsync(file.fileno())


def _buffer() -> NDArray[np.uint8]:
    """This thread's; begins at a page. In huge pages a direct write takes a third of the processor's time."""
    buffer: NDArray[np.uint8] | None = getattr(_kept, "buffer", None)
    if buffer is None or len(buffer) != BUFFER_BYTES:
        buffer = zeros(max(BUFFER_BYTES, HUGE_PAGE_BYTES), torch.uint8)[:BUFFER_BYTES].numpy()
        _kept.buffer = buffer
    return buffer


def _write_directly(descriptor: int, view: memoryview) -> int:
    """How many bytes of a view that begins at a page and is whole pages long went past the page cache; 0 where that is
    refused."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        return os.write(descriptor, view)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
