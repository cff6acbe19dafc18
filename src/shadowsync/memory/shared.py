"""Memory that processes of this machine have in common: a file without a name that lives as long as somebody has it.

Whoever makes it tells the others its path; they open it like a file. Only processes of the same user can, it is not
bounded by the size of /dev/shm, and nothing of it is left when the last process that has it is gone, however that came
about. What a process writes stays when the process is killed.
"""

import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shadowsync.errors import ConfigError, RunError
from shadowsync.memory.pages import memory_bytes

Allocate = Callable[[int, torch.dtype], Tensor]
"""Gives zeros `[count]` of that type; who opens memory that others have filled gets what stands there instead."""


def can_share() -> bool:
    """Whether this system has such memory (Linux)."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class SharedMemory:
    """One piece of it; `take` gives parts of it in the same order to everybody.

    Attributes:
        path: where other processes open it, as long as a process has it that has opened it by this object. Memory that
            is made later may have the same.
        number: in all processes; memory that is made later has another.
        file: a file of a disk that belongs to it, mapped like it; None where there is none.
    """

    def __init__(self, handle: int, file: "SharedMemory | None" = None) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{handle}"
        self.number = os.fstat(handle).st_ino
        self.file = file
        everything = mmap.mmap(handle, 0)
        self._everything = torch.frombuffer(everything, dtype=torch.uint8)[: -mmap.PAGESIZE]  # keeps it mapped
        self._taken = 0
        self.close = weakref.finalize(self, _close, handle, file)
        """Lets go of it; what was taken stays until nobody holds it."""

    @classmethod
    def create(cls, size: int, what: str, file: "FileBeside | None" = None) -> "SharedMemory":
        """New memory, all zero.

        Args:
            size: bytes of all that will be taken (`bytes_of`).
            what: will be kept there, for the message.
            file: one that is to belong to it.

        Raises:
            ConfigError: this machine does not have that much.
        """
        installed = memory_bytes()
        if installed is not None and size > installed:
            raise ConfigError(f"{what} take {size / 2**30:,.1f} GiB, and this machine has {installed / 2**30:,.1f} GiB")
        beside = None if file is None else unnamed_file(file.folder, file.size, what)
        return _filled(os.memfd_create("shadowsync"), size, what, "this machine", beside)

    @classmethod
    def open(cls, path: str) -> "SharedMemory":
        """Memory that another process has made, with the file that belongs to it.

        Raises:
            RunError: it is gone, or belongs to another user.
        """
        handle = _opened(path)
        told = os.pread(handle, mmap.PAGESIZE, os.fstat(handle).st_size - mmap.PAGESIZE).rstrip(bytes(1)).decode()
        return cls(handle, cls.open(told) if told else None)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next part, `[count]`, from the start of a page on."""
        start, size = self._taken, count * dtype.itemsize
        self._taken += _in_pages(size)
        if self._taken > len(self._everything):
            raise RunError("memory that the roles of this job have in common is smaller than what is to be kept there")
        return self._everything[start : start + size].view(dtype)

    def read(self) -> bytes:
        """What stands there now."""
        return self._everything.numpy().tobytes()


@dataclass(frozen=True)
class FileBeside:
    """So many bytes in a folder of a disk."""

    folder: Path
    size: int


def unnamed_file(folder: Path, size: int, what: str) -> SharedMemory:
    """A file of a disk without a name, all zero, mapped into memory; it is gone with those who have it, and nobody can
    cut it.

    Args:
        size: bytes of all that will be taken (`bytes_of`).
        what: will be kept there, for the message.

    Raises:
        ConfigError: the folder is not there, or its disk does not have that much room, or no such files.
    """
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{what} are to be in a file without a name in {folder}, which cannot be made: {error}"
        ) from error
    return _filled(handle, size, what, f"the disk of {folder}")


def _filled(handle: int, size: int, what: str, giver: str, file: SharedMemory | None = None) -> SharedMemory:
    """The last page, which nobody takes, tells where the file is that belongs to it."""
    whole = _in_pages(size) + mmap.PAGESIZE
    try:
        os.posix_fallocate(handle, 0, whole)  # or a lack of it would end whoever writes there
        if file is not None:
            os.pwrite(handle, file.path.encode(), whole - mmap.PAGESIZE)
        return SharedMemory(handle, file)
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"{giver} does not give {size / 2**30:,.1f} GiB for {what}: {error}") from error


def _close(handle: int, file: SharedMemory | None) -> None:
    os.close(handle)
    if file is not None:
        file.close()


def bytes_of(parts: Sequence[tuple[int, torch.dtype]]) -> int:
    """Bytes that these parts take, given as `SharedMemory.take` has them."""
    return sum(_in_pages(count * dtype.itemsize) for count, dtype in parts)


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def number_at(path: str) -> int:
    """`SharedMemory.number` of what is there now; raises as `SharedMemory.open`."""
    with _found():
        return Path(path).stat().st_ino


def _opened(path: str) -> int:
    with _found():
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@contextmanager
def _found() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"memory that the roles of this job have in common cannot be opened: {error}") from error


class FileGate:
    """As `PushGate`, between processes: any number go through with `with gate:`, and one is `alone`.

    The system keeps who is inside, with the process: whoever is killed inside is inside no more. Each thread has a
    handle of its own, so that it counts for itself. Locks of files know no turns, so there are two: whoever comes has
    the first, the turnstile, while it waits for the second. Who wants to be alone has the turnstile for itself, so that
    nobody goes past it. A way through costs four calls of the system (2 µs).

    Args:
        memory: the one whose gate it is, opened in each process.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._own = threading.local()

    def __enter__(self) -> None:
        handle = self._handle()
        _lock(handle, _TURNSTILE, fcntl.F_RDLCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
        finally:
            _lock(handle, _TURNSTILE, fcntl.F_UNLCK)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._handle(), fcntl.LOCK_UN)

    @contextmanager
    def singly(self) -> Iterator[None]:
        """As `with gate:`, but one of those who do so at a time."""
        with self, self.one():
            yield

    def one(self) -> AbstractContextManager[None]:
        """As `PushGate.one`."""
        return self._locked(_ONE)

    def moving(self) -> AbstractContextManager[None]:
        """As `PushGate.moving`."""
        return self._locked(_MOVING)

    @contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        handle = self._handle()
        _lock(handle, byte, fcntl.F_WRLCK)
        try:
            yield
        finally:
            _lock(handle, byte, fcntl.F_UNLCK)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nobody goes through, and nobody else is alone."""
        handle = self._handle()
        _lock(handle, _TURNSTILE, fcntl.F_WRLCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
            _lock(handle, _TURNSTILE, fcntl.F_UNLCK)

    def _handle(self) -> int:
        found: _Handle | None = getattr(self._own, "handle", None)
        if found is None:
            found = self._own.handle = _Handle(self._memory.path)
        return found.number


_LOCK = struct.Struct("hhqqi4x")
"""`struct flock` of fcntl(2): type, whence, start, length, process."""


_TURNSTILE, _ONE, _MOVING = 0, 1, 2


def _lock(handle: int, byte: int, kind: int) -> None:
    """A lock of one byte of the open file, apart from `flock` on the same file; waits until it can be had."""
    fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


class _Handle:
    """Closed with the thread that has it."""

    def __init__(self, path: str) -> None:
        self.number = _opened(path)
        weakref.finalize(self, os.close, self.number)
