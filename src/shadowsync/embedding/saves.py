"""Rows in and out of an embedding server, wherever it is, for checkpoints and for saves beside training."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from shadowsync.embedding.messages import as_int64, id_type
from shadowsync.embedding.requests import check_single
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, RowSet, RowSource, Shard, cut_rows
from shadowsync.errors import DataError, ShadowSyncError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import Pending, all_of
from shadowsync.rpc.served import ask, later, served

MOST_ROWS = 1 << 20
"""Numbers in one message."""
MOST_BYTES = 64 << 20
"""Rows in one message."""
COPY_S = 20.0
"""Deadline of each call of a save: rather no checkpoint than one for which all wait so long."""
CHUNK_BYTES = 4 << 20
"""Of one message. From about 16 MiB on each message is memory that the kernel maps and clears anew, at the cost of as
much processor time as encrypting it where that is a virtual machine's."""
UNDER_WAY = 4
"""Chunks asked for or given at once: some cross while the next is copied."""

T = TypeVar("T")


class SaveMethods:
    """Rows go out and come in, for a save that began or otherwise.

    Shards are named by their position at the server, rows by their numbers in the table. What belongs to a save names
    it, so that a server that took another's place does not answer for it: `PeerLost` is raised. Whoever saves does one
    thing after the other. `DataError` says that there is no such shard, that it has no such rows, or that they are too
    many for one message.
    """

    def __init__(self, server: EmbeddingServer) -> None:
        self.server = server
        self._picked: tuple[int, int, Tensor | None] | None = None  # save, shard, and what was picked last
        self._seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def _during(self, save: int | None, done: str = "") -> Iterator[None]:
        """What the block takes of the processor is the save's, which has to be under way if rows are to be `done`."""
        began = time.thread_time()
        try:
            if done and save is not None and not self.server.watches.is_under_way(save):
                raise PeerLost(f"an embedding server was replaced while its rows were {done}")
            yield
        finally:
            with self._lock:
                self._seconds += time.thread_time() - began

    @served(once=False)
    def shards(self) -> tuple[Shard, ...]:
        return self.server.shards

    @served(once=False)
    def tensor_names(self) -> Mapping[str, tuple[str, ...]]:
        """Of each table."""
        return {rows.table.name: tuple(rows.tensors) for rows in self.server.state()}

    @served(once=False, timeout_s=COPY_S)
    def rows(self, shard: int, start: int, stop: int, save: int | None = None) -> Mapping[str, Tensor]:
        """Rows `start … stop − 1` with their optimizer state, for a save if one is named."""
        with self._during(save, "copied"):
            return self._copy(shard, range(start, stop))

    @served(once=False, timeout_s=COPY_S)
    def singles(self, save: int | None, shard: int, numbers: Tensor) -> Mapping[str, Tensor]:
        """Some rows of a shard, as `rows`; their numbers are ascending."""
        with self._during(save, "copied"):
            return self._copy(shard, as_int64(numbers))

    def _copy(self, shard: int, rows: Tensor | range) -> Mapping[str, Tensor]:
        """Of no more rows than one message holds: memory is taken for them after that is known."""
        check_single(rows, self.server.shard(shard))
        table = self.server.shards[shard].table
        if len(rows) > (most := max(1, MOST_BYTES // self.server.optimizer.row_bytes(table.dim))):
            raise DataError(f"{len(rows)} rows of table {table.name} are asked for at once; at most {most} are allowed")
        return self.server.copy_rows(shard, rows)

    @served()
    def load_rows(self, shard: int, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the rows that `rows` would give; `DataError` too if they have other tensors."""
        run = range(start, stop)
        check_single(run, self.server.shard(shard))
        own = cut_rows(self.server.state()[shard], run)
        forms = [{name: (tensor.dtype, tensor.shape) for name, tensor in each.items()} for each in (tensors, own)]
        if forms[0] != forms[1]:
            given, there = (", ".join(f"{name} {list(form)}" for name, (_, form) in each.items()) for each in forms)
            raise DataError(
                f"{given or 'no tensors'} do not fit rows {start} to {stop - 1} of a shard that has {there}"
            )
        self.server.load([Rows(self.server.shards[shard].table, start, tensors)], partial=True)

    @served(timeout_s=COPY_S)
    def begin_save(self) -> tuple[int, bool, tuple[Mapping[str, Tensor], ...]]:
        """A save begins, and the one before it is over: its number, whether the server wants to hear what was written
        of the rows, and a copy of no rows of each shard, which tells their forms."""
        self._picked = None
        with self._lock:
            self._seconds = 0.0
        save, none = self.server.watches.begin(), torch.zeros(0, dtype=torch.int64)
        forms = tuple(self.server.copy_rows(shard, none) for shard in range(len(self.server.shards)))
        return save, self.server.watches.compares, forms

    @served(once=False, timeout_s=COPY_S)
    def save_cost(self, save: int) -> float:
        """Seconds of the processor that the save's calls have taken so far, over the machine's cores; without what
        crossing the wire takes. 0 if the save is not under way any more."""
        return self._seconds / (os.cpu_count() or 1) if self.server.watches.is_under_way(save) else 0.0

    @served(timeout_s=COPY_S)
    def pick(self, save: int, shard: int, end_of_round: bool, first: int) -> tuple[Tensor, int] | None:
        """Which rows of a shard are to be saved, by number, as many as one message may hold, and how many were picked;
        None for the whole shard.

        The answer begins with the row at position `first` among those picked: 0 picks, the rest comes by parts.
        """
        with self._during(save, "chosen"):
            if first == 0:
                self._picked = save, shard, self.server.pick(shard, end_of_round)
            if self._picked is None or self._picked[:2] != (save, shard):
                raise DataError(f"the rest of a choice of shard {shard} is asked for and none was made")
            numbers = self._picked[2]
            if numbers is None:
                return None
            if not 0 <= first <= len(numbers):
                raise DataError(f"row {first} of a choice is asked for and it has {len(numbers)}")
            part = numbers[first : first + MOST_ROWS]
            return part.to(id_type(self.server.shards[shard].table.rows)), len(numbers)

    @served(timeout_s=COPY_S)
    def saved(
        self, save: int, shard: int, start: int, stop: int, numbers: Tensor | None, weights: Tensor | None
    ) -> bool:
        """Rows `start … stop − 1`, or those of them with these numbers, are safely written as they were copied.

        As `EmbeddingServer.rows_saved`.
        """
        with self._during(save):
            rows = range(start, stop) if numbers is None else as_int64(numbers)
            if (count := stop - start if numbers is None else len(rows)) > MOST_ROWS:
                raise DataError(f"{count} rows are reported at once; at most {MOST_ROWS} are allowed")
            return self.server.rows_saved(save, shard, rows, weights)


def read_rows(
    connection: Connection, shards: Sequence[Shard], chunk_bytes: int = CHUNK_BYTES, only: Shard | None = None
) -> Iterator[Rows]:
    """All rows of a server's shards with their optimizer state, or those of one of them `only`, in chunks whose weights
    take about so much at most; of one moment only while nobody pushes."""
    chunks = [
        (index, shard, start, min(start + step, shard.stop))
        for index, shard in enumerate(shards)
        if only in (None, shard)
        for step in [rows_at_once(shard, chunk_bytes)]
        for start in range(shard.start, shard.stop, step)
    ]
    asked = (later(connection, SaveMethods.rows, index, start, stop) for index, _, start, stop in chunks)
    for (_, shard, start, _), tensors in zip(chunks, in_order(asked), strict=True):
        yield Rows(shard.table, start, tensors)


def rows_at_once(shard: Shard, chunk_bytes: int) -> int:
    """Rows whose weights take about so much, one at least."""
    return min(MOST_ROWS, max(1, chunk_bytes // (4 * shard.table.dim)))


def ask_for_singles(
    connection: Connection, save: int | None, index: int, shard: Shard, numbers: Tensor, at_once: int
) -> Iterator[Pending[Mapping[str, Tensor]]]:
    """Asks for rows of a shard by their numbers, so many in a message; a message with each step."""
    for start in range(0, len(numbers), at_once):
        part = numbers[start : start + at_once].to(id_type(shard.table.rows))
        yield later(connection, SaveMethods.singles, save, index, part)


def write_rows(connection: Connection, found: Iterable[Rows]) -> None:
    """Overwrites rows of a server with their optimizer state, those of them that it holds, none twice.

    Whatever ends it, nothing of it is under way any more. One chunk crosses while the next is looked for. Raises
    `DataError` if the tensors are not those of this server's rows.
    """
    shards = ask(connection, SaveMethods.shards)
    under_way: deque[Pending[None]] = deque()
    try:
        for rows in found:
            for index, shard in enumerate(shards):
                start, stop = max(rows.start, shard.start), min(rows.stop, shard.stop)
                if shard.table == rows.table and start < stop:
                    tensors = cut_rows(rows, range(start, stop))
                    under_way.append(later(connection, SaveMethods.load_rows, index, start, stop, tensors))
                if len(under_way) >= UNDER_WAY:
                    under_way.popleft().result()
    finally:
        with contextlib.suppress(ShadowSyncError):
            all_of(under_way).result()
    for answered in under_way:
        answered.result()


def in_order(asked: Iterable[Pending[T]]) -> Iterator[T]:
    """The answers in their order, with some messages under way."""
    under_way: deque[Pending[T]] = deque()
    for pending in asked:
        under_way.append(pending)
        if len(under_way) >= UNDER_WAY:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


Copy = Callable[[int, int], Iterator[Mapping[str, Tensor]]]
"""Copies those at positions `first … last − 1`, some rows at a time with all of their tensors; of none, once too."""


class LiveRows:
    """Its `read` is a `RowSource`: each row with its optimizer state as of one moment.

    The first tensor of a run that is asked for has its rows copied. What is copied of the others is held until they are
    asked for.

    Args:
        copy: copies rows.
        wide: names of tensors of the table as a whole: they are as they were after the last row.
    """

    def __init__(self, copy: Copy, wide: Collection[str]) -> None:
        self._copy, self._wide = copy, wide
        self._held: dict[tuple[int, int], dict[str, deque[Tensor]]] = {}

    def read(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        held = self._held.get((first, last), {})
        if name in held:
            parts = held.pop(name)
            if not held:
                del self._held[first, last]
            while parts:
                yield parts.popleft()
            return
        held = {}
        for tensors in self._copy(first, last):
            for other, tensor in tensors.items():
                if other != name:
                    held.setdefault(other, deque(maxlen=1 if other in self._wide else None)).append(tensor)
            yield tensors[name]
        if held:
            self._held[first, last] = held


def live_shard(shard: Shard, nothing: Mapping[str, Tensor], copy: Copy) -> Rows:
    """All rows of a shard, copied by their positions in it; a copy of `nothing` of them tells the tensors' forms."""
    forms, source = _live(nothing, shard.rows, copy)
    return Rows(shard.table, shard.start, forms, source)


def live_set(shard: Shard, numbers: Tensor, nothing: Mapping[str, Tensor], copy: Copy) -> RowSet:
    """As `live_shard`, of rows with these numbers in the table, int64 `[K]`, copied by their positions among them."""
    forms, source = _live(nothing, len(numbers), copy)
    return RowSet(shard.table, shard.start, shard.stop, numbers, forms, source)


def _live(nothing: Mapping[str, Tensor], count: int, copy: Copy) -> tuple[dict[str, Tensor], RowSource]:
    wide = {name for name, tensor in nothing.items() if len(tensor)}
    shapes = {name: t.shape if name in wide else (count, *t.shape[1:]) for name, t in nothing.items()}
    return {name: t.new_empty(shapes[name], device="meta") for name, t in nothing.items()}, LiveRows(copy, wide).read
