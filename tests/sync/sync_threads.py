"""Threads that must end."""

import threading
from collections.abc import Callable, Iterable

TIMEOUT_S = 60


def start(work: Callable[[int], object], indices: Iterable[int]) -> list[threading.Thread]:
    """A thread for each index."""
    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in indices]
    for thread in threads:
        thread.start()
    return threads


def join_all(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a thread hangs"


def run_all(work: Callable[[int], object], indices: Iterable[int]) -> None:
    join_all(start(work, indices))
