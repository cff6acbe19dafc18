"""Keeps freed memory in the process, so that every step's activations do not come from the kernel again."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def keep_freed_memory(top_pad_bytes: int = 64 << 20) -> bool:
    """Tells glibc to give no memory back and to map no block below 32 MiB on its own, for the whole process.

    By default glibc hands each freed activation of more than 128 KiB back to the kernel, or the end of its heap, and
    the next step pays for thousands of page faults. Peak memory stays about the same, since a step's peak is needed
    again in the next one.

    Args:
        top_pad_bytes: how much a heap grows at once.

    Returns:
        Whether there is a glibc that took it; elsewhere nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: (1 << 31) - 1, _M_TOP_PAD: top_pad_bytes}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
