"""Who trains which rows: a book of leases that trains every row of every epoch exactly once.

Pure: no clock, no thread, no file; the caller holds a lock around it. Rows are counted within a slice in the order in
which they are trained (a permutation of the file's order that depends on seed, epoch and slice only), so what is left
of a slice stays meaningful for another trainer, another batch size and another process.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from shadowsync.errors import CheckpointError

Span = tuple[int, int]
Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Lease:
    """A trainer's hold on rows of one slice.

    Attributes:
        number: unique in the book.
        trainer: who holds it.
        epoch: from 0.
        slice: position among the source's slices.
        spans: the rows to train, as `(start, stop)`; those of a slice that was never opened reach to its end.
    """

    number: int
    trainer: int
    epoch: int
    slice: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Plan:
    """What a book hands out.

    Attributes:
        slices: rows of each slice.
        epochs: passes over all of them.
        shuffle: hand slices out in an order drawn anew for each epoch, else in their own.
        seed: of that order.
    """

    slices: Sequence[int]
    epochs: int
    shuffle: bool
    seed: int

    def order(self, epoch: int) -> list[int]:
        """The slices in the order of an epoch."""
        if not self.shuffle:
            return list(range(len(self.slices)))
        order: list[int] = np.random.default_rng((self.seed, epoch)).permutation(len(self.slices)).tolist()
        return order


@dataclass
class EpochCount:
    """Rows of one epoch that were trained, and that were skipped because they are bad."""

    trained: int = 0
    skipped: int = 0


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

    def waiting(self) -> list[Span]:
        """The rows that nobody has claimed."""
        return _without(self.spans, (0, self.begun))


class _Saved(msgspec.Struct, frozen=True):
    """What `LeaseBook.state` gives."""

    slices: Count
    rows: Count
    epoch: Count
    position: Count
    parts: list[tuple[Count, Count, list[tuple[Count, Count]], bool]]
    trained: list[Count]
    skipped: list[Count]

    def fits(self, slices: Sequence[int]) -> bool:
        """Whether it is a position among slices of these rows."""
        counted = len(self.trained) == len(self.skipped) > self.epoch and self.position <= len(slices)
        return counted and all(
            epoch <= self.epoch and part < len(slices) and all(start < stop <= slices[part] for start, stop in spans)
            for epoch, part, spans, _ in self.parts
        )


@dataclass
class LeaseBook:
    """Hands out the slices of each epoch; the next epoch's follow at once.

    `lease` returns None when nothing can be handed out at the moment: `finished` tells whether that is for good, or
    whether rows held by others may still come back. Whoever holds a lease claims its rows, front to back, right
    before training them; what is not claimed yet, somebody idle may take over.

    Attributes:
        plan: what there is.
        first_number: of the leases; a book that goes on after a roll-back begins above those of the book before, so
            that no report from before is taken for one of now.
        epochs: what was trained in each that has begun.
    """

    plan: Plan
    first_number: int = 0
    epochs: list[EpochCount] = field(default_factory=list)
    _returned: deque[_Part] = field(default_factory=deque)
    _held: dict[int, tuple[Lease, _Part]] = field(default_factory=dict)
    _next_number: int = 0
    _epoch: int = 0
    _position: int = 0

    def __post_init__(self) -> None:
        self.epochs = [EpochCount()]
        self._order = self.plan.order(0)
        self._next_number = self.first_number

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""
        return not self._held and not self._returned and self._exhausted

    @property
    def trained(self) -> int:
        """Rows trained, all epochs."""
        return sum(epoch.trained for epoch in self.epochs)

    @property
    def skipped(self) -> int:
        """Bad rows left out, all epochs."""
        return sum(epoch.skipped for epoch in self.epochs)

    def lease(self, trainer: int) -> Lease | None:
        """The next rows for a trainer: what came back first, then the next slice; None: see the class."""
        part = self._returned.popleft() if self._returned else self._next_slice()
        return None if part is None else self._hold(part, trainer)

    def opened(self, lease: Lease, rows: int) -> bool:
        """Says that the slice turned out to have `rows` good rows; the rest counts as skipped, once.

        Returns:
            False if the lease is not held any more, or has nothing (left) to train.
        """
        held = self._held.get(lease.number)
        if held is None:
            return False
        part = held[1]
        if not part.opened:
            part.opened = True
            self.epochs[part.epoch].skipped += self.plan.slices[part.slice] - rows
            part.spans = _without(part.spans, (rows, self.plan.slices[part.slice]))
        self._drop_if_empty(lease)
        return lease.number in self._held

    def done(self, lease: Lease, start: int, stop: int) -> bool:
        """Rows `start … stop − 1` of the lease's slice were trained.

        Returns:
            False if the lease is not held any more (its trainer was given up, so that others train these rows).
        """
        held = self._held.get(lease.number)
        if held is None:
            return False
        part = held[1]
        if not any(first <= start <= stop <= last for first, last in part.spans):
            raise ValueError(f"rows {start} … {stop} are not among those to train: {part.spans}")
        part.spans = _without(part.spans, (start, stop))
        self.epochs[part.epoch].trained += stop - start
        self._drop_if_empty(lease)
        return True

    def abandon(self, trainer: int) -> None:
        """Puts back what the trainer holds and has not done."""
        for lease, part in [held for held in self._held.values() if held[0].trainer == trainer]:
            del self._held[lease.number]
            part.begun, part.settled = 0, True
            self._returned.append(part)

    def claim(self, lease: Lease, start: int, stop: int) -> int:
        """Says that the holder begins rows `start … stop − 1` of an opened lease now.

        Returns:
            How far it may go: at most `stop`; `start` where the rows are not its own any more.
        """
        held = self._held.get(lease.number)
        if held is None or start < held[1].begun:
            return start
        part = held[1]
        granted = next((min(stop, last) for first, last in part.spans if first <= start < last), start)
        if granted > start:
            part.begun, part.settled = granted, True
        return granted

    def held(self, lease: Lease) -> Lease | None:
        """The lease of that number as it was handed out; None if it is not held any more."""
        found = self._held.get(lease.number)
        return None if found is None else found[0]

    def take_over(self, trainer: int, grain: int) -> Lease | None:
        """Moves to `trainer` at least half of what waits in the fullest lease of the others, or all of it.

        Args:
            trainer: who has nothing left.
            grain: rows of a batch; at least that many stay together.

        Returns:
            None if nothing waits anywhere.
        """
        others = [(lease, part) for lease, part in self._held.values() if lease.trainer != trainer and part.settled]
        fullest = max(others, key=lambda held: _count(held[1].waiting()), default=None)
        if fullest is None or not (waiting := fullest[1].waiting()):
            return None
        lease, part = fullest
        if not part.opened:
            del self._held[lease.number]
            part.settled = False
            return self._hold(part, trainer)
        kept = -(-_count(waiting) // grain) // 2 * grain
        return self._split(lease, part, _row_after(waiting, kept), trainer)

    def _split(self, lease: Lease, part: _Part, start: int, trainer: int) -> Lease:
        """Moves the rows of an opened lease from `start` on to another trainer, as a new lease."""
        moved = _without(part.spans, (0, start))
        part.spans = _without(part.spans, (start, self.plan.slices[part.slice]))
        self._drop_if_empty(lease)
        return self._hold(_Part(part.epoch, part.slice, moved, opened=True, settled=False), trainer)

    def state(self) -> dict[str, Any]:
        """The position as plain JSON values; rows that are held and not done count as not trained."""
        parts = [*(part for _, part in self._held.values()), *self._returned]
        return {
            "slices": len(self.plan.slices),
            "rows": sum(self.plan.slices),
            "epoch": self._epoch,
            "position": self._position,
            "parts": [[p.epoch, p.slice, [list(span) for span in p.spans], p.opened] for p in parts],
            "trained": [epoch.trained for epoch in self.epochs],
            "skipped": [epoch.skipped for epoch in self.epochs],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state of a book with the same slices and seed; there may be more epochs now, or fewer.

        Raises:
            CheckpointError: the state is of other data.
        """
        try:
            saved = msgspec.convert(state, _Saved)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the checkpoint's position in the data is not that of a job: {error}") from error
        if saved.slices != len(self.plan.slices) or saved.rows != sum(self.plan.slices):
            had, have = saved.rows, sum(self.plan.slices)
            raise CheckpointError(
                f"the checkpoint was made on data of {had} rows, this data has {have}: give the same data"
            )
        if not saved.fits(self.plan.slices):
            raise CheckpointError("the checkpoint's position in the data contradicts itself")
        self._epoch, self._position = saved.epoch, saved.position
        self.epochs = [EpochCount(*pair) for pair in zip(saved.trained, saved.skipped, strict=True)]
        parts = [_Part(epoch, part, spans, opened) for epoch, part, spans, opened in saved.parts]
        self._returned = deque(sorted(parts, key=lambda part: part.epoch))
        self._held = {}
        self._order = self.plan.order(self._epoch)

    @property
    def _exhausted(self) -> bool:
        """Every slice of every epoch was handed out at least once."""
        left_over = self.plan.epochs - self._epoch
        return left_over <= 0 or (left_over == 1 and self._position == len(self._order))

    def _next_slice(self) -> _Part | None:
        if self._exhausted:
            return None
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            if self._epoch == len(self.epochs):
                self.epochs.append(EpochCount())
            self._order = self.plan.order(self._epoch)
        index = self._order[self._position]
        self._position += 1
        return _Part(self._epoch, index, [(0, self.plan.slices[index])])

    def _hold(self, part: _Part, trainer: int) -> Lease:
        lease = Lease(self._next_number, trainer, part.epoch, part.slice, tuple(part.spans))
        self._next_number += 1
        self._held[lease.number] = (lease, part)
        return lease

    def _drop_if_empty(self, lease: Lease) -> None:
        if not self._held[lease.number][1].spans:
            del self._held[lease.number]


def _without(spans: Sequence[Span], gone: Span) -> list[Span]:
    """The spans less the rows `gone[0] … gone[1] − 1`."""

    def pieces() -> Iterator[Span]:
        for start, stop in spans:
            yield start, min(stop, gone[0])
            yield max(start, gone[1]), stop

    return [(start, stop) for start, stop in pieces() if start < stop]


def _count(spans: Sequence[Span]) -> int:
    """Rows in the spans."""
    return sum(stop - start for start, stop in spans)


def _row_after(spans: Sequence[Span], count: int) -> int:
    """The row that comes after the first `count` rows of the spans."""
    for start, stop in spans:
        if count < stop - start:
            return start + count
        count -= stop - start
    return spans[-1][1]
