"""Who trains which rows: a book of leases that trains every row of every epoch exactly once.

Pure: no clock, no thread, no file; the caller holds a lock around it. Rows are counted within a slice in the order in
which they are trained (a permutation of the file's order that depends on seed, epoch and slice only), so what is left
of a slice stays meaningful for another trainer, another batch size and another process.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from shadowsync.errors import CheckpointError, DataError

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


class _Saved(msgspec.Struct, frozen=True):
    """What `LeaseBook.state` gives; of each part its epoch, its slice, its spans and whether it was opened."""

    slices: Count
    rows: Count
    epoch: Count
    position: Count
    parts: list[tuple[Count, Count, list[tuple[Count, Count]], bool]]
    trained: list[Count]
    skipped: list[Count]


class LeaseBook:
    """Hands out the slices of each epoch; the next epoch's follow at once.

    `lease` returns None when nothing can be handed out at the moment: `finished` tells whether that is for good, or
    whether rows held by others may still come back. Whoever holds a lease claims its rows, front to back, right
    before training them; what is not claimed yet, somebody idle may take over.

    Args:
        plan: what there is.
        first_number: of the leases; a book that goes on after a roll-back begins above those of the book before, so
            that no report from before is taken for one of now.

    Attributes:
        epochs: what was trained in each that has begun.
        trained: rows, all epochs.
    """

    def __init__(self, plan: Plan, first_number: int = 0) -> None:
        self.plan = plan
        self.epochs = [EpochCount()]
        self.trained = 0
        self._returned: deque[_Part] = deque()
        self._held: dict[int, tuple[Lease, _Part]] = {}
        self._next_number = first_number
        self._epoch = self._position = 0
        self._order = plan.order(0)

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""
        return not self._held and not self._returned and self._exhausted

    @property
    def _exhausted(self) -> bool:
        """Every slice of every epoch was handed out at least once."""
        left_over = self.plan.epochs - self._epoch
        return left_over <= 0 or (left_over == 1 and self._position == len(self._order))

    def lease(self, trainer: int) -> Lease | None:
        """The next rows for a trainer: what came back first, then the next slice; None: see the class."""
        if self._returned:
            return self._hold(self._returned.popleft(), trainer)
        if self._exhausted:
            return None
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            if self._epoch == len(self.epochs):
                self.epochs.append(EpochCount())
            self._order = self.plan.order(self._epoch)
        index = self._order[self._position]
        self._position += 1
        return self._hold(_Part(self._epoch, index, [(0, self.plan.slices[index])]), trainer)

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
            self._keep(lease, _without(part.spans, rows, self.plan.slices[part.slice]))
        return lease.number in self._held

    def claim(self, lease: Lease, start: int, stop: int) -> int:
        """Says that the holder begins rows `start … stop − 1` of an opened lease now.

        Returns:
            How far it may go: at most `stop`; `start` where the rows are not its own any more.
        """
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
        """Rows `start … stop − 1` of the lease's slice were trained.

        Returns:
            False if the lease is not held any more (its trainer was given up, so that others train these rows).

        Raises:
            DataError: they were not leased.
        """
        held = self._held.get(lease.number)
        if held is None:
            return False
        part = held[1]
        for first, last in part.spans:
            if first <= start <= stop <= last:
                break
        else:
            raise DataError(f"rows {start} … {stop} are not among those to train: {part.spans}")
        self.epochs[part.epoch].trained += stop - start
        self.trained += stop - start
        self._keep(lease, _without(part.spans, start, stop))
        return True

    def abandon(self, trainer: int) -> None:
        """Puts back what the trainer holds and has not done."""
        for lease, part in [held for held in self._held.values() if held[0].trainer == trainer]:
            del self._held[lease.number]
            part.begun, part.settled = 0, True
            self._returned.append(part)

    def take_over(self, trainer: int, grain: int) -> Lease | None:
        """Moves to `trainer` at least half of what waits in the fullest lease of the others, or all of it.

        Args:
            trainer: who has nothing left.
            grain: rows of a batch; at least that many stay together.

        Returns:
            None if nothing waits anywhere.
        """
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
        cut, end = first + kept, self.plan.slices[part.slice]
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
        slices = self.plan.slices
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
        self._epoch, self._position = saved.epoch, saved.position
        self.epochs = [EpochCount(*pair) for pair in zip(saved.trained, saved.skipped, strict=True)]
        self.trained = sum(saved.trained)
        self._returned = deque(sorted((_Part(*part) for part in saved.parts), key=lambda part: part.epoch))
        self._held = {}
        self._order = self.plan.order(self._epoch)


def _without(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The spans less the rows `begin … end − 1`."""
    left = []
    for start, stop in spans:
        if start < begin:
            left.append((start, min(stop, begin)))
        if stop > end:
            left.append((max(start, end), stop))
    return left
