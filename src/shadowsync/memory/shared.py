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
from contextlib import contextmanager
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
    """

    def __init__(self, handle: int, size: int) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{handle}"
        self.number = os.fstat(handle).st_ino
        self._mapping = mmap.mmap(handle, max(size, mmap.PAGESIZE))
        self._everything = torch.frombuffer(self._mapping, dtype=torch.uint8)  # keeps the mapping while views live
        self._taken = 0
        self.close = weakref.finalize(self, os.close, handle)
        """Lets go of it; what was taken stays until nobody holds it."""

    @classmethod
    def create(cls, size: int, what: str) -> "SharedMemory":
        """New memory, all zero.

        Args:
            size: bytes of all that will be taken (`bytes_of`).
            what: will be kept there, for the message.

        Raises:
            ConfigError: this machine does not have that much.
        """
        installed = memory_bytes()
        if installed is not None and size > installed:
            raise ConfigError(f"{what} take {size / 2**30:,.1f} GiB, and this machine has {installed / 2**30:,.1f} GiB")
        handle = os.memfd_create("shadowsync")
        try:
            os.posix_fallocate(handle, 0, max(size, mmap.PAGESIZE))  # or a lack of it would end whoever writes there
            return cls(handle, size)
        except OSError as error:
            os.close(handle)
            raise ConfigError(f"this machine does not give {size / 2**30:,.1f} GiB for {what}: {error}") from error

    @classmethod
    def open(cls, path: str) -> "SharedMemory":
        """Memory that another process has made.

        Raises:
            RunError: it is gone, or belongs to another user.
        """
        handle = _opened(path)
        return cls(handle, os.fstat(handle).st_size)

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
        handle = self._handle()
        with self:
            _lock(handle, _ONE, fcntl.F_WRLCK)
            try:
                yield
            finally:
                _lock(handle, _ONE, fcntl.F_UNLCK)

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


_TURNSTILE, _ONE = 0, 1


def _lock(handle: int, byte: int, kind: int) -> None:
    """A lock of one byte of the open file, apart from `flock` on the same file; waits until it can be had."""
    fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


class _Handle:
    """Closed with the thread that has it."""

    def __init__(self, path: str) -> None:
        self.number = _opened(path)
        weakref.finalize(self, os.close, self.number)
