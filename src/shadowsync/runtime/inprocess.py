"""Role processes that are objects in this process, behind the real wire: for tests, and to see what a wire costs."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from shadowsync.errors import RunError
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.keys import JobKeys
from shadowsync.runtime.host import LOOPBACK, RoleHost
from shadowsync.runtime.runtime import Builder, Machine, Order, Place, RoleProcess, Runtime


class HostedRole(RoleProcess):
    """A role in this process."""

    def __init__(self, order: Order, keys: JobKeys) -> None:
        self.order = order
        self._host = RoleHost(order.role, keys, LOOPBACK, order.threads, order.forget_s)
        self._ended: str | None = None

    def place(self, timeout_s: float) -> Place:
        if self._ended is not None:
            raise PeerLost(f"{self.order.role} ended: {self._ended}")
        return Place(self._host.address, self.order.machine or LOOPBACK, "here", os.getpid())

    def build(self, builder: Builder, spec: Any) -> Future[None]:
        future: Future[None] = Future()

        def run() -> None:
            try:
                self._host.build(builder, spec)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name=f"build-{self.order.role}", daemon=True).start()
        return future

    def ended(self) -> str | None:
        return self._ended

    def kill(self) -> None:
        if self._ended is None:
            self._ended = "it was killed"
            self._host.vanish()


class InProcess(Runtime):
    """Every role in this process. Machines are names only.

    Args:
        keys: of the job.
        machines: how many to pretend.
        shares_memory: what roles hold is reached in memory that they have in common, as far as it can be.
    """

    name: ClassVar[str] = "inprocess"

    def __init__(self, keys: JobKeys, machines: int = 1, shares_memory: bool = False) -> None:
        self.keys = keys
        self.shares_memory = shares_memory
        self._machines = [Machine(f"machine-{i}", f"machine-{i}", 64.0, 1 << 40) for i in range(machines)]
        self.processes: list[HostedRole] = []

    def machines(self) -> Sequence[Machine]:
        return self._machines

    def reserve(self, orders: Sequence[Order], timeout_s: float) -> None:
        known = {machine.id for machine in self._machines}
        if unknown := [order for order in orders if order.machine not in (None, *known)]:
            raise RunError(f"{unknown[0].role} needs machine {unknown[0].machine}, which is not there")

    def start(self, order: Order) -> RoleProcess:
        self.processes.append(HostedRole(order, self.keys))
        return self.processes[-1]

    def host(self) -> str:
        return LOOPBACK

    def close(self) -> None:
        for process in self.processes:
            process.kill()
