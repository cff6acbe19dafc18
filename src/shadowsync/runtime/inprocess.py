"""Roles that are objects in the driver's process: threads train, and nothing crosses."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import ClassVar

from shadowsync.rpc.connection import Direct, Service
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime.runtime import (
    LOOPBACK,
    Builder,
    Endpoint,
    LaunchRequest,
    Machine,
    ProcessContext,
    RoleProcess,
    Runtime,
)


class OwnRole(RoleProcess):
    """A role in this process.

    Attributes:
        part: what it serves, as it stands; None before it was built and after the end.
    """

    def __init__(self, request: LaunchRequest, runtime: "InProcess") -> None:
        self.request = request
        self.part: Service | None = None
        self._context = ProcessContext(request.role, runtime, LOOPBACK)
        self._ended: str | None = None

    def endpoint(self, timeout_s: float) -> Endpoint:
        return Endpoint(self.request.role, LOOPBACK, "", os.getpid())

    def build(self, builder: Builder) -> Future[None]:
        built: Future[None] = Future()
        try:
            self._end()
            self.part = builder(self._context)
        except Exception as error:
            built.set_exception(error)
        else:
            built.set_result(None)
        return built

    def served(self) -> Service:
        """The part; raises `PeerLost` where there is none."""
        if self.part is None:
            raise PeerLost(f"{self.request.role} ended: {self._ended or 'nothing was built'}")
        return self.part

    def ended(self) -> str | None:
        return self._ended

    def kill(self) -> None:
        if self._ended is None:
            self._ended = "it was killed"
            self._end()

    def _end(self) -> None:
        before, self.part = self.part, None
        if before is not None:
            before.close()


class InProcess(Runtime):
    """The roles of one job, by name (a `rpc.connection.Connector` for those who ask them)."""

    direct: ClassVar[bool] = True

    def __init__(self) -> None:
        self.roles: dict[str, OwnRole] = {}

    def machines(self) -> Sequence[Machine]:
        return []

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        """There is room."""

    def start(self, request: LaunchRequest) -> OwnRole:
        self.roles[request.role] = OwnRole(request, self)
        return self.roles[request.role]

    def host(self) -> str:
        return LOOPBACK

    def connector(self) -> "InProcess":
        return self

    def connect(self, address: str) -> Direct:
        return Direct(self.roles[address].served)

    def close(self) -> None:
        for role in self.roles.values():
            role.kill()
