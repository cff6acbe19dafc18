"""What a served embedding server answers to those who save its rows beside training, or read and overwrite them."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.embedding.row_numbers import as_int64, id_type
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, Shard
from shadowsync.errors import DataError
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.served import served

MOST_ROWS = 1 << 20
"""Numbers in one message."""
MOST_BYTES = 64 << 20
"""Rows in one message."""
COPY_S = 20.0
"""Deadline of each call of a save: rather no checkpoint than one for which all wait so long."""


@dataclass(frozen=True)
class _Pick:
    """What was picked last, for those who ask for the rest of it."""

    save: int
    shard: int
    numbers: Tensor | None


class _ProcessorTime:
    """What calls have taken of the processor since the last `begin`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Counts anew."""
        with self._lock:
            self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The block is counted."""
        began = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.thread_time() - began


class SaveMethods:
    """Methods of an `EmbeddingService`: rows go out and come in, for a save that began or otherwise.

    Shards are named by their position at the server, rows by their numbers in the table. What belongs to a save names
    it, so that a server that took another's place does not answer for it. Whoever saves does one thing after the other.

    Args:
        server: whose rows are saved.
    """

    def __init__(self, server: EmbeddingServer) -> None:
        self._server = server
        self._pick_kept: _Pick | None = None
        self._used = _ProcessorTime()

    @served(once=False)
    def shards(self) -> tuple[Shard, ...]:
        """What the server holds."""
        return self._server.shards

    @served(once=False)
    def tensor_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the tensors kept for each table."""
        return {rows.table.name: tuple(rows.tensors) for rows in self._server.state()}

    @served(once=False, timeout_s=COPY_S)
    def rows(self, shard: int, start: int, stop: int, save: int | None = None) -> Mapping[str, Tensor]:
        """Rows `start … stop − 1` with their optimizer state.

        Args:
            shard: position of the shard.
            start: first row.
            stop: one beyond the last.
            save: that they are for; None for no save.

        Raises:
            DataError: the shard has no such rows, or they are too many for one message.
            PeerLost: that save is not under way any more: another server has taken the place.
        """
        with self._used.counted():
            if save is not None:
                self._check(save, "copied")
            self._part(shard, start, stop)
            return self._copy(shard, range(start, stop))

    @served()
    def load_rows(self, shard: int, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the rows that `rows` would give.

        Raises:
            DataError: the shard has no such rows, or they have other tensors.
        """
        own = self._part(shard, start, stop)
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if shapes != {name: (tensor.dtype, tensor.shape) for name, tensor in own.items()}:
            raise DataError(
                f"{_described(tensors)} do not fit rows {start} to {stop - 1} of a shard that has {_described(own)}"
            )
        self._server.load([Rows(self._server.shards[shard].table, start, tensors)], partial=True)

    @served(timeout_s=COPY_S)
    def begin_save(self) -> tuple[int, bool, tuple[Mapping[str, Tensor], ...]]:
        """A save begins; the one before it is over.

        Returns:
            its number, whether the server wants to hear what was written of the rows, and a copy of no rows of each
            shard, which tells their forms.
        """
        self._pick_kept = None
        self._used.begin()
        save, none = self._server.begin_save(), torch.zeros(0, dtype=torch.int64)
        forms = tuple(self._server.copy_rows(shard, none) for shard in range(len(self._server.shards)))
        return save, self._server.compares, forms

    @served(once=False, timeout_s=COPY_S)
    def save_cost(self, save: int) -> float:
        """Seconds of the processor that the save's calls have taken so far, over the machine's cores; without what
        crossing the wire takes. 0 if the save is not under way any more."""
        return self._used.seconds / (os.cpu_count() or 1) if self._server.is_under_way(save) else 0.0

    @served(timeout_s=COPY_S)
    def pick(self, save: int, shard: int, end_of_round: bool, first: int) -> tuple[Tensor, int] | None:
        """Which rows of a shard are to be saved.

        Args:
            save: that they are for.
            shard: position of the shard.
            end_of_round: small tables are due too.
            first: the answer begins with the row at this position among those picked; 0 picks, the rest comes by parts.

        Returns:
            their numbers, as many as one message may hold, and how many were picked; None for the whole shard.

        Raises:
            DataError: there is no such shard, or no such choice.
            PeerLost: as `rows`.
        """
        with self._used.counted():
            self._check(save, "chosen")
            if first == 0:
                self._pick_kept = _Pick(save, shard, self._server.pick(shard, end_of_round))
            kept = self._pick_kept
            if kept is None or (kept.save, kept.shard) != (save, shard):
                raise DataError(f"the rest of a choice of shard {shard} is asked for and none was made")
            if kept.numbers is None:
                return None
            total = len(kept.numbers)
            if not 0 <= first <= total:
                raise DataError(f"row {first} of a choice is asked for and it has {total}")
            part = kept.numbers[first : first + MOST_ROWS]
            return part.to(id_type(self._server.shards[shard].table.rows)), total

    @served(once=False, timeout_s=COPY_S)
    def singles(self, save: int, shard: int, numbers: Tensor) -> Mapping[str, Tensor]:
        """Some rows of a shard, as `rows`; their numbers are ascending."""
        with self._used.counted():
            self._check(save, "copied")
            return self._copy(shard, as_int64(numbers))

    @served(timeout_s=COPY_S)
    def saved(
        self, save: int, shard: int, start: int, stop: int, numbers: Tensor | None, weights: Tensor | None
    ) -> bool:
        """Rows are safely written.

        Args:
            save: that they were copied for.
            shard: position of the shard.
            start: first row of the run.
            stop: one beyond its last.
            numbers: not all of the run, but these.
            weights: as written, where the server compares them.

        Returns:
            False if the save is not under way any more: nothing is taken note of.

        Raises:
            DataError: the shard has no such rows, they are too many for one message, or the weights are not theirs.
        """
        with self._used.counted():
            single = None if numbers is None else as_int64(numbers)
            count = stop - start if single is None else len(single)
            if count > MOST_ROWS:
                raise DataError(f"{count} rows are reported at once; at most {MOST_ROWS} are allowed")
            return self._server.rows_saved(save, shard, range(start, stop) if single is None else single, weights)

    def _check(self, save: int, done: str) -> None:
        if not self._server.is_under_way(save):
            raise PeerLost(f"an embedding server was replaced while its rows were {done}")

    def _copy(self, shard: int, rows: Tensor | range) -> Mapping[str, Tensor]:
        """Of no more rows than one message holds: memory is taken for them after that is known."""
        known = 0 <= shard < len(self._server.shards)
        if known and len(rows) > (most := max(1, MOST_BYTES // self._server.row_bytes(shard))):
            raise DataError(
                f"{len(rows)} rows of table {self._server.shards[shard].table.name} are asked for at once; at most "
                f"{most} are allowed"
            )
        return self._server.copy_rows(shard, rows)

    def _part(self, shard: int, start: int, stop: int) -> dict[str, Tensor]:
        """Live views of the rows; a tensor that belongs to the table as a whole is there in each part."""
        state = self._server.state()
        if not 0 <= shard < len(state):
            raise DataError(f"shard {shard} is asked for and this server has {len(state)} shards")
        own = state[shard]
        count = len(own.tensors["weight"])
        first, last = start - own.start, stop - own.start
        if not 0 <= first < last <= count:
            raise DataError(
                f"rows {start} to {stop - 1} of table {own.table.name} are asked for and this server has "
                f"{own.start} to {own.start + count - 1}"
            )
        return {name: t[first:last] if len(t) == count else t for name, t in own.tensors.items()}


def _described(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "no tensors"
