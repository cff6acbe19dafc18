"""Which rows of a shard are worth writing next: the members of `RowPriority`.

`R` rows of a shard, numbered from 0 in it; `D` their width; `K` rows picked.
"""

import functools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.embedding.watching import Restored, RowPriority, exactly
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate

CHUNK = 1 << 20
CHUNK_ROWS = 1 << 16
_HALF = 16
_INT32_ROWS = (1 << 31) - 1
PERIOD = 2
"""SSU takes every second access."""


class EveryRow(RowPriority):
    """All rows that changed since they were last saved, however many.

    Costs a byte a row, at a push 14 µs for 13,000 accesses (one core), and between the pick and the word that its rows
    are saved 8 bytes for each of them.

    It holds marks of the rows that changed, uint8 `[R]`, and the rows that were taken since the last save that was
    reported. `seen` comes within a push, before it changes the rows, and rows are copied after `begin` or `pick`,
    between pushes. Then no change is lost, even of a process that is killed in a push: either the mark comes after
    `begin`, and the row is in the next save as well, or the copy, which waits for the push, has the change. (Two
    threads that mark a row at once write the same byte.)
    """

    name: ClassVar[str] = "all"
    exact: ClassVar[bool] = True

    def __init__(
        self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros, restored: Restored = exactly
    ) -> None:
        self._marks: NDArray[np.uint8] = allocate(*self.seen_parts(len(weights), share)[0]).numpy()
        self._taken: NDArray[np.int64] = np.zeros(0, np.int64)
        self._writing = False

    @classmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        return [(rows, torch.uint8)]

    def inherit(self) -> None:
        """Which rows were taken for a save that may not be written, only the one before knew."""
        self._marks.fill(1)

    def seen(self, rows: Tensor) -> None:
        self._marks[checked(rows, len(self._marks))] = 1

    def begin(self) -> None:
        rows = not_zero(self._marks)
        self._marks[rows] = 0
        self._taken = np.union1d(self._taken, rows) if len(self._taken) else rows
        self._writing = True

    def pick(self, count: int, weights: Tensor) -> Tensor:
        self.begin()
        return torch.from_numpy(self._taken)

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        """Any rows tell that the save is written: it holds all those taken for it."""
        self._taken = np.zeros(0, np.int64)
        self._writing = False

    def loaded(self, rows: Tensor, weights: Tensor) -> None:
        """Of a save under way the rows are what they were before, so that the next one has to hold what they are."""
        self._marks[checked(rows, len(self._marks))] = 1 if self._writing else 0


class SubSampledUsed(RowPriority):
    """A list of r · R entries from every second access, emptied at each save (CPR-SSU, arXiv 2011.02999).

    Costs 4 bytes for each of the r · R entries (8 in a shard beyond 2³¹ rows), as much again while a save is being
    written, and at a push 15 µs for 13,000 accesses (one core).

    An access is a look-up, but where servers are told the distinct rows of a step, those.

    In the paper an access takes any free entry, and a random one when the list is full. Here each row has one entry,
    which it shares with 1/r − 1 others and takes from them: no row stands in the list twice, so that it has room for
    more of them, and of those that share an entry the one used more is the likelier to stand in it.

    Row `i` stands in the list as `i + 1` at `i mod capacity`, and 0 where none does; so in that of the save under way.
    """

    name: ClassVar[str] = "ssu"

    def __init__(
        self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros, restored: Restored = exactly
    ) -> None:
        self._rows = len(weights)
        self._list: NDArray[Any] = allocate(*self.seen_parts(self._rows, share)[0]).numpy()
        self._aside: NDArray[Any] | None = None
        self._random = random.Random(seed)  # noqa: S311 (nothing is kept secret with it)

    @classmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        return [(max(1, math.ceil(share * rows)), torch.int32 if rows < _INT32_ROWS else torch.int64)]

    def seen(self, rows: Tensor) -> None:
        """Begins at a random one of each push: in bags of two, say, the second ids would else never be taken."""
        first = int(self._random.random() * PERIOD)
        _put(self._list, checked(rows, self._rows)[first::PERIOD])

    def begin(self) -> None:
        self._set_aside()

    def pick(self, count: int, weights: Tensor) -> Tensor:
        rows = np.sort(_held(self._set_aside())).astype(np.int64)
        if len(rows) > count:
            rows = rows[sorted(self._random.sample(range(len(rows)), count))]
        return torch.from_numpy(rows)

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        """Any rows tell that the save is written."""
        self._aside = None

    def loaded(self, rows: Tensor, weights: Tensor) -> None:
        for entries in (self._list, self._aside):
            if entries is not None:
                places = _places(rows.numpy(), len(entries))
                entries[places[entries[places] == rows.numpy() + 1]] = 0

    def _set_aside(self) -> NDArray[Any]:
        """A new list begins; returns the one for the save, with all that came since the last one that was saved."""
        newer = self._list.copy()
        self._list.fill(0)  # in place: processes that push have it, too
        if self._aside is None:
            self._aside = newer
        else:
            _put(self._aside, _held(newer))
        return self._aside


