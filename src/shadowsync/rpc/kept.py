"""What services keep of their clients and of requests until others refer to it, within bounds; and for whom at all."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from shadowsync.errors import RunError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class KeptLimits:
    """How many look-ups of one client wait for their push (more lets more pulls be ahead), and how many bytes of ids
    and masks; beyond, the oldest is dropped and has to come again."""

    count: int = 1024
    bytes: int = 256 << 20


USUAL = KeptLimits()


class PerClient(Generic[V]):
    """What is remembered of each client that calls, from its first call until it is gone; a new one has what `make`
    makes."""

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._clients: dict[str, V] = {}

    def of(self, client: str) -> V:
        """That client's; of several threads that ask first, all get the same."""
        found = self._clients.get(client)
        return found if found is not None else self._clients.setdefault(client, self._make())

    def forget(self, client: str) -> None:
        self._clients.pop(client, None)

    def values(self) -> list[V]:
        return list(self._clients.values())


class Kept(Generic[K, V]):
    """Values by key, each until it is taken or newer ones need the room; any thread may call."""

    def __init__(self, limits: KeptLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._found: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0

    def keep(self, key: K, value: V, size: int) -> None:
        """Keeps a value of so many bytes, in place of an earlier one of that key."""
        with self._lock:
            self._remove(key)
            self._found[key] = value, size
            self._bytes += size
            while len(self._found) > self._limits.count or self._bytes > self._limits.bytes:
                self._remove(next(iter(self._found)))

    def take(self, key: K) -> V | None:
        """The value, which is not kept any more; None if it was dropped or never came."""
        with self._lock:
            return self._remove(key)

    def __len__(self) -> int:
        return len(self._found)

    def _remove(self, key: K) -> V | None:
        value, size = self._found.pop(key, (None, 0))
        self._bytes -= size
        return value


@dataclass(frozen=True)
class Mask:
    """The elements of a pull that crossed, as both sides know them: positions, as `Encoded.kept`, for each tensor of
    the answer, and the sender's number, since a pull that was asked for twice is answered under two masks."""

    number: int
    kept: tuple[Tensor | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(0 if positions is None else positions.nbytes for positions in self.kept)


def check_generation(own: int, sent: int) -> None:
    """Refuses (`RunError`) what a trainer of another generation of the job's parts sends: those that started from one
    checkpoint. Trainers of an earlier one change nothing any more."""
    if sent != own:
        raise RunError("this trainer was given up: all others have gone back to a checkpoint")
