"""What a storage gets: memory, a file of a disk if it wants one, and a gate for those who change its rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor

from shadowsync.memory.pages import zeros
from shadowsync.memory.push_gate import PushGate
from shadowsync.memory.shared import Allocate, FileGate, bytes_of, unnamed_file


@dataclass(frozen=True)
class Disk:
    """Where rows are that need not all be in memory.

    Attributes:
        folder: of a fast disk; a file there takes all rows, and has no name, so that it ends with those who have it.
        memory_bytes: what of them, and what says where each is, may take in memory.
    """

    folder: Path
    memory_bytes: int


@dataclass(frozen=True)
class Room:
    """
    Attributes:
        allocate: gives memory.
        gate: whoever changes rows goes through it.
        disk: what may be in memory; None: everything.
        on_disk: gives parts of a file that is mapped into memory; None makes one in the disk's folder.
    """

    allocate: Allocate = zeros
    gate: PushGate | FileGate = field(default_factory=PushGate)
    disk: Disk | None = None
    on_disk: Allocate | None = None

    def file(self, parts: list[tuple[int, torch.dtype]], what: str) -> Callable[[int, torch.dtype], Tensor]:
        """Gives these parts of the file, in their order; raises `ConfigError` where the disk has no room for them."""
        if self.on_disk is not None:
            return self.on_disk
        folder = Path(gettempdir()) if self.disk is None else self.disk.folder
        return unnamed_file(folder, bytes_of(parts), what).take
