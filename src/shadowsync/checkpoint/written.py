"""What a checkpoint that was just written holds, for whoever compares later rows with it."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError

Written = Callable[[Table, Tensor | range], Tensor]
"""The weights of rows of a table as they were written, float32 `[K, D]`.

The rows are a run, or single ones in ascending order, int64 `[K]`: all that the save holds between the first and the
last of them.
"""
WEIGHT = "weight"


class WrittenRows:
    """`Written` of a checkpoint, which is opened when the first rows are asked for; any number of threads may ask.

    Args:
        opened: opens it, and keeps it within the block.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[LoadedCheckpoint]]) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._loaded: LoadedCheckpoint | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __call__(self, table: Table, rows: Tensor | range) -> Tensor:
        """As `Written`.

        Raises:
            CheckpointError: it cannot be read, or does not hold these rows.
        """
        if not len(rows):
            return torch.zeros(0, table.dim)
        loaded, start, stop = self._open(), int(rows[0]), int(rows[-1]) + 1
        if isinstance(rows, range):
            return loaded.rows(table.name, start, stop, {WEIGHT})[WEIGHT]
        found = loaded.newer_rows(table.name, start, stop, 1, {WEIGHT})
        if not torch.equal(found.numbers, rows):
            raise CheckpointError(f"{loaded.name} does not hold the rows of table {table.name} that were saved")
        return found.tensors[WEIGHT]

    def _open(self) -> LoadedCheckpoint:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._stack.enter_context(self._opened())
            return self._loaded
