"""The dense server: holds a part of the central dense copy."""

import threading
from collections.abc import Callable

from torch import Tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class DenseServer:
    """Parameters `start … start + p − 1` of the central copy `w_PS` (a role; needed by centralised methods only).

    Exchanges take turns, so that every one of them sees all of the one before.

    Args:
        values: the initial copy, `[p]`; kept and changed in place.
        sent: what a reply looks like at the trainer (a lossy codec there and back), so that both sides apply the
            same difference.
    """

    def __init__(self, values: Tensor, sent: Callable[[Tensor], Tensor] = _as_it_is) -> None:
        self._values = values
        self._sent = sent
        self._lock = threading.Lock()

    def elastic(self, local: Tensor, alpha: float) -> Tensor:
        """Adds `d = α (local − w_PS)` to the central copy and returns it, `[p]`."""
        with self._lock:
            difference = self._sent((local - self._values).mul_(alpha))
            self._values.add_(difference)
        return difference

    def sequential(self, local: Tensor, alpha: float) -> Tensor:
        """`w_PS ← (1−α) w_PS + α local`; returns a copy of the new `w_PS`, `[p]`."""
        with self._lock:
            self._values.lerp_(local, alpha)
            return self._sent(self._values.clone())

    def read(self) -> Tensor:
        """A copy of the part, `[p]`."""
        with self._lock:
            return self._values.clone()

    def write(self, values: Tensor) -> None:
        """Replaces the part, `[p]`."""
        with self._lock:
            self._values.copy_(values)
