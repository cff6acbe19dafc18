"""Answers that may still be on their way.

In process an answer is there when the call returns, and `Done` costs no more than an object; across a wire it comes in
another thread.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

Callback = Callable[[BaseException | None], None]
"""Told how it ended: None, or what went wrong."""


class Pending(ABC, Generic[T]):
    """An answer or an error, now or later; any thread may ask."""

    @abstractmethod
    def result(self) -> T:
        """Waits for the answer; raises what went wrong."""

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

    def result(self) -> T:
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
    callbacks are through; what a callback raises, `result` raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._callbacks: list[Callback] = []
        self._values: list[T] = []
        self._error: BaseException | None = None

    def keep(self, value: T) -> None:
        """Gives the answer; only the first end counts."""
        self._end([value], None)

    def fail(self, error: BaseException) -> None:
        """Gives an error instead of an answer."""
        self._end([], error)

    def result(self) -> T:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._values[0]

    def done(self) -> bool:
        return self._ended.is_set()

    def then(self, callback: Callback) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self._error)

    def _end(self, values: list[T], error: BaseException | None) -> None:
        with self._lock:
            if self._values or self._error is not None:
                return
            self._values, self._error = values, error
        # one more may be added while the others run: it must not find the list closed before it was called
        while True:
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._ended.set()
                    return
            for callback in callbacks:
                self._call(callback)

    def _call(self, callback: Callback) -> None:
        try:
            callback(self._error)
        except BaseException as error:  # it is the waiter's, not that of the thread which brought the answer
            self._error = self._error or error


class Joined(Pending[T], Generic[S, T]):
    """The answers of all parts as one, put together by the one thread that asks for it."""

    def __init__(self, parts: Sequence[Pending[S]], join: Callable[[Sequence[S]], T]) -> None:
        self._parts = parts
        self._join = join
        self._joined: list[T] = []

    def result(self) -> T:
        if not self._joined:
            self._joined.append(self._join([part.result() for part in self._parts]))
        return self._joined[0]

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def then(self, callback: Callback) -> None:
        all_of(self._parts).then(callback)


def all_of(parts: Sequence[Pending[Any]]) -> Pending[None]:
    """Ends when all parts have ended, with the first error that came; what they answer is left to them."""
    waiting = [part for part in parts if not isinstance(part, Done)]
    if len(waiting) < 2:
        return waiting[0] if waiting else DONE
    return _All(waiting)


def ended(parts: Sequence[Pending[Any]], timeout_s: float | None = None) -> bool:
    """Waits until all parts have ended, well or not, but no longer than that; whether they have."""
    over = threading.Event()
    all_of(parts).then(lambda _: over.set())
    return over.wait(timeout_s)


class _All(Promise[None]):
    def __init__(self, parts: Sequence[Pending[Any]]) -> None:
        super().__init__()
        self._left = len(parts)
        self._first: BaseException | None = None
        self._count_lock = threading.Lock()
        for part in parts:
            part.then(self._ended_one)

    def _ended_one(self, error: BaseException | None) -> None:
        with self._count_lock:
            self._left -= 1
            self._first = self._first or error
            if self._left:
                return
        if self._first is None:
            self.keep(None)
        else:
            self.fail(self._first)
