"""Answers that another thread brings, as `rpc.pending` has them."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

from shadowsync.rpc.connection import Answer
from shadowsync.rpc.pending import Callback, Pending

S = TypeVar("S")
T = TypeVar("T")


class Fetched(Pending[T], Generic[S, T]):
    """An answer that is decoded by the one thread that asks for it, not by the one that serves all connections."""

    def __init__(self, future: "Future[S]", decode: Callable[[S], T]) -> None:
        self._future = future
        self._decode = decode
        self._decoded: list[T] = []

    def result(self) -> T:
        if not self._decoded:
            self._decoded.append(self._decode(self._future.result()))
        return self._decoded[0]

    def done(self) -> bool:
        return self._future.done()

    def then(self, callback: Callback) -> None:
        self._future.add_done_callback(
            lambda future: callback(CancelledError() if future.cancelled() else future.exception())
        )


def nothing(_: Answer) -> None:
    """Decodes an answer that only says that it was done."""
