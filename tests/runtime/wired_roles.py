"""Role processes that are objects in this process, behind the real wire."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from shadowsync.errors import RunError
from shadowsync.memory.shared import FileBeside, SharedMemory
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime.child import RoleHost
from shadowsync.runtime.runtime import (
    LOOPBACK,
    Builder,
    Endpoint,
    HeldMemory,
    LaunchRequest,
    Machine,
    RoleProcess,
    Runtime,
)


class HostedRole(RoleProcess):
    """A role in this process."""

    def __init__(self, request: LaunchRequest, keys: JobKeys) -> None:
        self.request = request
        self._host = RoleHost(request, keys, LOOPBACK)
        self._ended: str | None = None

    def endpoint(self, timeout_s: float) -> Endpoint:
        if self._ended is not None:
            raise PeerLost(f"{self.request.role} ended: {self._ended}")
        machine = self.request.machine or LOOPBACK
        return Endpoint(self._host.address, machine, machine, os.getpid())

    def build(self, builder: Builder) -> Future[None]:
        future: Future[None] = Future()
        if self._ended is not None:
            future.set_exception(PeerLost(f"{self.request.role} ended: {self._ended}"))
            return future

        def run() -> None:
            try:
                self._host.build(builder)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name=f"build-{self.request.role}", daemon=True).start()
        return future

    def ended(self) -> str | None:
        return self._ended

    def kill(self) -> None:
        if self._ended is None:
            self._ended = "it was killed"
            # what was asked for gets no answer, not even an error, as if the process were killed
            self._host._server._loop.close()
            self._host._server._socket.shut()
            self._host.close()


class Wired(Runtime):
    """Every role in this process. Machines are names only.

    Args:
        keys: of the job.
        machines: how many to pretend.
        shares_memory: what roles hold is reached in memory that they have in common, as far as it can be.

    Attributes:
        lost: machines that are gone, with what was held there.
    """

    def __init__(self, keys: JobKeys, machines: int = 1, shares_memory: bool = False) -> None:
        self.keys = keys
        self.shares_memory = shares_memory
        self._machines = [Machine(f"machine-{i}", f"machine-{i}", 64.0, 1 << 40) for i in range(machines)]
        self.processes: list[HostedRole] = []
        self.lost: set[str] = set()
        self._held: list[SharedMemory] = []

    def machines(self) -> Sequence[Machine]:
        return [machine for machine in self._machines if machine.id not in self.lost]

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        known = {machine.id for machine in self._machines}
        if unknown := [request for request in requests if request.machine not in (None, *known)]:
            raise RunError(f"{unknown[0].role} needs machine {unknown[0].machine}, which is not there")

    def start(self, request: LaunchRequest) -> RoleProcess:
        self.processes.append(HostedRole(request, self.keys))
        return self.processes[-1]

    def create_memory(self, machine: str, size: int, what: str, file: FileBeside | None = None) -> HeldMemory:
        made = SharedMemory.create(size, what, file)
        self._held.append(made)
        return HeldMemory(machine, made.path, made.close, lambda: machine not in self.lost, made.read)

    def host(self) -> str:
        return LOOPBACK

    def close(self) -> None:
        for process in self.processes:
            process.kill()
