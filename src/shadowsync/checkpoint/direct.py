"""Writes a file past the page cache where the file system lets one.

A checkpoint is written once and read seldom. Through the page cache each of its bytes costs the kernel a page, which
it then has to write back and reclaim; the processor's time for that is taken from training. Written directly from one
aligned buffer, which is used again and again, the disk fetches the bytes itself.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shadowsync.memory.pages import HUGE_PAGE_BYTES, zeros

BUFFER_BYTES = 4 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux
_kept = threading.local()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes and flushes a file; what does not fill the buffer, as small files, goes the ordinary way.

    Raises:
        OSError: what the file system raised; what `chunks` raises passes through.
    """
    buffer, filled = _buffer(), 0
    with path.open("wb", buffering=0) as file:
        target = _Target(file.fileno())
        for chunk in chunks:
            source, used = np.frombuffer(chunk, np.uint8), 0
            while used < len(source):
                count = min(len(source) - used, BUFFER_BYTES - filled)
                buffer[filled : filled + count] = source[used : used + count]
                used, filled = used + count, filled + count
                if filled == BUFFER_BYTES:
                    target.write_aligned(buffer.data)
                    filled = 0
        target.write(buffer[:filled].data)
        os.fsync(file.fileno())


def _buffer() -> NDArray[np.uint8]:
    """This thread's; begins at a page. In huge pages a direct write takes a third of the processor's time."""
    buffer: NDArray[np.uint8] | None = getattr(_kept, "buffer", None)
    if buffer is None or len(buffer) != BUFFER_BYTES:
        buffer = zeros(max(BUFFER_BYTES, HUGE_PAGE_BYTES), torch.uint8)[:BUFFER_BYTES].numpy()
        _kept.buffer = buffer
    return buffer


class _Target:
    """An open file; the first aligned write shows whether its file system takes them directly."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_direct = False
        self._may_be_direct = _O_DIRECT != 0

    def write_aligned(self, view: memoryview) -> None:
        """All of a view that begins at a page and is whole pages long, behind others such."""
        if self._may_be_direct and not self._is_direct:
            self._may_be_direct = self._is_direct = self._set(_O_DIRECT)
        try:
            done = os.write(self._descriptor, view)
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
            self._may_be_direct, done = False, 0
        if done < len(view):  # a disk that is about to be full, or not to be written so
            self.write(view[done:])

    def write(self, view: memoryview) -> None:
        """All of a view, the ordinary way."""
        if self._is_direct:
            self._set(0)
            self._is_direct = False
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _set(self, direct: int) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True
