"""Who is told which rows of a server change, and asked which of them to save.

`L` looked-up rows, `K` rows of one save, `R` rows of a shard, `D` their width.
"""

import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.table import RowNumbers, Rows, Shard
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate

QUEUED_IDS = 1 << 17
"""Watches hear of so many rows at once: a call for each table at each push would cost more than what it does. The ids
take 1 MiB meanwhile."""

Restored = Callable[[Tensor], Tensor]
"""What a checkpoint gives back of weights, float32 `[K, D]`: rounded, where it holds them in fewer bytes."""


def exactly(weights: Tensor) -> Tensor:
    """`Restored` where they are held as they are."""
    return weights


class RowPriority(ABC):
    """A way to choose which rows of a shard are worth writing next, as it follows one shard all of whose rows are saved
    as they are when it is made; they are numbered from 0 in it (its members are in `recovery`).

    CPR, arXiv 2011.02999: instead of every row each T_save, the share r of the rows each r · T_save.

    `seen` comes from many threads at once and takes no lock: two threads at the same row, or a `saved` at the same
    moment, may lose an access, which makes a row a little less likely to be saved and nothing else. The other methods
    come from one thread at a time.

    Attributes:
        sees: it wants to know which rows change.
        counts: it wants to hear of a row once for each push that changes it, else of each look-up.
        compares: it wants to know what was written of them.
        exact: it wants to know of each change before it is made, as nothing that was `seen` may be lost, not even with
            the process that saw it.
    """

    name: ClassVar[str]
    sees: ClassVar[bool] = True
    counts: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    @abstractmethod
    def __init__(
        self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros, restored: Restored = exactly
    ) -> None:
        """
        Args:
            weights: the shard's, float32 `[R, D]`.
            share: r, the share of the rows that will be picked at a time, in (0, 1].
            seed: of its random choices.
            allocate: gives the memory to which `seen` writes (`seen_parts`); others in other processes may have it,
                too, of which nothing but `seen` is called.
            restored: what the job's checkpoints give back of rows.
        """

    @classmethod
    @abstractmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        """Elements and type of what is allocated for a shard."""

    @classmethod
    def memory_bytes(cls, rows: int, dim: int, share: float) -> int:
        """Memory that one for `rows` rows of `dim` floats holds on to."""
        return sum(count * dtype.itemsize for count, dtype in cls.seen_parts(rows, share))

    def inherit(self) -> None:  # noqa: B027 (most lose what a save under way had picked, and nothing else)
        """Takes the place of one that is gone with its process; what that one wrote in shared memory is here."""

    @abstractmethod
    def seen(self, rows: Tensor) -> None:
        """Pushes change these rows, int64 `[L]`, in any order and with duplicates; `IndexError` if one is not there."""

    def begin(self) -> None:  # noqa: B027 (most only look at what is picked and saved)
        """A save begins: all that it holds is copied after this."""

    @abstractmethod
    def pick(self, count: int, weights: Tensor) -> Tensor:
        """The rows most worth saving, distinct and ascending, int64 `[K]`, at most `count` (but under priority `all`).

        Those known to be as saved are left out. `weights` are the shard's, live, float32 `[R, D]`.
        """

    @abstractmethod
    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        """These rows, distinct, int64 `[K]`, are safely written as they were copied after the last `begin`.

        Those picked last, or others. A save that failed is not reported, so its rows come up again. `weights` are as
        written, float32 `[K, D]`; None unless it `compares`.
        """

    def loaded(self, rows: Tensor, weights: Tensor) -> None:
        """These rows have been overwritten with saved ones; the arguments as in `saved`."""
        self.saved(rows, weights)


@dataclass(frozen=True)
class RowTracking:
    """Which shards of an embedding server are tracked, and how.

    One save has this share of a shard's rows; tables of less than `min_rows` are not tracked and saved as a whole.
    """

    priority: type[RowPriority]
    share: float
    min_rows: int
    seed: int
    restored: Restored = exactly

    def watch(self, own: Rows, allocate: Allocate = zeros) -> RowPriority | None:
        """A tracker of a shard whose rows are saved as they are; None if its table is small."""
        if own.table.rows < self.min_rows:
            return None
        return self.priority(own.tensors["weight"], self.share, self.seed, allocate, self.restored)

    def parts(self, shard: Shard) -> Sequence[tuple[int, torch.dtype]]:
        """Elements and type of what `watch` allocates for a shard."""
        return [] if shard.table.rows < self.min_rows else self.priority.seen_parts(shard.rows, self.share)

    def count(self, rows: int) -> int:
        """How many of a shard's rows one save is to hold."""
        return math.ceil(self.share * rows)


