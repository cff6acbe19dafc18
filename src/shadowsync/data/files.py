"""Files named by the user: paths, lists and globs on any file system that fsspec knows."""

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec.core

from shadowsync.errors import DataError

_url_to_fs: Any = fsspec.core.url_to_fs  # has no types


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

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1`.

        Raises:
            DataError: the file cannot be read, or is shorter now.
        """
        with reading(self.path), self.filesystem.open(self.key, "rb") as stream:
            stream.seek(start)
            data: bytes = stream.read(stop - start)
        if len(data) < stop - start:
            raise DataError(f"{self.path}: ends at byte {start + len(data)}, it was cut while it was being read")
        return data

    def chunks(self, size: int, start: int = 0) -> Iterator[bytes]:
        """Everything from byte `start` on, `size` bytes at a time."""
        with reading(self.path), self.filesystem.open(self.key, "rb") as stream:
            stream.seek(start)
            while chunk := stream.read(size):
                yield chunk

    def local(self) -> str:
        """A path on this machine with the same content: of the file itself, or of a copy of a remote one."""
        if "file" in _protocols(self.filesystem):
            return self.key
        with reading(self.path):
            return str(fsspec.open_local(f"simplecache::{self.filesystem.unstrip_protocol(self.key)}"))


def resolve(key: str, paths: str | Sequence[str]) -> tuple[File, ...]:
    """The files meant by a path, a glob or a list of either; those of a glob in the order of their names.

    Args:
        key: the configuration key that holds `paths`, for messages.
        paths: local paths or URLs such as `s3://bucket/day_*.gz`.

    Raises:
        DataError: a file is missing, empty or a folder, or a glob matches nothing.
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise DataError(f"{key} names no file: give a path, a glob or a list of paths")
    return tuple(file for pattern in patterns for file in _expand(key, pattern))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns errors of file systems into `DataError`s that name `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder; name its files, for instance {path.rstrip('/')}/*") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _expand(key: str, pattern: str) -> Iterator[File]:
    filesystem, inner = _open_filesystem(key, pattern)
    with reading(pattern):
        if not glob.has_magic(inner) or filesystem.exists(inner):
            yield _file(filesystem, pattern, inner)
            return
        matches = sorted(match for match in filesystem.glob(inner) if not filesystem.isdir(match))
        if not matches:
            raise DataError(f"{key}={pattern}: no file matches")
        for match in matches:
            yield _file(filesystem, match, match)


def _open_filesystem(key: str, pattern: str) -> tuple[Any, str]:
    try:
        filesystem, inner = _url_to_fs(pattern)
    except ImportError as error:
        raise DataError(f"{key}={pattern}: needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise DataError(f"{key}={pattern}: {error}") from error
    return filesystem, inner


def _file(filesystem: Any, path: str, key: str) -> File:
    with reading(path):
        information = filesystem.info(key)
        if information["type"] == "directory":
            raise IsADirectoryError
    if information["size"] == 0:
        raise DataError(f"{path}: the file is empty")
    return File(path, key, information["size"], filesystem)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
