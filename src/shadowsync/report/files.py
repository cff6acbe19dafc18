"""Writing and reading the files of a run's folder."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shadowsync.errors import DataError, SaveError


@contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write `path` into a `SaveError` that names it."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is never seen half-written, not even after a power cut.

    Raises:
        SaveError: the folder is missing or read-only, or the disk is full; what stood at `path` is kept.
    """
    with save_errors(path):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_bytes(path: Path, missing: str) -> bytes:
    """The content of `path`.

    Raises:
        DataError: it is not there (`missing` says what to do) or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; {missing}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
