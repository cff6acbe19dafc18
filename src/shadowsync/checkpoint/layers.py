"""Reads the files of one checkpoint, each byte checked in the pass that reads it, as one layer of a chain.

`K` rows that a piece of a delta holds.
"""

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.manifest import FileEntry, Group, Piece, TensorEntry, damaged
from shadowsync.checkpoint.tensors import DTYPES, bytes_of

KEPT_BLOCKS = 4
"""More lets more tensors of a table be read side by side, a run of rows at a time, without reading a block twice."""


class BlockReader:
    """Reads byte ranges of a checkpoint's files, block by block, each block compared with its checksum.

    A block in the midst of which a range ended is kept for the next range, and so is a file's last block, in which
    small tensors lie together. Any thread may read. What is gone, too short or not what was written is a
    `DamagedCheckpoint`; if the file system fails, that is another `CheckpointError`.
    """

    def __init__(self, files: Files, folder: str, entries: Sequence[FileEntry], block_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._block_bytes = block_bytes
        self._entries = {entry.name: entry for entry in entries}
        self._kept: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def place(self, name: str) -> str:
        return self._files.place(f"{self._folder}/{name}")

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` from byte `offset` of a file."""
        entry, done = self._entries[name], 0
        while done < len(target):
            index, skip = divmod(offset + done, self._block_bytes)
            with self._lock:
                content = self._kept.pop((name, index), None)
            content = content or self._block(entry, index)
            part = memoryview(content)[skip : skip + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            if skip + len(part) < len(content) or index == len(entry.crc32) - 1:
                with self._lock:
                    self._kept[name, index] = content
                    if len(self._kept) > KEPT_BLOCKS:
                        del self._kept[next(iter(self._kept))]

    def read_tensor(self, file: str, entry: TensorEntry) -> Tensor:
        tensor = torch.empty(math.prod(entry.shape), dtype=DTYPES[entry.dtype])
        self.read_into(file, entry.offset, bytes_of(tensor))
        return tensor.view(entry.shape)

    def read_group(self, group: Group) -> dict[str, Tensor]:
        return {tensor.name: self.read_tensor(group.file, tensor) for tensor in group.tensors}

    def check_sizes(self) -> None:
        """Compares every file's size with the manifest's."""
        for entry in self._entries.values():
            size = self._files.guarded(f"{self._folder}/{entry.name}", self._files.size)
            if size is None:
                raise damaged(self.place(entry.name), "is missing")
            if size != entry.bytes:
                raise damaged(self.place(entry.name), f"has {size} bytes where the manifest says {entry.bytes}")

    def check_content(self) -> None:
        """Reads every file once and compares it with its checksums, in bounded memory."""
        for entry in self._entries.values():
            for index in range(len(entry.crc32)):
                self._block(entry, index)

    def _block(self, entry: FileEntry, index: int) -> bytes:
        start = index * self._block_bytes
        stop = min(start + self._block_bytes, entry.bytes)
        path = f"{self._folder}/{entry.name}"
        content = self._files.guarded(path, lambda path: self._files.read(path, start, stop))
        if len(content) != stop - start:
            raise damaged(self.place(entry.name), f"ends before byte {stop} of {entry.bytes}")
        if crc32(content) != entry.crc32[index]:
            raise damaged(self.place(entry.name), f"is not what was written (bytes {start} to {stop})")
        return content


class Layer:
    """The pieces of one checkpoint that are needed to load another; errors as of its reader.

    Attributes:
        samples: trained when it was taken.
        exact: as in its manifest.
        pieces: by table, in the order of their rows; tables without any are absent.
    """

    def __init__(
        self, name: str, samples: int, exact: bool, pieces: Mapping[str, Sequence[Piece]], reader: BlockReader
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
        """The rows of `start … stop − 1` that a scattered piece holds, and how many it holds before them."""
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
            found: tensors to fill, by name; which of the piece's are not among them is not read.
            places: from row numbers to positions in `found`; None where its first row is row `start`.
        """
        wanted = [tensor for tensor in piece.tensors if tensor.name in found]
        if piece.scattered is None:
            first, last = max(start, piece.start), min(stop, piece.stop)
            for tensor in wanted:
                self._read_from(piece, tensor, first - piece.start, found[tensor.name][first - start : last - start])
            return
        skip, numbers = self.numbers(piece, start, stop)
        where = numbers - start if places is None else places(numbers)
        for tensor in wanted:
            part = torch.empty((len(numbers), *tensor.shape[1:]), dtype=DTYPES[tensor.dtype])
            self._read_from(piece, tensor, skip, part)
            found[tensor.name].index_copy_(0, where, part)

    def wide(self, piece: Piece, name: str) -> Tensor:
        """The tensor `name` of the table as a whole, as it stood with the piece's rows."""
        return self._reader.read_tensor(piece.file, next(tensor for tensor in piece.wide if tensor.name == name))

    def verify(self) -> None:
        """Reads everything that is needed of it once and compares it with its checksums."""
        self._reader.check_content()
        for piece in (one for pieces in self.pieces.values() for one in pieces if one.scattered is not None):
            self._numbers(piece)

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
        inside = not len(numbers) or (piece.start <= int(numbers[0]) and int(numbers[-1]) < piece.stop)
        if not inside or not bool((numbers[1:] > numbers[:-1]).all()):
            raise damaged(self._reader.place(piece.file), f"has impossible row numbers for table {piece.table}")
        self._last.read = (piece, numbers)
        return numbers
