"""Answers that may still be on their way.

In process an answer is there when the call returns, and `Done` costs no more than an object; across a wire it comes in
another thread.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

Callback = Callable[[BaseException | None], None]
"""Told how it ended: None, or what went wrong."""


class Pending(ABC, Generic[T]):
    """An answer or an error, now or later; any thread may ask."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> T:
        """Waits for the answer; raises what went wrong, or `TimeoutError`."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return or raise at once."""

    @abstractmethod
    def then(self, callback: Callback) -> None:
        """Calls back once it has ended: at once in this thread if it has, else in the thread that ends it."""


class Done(Pending[T]):
    """An answer that is there."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout_s: float | None = None) -> T:
        return self._value

    def done(self) -> bool:
        return True

    def then(self, callback: Callback) -> None:
        callback(None)


DONE: Pending[None] = Done(None)
"""Nothing was to be waited for."""


class Promise(Pending[T]):
    """An answer that somebody will give.

    Everything given to `then` before has run when `result` returns, so that whoever waits also knows that the
    callbacks are through; what a callback raises, `result` raises. The callbacks themselves may ask for the result.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._callbacks: list[Callback] = []
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ender: int | None = None  # the thread that gave the answer and calls back
        self._ended = False

    def keep(self, value: T) -> None:
        """Gives the answer; only the first end counts."""
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        """Gives an error instead of an answer."""
        self._end(None, error)

    def end(self, error: BaseException | None) -> None:
        """Ends as something else did that has no answer; a `Callback`."""
        self._end(None, error)

    def result(self, timeout_s: float | None = None) -> T:
        if not self._ended and self._ender != threading.get_ident():
            with self._changed:
                if not self._changed.wait_for(self.done, timeout_s):
                    raise TimeoutError(f"no answer in {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def done(self) -> bool:
        return self._ended

    def then(self, callback: Callback) -> None:
        with self._changed:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback(self._error)

    def _end(self, value: T | None, error: BaseException | None) -> None:
        with self._changed:
            if self._ender is not None:
                return
            self._ender, self._value, self._error = threading.get_ident(), value, error
        # one more may be added while the others run: it must not find the list closed before it was called
        while True:
            with self._changed:
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._ended = True
                    self._changed.notify_all()
                    return
            for callback in callbacks:
                try:
                    callback(self._error)
                except BaseException as raised:  # the waiter's, not that of the thread which brought the answer
                    self._error = self._error or raised


class Mapped(Pending[T]):
    """One answer made of the answers of all parts, by the one thread that asks for it: not by the one that serves all
    connections."""

    def __init__(self, decode: Callable[..., T], *parts: Pending[Any]) -> None:
        self._decode, self._parts = decode, parts
        self._decoded: list[T] = []

    def result(self, timeout_s: float | None = None) -> T:
        if not self._decoded:
            self._decoded.append(self._decode(*[part.result(timeout_s) for part in self._parts]))
        return self._decoded[0]

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def then(self, callback: Callback) -> None:
        all_of(self._parts).then(callback)


def failed(error: BaseException) -> Pending[Any]:
    """What went wrong before anything was on its way."""
    promise: Promise[Any] = Promise()
    promise.fail(error)
    return promise


def from_future(future: "Future[T]") -> Pending[T]:
    """The result of what a pool of threads does."""
    promise: Promise[T] = Promise()

    def pass_on(done: "Future[T]") -> None:
        try:
            promise.keep(done.result())
        except BaseException as error:  # also of one that was cancelled
            promise.fail(error)

    future.add_done_callback(pass_on)
    return promise


def all_of(parts: Sequence[Pending[Any]]) -> Pending[None]:
    """Ends when all parts have ended, with the first error that came; what they answer is left to them."""
    waiting = [part for part in parts if not isinstance(part, Done)]
    if len(waiting) < 2:
        return waiting[0] if waiting else DONE
    whole: Promise[None] = Promise()
    left, first, lock = len(waiting), None, threading.Lock()

    def ended_one(error: BaseException | None) -> None:
        nonlocal left, first
        with lock:
            left, first = left - 1, first or error
            if left:
                return
        whole.end(first)

    for part in waiting:
        part.then(ended_one)
    return whole


def ended(parts: Sequence[Pending[Any]], timeout_s: float | None = None) -> bool:
    """Waits until all parts have ended, well or not, but no longer than that; whether they have."""
    over = threading.Event()
    all_of(parts).then(lambda _: over.set())
    return over.wait(timeout_s)
