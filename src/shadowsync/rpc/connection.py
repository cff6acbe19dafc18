"""The seam between a caller and a service, its forms within a process, and the keys of a job."""

import importlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec

from shadowsync.rpc.pending import Pending
from shadowsync.rpc.service import EMPTY, Payload, Service


class JobKeys(msgspec.Struct, frozen=True):
    """CURVE keys in Z85 (40 characters each), made for one job: whoever has them may read and write its parameters."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> "JobKeys":
        zmq = importlib.import_module("zmq")  # jobs in one process need neither
        return cls(*(key.decode() for _ in range(2) for key in zmq.curve_keypair()))

    def __repr__(self) -> str:
        """Without the secrets: a log must not give them away."""
        return f"JobKeys(server_public={self.server_public!r}, client_public={self.client_public!r})"


class Connection(ABC):
    """A caller's end; any thread may use it, with any number of calls under way."""

    client: str = ""
    """Its random id."""

    @abstractmethod
    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        """Starts a call of one of the service's methods; without a deadline the connection's own holds.

        Tensors that are sent are not to be written to until the answer is there; those of the answer belong to the
        caller. Instead of it comes what the service raised (a `ShadowSyncError` of the same class), `PeerLost` when the
        peer is given up or the connection is closed, or `CallTimeout`.
        """

    def call_along(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        """As `call`, and there is no hurry: it may wait a few hundredths of a second for a call that it travels with.

        The server runs what travels together in order, and answers it together.
        """
        return self.call(method, payload, timeout_s)

    @abstractmethod
    def close(self) -> None:
        """Fails what is under way with `PeerLost`, and every later call."""

    def redirect(self, address: str | None) -> None:  # noqa: B027 (matters only where a peer may be replaced)
        """The peer was replaced: what is under way is sent to the new address. None: it is given up for now."""

    def silent_s(self) -> float:
        """Seconds since anything was heard from the peer; 0 where it cannot be out of reach."""
        return 0.0

    def waiting(self, longer_than_s: float) -> str | None:
        """The method of the call that has waited longest for its answer, if it has for so long."""
        return None


class Connector(Protocol):
    """Connects a process to roles, wherever they are."""

    def connect(self, address: str) -> Connection:
        """A connection to the role at an address; it need not be there yet."""

    def close(self) -> None:
        """Closes all connections."""


class Direct(Connection):
    """To a role in this process, whose methods `rpc.served` calls with the objects as they are.

    Args:
        part: gives what the role serves now; raises `PeerLost` where it has ended.
    """

    def __init__(self, part: Callable[[], Service]) -> None:
        self.client = new_client()
        self.part = part

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        raise TypeError(f"{method} is asked for with the objects as they are (rpc.served)")

    def close(self) -> None:
        """Nothing is under way."""


def new_client() -> str:
    """A random id of a connection."""
    return secrets.token_hex(16)