def _put(entries: NDArray[Any], rows: NDArray[Any]) -> None:
    rows = np.ascontiguousarray(rows)
    entries[_places(rows, len(entries))] = rows.astype(entries.dtype) + 1


def _places(rows: NDArray[Any], capacity: int) -> NDArray[Any]:
    """`rows % capacity`, in half the time that numpy takes for it."""
    places: NDArray[Any] = rows - rows // capacity * capacity
    return places


def _held(entries: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = entries[entries != 0]
    return found - 1


class MostFrequentlyUsed(RowPriority):
    """A counter per row of the steps that changed it, less what a saved row was picked for (CPR-MFU, arXiv 2011.02999).

    In the paper accesses are counted. Here a row that a batch looks up several times counts once, however its rows
    cross: of distinct rows and of gradients that wait for a global step, servers know no more than that it was there.
    In the paper the counter is set to 0, which forgets the accesses while the save was being written. Here only a save
    of every row does so.

    Costs 4 bytes a row, at a push 16 µs for 13,000 rows (one core), and a sort of all look-ups where those cross; at a
    save three passes over the counters, and between the pick and the word that its rows are saved 12 bytes
    for each of them. Among rows of as many steps as the last one taken, those taken change from save to save.
    """

    name: ClassVar[str] = "mfu"
    counts: ClassVar[bool] = True

    def __init__(
        self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros, restored: Restored = exactly
    ) -> None:
        self._counts = allocate(*self.seen_parts(len(weights), share)[0])  # steps of each row, int32 `[R]`
        self._turn = 0
        self._forget()

    @classmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        return [(rows, torch.int32)]

    def seen(self, rows: Tensor) -> None:  # each as often as steps changed it
        checked(rows, len(self._counts))
        ones = _ones()
        for start in range(0, len(rows), len(ones)):
            part = rows[start : start + len(ones)]
            self._counts.scatter_add_(0, part, ones[: len(part)])

    def begin(self) -> None:
        self._forget()

    def pick(self, count: int, weights: Tensor) -> Tensor:
        self._turn = (self._turn + count) % len(self._counts)
        rows = torch.from_numpy(largest(self._counts.numpy(), count, self._turn))
        self._picked, self._as_picked, self._told = rows, self._counts[rows], 0
        return rows

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        here, there = _matches(rows, self._picked)
        left = torch.zeros(len(rows), dtype=torch.int32)
        left[here] = (self._counts[rows[here]] - self._as_picked[there]).clamp_(min=0)  # threads may lose a step
        self._counts[rows] = left
        self._as_picked[there] = 0
        self._told += len(there)
        if self._told >= len(self._picked):
            self._forget()

    def loaded(self, rows: Tensor, weights: Tensor) -> None:
        """What was picked of them is not what they are now."""
        self._as_picked[_matches(rows, self._picked)[1]] = 0
        self._counts[rows] = 0

    def _forget(self) -> None:
        """Nothing is picked."""
        self._picked, self._as_picked = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
        self._told = 0


def _matches(rows: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Where rows that were picked stand among `rows`, and where among those picked, which ascend."""
    if not len(picked):
        return picked, picked
    at = torch.searchsorted(picked, rows).clamp_(max=len(picked) - 1)
    here = (picked[at] == rows).nonzero().flatten()
    return here, at[here]


@functools.cache
def _ones() -> Tensor:
    """What is added, 64 KB for all trackers: a single one, expanded, would take four times as long."""
    return torch.ones(1 << 14, dtype=torch.int32)


class Scar(RowPriority):
    """The largest L2 change since saved (Qiao et al. 2019, as CPR-SCAR in arXiv 2011.02999).

    Costs a copy of the weights (+100 %), nothing at a push, and at each save one pass over weights and copy, during
    which 4 bytes a row are taken for the changes. Where checkpoints hold rows in fewer bytes, the copy is what they
    give back, and a change is that from it to what they would give back now: what rounding takes off a row no save
    brings back, so that a row that is as saved is left out here as well. The pass then rounds all weights, too.
    """

    name: ClassVar[str] = "scar"
    sees: ClassVar[bool] = False
    compares: ClassVar[bool] = True

    def __init__(
        self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros, restored: Restored = exactly
    ) -> None:
        self._saved = weights.detach().clone(memory_format=torch.contiguous_format)
        self._restored = restored
        for rows in torch.split(self._saved, CHUNK_ROWS):
            rows.copy_(restored(rows))

    @classmethod
    def seen_parts(cls, rows: int, share: float) -> Sequence[tuple[int, torch.dtype]]:
        return []

    @classmethod
    def memory_bytes(cls, rows: int, dim: int, share: float) -> int:
        return 4 * rows * dim

    def inherit(self) -> None:
        """How rows were saved last, only the one before knew: all of them count as moved furthest."""
        self._saved.fill_(torch.nan)

    def seen(self, rows: Tensor) -> None:
        """The weights themselves tell."""

    def pick(self, count: int, weights: Tensor) -> Tensor:
        changes = torch.empty(len(weights))
        for start in range(0, len(weights), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            torch.linalg.vector_norm(self._restored(weights[part]) - self._saved[part], dim=1, out=changes[part])
        changes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return torch.from_numpy(largest(changes.numpy(), count))

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        assert weights is not None, "a tracker that compares is given what was written"
        self._saved.index_copy_(0, rows, self._restored(weights))


# --- choosing ---------------------------------------------------------------------------------------------------------


def checked(rows: Tensor, count: int) -> NDArray[np.int64]:
    """Row numbers as an array; `IndexError` if one is outside `[0, count)`; 3 µs for 13,000."""
    found: NDArray[Any] = rows.numpy()
    if len(found) and int(found.view(np.uint64).max()) >= count:  # a negative number is a huge one here
        wrong = found[(found < 0) | (found >= count)][0]
        raise IndexError(f"row {wrong} is not a row of a shard of {count} rows")
    return found


def not_zero(values: NDArray[Any]) -> NDArray[np.int64]:
    """Positions of what is not 0, each as of some moment: other processes may write meanwhile, which numpy refuses."""
    return np.concatenate([np.zeros(0, np.int64), *(at + np.flatnonzero(part != 0) for at, part in _chunks(values))])


def largest(values: NDArray[Any], count: int, first: int = 0) -> NDArray[np.int64]:
    """Positions of the `count` largest values above 0, ascending; of fewer if fewer are above 0.

    In memory that does not grow with their number: `torch.topk` takes 16 bytes a value; here the k-th largest is found
    by counting halves of the bit patterns, which for non-negative numbers are ordered as the numbers are.

    `values` are int32 or float32, none negative or NaN, `[R]`. They may grow meanwhile; then the choice is as of some
    moment of the search. Of equal values at its end those from position `first` on are taken, and then those from 0.
    """
    bits = values.view(np.int32)
    positive = int(np.count_nonzero(bits))
    if min(count, positive) <= 0:
        return np.zeros(0, np.int64)
    if positive <= count:
        return not_zero(bits)[:count]
    high, more = _half(bits, count, None)
    low, _ = _half(bits, count - more, high)
    threshold = max(1, high << _HALF | low)
    found = [np.concatenate([start + np.flatnonzero(part > threshold) for start, part in _chunks(bits)])[:count]]
    left = count - len(found[0])
    for begin, end in ((first, len(bits)), (0, first)):
        for start, part in _chunks(bits[begin:end]):
            if left > 0:
                found.append(begin + start + np.flatnonzero(part == threshold)[:left])
                left -= len(found[-1])
    return np.sort(np.concatenate(found))


def _half(bits: NDArray[np.int32], count: int, high: int | None) -> tuple[int, int]:
    """The upper half of the `count`-th largest, or under `high` its lower half, and how many lie above that."""
    found = np.zeros(1 << _HALF, np.int64)
    for _, part in _chunks(bits):
        halves = part >> _HALF if high is None else part[part >> _HALF == high] & (1 << _HALF) - 1
        found += np.bincount(halves, minlength=1 << _HALF)
    at_least = found[::-1].cumsum()[::-1]
    place = max(0, int(np.count_nonzero(at_least >= count)) - 1)
    return place, int(at_least[place] - found[place])


def _chunks(bits: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for start in range(0, len(bits), CHUNK):
        yield start, bits[start : start + CHUNK]