class RowWatches:
    """The watches of one server.

    Pushes put what they looked up into a queue, which the watches hear of from time to time, and before any question.

    Args:
        state: live views of all shards, whose rows have these `numbers`.
        allocate: gives the memory to which changes are written; `shared`, other processes have it, too.

    Attributes:
        turn: held by whoever asks or tells anything but of pushes.
    """

    def __init__(
        self,
        state: Sequence[Rows],
        numbers: RowNumbers,
        tracking: RowTracking | None,
        allocate: Allocate = zeros,
        shared: bool = False,
    ) -> None:
        self.turn = threading.RLock()
        self._weights = [own.tensors["weight"] for own in state]
        self._watches = [None if tracking is None else tracking.watch(own, allocate) for own in state]
        self._counts = [0 if tracking is None else tracking.count(len(weights)) for weights in self._weights]
        self._seeing = {index: watch for index, watch in enumerate(self._watches) if watch is not None and watch.sees}
        self._of_slot = [index for index, own in enumerate(state) for _ in own.table.features]
        self._starts = numbers.starts
        self._at_once = shared and any(watch.exact for watch in self._seeing.values())
        self._queue: deque[tuple[tuple[int, ...], Jagged] | Tensor] = deque()
        self._queued = 0
        self._telling = threading.Lock()
        # a server that takes this one's place counts from elsewhere, so that nobody takes its saves for this one's
        self._save = secrets.randbits(62)

    def inherit(self) -> None:
        for watch in self._watches:
            if watch is not None:
                watch.inherit()

    # --- pushes ------------------------------------------------------------------------------------------------------

    def pushed(self, slots: tuple[int, ...], ids: Jagged) -> None:
        """A push is about to change the rows that were looked up; they are copied when it has."""
        if self._seeing:
            self._add((slots, ids), len(ids.values))

    def stepped(self, rows: Tensor) -> None:
        """A push is about to change the rows of these numbers (`RowNumbers`), ascending, int64 `[K]`."""
        if self._seeing:
            self._add(rows, len(rows))

    def _add(self, changed: tuple[tuple[int, ...], Jagged] | Tensor, ids: int) -> None:
        self._queue.append(changed)
        if self._at_once:  # another thread may have taken this one out of the queue, and still be telling it
            self._tell()
            return
        self._queued += ids  # threads may lose a sum to each other: then the watches hear a little later
        if self._queued >= QUEUED_IDS and self._telling.acquire(blocking=False):
            try:
                self._empty()
            finally:
                self._telling.release()

    def _tell(self) -> None:
        """All that was queued before is told when this returns."""
        with self._telling:
            self._empty()

    def _empty(self) -> None:
        self._queued = 0
        found: dict[int, list[NDArray[np.int64]]] = {index: [] for index in self._seeing}
        for _ in range(len(self._queue)):
            changed = self._queue.popleft()
            parts = self._by_number(changed.numpy()) if isinstance(changed, Tensor) else self._by_slot(*changed)
            for index, rows in parts:
                found[index].append(rows)
        for index, watch in self._seeing.items():
            if found[index]:
                watch.seen(torch.from_numpy(np.concatenate(found[index])))

    def _by_slot(self, slots: tuple[int, ...], ids: Jagged) -> Iterator[tuple[int, NDArray[np.int64]]]:
        if not ids.samples:
            return
        values: NDArray[np.int64] = ids.values.numpy()
        offsets = range(len(values) + 1) if ids.offsets is None else ids.offsets.numpy()
        edges = offsets[:: ids.samples]
        counted: list[NDArray[np.int64]] = []
        for position, slot in enumerate(slots):
            index = self._of_slot[slot]
            if index in self._seeing:
                rows = values[edges[position] : edges[position + 1]]
                if self._seeing[index].counts:
                    counted.append(rows + self._starts[index])
                else:
                    yield index, rows
        if counted:
            numbers = np.sort(np.concatenate(counted))
            yield from self._by_number(numbers[np.diff(numbers, prepend=-1) > 0])

    def _by_number(self, values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for index in self._seeing:
            start = self._starts[index]
            first, last = np.searchsorted(values, (start, start + len(self._weights[index])))
            yield index, values[first:last] - start

    # --- saves -------------------------------------------------------------------------------------------------------

    @property
    def compares(self) -> bool:
        return any(watch is not None and watch.compares for watch in self._watches)

    def begin(self) -> int:
        """A save begins, whose number is returned; the one before it is over, reported as saved or not."""
        with self.turn:
            self._tell()
            for watch in self._watches:
                if watch is not None:
                    watch.begin()
            self._save += 1
            return self._save

    def is_under_way(self, save: int) -> bool:
        """The save of this number is the one that began last."""
        return save == self._save

    def pick(self, shard: int, end_of_round: bool) -> Tensor | None:
        """The rows of a shard that a save is to hold, int64 `[K]`; None for all of them."""
        watch = self._watches[shard]
        if watch is None:
            return None if end_of_round else torch.zeros(0, dtype=torch.int64)
        with self.turn:
            self._tell()
            return watch.pick(self._counts[shard], self._weights[shard])

    def take(self, shard: int) -> Tensor | None:
        """The rows of a shard that changed since they were taken last, int64 `[K]`, which are copied after this; None
        where nobody knows. Not beside saves."""
        watch = self._watches[shard]
        if watch is None:
            return None
        with self.turn:
            self._tell()
            rows = watch.pick(self._counts[shard], self._weights[shard])
            watch.saved(rows, None)
            return rows

    def saved(self, save: int, shard: int, rows: Tensor, weights: Tensor | None) -> bool:
        """As `RowPriority.saved`; false if another save has begun since, so that this one is of no interest."""
        watch = self._watches[shard]
        with self.turn:
            if watch is not None and save == self._save:
                watch.saved(rows, weights if watch.compares else None)
            return save == self._save

    def loaded(self, shard: int, rows: Tensor) -> None:
        """Rows of a shard have been overwritten with saved ones."""
        watch = self._watches[shard]
        if watch is not None:
            self._tell()
            watch.loaded(rows, self._weights[shard][rows])

    def reset(self) -> None:
        """All rows have become the initial ones, which nobody has saved."""
        self._tell()
        for index, watch in self._seeing.items():
            watch.seen(torch.arange(len(self._weights[index])))
