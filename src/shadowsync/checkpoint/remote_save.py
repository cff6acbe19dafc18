"""Who saves the rows of an embedding server behind a wire, beside training."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shadowsync.checkpoint.written import Written
from shadowsync.embedding.live_rows import Copy, live_set, live_shard
from shadowsync.embedding.messages import (
    PickAsked,
    Picked,
    RowsAsked,
    SaveBegun,
    SaveCost,
    SaveCostAsked,
    SavedTold,
    SinglesAsked,
)
from shadowsync.embedding.row_numbers import as_int64, id_type
from shadowsync.embedding.rows import CHUNK_BYTES, UNDER_WAY, tensors_of
from shadowsync.embedding.saves import MOST_ROWS
from shadowsync.embedding.table import Rows, RowSet, Shard, parts_of
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.service import Meta

EARLY_BYTES = 4 << 20
"""Weights of small shards of one server that are copied as soon as a save begins."""


@dataclass(frozen=True)
class RemoteSave:
    """One save of a server (`EmbeddingService`), from the word that it begins to the word that it is written.

    Attributes:
        connection: to the service.
        number: of the save.
        compares: the server wants to hear what was written.
        forms: a copy of no rows of each shard.
        timeout_s: the deadline of every call; None leaves it to the connection.
        chunk_bytes: weights in one message.
    """

    connection: Connection
    number: int
    compares: bool
    forms: tuple[Mapping[str, Tensor], ...]
    timeout_s: float | None = None
    chunk_bytes: int = CHUNK_BYTES

    @classmethod
    def begin(
        cls, connection: Connection, timeout_s: float | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> "RemoteSave":
        """A save begins; the one before it is over."""
        answer = connection.call("begin_save", timeout_s=timeout_s).result()
        begun, tensors = answer.read(SaveBegun), iter(answer.tensors)
        forms = tuple({name: next(tensors) for name in names} for names in begun.names)
        return cls(connection, begun.save, begun.compares, forms, timeout_s, chunk_bytes)

    def everything(self, shards: Sequence[Shard]) -> Iterator[Rows]:
        """All rows, one `Rows` a shard, which are copied when they are read.

        Args:
            shards: what the server holds.

        Raises:
            PeerLost: another server has taken the place.
        """
        early = _Budget(EARLY_BYTES)
        for index, shard in enumerate(shards):
            yield self._whole(index, shard, early)

    def changed(self, shards: Sequence[Shard], end_of_round: bool) -> Iterator[Rows | RowSet]:
        """The rows that are to be saved now, one `RowSet` or `Rows` a shard, which are copied when they are read.

        Args:
            shards: what the server holds.
            end_of_round: small tables are due too.

        Raises:
            PeerLost: as `everything`.
        """
        early = _Budget(EARLY_BYTES)
        for index, shard in enumerate(shards):
            picked = self._pick(index, end_of_round)
            if picked is None:
                yield self._whole(index, shard, early)
            else:
                copy = partial(self._singles, index, shard, picked)
                yield live_set(shard, picked, self.forms[index], self._early(index, shard, len(picked), copy, early))

    def saved(self, index: int, shard: Shard, rows: Rows | RowSet, written: Written) -> None:
        """Rows of the shard at that position are safely written; a server that took the place does not hear of it.

        Args:
            index: position of the shard.
            shard: which.
            rows: as given out for this save.
            written: their weights, should the server want them.
        """
        for part in parts_of(rows, self._rows_at_once(shard)):
            if isinstance(part, range):
                start, stop, single = part.start, part.stop, []
            else:
                start, stop, single = rows.start, shard.stop, [self._narrow(shard, part)]
            weights = [written(shard.table, part).contiguous()] if self.compares else []
            told = SavedTold(self.number, index, start, stop, bool(single))
            self._call("saved", told, [*single, *weights]).result()

    def cost_s(self) -> float:
        """Seconds by which the save has held others up at the server so far; 0 if another took the place."""
        return self._call("save_cost", SaveCostAsked(self.number)).result().read(SaveCost).seconds

    def _pick(self, index: int, end_of_round: bool) -> Tensor | None:
        parts: list[Tensor] = []
        while True:
            asked = PickAsked(self.number, index, end_of_round, sum(map(len, parts)))
            answer = self._call("pick", asked).result()
            picked = answer.read(Picked)
            if not picked.known:
                raise PeerLost("an embedding server was replaced while its rows were chosen")
            if picked.whole:
                return None
            parts.append(as_int64(answer.tensors[0]))
            if sum(map(len, parts)) >= picked.total or not len(parts[-1]):
                return torch.cat(parts)

    def _whole(self, index: int, shard: Shard, early: "_Budget") -> Rows:
        copy = partial(self._run, index, shard)
        return live_shard(shard, self.forms[index], self._early(index, shard, shard.rows, copy, early))

    def _early(self, index: int, shard: Shard, count: int, ask: "_Ask", early: "_Budget") -> Copy:
        """Few rows are asked for at once, so that many small shards do not each wait for an answer in their turn."""
        fits = 0 < count <= self._rows_at_once(shard) and early.takes(4 * shard.table.dim * count)
        asked = [list(ask(0, count))] if fits else []

        def copy(first: int, last: int) -> Iterator[Mapping[str, Tensor]]:
            if first == last:
                yield self.forms[index]
            elif asked and (first, last) == (0, count):
                yield from _answers(iter(asked.pop()))
            else:
                yield from _answers(ask(first, last))

        return copy

    def _run(self, index: int, shard: Shard, first: int, last: int) -> Iterator[Future[Answer]]:
        step = self._rows_at_once(shard)
        for start in range(shard.start + first, shard.start + last, step):
            asked = RowsAsked(index, start, min(start + step, shard.start + last), self.number)
            yield self._call("rows", asked)

    def _singles(self, index: int, shard: Shard, numbers: Tensor, first: int, last: int) -> Iterator[Future[Answer]]:
        step = self._rows_at_once(shard)
        for start in range(first, last, step):
            part = self._narrow(shard, numbers[start : min(start + step, last)])
            yield self._call("singles", SinglesAsked(self.number, index), [part])

    def _rows_at_once(self, shard: Shard) -> int:
        return min(MOST_ROWS, max(1, self.chunk_bytes // (4 * shard.table.dim)))

    def _narrow(self, shard: Shard, numbers: Tensor) -> Tensor:
        return numbers.to(id_type(shard.table.rows))

    def _call(self, method: str, meta: Meta, tensors: Sequence[Tensor] = ()) -> Future[Answer]:
        return self.connection.call(method, meta, tensors, self.timeout_s)


_Ask = Callable[[int, int], Iterator[Future[Answer]]]
"""Asks for the rows at positions `first … last − 1`, a message at a time."""


class _Budget:
    """Bytes that may be taken."""

    def __init__(self, left: int) -> None:
        self._left = left

    def takes(self, count: int) -> bool:
        """Takes so many, if they are left."""
        fits = count <= self._left
        self._left -= count if fits else 0
        return fits


def _answers(asked: Iterator[Future[Answer]]) -> Iterator[Mapping[str, Tensor]]:
    """In their order, with some messages under way."""
    under_way: deque[Future[Answer]] = deque()
    for future in asked:
        under_way.append(future)
        if len(under_way) >= UNDER_WAY:
            yield tensors_of(under_way.popleft().result())
    while under_way:
        yield tensors_of(under_way.popleft().result())
