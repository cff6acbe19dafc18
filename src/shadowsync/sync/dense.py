"""The dense server: holds a part of the central dense copy."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

Sent = Callable[[Tensor], Tensor]
"""What a tensor looks like at the other side: a lossy codec there and back."""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class DenseServer:
    """Parameters `start … start + p − 1` of the central copy `w_PS` (a role; needed by centralised methods only).

    Exchanges take turns, so that every one of them sees all of the one before.

    Args:
        values: the initial copy, `[p]`; kept and changed in place.
        lock: for turns, where the values are in memory that other processes have in common.
    """

    def __init__(self, values: Tensor, lock: AbstractContextManager[Any] | None = None) -> None:
        self._values = values
        self._lock = lock or threading.Lock()

    @property
    def length(self) -> int:
        """Parameters held, `p`."""
        return len(self._values)

    def elastic(self, local: Tensor, alpha: float, sent: Sent = _as_it_is) -> Tensor:
        """Adds `d = α (local − w_PS)` as it arrives at the trainer to the central copy and returns it, `[p]`.

        `sent` of it, so that both sides apply the same difference.
        """
        with self._lock:
            difference = sent((local - self._values).mul_(alpha))
            self._values.add_(difference)
        return difference

    def sequential(self, local: Tensor, alpha: float, sent: Sent = _as_it_is) -> Tensor:
        """`w_PS ← (1−α) w_PS + α local`; returns a copy of the new `w_PS` as it arrives at the trainer, `[p]`."""
        with self._lock:
            self._values.lerp_(local, alpha)
            return sent(self._values.clone())

    def read(self) -> Tensor:
        """A copy of the part, `[p]`."""
        with self._lock:
            return self._values.clone()

    def write(self, values: Tensor) -> None:
        """Replaces the part, `[p]`."""
        with self._lock:
            self._values.copy_(values)
