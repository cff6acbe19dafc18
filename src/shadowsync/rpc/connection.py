"""The seam between a caller and a service: what is served, what is asked for and answered, and the keys of a job."""

import importlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import Tensor

from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.rpc.pending import Pending

_LOG = logging.getLogger(__name__)


class Meta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the small typed parts of payloads; fields cross in their order, without their names."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a request or its answer carries.

    Attributes:
        meta: a small typed part in msgpack.
        tensors: on the CPU, of any shape. They are sent later and without a copy, so their giver does not write to them
            any more; in process they are the giver's own, so a service does not write into those of a request.
        client: of a request as the service sees it, the id of the connection that asks, the same for all its calls.
        served_s: of an answer that crossed a wire, what the server says that it took itself.
    """

    meta: bytes = msgspec.msgpack.encode(None)
    tensors: tuple[Tensor, ...] = ()
    client: str = ""
    served_s: float = 0.0


EMPTY = Payload()
Handle = Callable[[Payload], Payload | Pending[Payload]]


@dataclass(frozen=True, slots=True)
class Method:
    """One named method.

    Attributes:
        handle: answers a request, in any thread, several at a time; calls of one client may overtake each other. An
            answer that comes later holds no thread, and is sent in the thread that ends it.
        once: a request that is sent again is answered from the kept answer and never runs twice. False where running
            it again is harmless (reads): nothing is kept then.
        quick: it takes microseconds and waits for nobody, so that the thread that receives may run it itself.
        own: the role's method itself, for callers in its process; None where it is served in messages only.
    """

    handle: Handle
    once: bool = True
    quick: bool = False
    own: Callable[..., Any] | None = None


class Service(Protocol):
    """An object that connections can reach."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """All methods by name; does not change while it is served."""
        ...

    def client_gone(self, client: str) -> None:
        """Frees what is kept for that connection: it was closed or has been silent for too long."""
        ...

    def close(self) -> None:
        """Ends its threads; called before another takes its place, and at the end."""
        ...


def perform(service: Service, name: str, request: Payload) -> Payload | Pending[Payload]:
    """Runs a method.

    Raises:
        ShadowSyncError: as the method raised it; anything else that it raised becomes a `RunError` and is logged.
        KeyboardInterrupt, SystemExit: as they came, for the thread that calls.
    """
    method = service.methods.get(name)
    if method is None:
        known = ", ".join(sorted(service.methods)) or "none yet"
        raise RunError(f"there is no method {name!r} here; those that are: {known}")
    try:
        return method.handle(request)
    except (ShadowSyncError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        raise known_error(name, error) from error


def known_error(method: str, error: BaseException) -> ShadowSyncError:
    """What a method raised, as it crosses: anything but a `ShadowSyncError` becomes a `RunError` and is logged."""
    if isinstance(error, ShadowSyncError):
        return error
    _LOG.error("method %s failed", method, exc_info=error)
    reason = str(error).partition("\n")[0]
    return RunError(f"{method} failed with {type(error).__name__}: {reason}")


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
