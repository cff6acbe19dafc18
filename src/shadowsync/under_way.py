"""Which copies of rows belong to the save that embedding servers were asked for last."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from shadowsync.embedding.table import Rows, RowSet, Shard

S = TypeVar("S")


class UnderWay(Generic[S]):
    """The newest save: what each server knows it by (`S`), and the copies that were made for it.

    Servers know what changed since the newest save began, so only its rows can be reported as saved: what is known of
    an older copy is out of date.
    """

    def __init__(self) -> None:
        self._saves: Mapping[int, S] = {}
        self._first: weakref.ref[Rows | RowSet] | None = None

    def began(self, saves: Mapping[int, S], copies: Sequence[Rows | RowSet]) -> None:
        """All copies of a save are made; `saves` are by the server's index."""
        self._saves = saves
        self._first = weakref.ref(copies[0]) if copies else None

    def saves(self, copies: Sequence[Rows | RowSet]) -> Mapping[int, S]:
        """The save that these copies are of, by server; nothing if it is not the newest one."""
        newest = bool(copies) and self._first is not None and self._first() is copies[0]
        return self._saves if newest else {}


def span_of(rows: Rows | RowSet) -> tuple[int, int]:
    """The run of rows of its table that a copy is of: the first, and one beyond the last."""
    return rows.start, rows.stop if isinstance(rows, RowSet) else rows.start + len(rows.tensors["weight"])


def numbers_of(rows: Rows | RowSet) -> Tensor | range:
    """The rows that a copy holds, as numbers in their table."""
    return rows.numbers if isinstance(rows, RowSet) else range(*span_of(rows))


def parts_of(rows: Rows | RowSet, most: int) -> Iterator[Tensor | range]:
    """The numbers of the rows that a copy holds, so many at a time; of none, once too."""
    numbers = numbers_of(rows)
    for first in range(0, max(1, len(numbers)), most):
        yield numbers[first : first + most]


def held(shards: Sequence[Shard], copies: Sequence[Rows | RowSet]) -> Iterator[tuple[int, Rows | RowSet]]:
    """The copies that are of these shards, each with the position of its shard."""
    for rows in copies:
        start, stop = span_of(rows)
        for index, shard in enumerate(shards):
            if shard.table == rows.table and shard.start <= start and stop <= shard.stop:
                yield index, rows
