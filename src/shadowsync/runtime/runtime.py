"""The seam of the runtimes: starts the processes of roles, says where they are reached, and reports their deaths."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from shadowsync.rpc.client import Courier
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.service import Method


class Part(Protocol):
    """What a role's process serves (a `rpc.service.Service`)."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """By name."""

    def client_gone(self, client: str) -> None:
        """Frees what is kept for a connection."""

    def close(self) -> None:
        """Ends its threads; called before another part takes its place, and at the end."""


@dataclass(frozen=True)
class Home:
    """What a part finds in its process.

    Attributes:
        role: its name, for instance `trainer-0`.
        courier: connects to the other roles.
        host: address of this machine as the others see it.
    """

    role: str
    courier: Courier
    host: str


Builder = Callable[[Any, Home], Part]
"""Makes a part from a specification, in the role's process."""


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster.

    Attributes:
        id: in the runtime's terms.
        name: for people.
        cpus: CPUs it offers.
        memory_bytes: memory it offers.
        resources: custom resources it offers.
    """

    id: str
    name: str
    cpus: float
    memory_bytes: int
    resources: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Order:
    """A process to start.

    Attributes:
        role: name of the role.
        machine: where; None leaves it to the runtime.
        cpus: to reserve there.
        resource: custom resource the machine must have.
        threads: that answer requests there.
        forget_s: silence after which its server forgets a client.
    """

    role: str
    machine: str | None = None
    cpus: float = 0.0
    resource: str | None = None
    threads: int = 4
    forget_s: float = 120.0


@dataclass(frozen=True)
class Place:
    """Where a process is.

    Attributes:
        address: on which its part is served.
        machine: id of its machine.
        host: name of its machine.
        pid: of the process.
        log: path of its log there.
    """

    address: str
    machine: str
    host: str
    pid: int
    log: str = ""


class RoleProcess(ABC):
    """A process that holds one role."""

    order: Order

    @abstractmethod
    def place(self, timeout_s: float) -> Place:
        """Waits until it runs and says where.

        Raises:
            PeerLost: it ended, or did not start in time.
        """

    @abstractmethod
    def build(self, builder: Builder, spec: Any) -> Future[None]:
        """Has a part made there, which takes the place of the one before; errors of the builder are in the future."""

    @abstractmethod
    def ended(self) -> str | None:
        """Why the process is no more; None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once, without a farewell."""


class Runtime(ABC):
    """Starts processes; made for one job with its keys. Used as a context, which ends all of them."""

    name: ClassVar[str]
    keys: JobKeys
    shares_memory: bool = False
    """All processes and the driver are on one machine, whose memory they can have in common."""

    @abstractmethod
    def machines(self) -> Sequence[Machine]:
        """The machines that are there now."""

    @abstractmethod
    def reserve(self, orders: Sequence[Order], timeout_s: float) -> None:
        """Reserves what all these processes need together, before any of them starts.

        Raises:
            RunError: the cluster does not have it within the time.
        """

    @abstractmethod
    def start(self, order: Order) -> RoleProcess:
        """Starts a process; returns at once."""

    @abstractmethod
    def host(self) -> str:
        """Where the driver serves: address of its machine as the others see it, or a folder (see `ServerOptions`)."""

    @abstractmethod
    def close(self) -> None:
        """Ends every process it started."""
