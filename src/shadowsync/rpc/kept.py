"""What is kept of requests until others refer to it, within bounds."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from shadowsync.errors import DataError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class KeptLimits:
    """How many look-ups of one client wait for their push; beyond, the oldest is dropped and has to come again.

    Attributes:
        count: look-ups; more lets more pulls be ahead of their pushes.
        bytes: of their ids and masks.
    """

    count: int = 1024
    bytes: int = 256 << 20


USUAL = KeptLimits()


MOST_STREAMS = 256
"""Streams of one client where a job does not say how many there are: the most workers that a trainer may have."""


class Bounded(Generic[K, V]):
    """What is remembered for each name that a client gives (its streams, say), made when it is first given.

    Whoever sends names and numbers makes up as many as it likes, so there is a bound.

    Args:
        most: names.
        called: what they name, for errors.
    """

    def __init__(self, most: int, called: str) -> None:
        self._most, self._called = most, called
        self._found: dict[K, V] = {}
        self._lock = threading.Lock()

    def get(self, name: K, make: Callable[[], V]) -> V:
        """What belongs to the name.

        Raises:
            DataError: it is one name too many.
        """
        with self._lock:
            if name not in self._found:
                if len(self._found) >= self._most:
                    raise DataError(
                        f"a client names more than {self._most} {self._called}, the most that this job has room for"
                    )
                self._found[name] = make()
            return self._found[name]

    def values(self) -> list[V]:
        """All that is remembered."""
        with self._lock:
            return list(self._found.values())


class PerClient(Generic[V]):
    """What is remembered of each client that calls, from its first call until it is gone.

    Args:
        make: what a new client has.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._clients: dict[str, V] = {}

    def of(self, client: str) -> V:
        """That client's; of several threads that ask first, all get the same."""
        found = self._clients.get(client)
        return found if found is not None else self._clients.setdefault(client, self._make())

    def forget(self, client: str) -> None:
        """It is gone."""
        self._clients.pop(client, None)

    def values(self) -> list[V]:
        """Of all clients."""
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
    """The elements of a pull that crossed, as both sides know them.

    Attributes:
        number: the sender's own for this answer; a pull that was asked for twice is answered under two masks.
        kept: positions, as `Encoded.kept`, for each tensor of the answer.
    """

    number: int
    kept: tuple[Tensor | None, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(0 if positions is None else positions.nbytes for positions in self.kept)
