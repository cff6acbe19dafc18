"""How long a chain of deltas is, and when it is to be rewritten as one whole checkpoint."""

from collections.abc import Sequence

from shadowsync.checkpoint.snapshot import Rows, RowSet

MOST_LAYERS = 16
"""Of a chain, the whole one included: each is opened to load the newest."""
MOST_SHARE = 1.0
"""Bytes of the deltas over those of the whole one below them: all of them are kept, and read to load the newest."""


class Chain:
    """A whole checkpoint and the deltas on it, by the bytes of their rows.

    Args:
        layers: bytes of each, the whole one first; nothing before the first save.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self._whole_bytes = layers[0] if layers else 0
        self._deltas = list(layers[1:])

    def whole(self, size: int) -> None:
        """A whole checkpoint begins a new chain."""
        self._whole_bytes, self._deltas = size, []

    def delta(self, size: int) -> None:
        """One more lies on top."""
        self._deltas.append(size)

    def takes(self, size: int) -> bool:
        """A delta of so many bytes is worth it: else a whole one costs little more and need not be rewritten soon."""
        return size <= MOST_SHARE * self._whole_bytes / 2

    @property
    def is_long(self) -> bool:
        """It is time to rewrite it. A single delta never is a reason: it can hardly be larger than a whole one."""
        large = len(self._deltas) > 1 and sum(self._deltas) > MOST_SHARE * self._whole_bytes
        return large or 1 + len(self._deltas) > MOST_LAYERS

    def rewritten(self) -> None:
        """It has become a whole checkpoint, as large as the one below was: tables do not grow."""
        self._deltas = []

    def put_off(self) -> None:
        """It could not be rewritten: it is long again when about half as much has been added once more."""
        self._deltas = [size // 2 for size in self._deltas[: MOST_LAYERS // 2 - 1]]


def rows_bytes(tables: Sequence[Rows | RowSet]) -> int:
    """Bytes of rows with all that belongs to them."""
    numbers = sum(rows.numbers.nbytes for rows in tables if isinstance(rows, RowSet))
    return numbers + sum(tensor.nbytes for rows in tables for tensor in rows.tensors.values())
