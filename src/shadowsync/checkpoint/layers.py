"""One checkpoint of a chain: its pieces laid over those of its parent.

`K` rows that a piece of a delta holds.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shadowsync.checkpoint.blocks import BlockReader
from shadowsync.checkpoint.manifest import Piece, TensorEntry, damaged
from shadowsync.checkpoint.tensors import DTYPES, bytes_of


class Layer:
    """The pieces of one checkpoint that are needed to load another.

    Args:
        name: the checkpoint's.
        samples: trained when it was taken.
        exact: as in its manifest.
        pieces: by table, in the order of their rows; tables without any are absent.
        reader: of its files.
    """

    def __init__(
        self, name: str, samples: int, exact: bool, pieces: Mapping[str, tuple[Piece, ...]], reader: BlockReader
    ) -> None:
        self.name = name
        self.samples = samples
        self.exact = exact
        self.pieces = pieces
        self._reader = reader
        self._last = threading.local()  # several servers may read at once, each from a piece of its own

    @property
    def byte_count(self) -> int:
        """Bytes of the rows that are needed of it."""
        return sum(tensor.byte_count for found in self.pieces.values() for one in found for tensor in one.all_tensors)

    def is_whole(self, table: str) -> bool:
        """Whether every row of the table is here."""
        return table in self.pieces and self.pieces[table][0].scattered is None

    def touched(self, table: str, start: int, stop: int) -> list[Piece]:
        """Pieces that speak of any of these rows."""
        pieces = self.pieces.get(table, ())
        first = bisect_right(pieces, start, key=lambda piece: piece.stop)
        return list(pieces[first : bisect_left(pieces, stop, key=lambda piece: piece.start)])

    def numbers(self, piece: Piece, start: int, stop: int) -> tuple[int, Tensor]:
        """The rows of `start … stop − 1` that a scattered piece holds, and how many it holds before them.

        Raises:
            DamagedCheckpoint: they are not distinct rows of the piece's run in ascending order, or unreadable.
        """
        numbers = self._numbers(piece)
        first, last = torch.searchsorted(numbers, torch.tensor([start, stop])).tolist()
        return first, numbers[first:last]

    def read(
        self,
        piece: Piece,
        start: int,
        stop: int,
        found: Mapping[str, Tensor],
        places: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Lays the piece's share of rows `start … stop − 1` over what was found so far.

        Args:
            piece: one that speaks of some of them.
            start: the first row.
            stop: one beyond the last.
            found: tensors to fill, by name; which of the piece's are not among them is not read.
            places: from row numbers to positions in `found`; None where its first row is row `start`.
        """
        if piece.scattered is None:
            self._read_run(piece, start, stop, found)
            return
        skip, numbers = self.numbers(piece, start, stop)
        where = numbers - start if places is None else places(numbers)
        for tensor in (one for one in piece.tensors if one.name in found):
            part = torch.empty((len(numbers), *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])
            self._read_from(piece, tensor, skip, part)
            found[tensor.name].index_copy_(0, where, part)

    def wide(self, piece: Piece, name: str) -> Tensor:
        """The tensor `name` of the table as a whole, as it stood with the piece's rows."""
        return self._reader.read_tensor(piece.file, next(tensor for tensor in piece.wide if tensor.name == name))

    def verify(self) -> None:
        """Reads everything that is needed of it once and compares it with its checksums.

        Raises:
            CheckpointError: something is not what was written.
        """
        self._reader.check_content()
        for piece in (one for pieces in self.pieces.values() for one in pieces if one.scattered is not None):
            self._numbers(piece)

    def _read_run(self, piece: Piece, start: int, stop: int, found: Mapping[str, Tensor]) -> None:
        first, last = max(start, piece.start), min(stop, piece.stop)
        for tensor in (one for one in piece.tensors if one.name in found):
            self._read_from(piece, tensor, first - piece.start, found[tensor.name][first - start : last - start])

    def _read_from(self, piece: Piece, tensor: TensorEntry, skip: int, target: Tensor) -> None:
        """Fills `target` with the tensor's rows after the first `skip`."""
        if len(target):
            row_bytes = tensor.byte_count // piece.rows
            self._reader.read_into(piece.file, tensor.offset + skip * row_bytes, bytes_of(target))

    def _numbers(self, piece: Piece) -> Tensor:
        """All row numbers of a piece; those of the last one asked for in this thread are kept."""
        last: tuple[Piece, Tensor] | None = getattr(self._last, "read", None)
        if last is not None and last[0] is piece:
            return last[1]
        assert piece.scattered is not None
        numbers = self._reader.read_tensor(piece.file, piece.scattered.numbers)
        if not _ascending(numbers, piece.start, piece.stop):
            raise damaged(self._reader.place(piece.file), f"has impossible row numbers for table {piece.table}")
        self._last.read = (piece, numbers)
        return numbers


def pieces_by_table(pieces: Sequence[Piece]) -> dict[str, tuple[Piece, ...]]:
    """The pieces of each table in the order of their rows."""
    found: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        found.setdefault(piece.table, []).append(piece)
    return {table: tuple(ordered) for table, ordered in found.items()}


def _ascending(numbers: Tensor, start: int, stop: int) -> bool:
    if not len(numbers):
        return True
    return start <= int(numbers[0]) and int(numbers[-1]) < stop and bool((numbers[1:] > numbers[:-1]).all())
