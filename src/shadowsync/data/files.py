"""Files named by the user: paths, lists and globs on any file system that fsspec knows."""

import glob
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec.core
import polars as pl

from shadowsync.errors import DataError, ShadowSyncError
from shadowsync.places import redacted

_url_to_fs: Any = fsspec.core.url_to_fs  # has no types

_BLOCK = 8 << 20  # bytes of one request when a remote file is read through: few enough requests, little memory
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0)  # before a request is made again; together longer than a usual outage
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ShadowSyncError)
PANIC = pl.exceptions.PanicException
"""How polars ends on bytes that it did not expect; no `Exception`, so that who catches those lets it pass."""
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
        data = self._local_range(start, stop) if self.local else self._remote_range(start, stop)
        if len(data) < stop - start:
            raise DataError(f"{self.path}: ends at byte {start + len(data)}, it was cut while it was being read")
        return data

    def _local_range(self, start: int, stop: int) -> bytes:
        with reading(self.path), self.filesystem.open(self.key, "rb") as stream:
            stream.seek(start)
            data: bytes = stream.read(stop - start)
            return data

    def _remote_range(self, start: int, stop: int) -> bytes:
        with reading(self.path):
            data: bytes = patiently(lambda: self.filesystem.cat_file(self.key, start=start, end=stop))
        if len(data) > stop - start:
            raise DataError(f"{self.path}: the server does not give parts of a file; copy it to this machine first")
        return data

    def chunks(self, size: int, start: int = 0) -> Iterator[bytes]:
        """Everything from byte `start` on, `size` bytes at a time."""
        return self._local_chunks(size, start) if self.local else self._remote_chunks(size, start)

    def _local_chunks(self, size: int, start: int) -> Iterator[bytes]:
        with reading(self.path), self.filesystem.open(self.key, "rb") as stream:
            stream.seek(start)
            while chunk := stream.read(size):
                yield chunk

    def _remote_chunks(self, size: int, start: int) -> Iterator[bytes]:
        """Fetches the next block while the one before it is used."""
        spans = [(begin, min(begin + _BLOCK, self.size)) for begin in range(start, self.size, _BLOCK)]
        with ThreadPoolExecutor(1, "fetch") as pool:
            ahead = [pool.submit(self.read, *span) for span in spans[:1]]
            for span in [*spans[1:], None]:
                block = ahead.pop().result() if ahead else b""
                if span is not None:
                    ahead.append(pool.submit(self.read, *span))
                yield from (block[begin : begin + size] for begin in range(0, len(block), size))


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
