"""Which copies of rows belong to the save that embedding servers were asked for last."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from shadowsync.embedding.table import Rows, RowSet, Shard, span_of

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


def held(shards: Sequence[Shard], copies: Sequence[Rows | RowSet]) -> Iterator[tuple[int, Rows | RowSet]]:
    """The copies that are of these shards, each with the position of its shard."""
    for rows in copies:
        start, stop = span_of(rows)
        for index, shard in enumerate(shards):
            if shard.table == rows.table and shard.start <= start and stop <= shard.stop:
                yield index, rows
