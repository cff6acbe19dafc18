"""Reads the files of one checkpoint, each byte checked in the pass that reads it."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shadowsync.errors import CheckpointError
from shadowsync.recovery.files import Files
from shadowsync.recovery.manifest import FileEntry, Group, TensorEntry, damaged
from shadowsync.recovery.tensors import DTYPES, bytes_of

T = TypeVar("T")


class BlockReader:
    """Reads byte ranges of a checkpoint's files, block by block, each block compared with its checksum.

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
        self._last: tuple[str, int, bytes] = ("", -1, b"")

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
            block = memoryview(self._block(self._entries[name], index))[skip : skip + len(target) - done]
            target[done : done + len(block)] = block
            done += len(block)

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

    def _block(self, entry: FileEntry, index: int) -> bytes:
        name, last_index, content = self._last
        if (name, last_index) == (entry.name, index):
            return content
        start = index * self._block_bytes
        stop = min(start + self._block_bytes, entry.bytes)
        content = self._guard(entry.name, lambda path: self._files.read(path, start, stop))
        if len(content) != stop - start:
            raise damaged(self.place(entry.name), f"ends before byte {stop} of {entry.bytes}")
        if crc32(content) != entry.crc32[index]:
            raise damaged(self.place(entry.name), f"is not what was written (bytes {start} to {stop})")
        self._last = (entry.name, index, content)
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
