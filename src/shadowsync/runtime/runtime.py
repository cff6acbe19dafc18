"""The seam of the runtimes: starts the processes of roles, says where they are reached, and reports their deaths."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

from shadowsync.memory.shared import FileBeside
from shadowsync.rpc.connection import Connection, Connector, JobKeys, Service

CALL_S = 3600.0
"""Deadline of a role's calls. Who gives up a peer is the driver, which ends the wait by moving or ending the role."""

LONG_S = 60.0
"""A call that takes longer is told of: its peer lives, or the driver would have given it up, but may be stuck."""
LOOPBACK = "127.0.0.1"


def waiting_for(peers: Iterable[tuple[str, Connection]]) -> str:
    """In words, what has had no answer for too long from these peers, by their names; empty for nothing."""
    methods = [(name, connection.waiting(LONG_S)) for name, connection in peers]
    found = [f"{method} of {name}" for name, method in methods if method is not None]
    return f"waits for {', '.join(found)} for more than {LONG_S:g} s" if found else ""


@dataclass(frozen=True)
class ProcessContext:
    """What a part finds in its process: its role's name, the way to the others, and how they reach this machine."""

    role: str
    connector: Connector
    host: str


Builder = Callable[[ProcessContext], Service]
"""Makes a part in the role's process; what it is made from travels in it (`functools.partial`)."""


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster, with what it offers; `id` is the runtime's name for it, `name` is for people.

    Attributes:
        doubtful: all roles there were lost a moment ago, and nobody knows yet whether the machine was.
    """

    id: str
    name: str
    cpus: float
    memory_bytes: int
    resources: frozenset[str] = frozenset()
    doubtful: bool = False


@dataclass(frozen=True)
class LaunchRequest:
    """A role that wants a process, and what it needs of its machine.

    Attributes:
        role: its name, `kind-index`.
        machine: where; None for any, until the scheduler has found one.
        cpus: to reserve there.
        resource: custom resource the machine must have.
        bytes: of memory that it will fill; where it fills any, that decides about its place.
        keeps_off: kind of the roles that must not be on its machine; empty for none.
        seeks: kind of the roles that it would be near; likewise.
        threads: that answer requests there.
        forget_s: silence after which its server forgets a client.
    """

    role: str
    machine: str | None = None
    cpus: float = 0.0
    resource: str | None = None
    bytes: int = 0
    keeps_off: str = ""
    seeks: str = ""
    threads: int = 4
    forget_s: float = 120.0

    @property
    def kind(self) -> str:
        """`reader`, `trainer`, `embedding` or `dense`."""
        return self.role.rpartition("-")[0]


@dataclass(frozen=True)
class Endpoint:
    """Where a process is: the address on which its part is served, id and name of its machine, and its log there."""

    address: str
    machine: str
    host: str
    pid: int
    log: str = ""


@dataclass(frozen=True)
class HeldMemory:
    """Memory that the processes of a machine have in common, held there by whoever starts them (`memory.shared`).

    Attributes:
        path: where the machine's processes open it.
        close: lets go of it.
        is_there: it was not lost with its machine.
        read: what stands there; raises `PeerLost` where it is gone.
    """

    machine: str
    path: str
    close: Callable[[], None]
    is_there: Callable[[], bool]
    read: Callable[[], bytes]


class RoleProcess(ABC):
    """A process that holds one role."""

    request: LaunchRequest

    @abstractmethod
    def endpoint(self, timeout_s: float) -> Endpoint:
        """Waits until it runs and says where.

        Raises:
            PeerLost: it ended, or did not start in time.
        """

    @abstractmethod
    def build(self, builder: Builder) -> Future[None]:
        """Has a part made there, which takes the place of the one before; errors of the builder are in the future."""

    @abstractmethod
    def ended(self) -> str | None:
        """Why the process is no more; None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once, without a farewell."""


class Runtime(ABC):
    """Starts processes; made for one job with its keys. Used as a context, which ends all of them."""

    direct: ClassVar[bool] = False
    """Roles are objects in the driver's process, which are called as they are: there is no wire, and nobody dies."""
    keys: JobKeys
    shares_memory: bool = False
    """The processes of a machine can have its memory in common."""

    @abstractmethod
    def machines(self) -> Sequence[Machine]:
        """The machines that are there now."""

    @abstractmethod
    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        """Reserves what all these processes need together, before any of them starts.

        Raises:
            RunError: the cluster does not have it within the time.
        """

    @abstractmethod
    def start(self, request: LaunchRequest) -> RoleProcess:
        """Starts a process; returns at once."""

    @abstractmethod
    def host(self) -> str:
        """Where the driver serves: address of its machine as the others see it, or a folder (see `WireServer`)."""

    def create_memory(self, machine: str, size: int, what: str, file: FileBeside | None = None) -> HeldMemory:
        """New memory of `size` bytes on a machine, all zero, which outlives its processes; only where `shares_memory`.

        `what` will be kept there, for messages; a `file` belongs to it.

        Raises:
            ConfigError: the machine does not have that much.
            PeerLost: it is gone.
        """
        raise NotImplementedError

    def connector(self) -> Connector:
        """The driver's way to the roles."""
        from shadowsync.rpc.client import WireClient  # noqa: PLC0415 needs an extra

        return WireClient(self.keys, timeout_s=CALL_S)

    @abstractmethod
    def close(self) -> None:
        """Ends every process it started."""
