"""How the process uses the pages of its memory.

Look-ups hit random rows, so with pages of 4 KiB nearly each one also misses the processor's page table cache. On
2.2 GB of rows (33.8 M × 16 floats, two cores) huge pages took a random row from 110 ns to 24 ns, and the first filling
from 2.7 s to 0.9 s.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.errors import ConfigError

HUGE_PAGE_BYTES = 2 << 20
_PROCESS_MADVISE, _SPANS = 440, 1024  # number of the system call, the same on all processors; pieces in one call
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros `[count]`, in huge pages where they are large enough and the system has them on offer (Linux).

    Raises:
        ConfigError: there is not that much memory.
    """
    size = count * dtype.itemsize
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"this machine does not give {size / 2**30:,.1f} GiB for the rows of one embedding server: lower the rows "
            "of the tables (data.hash_size, data.rows, embedding.tables) or model.embedding_dim"
        ) from error
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping as long as any view of it lives
    start = -everything.data_ptr() % HUGE_PAGE_BYTES
    return everything[start : start + size].view(dtype)


def expect_at_random(tensor: Tensor) -> None:
    """Of a mapped file: reading a page does not bring the ones after it."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    if size > 0 and hasattr(mmap, "MADV_RANDOM"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_RANDOM)


def read_ahead(records: Tensor, rows: Tensor | range) -> None:
    """Has pages of a mapped file in memory when it returns: those of rows of a tensor `[R, D]`, by number, int64 `[K]`,
    or of a run of them. They are all asked for before the first is waited for, many with one call where the system
    allows that (process_madvise(2)), else one by one.

    Of 2,000 rows in a cold file 105,000 a second came like this, 80,000 by 16 threads that wait for a page each, which
    took twice the processor's time, too (two cores of an EPYC).
    """
    if not len(rows):
        return
    width = records.stride(0) * records.element_size()
    if isinstance(rows, range):
        first, end = (records.data_ptr() + row * width for row in (rows.start, rows.stop))
        page = first // mmap.PAGESIZE * mmap.PAGESIZE
        spans = np.array([[page, end - page]])
    else:
        begins = records.data_ptr() + rows.numpy() * width
        pages = np.unique(np.concatenate([begins, begins + width - 1]) // mmap.PAGESIZE)
        spans = np.stack([pages * mmap.PAGESIZE, np.full_like(pages, mmap.PAGESIZE)], 1)
    _will_need(spans)
    chosen = records[rows.start : rows.stop] if isinstance(rows, range) else records
    for column in (0, records.shape[1] - 1):  # waits
        if isinstance(rows, range):
            chosen[:: max(1, mmap.PAGESIZE // width // 2), column].sum()
        else:
            chosen[:, column].index_select(0, rows)


def _will_need(spans: NDArray[np.int64]) -> None:
    """Pieces of memory, address and bytes `[N, 2]`, are to be read."""
    library = ctypes.CDLL(None, use_errno=True)
    for address, size in spans[_advised(library, np.ascontiguousarray(spans, dtype=np.uint64)) :].tolist():
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_WILLNEED)


def _advised(library: ctypes.CDLL, spans: NDArray[np.uint64]) -> int:
    """How many of the first of these pieces one call for many has told the system of."""
    try:
        process = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # an old system, a sandbox
        return 0
    call = library.syscall
    call.restype = ctypes.c_long
    try:
        for start in range(0, len(spans), _SPANS):
            part = spans[start : start + _SPANS]
            given = process, ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(len(part)), mmap.MADV_WILLNEED, 0
            if call(_PROCESS_MADVISE, *given) != int(part[:, 1].sum()):
                return start
        return len(spans)
    finally:
        os.close(process)


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory for the next allocation; True if it does (glibc).

    By default glibc hands the top of its heap back to the system as soon as a tensor there is freed, and the next step
    pays for the same pages again: a pull of 1,024 × 26 vectors of 16 floats from two servers took 0.86 ms so, and
    0.24 ms with the memory kept. It concerns the whole process, so a job calls it once, before it starts.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, 512 << 20)) and bool(mallopt(M_MMAP_THRESHOLD, 32 << 20))


def memory_bytes() -> int | None:
    """What this machine has, or the control group that this process is in may take; None where nobody says."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    allowed = [limit for path in limits_of_groups(Path("/")) if (limit := _number_in(path)) is not None]
    return min([installed, *allowed])


def limits_of_groups(root: Path) -> Iterator[Path]:
    """Files with the limits of the control groups that this process is in, those around them included (v2 and v1).

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in ["0::/", "0:memory:/", *lines]:  # in a container the group is often mounted as the root
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        else:
            continue
        own = top / group.strip("/")
        yield from (place / name for place in (own, *own.parents) if place.is_relative_to(top))


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None
