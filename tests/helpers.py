"""What tests of several folders share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shadowsync.compression.channel import Channel
from shadowsync.sync.dense import DenseServer, DenseServers, split_evenly
from shadowsync.training.gate import Gate


@contextmanager
def pause(gate: Gate) -> Iterator[None]:
    """Inside, every member of the gate stands still."""
    gate.hold()
    try:
        yield
    finally:
        gate.release()


class WholeCopy(DenseServers):
    """New dense servers for all parts of a central copy, and what they hold together."""

    def __init__(self, center: Tensor, count: int, channel: Channel) -> None:
        parts = [center[start:stop].clone() for start, stop in split_evenly(len(center), count)]
        super().__init__([DenseServer(part) for part in parts], channel)

    def read(self) -> Tensor:
        return torch.cat([server.read() for server in self._servers])
