"""Who trains which rows: a book of leases that trains every row of every epoch exactly once, and the service of it.

Rows are counted within a slice in the order in which they are trained (a permutation of the file's order that depends
on seed, epoch and slice only), so what is left of a slice stays meaningful for another trainer, another batch size and
another process.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.errors import CheckpointError, DataError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending, ended
from shadowsync.rpc.served import ask, later, served

LOOK_AGAIN_S = 0.025
AHEAD_S = 0.1
"""A trainer elsewhere claims at once what it begins in about this time; nobody idle takes that over."""
MOST_AHEAD = 256
TELL_S = 0.2
"""What was done is told after this time, should no claim have taken it along."""
LOGGED = 4096
"""Batches in a `DoneLog`: more than any trainer does between two pieces of news, many times a second."""

T = TypeVar("T")
Span = tuple[int, int]
Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Lease:
    """A trainer's hold on rows of one slice, by its position among the source's, in an epoch, from 0.

    Attributes:
        number: unique in the book.
        spans: the rows to train, as `(start, stop)`; those of a slice that was never opened may reach to its end.
    """

    number: int
    trainer: int
    epoch: int
    slice: int
    spans: tuple[Span, ...]


class BookState(msgspec.Struct, frozen=True):
    """What of a book goes into a checkpoint.

    Attributes:
        slices, rows: how many.
        epoch, position: of the slice that is handed out next, and of it in the epoch's order.
        parts: of each that is held or came back its epoch, its slice, its rows and whether it was opened.
        trained, skipped: rows of each epoch that has begun.
    """

    slices: Count
    rows: Count
    epoch: Count
    position: Count
    parts: list[tuple[Count, Count, list[tuple[Count, Count]], bool]]
    trained: list[Count]
    skipped: list[Count]


class Position(msgspec.Struct, frozen=True):
    """How far the data is trained: what `Reader.state` gives."""

    slice_rows: Annotated[int, msgspec.Meta(ge=1)]
    shuffle: bool
    seed: Annotated[int, msgspec.Meta(ge=0)]
    book: BookState
    window: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Position":
        """The position in a checkpoint; raises `CheckpointError` if it is not one that `Reader.state` gives."""
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the checkpoint's position in the data is not that of a job: {error}") from error


@dataclass
class _Part:
    """Rows that are still to be trained: of a slice of an epoch, or of a piece that was split off it.

    Rows before `begun` were claimed by whoever holds the part; nobody else may take those over. A part that was taken
    over is settled when its new holder has claimed rows of it; until then it is not taken over again, or idle trainers
    could pass it round for ever without anybody training.
    """

    epoch: int
    slice: int
    spans: list[Span]
    opened: bool = False
    begun: int = 0
    settled: bool = True


class LeaseBook:
    """Hands out the slices of each epoch; the next epoch's follow at once.

    Pure: no clock, no thread, no file; the caller holds a lock around it. `lease` returns None when nothing can be
    handed out at the moment: `finished` tells whether that is for good, or whether rows held by others may still come
    back. Whoever holds a lease claims its rows, front to back, right before training them; what is not claimed yet,
    somebody idle may take over.

    Args:
        slices: rows of each.
        shuffle: hand slices out in an order drawn anew for each epoch, else in their own.
        window: slices among which each is moved then; None for all.
        first_number: of the leases; a book that goes on after a roll-back begins above those of the book before, so
            that no report from before is taken for one of now.

    Attributes:
        trained: rows, all epochs.
        trained_in, skipped_in: rows of each epoch that has begun; bad ones are skipped.
        barrier: rows of all epochs, bad ones counted, of which no more are handed out; None for no bound.
    """

    def __init__(
        self,
        slices: Sequence[int],
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        first_number: int = 0,
        window: int | None = None,
    ) -> None:
        self.trained, self.trained_in, self.skipped_in = 0, [0], [0]
        self.barrier: int | None = None
        self._slices, self._passes, self._shuffle, self._seed = slices, epochs, shuffle, seed
        self._window = window
        self._rows = sum(slices)
        self._returned: deque[_Part] = deque()
        self._held: dict[int, tuple[Lease, _Part]] = {}
        self._next_number = first_number
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position, self._order = epoch, 0, range(len(self._slices))
        if self._shuffle:
            draw = np.random.default_rng((self._seed, epoch))
            self._order = permutation(draw, len(self._slices), self._window).tolist()

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""
        return not self._held and not self._returned and self._exhausted

    @property
    def _exhausted(self) -> bool:
        """Every slice of every epoch was handed out at least once."""
        left_over = self._passes - self._epoch
        return left_over <= 0 or (left_over == 1 and self._position == len(self._order))

    @property
    def passed(self) -> int:
        """Rows that were trained or skipped, all epochs."""
        return self.trained + sum(self.skipped_in)

    @property
    def remaining(self) -> int:
        """Rows of all epochs, as far as the barrier if there is one, that are neither trained nor skipped."""
        end = self._passes * self._rows
        return (end if self.barrier is None else min(end, self.barrier)) - self.passed

    @property
    def at_barrier(self) -> bool:
        """All rows before the barrier were trained or skipped, and none after it."""
        return self.barrier is not None and not self._held and self.passed >= self.barrier

    def lease(self, trainer: int) -> Lease | None:
        """The next rows for a trainer: what came back first, then the next slice; None: see the class."""
        if self.barrier is None:
            part = self._next()
        else:
            room = self.barrier - self.passed - sum(_count(part.spans) for _, part in self._held.values())
            part = self._next() if room > 0 else None
            if part is not None and room < _count(part.spans):
                self._returned.appendleft(self._cut(part, room))
        return None if part is None else self._hold(part, trainer)

    def _next(self) -> _Part | None:
        if self._returned:
            return self._returned.popleft()
        if self._exhausted:
            return None
        if self._position == len(self._order):
            self._begin(self._epoch + 1)
            if self._epoch == len(self.trained_in):
                self.trained_in.append(0)
                self.skipped_in.append(0)
        index = self._order[self._position]
        self._position += 1
        return _Part(self._epoch, index, [(0, self._slices[index])])

    def _cut(self, part: _Part, rows: int) -> _Part:
        """Takes all but its first rows from a part."""
        end = self._slices[part.slice]
        for start, stop in part.spans:
            if rows < stop - start:
                rest = replace(part, spans=_without(part.spans, 0, start + rows))
                part.spans = _without(part.spans, start + rows, end)
                return rest
            rows -= stop - start
        raise ValueError("there are not more rows than that")

    def opened(self, lease: Lease, rows: int) -> bool:
        """The slice turned out to have so many good rows; the rest counts as skipped, once. False if the lease is not
        held any more, or has nothing (left) to train."""
        held = self._held.get(lease.number)
        if held is None:
            return False
        part = held[1]
        if not part.opened:
            part.opened = True
            good = _without(part.spans, rows, self._slices[part.slice])
            self.skipped_in[part.epoch] += _count(part.spans) - _count(good)
            self._keep(lease, good)
        return lease.number in self._held

    def claim(self, lease: Lease, start: int, stop: int) -> int:
        """The holder begins rows `start … stop − 1` of an opened lease now: how far it may go, at most `stop`; `start`
        where the rows are not its own any more."""
        held = self._held.get(lease.number)
        if held is None or start < held[1].begun:
            return start
        part = held[1]
        for first, last in part.spans:
            if first <= start < last:
                part.begun, part.settled = min(stop, last), True
                return part.begun
        return start

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """Rows `start … stop − 1` of the lease's slice were trained; raises `DataError` if they were not leased. False
        if the lease is not held any more (its trainer was given up, so that others train these rows)."""
        held = self._held.get(lease.number)
        if held is None:
            return False
        part = held[1]
        if not _covered(part.spans, start, stop):
            raise DataError(f"rows {start} … {stop} are not among those to train: {part.spans}")
        self.trained_in[part.epoch] += stop - start
        self.trained += stop - start
        self._keep(lease, _without(part.spans, start, stop))
        return True

    def redo(self, log: Iterable[tuple[int, int, int]]) -> None:
        """Takes note of rows `start … stop − 1` of leases by number that were done; those that it knows are no harm."""
        for number, start, stop in log:
            held = self._held.get(number)
            if held is not None and _covered(held[1].spans, start, stop):
                self.done(held[0], start, stop)

    def abandon(self, trainer: int) -> None:
        """Puts back what the trainer holds and has not done."""
        for lease, part in [held for held in self._held.values() if held[0].trainer == trainer]:
            del self._held[lease.number]
            part.begun, part.settled = 0, True
            self._returned.append(part)

    def take_over(self, trainer: int, grain: int) -> Lease | None:
        """Moves to `trainer`, who has nothing left, the last half of the batches that wait in the fullest lease of the
        others, one more of an odd number, if any wait anywhere. A batch has `grain` rows, the last one perhaps less."""
        waiting: list[Span] = []
        most, fullest = 0, None
        for lease, part in self._held.values():
            unclaimed = _without(part.spans, 0, part.begun)
            count = sum(stop - start for start, stop in unclaimed)
            if lease.trainer != trainer and part.settled and count > most:
                most, fullest, waiting = count, (lease, part), unclaimed
        if fullest is None:
            return None
        lease, part = fullest
        if not part.opened:
            del self._held[lease.number]
            part.settled = False
            return self._hold(part, trainer)
        kept = -(-most // grain) // 2 * grain
        for first, last in waiting:
            if kept < last - first:
                break
            kept -= last - first
        cut, end = first + kept, self._slices[part.slice]
        moved = _Part(part.epoch, part.slice, _without(part.spans, 0, cut), opened=True, settled=False)
        self._keep(lease, _without(part.spans, cut, end))
        return self._hold(moved, trainer)

    def _hold(self, part: _Part, trainer: int) -> Lease:
        lease = Lease(self._next_number, trainer, part.epoch, part.slice, tuple(part.spans))
        self._next_number += 1
        self._held[lease.number] = (lease, part)
        return lease

    def _keep(self, lease: Lease, spans: list[Span]) -> None:
        """These are left of a lease, which ends without any."""
        self._held[lease.number][1].spans = spans
        if not spans:
            del self._held[lease.number]

    def state(self) -> BookState:
        """The position; rows that are held and not done count as not trained."""
        parts = [*(part for _, part in self._held.values()), *self._returned]
        return BookState(
            len(self._slices),
            sum(self._slices),
            self._epoch,
            self._position,
            [(part.epoch, part.slice, list(part.spans), part.opened) for part in parts],
            list(self.trained_in),
            list(self.skipped_in),
        )

    def restore(self, saved: BookState) -> None:
        """Goes on from a state of a book with the same slices and seed; there may be more epochs now, or fewer. Raises
        `CheckpointError` if the state is of other data."""
        slices = self._slices
        if saved.slices != len(slices) or saved.rows != sum(slices):
            raise CheckpointError(
                f"the checkpoint was made on data of {saved.rows} rows, this data has {sum(slices)}: give the same data"
            )
        counted = len(saved.trained) == len(saved.skipped) > saved.epoch and saved.position <= len(slices)
        if not counted or not all(
            epoch <= saved.epoch and part < len(slices) and all(start < stop <= slices[part] for start, stop in spans)
            for epoch, part, spans, _ in saved.parts
        ):
            raise CheckpointError("the checkpoint's position in the data contradicts itself")
        self._begin(saved.epoch)
        self._position = saved.position
        self.trained, self.trained_in, self.skipped_in = sum(saved.trained), list(saved.trained), list(saved.skipped)
        self._returned = deque(sorted((_Part(*part) for part in saved.parts), key=lambda part: part.epoch))
        self._held = {}


def permutation(draw: np.random.Generator, count: int, window: int | None) -> NDArray[np.int64]:
    """So many places in another order, in which each stays within its stretch of `window` places; None: of all."""
    if window is None or window >= count:
        return draw.permutation(count)
    stretches = ((start, min(window, count - start)) for start in range(0, count, window))
    return np.concatenate([start + draw.permutation(size) for start, size in stretches])


def _count(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _covered(spans: Sequence[Span], start: int, stop: int) -> bool:
    """The rows `start … stop − 1` lie in one of the spans."""
    return any(first <= start <= stop <= last for first, last in spans)


def _without(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The spans less the rows `begin … end − 1`."""
    left = []
    for start, stop in spans:
        if start < begin:
            left.append((start, min(stop, begin)))
        if stop > end:
            left.append((max(start, end), stop))
    return left


