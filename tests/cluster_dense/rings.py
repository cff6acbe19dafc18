"""Rings that reduce inside the test, late and in the wrong order, and fail where they are told to; hasty callers, and a
codec that rounds."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Encoded
from shadowsync.rpc.connection import Connection, Payload
from shadowsync.rpc.pending import Pending
from shadowsync.sync.all_reduce import Seat, mean_of
from shadowsync.sync.averaging import RingBroken

PATIENCE_S = 120.0


@dataclass
class Epoch:
    """What has come together in one epoch, by position."""

    given: dict[int, tuple[Tensor, Future[Any]]] = field(default_factory=dict)
    broken: bool = False


class Hall:
    """Makes rings.

    Args:
        fails: epoch and position of a member's end that fails although the others succeed.
        deaf: epochs in which nothing ever comes back.
    """

    def __init__(self, fails: set[tuple[int, int]] | None = None, deaf: set[int] | None = None) -> None:
        self.fails, self.deaf = fails or set(), deaf or set()
        self.always_fails = False
        self.moved: list[Tensor] = []
        self.gathered = 0
        self.seats: list[Seat] = []
        self.closed: list[Seat] = []
        self.before_reduction: Callable[[], None] = lambda: None
        self._epochs: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    def ring(self, seat: Seat) -> "HallRing":
        self.seats.append(seat)
        return HallRing(self, seat)

    def give(self, seat: Seat, vector: Tensor, reduce: Callable[[Sequence[Tensor]], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            epoch = self._epochs.setdefault(seat.epoch, Epoch())
            self.moved.append(vector)
            if epoch.broken or self.always_fails:
                future.set_exception(RingBroken("closed"))
                return future
            epoch.given[seat.position] = (vector, future)
            if len(epoch.given) < seat.size or seat.epoch in self.deaf:
                return future
            given, epoch.given = epoch.given, {}
        threading.Thread(target=self._reduce, args=(seat.epoch, given, reduce), daemon=True).start()
        return future

    def _reduce(
        self,
        epoch: int,
        given: dict[int, tuple[Tensor, Future[Any]]],
        reduce: Callable[[Sequence[Tensor]], Any],
    ) -> None:
        self.before_reduction()
        result = reduce([given[position][0] for position in sorted(given)])
        for position in sorted(given, reverse=True):
            if (epoch, position) in self.fails:
                given[position][1].set_exception(RingBroken("on purpose"))
            else:
                given[position][1].set_result(result.clone() if isinstance(result, Tensor) else result)

    def close(self, seat: Seat) -> None:
        self.closed.append(seat)
        with self._lock:
            epoch = self._epochs.setdefault(seat.epoch, Epoch())
            epoch.broken, given, epoch.given = True, epoch.given, {}
        if seat.epoch not in self.deaf:
            for _, future in given.values():
                future.set_exception(RingBroken("a member closed it"))


@dataclass(frozen=True)
class HallRing:
    """One member's end."""

    hall: Hall
    seat: Seat

    def mean(self, vector: Tensor) -> Future[Tensor]:
        return self.hall.give(self.seat, vector, lambda vectors: mean_of([v.float() for v in vectors]))

    def gather(self, message: Tensor, most: int) -> Future[tuple[Tensor, ...] | None]:
        self.hall.gathered += 1
        return self.hall.give(
            self.seat, message, lambda messages: tuple(messages) if sum(map(len, messages)) <= most else None
        )

    def close(self) -> None:
        self.hall.close(self.seat)


def until(true: Callable[[], bool]) -> None:
    """Looks again and again, for a while."""
    nothing = threading.Event()
    for _ in range(int(PATIENCE_S / 0.001)):
        if true():
            return
        nothing.wait(0.001)
    raise AssertionError("it did not happen")


class Hasty(Connection):
    """Waits less long for what has a deadline of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.asked: list[str] = []

    def call(self, *asked: Any) -> Pending[Payload]:
        *what, timeout_s = asked
        self.asked.append(what[0])
        return self._connection.call(*what, timeout_s and 0.05)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Rounded(Codec):
    """Whole numbers in a byte, with error feedback."""

    name = "rounded"

    def encode(self, tensor: Tensor, state: Tensor | None = None, groups: Sequence[int] = ()) -> Encoded:
        wanted = tensor if state is None else tensor + state
        return Encoded((wanted.round().to(torch.int8),), tuple(tensor.shape), wanted - wanted.round())

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return frames[0].view(shape).to(torch.float32)
