"""SSU: a sample of the rows used since the last save."""

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate
from shadowsync.recovery.priority import RowPriority, checked

PERIOD = 2
_INT32_ROWS = (1 << 31) - 1


class SubSampledUsed(RowPriority):
    """A list of r · R entries from every second access, emptied at each save (CPR-SSU, arXiv 2011.02999).

    Costs 4 bytes for each of the r · R entries (8 in a shard beyond 2³¹ rows), as much again while a save is being
    written, and at a push 15 µs for 13,000 accesses (one core).

    In the paper an access takes any free entry, and a random one when the list is full. Here each row has one entry,
    which it shares with 1/r − 1 others and takes from them: no row stands in the list twice, so that it has room for
    more of them, and of those that share an entry the one used more is the likelier to stand in it.

    Row `i` stands in the list as `i + 1` at `i mod capacity`, and 0 where none does; so in that of the save under way.
    """

    name: ClassVar[str] = "ssu"

    def __init__(self, weights: Tensor, share: float, seed: int, allocate: Allocate = zeros) -> None:
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