class LeaseStatus(NamedTuple):
    """How things stand, as every answer of the service says, so that nobody has to ask; `version` grows whenever rows
    come back, a barrier is lifted or everything is `finished`, `trained` are rows of all epochs, `scale` is a factor on
    learning rates."""

    version: int
    finished: bool
    trained: int
    scale: float = 1.0


class Claim(NamedTuple):
    """Leave to train the rows before `stop` now, as batch `number` of all trainers, from 0, or as that and the next."""

    number: int
    stop: int


class DoneRows(NamedTuple):
    """Rows `start … stop − 1` of a lease."""

    lease: Lease
    start: int
    stop: int


class DoneLog:
    """The last batches that a trainer has done, in memory that outlives it: what it could not tell any more counts.

    A ring of `(number of the lease + 1, start, stop)`, int64 `[LOGGED, 3]`; 0 in place of a number: nothing.
    """

    PARTS = ((LOGGED * 3, torch.int64),)

    def __init__(self, ring: Tensor) -> None:
        """In memory of `PARTS`."""
        self._ring = ring.view(LOGGED, 3).numpy()
        self._next = 0

    @classmethod
    def of(cls, data: bytes) -> "DoneLog":
        """What another one has logged."""
        return cls(torch.frombuffer(bytearray(data), dtype=torch.int64, count=LOGGED * 3))

    def note(self, rows: DoneRows) -> None:
        """By one thread at a time; of one that is killed meanwhile it stands there whole or not at all."""
        entry = self._ring[self._next % LOGGED]
        entry[0] = 0
        entry[1:] = rows.start, rows.stop
        entry[0] = rows.lease.number + 1
        self._next += 1

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Number of the lease, start and stop of each batch, in no order."""
        for number, start, stop in self._ring.tolist():
            if number:
                yield number - 1, start, stop


class LeaseService:
    """A `LeaseBook` behind a lock, for the threads of its process and, behind a wire, for other processes.

    Its methods do what the book's of the same names do. What a trainer holds goes back when the job gives the trainer
    up, not with its connection. `grain` are the rows of a batch.
    """

    def __init__(self, book: LeaseBook, grain: int) -> None:
        self._book, self._grain = book, grain
        self._begun = 0
        self._number: Callable[[Lease, int, int], int] = self._in_order
        self._version = 0
        self._changed = threading.Condition()
        self._alarm: tuple[int, Callable[[], None]] | None = None
        self._arrived: Callable[[], object] = lambda: None
        self.scale = 1.0

    @served(quick=True)
    def lease(self, trainer: int, idle: bool) -> tuple[LeaseStatus, Lease | None]:
        """One that is idle may get what others hold."""
        with self._changed:
            found = self._book.lease(trainer)
            if found is None and idle:
                found = self._book.take_over(trainer, self._grain)
            return self._status(), found

    @served(quick=True)
    def opened(self, lease: Lease, rows: int) -> tuple[LeaseStatus, bool]:
        with self._changed:
            held = self._book.opened(lease, rows)
            self._wake_at_the_end()
            return self._status(), held

    @served(quick=True)
    def claim(
        self, lease: Lease, start: int, stop: int, done: tuple[DoneRows, ...] = ()
    ) -> tuple[LeaseStatus, Claim | None]:
        """After `done` of those rows; None where the rows are not the holder's any more."""
        for rows in done:
            self.done(*rows)
        with self._changed:
            granted = self._book.claim(lease, start, stop)
            claim = Claim(self._number(lease, start, granted), granted) if granted > start else None
            return self._status(), claim

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        with self._changed:
            held = self._book.done(lease, start, stop)
            ring = self._after_done()
        ring()
        return held

    @served(quick=True)
    def tell(self, done: tuple[DoneRows, ...]) -> LeaseStatus:
        for rows in done:
            self.done(*rows)
        with self._changed:
            return self._status()

    def redo(self, log: DoneLog) -> None:
        """What a trainer has done that is gone; to be followed by `abandon`."""
        with self._changed:
            self._book.redo(log)
            ring = self._after_done()
        ring()

    @served(quick=True)
    def abandon(self, trainer: int) -> None:
        with self._changed:
            self._book.abandon(trainer)
        self.wake()

    def wait(self, version: int) -> None:
        """Returns when the version is another one; of a `LeaseClient` perhaps earlier: ask again then."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version)

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def number_by(self, give: Callable[[Lease, int, int], int]) -> None:
        """Has somebody else number the batches: called for each claim, in their order, with the lease, the first row
        and the one after the last; not to call back."""
        with self._changed:
            self._number = give

    def alarm(self, trained: int, call: Callable[[], None]) -> None:
        """Has `call` called once, as soon as so many rows are trained, in the thread that tells of the last of them.
        There is one alarm, the one set last; where so many are trained already it never rings."""
        with self._changed:
            self._alarm = (trained, call) if self._book.trained < trained else None

    def go_on_to(self, barrier: int | None, scale: float, arrived: Callable[[], object]) -> None:
        """Rows are handed out as far as this barrier (`LeaseBook.barrier`), and learning rates have this factor from
        now on, which is to change while nobody trains. `arrived` is called when all rows before it were trained; it is
        not to call back."""
        with self._changed:
            self._book.barrier, self.scale, self._arrived = barrier, scale, arrived
            self._version += 1
            self._changed.notify_all()

    @property
    def at_barrier(self) -> bool:
        with self._changed:
            return self._book.at_barrier

    @property
    def passed(self) -> int:
        """As `LeaseBook.passed`."""
        with self._changed:
            return self._book.passed

    @property
    def remaining(self) -> int:
        """As `LeaseBook.remaining`, without waiting for anybody."""
        return self._book.remaining

    @property
    def finished(self) -> bool:
        with self._changed:
            return self._book.finished

    @property
    def trained(self) -> int:
        return self._book.trained

    @property
    def skipped(self) -> int:
        """Bad rows, all epochs."""
        return sum(self._book.skipped_in)

    def state(self) -> BookState:
        with self._changed:
            return self._book.state()

    def _in_order(self, _: Lease, start: int, stop: int) -> int:
        """Numbers the batches of these rows; the first one's."""
        first = self._begun
        self._begun += -(-(stop - start) // self._grain)
        return first

    def _after_done(self) -> Callable[[], None]:
        """Wakes who waits at the end; what is to be called without the lock."""
        self._wake_at_the_end()
        if self._alarm is None or self._book.trained < self._alarm[0]:
            return lambda: None
        _, ring = self._alarm
        self._alarm = None
        return ring

    def _status(self) -> LeaseStatus:
        return LeaseStatus(self._version, self._book.finished, self._book.trained, self.scale)

    def _wake_at_the_end(self) -> None:
        if self._book.at_barrier:
            self._arrived()
        if self._book.finished:
            self._version += 1
            self._changed.notify_all()


class LeaseClient:
    """A trainer's end of a `LeaseService`, to be used as that is.

    What was done goes along with the next claim; where none follows, somebody has to call `tell`. Who waits asks again
    every 25 ms, at the end of a job only.

    Args:
        log: of what was done, for the service to look at when this trainer is gone.
        ahead: claims go ahead of what is begun; not where the service numbers batches by `number_by`.

    Attributes:
        trained: rows of the whole job, as of the last reply, and what was done here since.
    """

    def __init__(self, connection: Connection, log: DoneLog | None = None, ahead: bool = False) -> None:
        self._connection, self._log = connection, log
        self._lock = threading.Lock()
        self._untold, self._untold_since = 0, 0.0
        self._done: list[DoneRows] = []
        self._told: deque[Pending[Any]] = deque()
        self._closed = threading.Event()
        self._ahead, self._most_ahead = 1, MOST_AHEAD if ahead else 1
        self._claimed: tuple[Lease, int, Claim] | None = None
        self._claimed_at, self._whole = -math.inf, False
        self._status = LeaseStatus(0, False, 0)

    @property
    def trained(self) -> int:
        return self._status.trained + self._untold

    @property
    def scale(self) -> float:
        """As the last reply said."""
        return self._status.scale

    def lease(self, trainer: int, idle: bool) -> tuple[LeaseStatus, Lease | None]:
        return self._heard(ask(self._connection, LeaseService.lease, trainer, idle))

    def opened(self, lease: Lease, rows: int) -> tuple[LeaseStatus, bool]:
        return self._heard(ask(self._connection, LeaseService.opened, lease, rows))

    def claim(self, lease: Lease, start: int, stop: int) -> tuple[LeaseStatus, Claim | None]:
        """By one thread at a time, front to back."""
        found = self._from_claimed(lease, start, stop)
        if found is None:
            self._look_ahead()
            end = start + self._ahead * (stop - start)
            claimed, news = self._send(
                lambda done: later(self._connection, LeaseService.claim, lease, start, end, done)
            )
            _, claim = answer = claimed.result()
            self._hear(answer, news)
            self._claimed = None if claim is None else (lease, start, claim)
            self._whole = claim is not None and claim.stop == end
            found = self._from_claimed(lease, start, stop)
        return self._status, found

    def _from_claimed(self, lease: Lease, start: int, stop: int) -> Claim | None:
        """Of what was claimed ahead."""
        if self._claimed is None:
            return None
        of, first, (number, end) = self._claimed
        if of.number != lease.number or start != first or start >= end:
            return None
        self._claimed = of, stop, Claim(number + 1, end)
        return Claim(number, min(stop, end))

    def _look_ahead(self) -> None:
        """By doubling after a claim that was granted whole and lasted less than `AHEAD_S`, and halving after a longer
        one."""
        now = time.monotonic()
        if now - self._claimed_at > AHEAD_S:
            self._ahead = max(1, self._ahead // 2)
        elif self._whole:
            self._ahead = min(self._most_ahead, 2 * self._ahead)
        self._claimed_at = now

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """Notes it: always True, since it cannot be known here yet."""
        rows = DoneRows(lease, start, stop)
        with self._lock:
            if not self._done:
                self._untold_since = time.monotonic()
            self._done.append(rows)
            self._untold += stop - start
            if self._log is not None:
                self._log.note(rows)
        return True

    def tell(self, after_s: float = 0.0) -> None:
        """Tells what was done and not told for so long, without waiting for it."""
        if self._done and time.monotonic() >= self._untold_since + after_s:
            self._send(lambda done: later(self._connection, LeaseService.tell, done))

    def settle(self, timeout_s: float) -> bool:
        """Waits until everything that was done is known; false if it is not after that time."""
        self.tell()
        with self._lock:
            told = tuple(self._told)
        return ended(told, timeout_s)

    def abandon(self, trainer: int) -> None:
        self.tell()
        ask(self._connection, LeaseService.abandon, trainer)

    def wait(self, version: int) -> None:
        self.tell()
        self._closed.wait(LOOK_AGAIN_S)

    def close(self) -> None:
        self._closed.set()

    def _send(self, call: Callable[[tuple[DoneRows, ...]], Pending[T]]) -> tuple[Pending[T], list[int]]:
        """The call, and how many rows of each batch it tells of, to be given to `_hear` with the answer."""
        with self._lock:  # so that `settle` sees each piece of news either here or under way
            done, self._done = tuple(self._done), []
            told = call(done)
            while self._told and self._told[0].done():
                self._told.popleft()
            if done:
                self._told.append(told)

        news = [rows.stop - rows.start for rows in done]
        told.then(lambda error: None if error else self._hear(told.result(), news))
        return told, news

    def _heard(self, answer: tuple[LeaseStatus, T]) -> tuple[LeaseStatus, T]:
        self._hear(answer, [])
        return answer

    def _hear(self, answer: Any, news: list[int]) -> None:
        """Notes an answer, which may come here twice, to the news that its call took along."""
        status: LeaseStatus = answer if isinstance(answer, LeaseStatus) else answer[0]
        with self._lock:  # replies may overtake each other
            self._untold -= sum(news)
            news.clear()
            self._status = max(self._status, status)  # nothing in it ever falls


Leases = LeaseService | LeaseClient
"""What a trainer's feed asks, near or behind a wire."""
