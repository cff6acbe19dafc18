"""What a served embedding server answers to those who save its rows beside training."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.embedding.messages import (
    PickAsked,
    Picked,
    Pushed,
    RowsFound,
    SaveBegun,
    SaveCost,
    SaveCostAsked,
    SavedTold,
    SinglesAsked,
)
from shadowsync.embedding.row_numbers import id_type, row_numbers
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.errors import DataError
from shadowsync.rpc.service import Method, Reply, Request

Handle = Callable[[Request], Reply]

MOST_ROWS = 1 << 20
"""Numbers in one message."""
MOST_BYTES = 64 << 20
"""Rows in one message."""


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

    def of(self, handle: Handle) -> Handle:
        """The same method, counted."""

        def counted(request: Request) -> Reply:
            began = time.thread_time()
            try:
                return handle(request)
            finally:
                with self._lock:
                    self.seconds += time.thread_time() - began

        return counted


class SaveMethods:
    """Methods of an `EmbeddingService`: a save begins, rows are picked, copied by number, and reported as saved.

    Each but the first names the save, so that a server that took another's place does not answer for it. Whoever saves
    does one thing after the other.

    Args:
        server: whose rows are saved.
        rows: the service's method that gives runs of rows, for saves and otherwise.
    """

    def __init__(self, server: EmbeddingServer, rows: Handle) -> None:
        self._server = server
        self._pick_kept: _Pick | None = None
        self._used = _ProcessorTime()
        self.methods: Mapping[str, Method] = {
            "begin_save": Method(self._begin),
            "rows": Method(self._used.of(rows), once=False),
            "pick": Method(self._used.of(self._pick)),
            "singles": Method(self._used.of(self._singles), once=False),
            "saved": Method(self._used.of(self._saved)),
            "save_cost": Method(self._cost, once=False),
        }

    def _begin(self, _: Request) -> Reply:
        self._pick_kept = None
        self._used.begin()
        save, none = self._server.begin_save(), torch.zeros(0, dtype=torch.int64)
        forms = [self._server.copy_rows(shard, none) for shard in range(len(self._server.shards))]
        begun = SaveBegun(save, self._server.compares, tuple(tuple(form) for form in forms))
        return Reply(begun, tuple(tensor for form in forms for tensor in form.values()))

    def _cost(self, request: Request) -> Reply:
        known = self._server.is_under_way(request.read(SaveCostAsked).save)
        return Reply(SaveCost(self._used.seconds / (os.cpu_count() or 1) if known else 0.0))

    def _pick(self, request: Request) -> Reply:
        asked = request.read(PickAsked)
        if not self._server.is_under_way(asked.save):
            return Reply(Picked(False, False, 0))
        if asked.first == 0:
            picked = self._server.pick(asked.shard, asked.end_of_round)
            self._pick_kept = _Pick(asked.save, asked.shard, picked)
        kept = self._pick_kept
        if kept is None or (kept.save, kept.shard) != (asked.save, asked.shard):
            raise DataError(f"the rest of a choice of shard {asked.shard} is asked for and none was made")
        if kept.numbers is None:
            return Reply(Picked(True, True, 0))
        total = len(kept.numbers)
        if not 0 <= asked.first <= total:
            raise DataError(f"row {asked.first} of a choice is asked for and it has {total}")
        part = kept.numbers[asked.first : asked.first + MOST_ROWS]
        narrow = part.to(id_type(self._server.shards[asked.shard].table.rows))
        return Reply(Picked(True, False, total), (narrow,))

    def _singles(self, request: Request) -> Reply:
        asked = request.read(SinglesAsked)
        if not self._server.is_under_way(asked.save):
            return Reply(RowsFound((), False))
        numbers = row_numbers(request.tensors)
        check_size(self._server, asked.shard, len(numbers))
        found = self._server.copy_rows(asked.shard, numbers)
        return Reply(RowsFound(tuple(found)), tuple(found.values()))

    def _saved(self, request: Request) -> Reply:
        told = request.read(SavedTold)
        numbers, weights = request.tensors[: told.single], request.tensors[told.single :]
        if len(weights) > 1:
            raise DataError(f"rows that were saved come with {len(weights)} tensors of weights")
        single = row_numbers(numbers) if told.single else None
        count = told.stop - told.start if single is None else len(single)
        if count > MOST_ROWS:
            raise DataError(f"{count} rows are reported at once; at most {MOST_ROWS} are allowed")
        rows = range(told.start, told.stop) if single is None else single
        return Reply(Pushed(self._server.rows_saved(told.save, told.shard, rows, *weights)))


def check_size(server: EmbeddingServer, shard: int, rows: int) -> None:
    """Raises `DataError` for more rows than one message holds, before memory is taken for them."""
    known = 0 <= shard < len(server.shards)
    if known and rows > most_rows(server, shard):
        raise DataError(
            f"{rows} rows of table {server.shards[shard].table.name} are asked for at once; at most "
            f"{most_rows(server, shard)} are allowed"
        )


def most_rows(server: EmbeddingServer, shard: int) -> int:
    """Rows of a shard that one message holds."""
    return max(1, MOST_BYTES // server.row_bytes(shard))
