"""Reads the files of one checkpoint, each byte checked in the pass that reads it."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.manifest import FileEntry, Group, TensorEntry, damaged
from shadowsync.checkpoint.tensors import DTYPES, bytes_of
from shadowsync.errors import CheckpointError

T = TypeVar("T")

KEPT_BLOCKS = 4
"""More lets more tensors of a table be read side by side, a run of rows at a time, without reading a block twice."""


class BlockReader:
    """Reads byte ranges of a checkpoint's files, block by block, each block compared with its checksum.

    A block in the midst of which a range ended is kept for the next range, and so is a file's last block, in which
    small tensors lie together. Any thread may read.

    Args:
        files: where the checkpoints are.
        folder: the checkpoint's.
        entries: the files that will be read.
        block_bytes: of each checksum.
    """

    def __init__(self, files: Files, folder: str, entries: Sequence[FileEntry], block_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._block_bytes = block_bytes
        self._entries = {entry.name: entry for entry in entries}
        self._kept: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def place(self, name: str) -> str:
        """A file's whole path, for messages."""
        return self._files.place(f"{self._folder}/{name}")

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` from byte `offset` of a file.

        Raises:
            DamagedCheckpoint: the file is gone, too short, or not what was written.
            CheckpointError: the file system failed.
        """
        done = 0
        while done < len(target):
            index, skip = divmod(offset + done, self._block_bytes)
            content = self._taken(name, index) or self._block(self._entries[name], index)
            part = memoryview(content)[skip : skip + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            if skip + len(part) < len(content) or index == len(self._entries[name].crc32) - 1:
                self._keep(name, index, content)

    def read_tensor(self, file: str, entry: TensorEntry) -> Tensor:
        """A tensor as a whole; errors as `read_into`."""
        tensor = torch.empty(math.prod(entry.shape), dtype=DTYPES[entry.dtype])
        self.read_into(file, entry.offset, bytes_of(tensor))
        return tensor.view(entry.shape)

    def read_group(self, group: Group) -> dict[str, Tensor]:
        """All tensors of a group by name; errors as `read_into`."""
        return {tensor.name: self.read_tensor(group.file, tensor) for tensor in group.tensors}

    def check_sizes(self) -> None:
        """Compares every file's size with the manifest's."""
        for entry in self._entries.values():
            size = self._guard(entry.name, self._files.size)
            if size is None:
                raise damaged(self.place(entry.name), "is missing")
            if size != entry.bytes:
                raise damaged(self.place(entry.name), f"has {size} bytes where the manifest says {entry.bytes}")

    def check_content(self) -> None:
        """Reads every file once and compares it with its checksums, in bounded memory."""
        for entry in self._entries.values():
            for index in range(len(entry.crc32)):
                self._block(entry, index)

    def _taken(self, name: str, index: int) -> bytes | None:
        with self._lock:
            return self._kept.pop((name, index), None)

    def _keep(self, name: str, index: int, content: bytes) -> None:
        with self._lock:
            self._kept[name, index] = content
            if len(self._kept) > KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]

    def _block(self, entry: FileEntry, index: int) -> bytes:
        start = index * self._block_bytes
        stop = min(start + self._block_bytes, entry.bytes)
        content = self._guard(entry.name, lambda path: self._files.read(path, start, stop))
        if len(content) != stop - start:
            raise damaged(self.place(entry.name), f"ends before byte {stop} of {entry.bytes}")
        if crc32(content) != entry.crc32[index]:
            raise damaged(self.place(entry.name), f"is not what was written (bytes {start} to {stop})")
        return content

    def _guard(self, name: str, read: Callable[[str], T]) -> T:
        return guarded(self._files, f"{self._folder}/{name}", read)


def guarded(files: Files, path: str, read: Callable[[str], T]) -> T:
    """`read(path)`, with the file system's errors as a `CheckpointError`."""
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(files.place(path), "is missing") from error
    except OSError as error:
        raise CheckpointError(f"{files.place(path)} cannot be read: {error.strerror or error}") from error
