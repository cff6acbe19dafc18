"""The one authority over who trains which rows: a lease book that threads share and that tells when it changed."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from shadowsync.data.leases import EpochCount, Lease, LeaseBook


@dataclass(frozen=True)
class Claim:
    """Leave to train rows now.

    Attributes:
        number: place in the order in which batches are begun, over all trainers, from 0.
        stop: the row before which to stop.
    """

    number: int
    stop: int


class Rows(NamedTuple):
    """Rows `start … stop − 1` of a lease."""

    lease: Lease
    start: int
    stop: int


class Leasing(Protocol):
    """What a trainer's feed needs of the desk, near or behind a wire."""

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""

    def lease(self, trainer: int, idle: bool) -> Lease | None:
        """As `LeaseBook.lease`; for a trainer that is idle, else as `LeaseBook.take_over`."""

    def opened(self, lease: Lease, rows: int) -> bool:
        """As `LeaseBook.opened`."""

    def claim(self, lease: Lease, start: int, stop: int) -> Claim | None:
        """As `LeaseBook.claim`; None where the rows are not the holder's any more."""

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """As `LeaseBook.done`."""

    def abandon(self, trainer: int) -> None:
        """As `LeaseBook.abandon`."""

    def version(self) -> int:
        """A number that grows whenever rows come back or everything is finished."""

    def wait(self, version: int) -> None:
        """Returns when `version()` is another one, or earlier: ask again then."""


Numbering = Callable[[Lease, int, int], int]
"""Numbers a batch: given the lease and the first row and the one after the last."""


def _counting() -> Numbering:
    numbers = itertools.count()
    return lambda *_: next(numbers)


class Desk:
    """A `LeaseBook` behind a lock (a `Leasing`)."""

    def __init__(self, book: LeaseBook, grain: int) -> None:
        """
        Args:
            book: not to be used by anybody else from now on.
            grain: rows of a batch.
        """
        self._book = book
        self._grain = grain
        self._number = _counting()
        self._version = 0
        self._changed = threading.Condition()
        self._alarm: tuple[int, Callable[[], None]] | None = None

    def number_by(self, give: Numbering) -> None:
        """Has somebody else number the batches: called for each claim, in their order, and not to call back."""
        with self._changed:
            self._number = give

    @property
    def finished(self) -> bool:
        """As `Leasing.finished`."""
        with self._changed:
            return self._book.finished

    @property
    def trained(self) -> int:
        """Rows trained so far, all epochs."""
        with self._changed:
            return self._book.trained

    def epochs(self) -> Sequence[EpochCount]:
        """Rows trained and skipped in each epoch so far."""
        with self._changed:
            return [replace(count) for count in self._book.epochs]

    def state(self) -> Mapping[str, Any]:
        """As `LeaseBook.state`."""
        with self._changed:
            return self._book.state()

    def lease(self, trainer: int, idle: bool) -> Lease | None:
        """As `Leasing.lease`."""
        with self._changed:
            found = self._book.lease(trainer)
            return self._book.take_over(trainer, self._grain) if found is None and idle else found

    def opened(self, lease: Lease, rows: int) -> bool:
        """As `Leasing.opened`."""
        with self._changed:
            return self._notice(self._book.opened(lease, rows))

    def claim(self, lease: Lease, start: int, stop: int) -> Claim | None:
        """As `Leasing.claim`."""
        with self._changed:
            granted = self._book.claim(lease, start, stop)
            held = self._book.held(lease)
            if granted <= start or held is None:
                return None
            return Claim(self._number(held, start, granted), granted)

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """As `Leasing.done`."""
        with self._changed:
            held = self._notice(self._book.done(lease, start, stop))
            alarm = self._alarm
            if alarm is None or self._book.trained < alarm[0]:
                return held
            self._alarm = None
        alarm[1]()
        return held

    def alarm(self, trained: int, call: Callable[[], None]) -> None:
        """Has `call` called once, as soon as so many rows are trained, in the thread that tells of the last of them.

        There is one alarm, the one that was set last; where so many are trained already it never rings.
        """
        with self._changed:
            self._alarm = (trained, call) if self._book.trained < trained else None

    def abandon(self, trainer: int) -> None:
        """As `Leasing.abandon`."""
        with self._changed:
            self._book.abandon(trainer)
            self._wake()

    def version(self) -> int:
        """As `Leasing.version`."""
        with self._changed:
            return self._version

    def wait(self, version: int) -> None:
        """As `Leasing.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version)

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _notice(self, held: bool) -> bool:
        if self._book.finished:
            self._wake()
        return held
