"""What tests of several folders share."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from shadowsync.aggregation.coordinator import StepCoordinator
from shadowsync.compression.channel import Channel
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.connection import EMPTY, Connection, Payload, Service, known_error, new_client, perform
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import Done, Pending, Promise, failed
from shadowsync.rpc.served import ask, direct, later
from shadowsync.sync.dense import CentralCopy, DenseServer, split_evenly
from shadowsync.training.gate import Gate


@contextmanager
def pause(gate: Gate) -> Iterator[None]:
    """Inside, every member of the gate stands still."""
    gate.hold()
    try:
        yield
    finally:
        gate.release()


class PackedConnection(Connection):
    """To a service in this process, by payloads as they cross a wire: the method runs in the caller's thread, before
    `call` returns, and no tensor is copied. A deadline means nothing."""

    def __init__(self, service: Service) -> None:
        self.client = new_client()
        self._service = service
        self._closed = threading.Event()

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        try:
            if self._closed.is_set():
                raise PeerLost("the connection is closed")
            found = perform(self._service, method, replace(payload, client=self.client))
            if isinstance(found, Payload):
                return Done(found)
        except ShadowSyncError as error:
            return failed(error)
        answer: Promise[Payload] = Promise()
        found.then(lambda error: answer.fail(known_error(method, error)) if error else answer.keep(found.result()))
        return answer

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._service.client_gone(self.client)


class Workers:
    """What a coordinator hears of a trainer's workers."""

    def __init__(self, coordinator: Connection) -> None:
        self._coordinator = coordinator

    def ask(self, worker: tuple[int, int], number: int) -> Pending[int | None]:
        return later(self._coordinator, StepCoordinator.ask, worker, number)

    def begin(self, worker: tuple[int, int], number: int) -> int:
        """Asks, and gets leave to compute it, with that version."""
        version = self.ask(worker, number).result()
        assert version is not None
        return version

    def arrived(self, number: int, version: int = 0) -> None:
        ask(self._coordinator, StepCoordinator.arrived, number, version)

    def idle(self, worker: tuple[int, int]) -> None:
        ask(self._coordinator, StepCoordinator.idle, worker)

    def left(self, worker: tuple[int, int]) -> None:
        ask(self._coordinator, StepCoordinator.left, worker)


class WholeCopy:
    """New dense servers for all parts of a central copy, and each trainer's way to them.

    Args:
        connect: makes the way to a server; by default as in one process.
    """

    def __init__(
        self, center: Tensor, count: int, channel: Channel, connect: Callable[[DenseServer], Connection] = direct
    ) -> None:
        self.spans = split_evenly(len(center), count)
        self.servers = [DenseServer(center[start:stop].clone(), channel.codec) for start, stop in self.spans]
        self._driver = [connect(server) for server in self.servers]
        self._channel, self._connect = channel, connect
        self._ways: dict[int, CentralCopy] = {}

    def of(self, rank: int) -> CentralCopy:
        """That trainer's end."""
        if rank not in self._ways:
            connections = [self._connect(server) for server in self.servers]
            self._ways[rank] = CentralCopy(rank, connections, self.spans, self._channel)
        return self._ways[rank]

    def elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        return self.of(rank).elastic(weights, alpha)

    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        return self.of(rank).sequential(weights, alpha)

    def catch_up(self, rank: int) -> bool:
        return self.of(rank).catch_up()

    def read(self) -> Tensor:
        """As the driver reads it."""
        return torch.cat([asked.result() for asked in [later(way, DenseServer.read) for way in self._driver]])

    def write(self, center: Tensor) -> None:
        for way, (start, stop) in zip(self._driver, self.spans, strict=True):
            ask(way, DenseServer.write, center[start:stop])
