"""Replicas of one machine's trainers in memory that all of them map, so that they are averaged where they lie.

`P` dense parameters.
"""

from collections.abc import Sequence

import torch

from shadowsync.memory.shared import SharedMemory, number_at


class ReplicaMemory:
    """What a trainer lets the others of its machine see, float32 `[P]` each.

    Attributes:
        replica: its own; its workers write to it.
        known: what of it is in the last average; written by whoever added it up.
        average: the last one that it has made for its machine.
        number: as of `SharedMemory`.
    """

    def __init__(self, memory: SharedMemory, length: int) -> None:
        self.number = memory.number
        self.replica, self.known, self.average = (memory.take(*part) for part in self.parts(length))

    @staticmethod
    def parts(length: int) -> tuple[tuple[int, torch.dtype], ...]:
        """As `memory.shared.bytes_of` has them."""
        return ((length, torch.float32),) * 3


class Neighbours:
    """A trainer's way to the memory of those on its machine.

    Attributes:
        own: its own.
    """

    def __init__(self, path: str, length: int) -> None:
        self._length = length
        self._open: dict[str, ReplicaMemory] = {}
        (self.own,) = self.at([path])

    def at(self, paths: Sequence[str]) -> list[ReplicaMemory]:
        """The memory of those, in their order; others are forgotten, and so is what had such a path before.

        Raises:
            RunError: one of them is gone.
        """
        before, self._open = self._open, {}
        for path in paths:
            found = before.get(path)
            if found is None or found.number != number_at(path):
                found = ReplicaMemory(SharedMemory.open(path), self._length)
            self._open[path] = found
        return list(self._open.values())
