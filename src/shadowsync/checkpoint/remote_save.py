"""Who saves the rows of an embedding server beside training, wherever it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shadowsync.checkpoint.loading import Written
from shadowsync.embedding.messages import as_int64, id_type
from shadowsync.embedding.saves import (
    CHUNK_BYTES,
    Copy,
    SaveMethods,
    ask_for_singles,
    in_order,
    live_set,
    live_shard,
    rows_at_once,
)
from shadowsync.embedding.table import Rows, RowSet, Shard, parts_of
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import ask, later

EARLY_BYTES = 4 << 20
"""Weights of small shards of one server that are copied as soon as a save begins."""


@dataclass(frozen=True)
class RemoteSave:
    """One save of a server (`SaveMethods`), from the word that it begins to the word that it is written.

    To pick or copy rows raises `PeerLost` if another server has taken the place. `compares`: the server wants to hear
    what was written; `forms`: a copy of no rows of each shard; `chunk_bytes`: weights in one message.
    """

    connection: Connection
    number: int
    compares: bool
    forms: tuple[Mapping[str, Tensor], ...]
    chunk_bytes: int = CHUNK_BYTES
    early_bytes: int = 0

    @classmethod
    def begin(cls, connection: Connection, chunk_bytes: int = CHUNK_BYTES, early: bool = True) -> "RemoteSave":
        """The save before is over. Small shards are copied `early`, if messages take their time."""
        begun = ask(connection, SaveMethods.begin_save)
        return cls(connection, *begun, chunk_bytes, EARLY_BYTES if early else 0)

    def everything(self, shards: Sequence[Shard]) -> Iterator[Rows]:
        """All rows, one `Rows` for each shard, which are copied when they are read."""
        left = [self.early_bytes]
        for index, shard in enumerate(shards):
            yield self._whole(index, shard, left)

    def changed(self, shards: Sequence[Shard], end_of_round: bool) -> Iterator[Rows | RowSet]:
        """As `everything`, of what is to be saved now; at the `end_of_round` small tables are due too."""
        left = [self.early_bytes]
        for index, shard in enumerate(shards):
            picked = self._pick(index, end_of_round)
            if picked is None:
                yield self._whole(index, shard, left)
            else:
                copy = partial(self._singles, index, shard, picked)
                yield live_set(shard, picked, self.forms[index], self._early(index, shard, len(picked), copy, left))

    def saved(self, index: int, shard: Shard, rows: Rows | RowSet, written: Written) -> None:
        """Rows of shard number `index` are safely written; a server that took the place does not hear of it."""
        for part in parts_of(rows, self._rows_at_once(shard)):
            run = part if isinstance(part, range) else range(rows.start, shard.stop)
            single = None if isinstance(part, range) else part.to(id_type(shard.table.rows))
            weights = written(shard.table, part) if self.compares else None
            ask(self.connection, SaveMethods.saved, self.number, index, run.start, run.stop, single, weights)

    def cost_s(self) -> float:
        """Seconds by which the save has held others up at the server so far; 0 if another took the place."""
        return ask(self.connection, SaveMethods.save_cost, self.number)

    def _pick(self, index: int, end_of_round: bool) -> Tensor | None:
        parts: list[Tensor] = []
        while True:
            picked = ask(self.connection, SaveMethods.pick, self.number, index, end_of_round, sum(map(len, parts)))
            if picked is None:
                return None
            part, total = picked
            parts.append(as_int64(part))
            if sum(map(len, parts)) >= total or not len(part):
                return torch.cat(parts)

    def _whole(self, index: int, shard: Shard, left: list[int]) -> Rows:
        copy = partial(self._run, index, shard)
        return live_shard(shard, self.forms[index], self._early(index, shard, shard.rows, copy, left))

    def _early(self, index: int, shard: Shard, count: int, start: "_Ask", left: list[int]) -> Copy:
        """Few rows are asked for at once, so that many small shards do not each wait for an answer in their turn.

        `left` are the bytes that may still be asked for so.
        """
        size = 4 * shard.table.dim * count
        fits = 0 < count <= self._rows_at_once(shard) and size <= left[0]
        left[0] -= size if fits else 0
        asked: list[Iterable[_Copied]] = [list(start(0, count))] if fits else []

        def copy(first: int, last: int) -> Iterator[Mapping[str, Tensor]]:
            if first == last:
                return iter([self.forms[index]])
            return in_order(asked.pop() if asked and (first, last) == (0, count) else start(first, last))

        return copy

    def _run(self, index: int, shard: Shard, first: int, last: int) -> Iterator["_Copied"]:
        step = self._rows_at_once(shard)
        for start in range(shard.start + first, shard.start + last, step):
            stop = min(start + step, shard.start + last)
            yield later(self.connection, SaveMethods.rows, index, start, stop, self.number)

    def _singles(self, index: int, shard: Shard, numbers: Tensor, first: int, last: int) -> Iterator["_Copied"]:
        at_once = self._rows_at_once(shard)
        return ask_for_singles(self.connection, self.number, index, shard, numbers[first:last], at_once)

    def _rows_at_once(self, shard: Shard) -> int:
        return rows_at_once(shard, self.chunk_bytes)


_Copied = Pending[Mapping[str, Tensor]]
_Ask = Callable[[int, int], Iterator[_Copied]]
"""Asks for the rows at positions `first … last − 1`, a message at a time."""
