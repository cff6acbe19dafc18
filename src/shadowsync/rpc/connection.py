"""The seam between a caller and a service, and its twin in process."""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.service import (
    M,
    Meta,
    Outcome,
    Reply,
    Request,
    Service,
    decode_meta,
    encode_meta,
    known_error,
    perform,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the typed part in bytes, see `read`, and tensors that belong to the caller.

    Attributes:
        served_s: of the time that the call took, what the server says it took itself; 0 where it does not say.
    """

    meta: bytes
    tensors: tuple[Tensor, ...]
    served_s: float = 0.0

    def read(self, kind: type[M]) -> M:
        """The typed part.

        Raises:
            DataError: it is not of that kind.
        """
        return decode_meta(self.meta, kind)


class Connection(ABC):
    """A caller's end; any thread may use it, with any number of calls under way."""

    @abstractmethod
    def call(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """Starts a call; its answer or error is in the future.

        Args:
            method: one of the service's.
            meta: the typed part.
            tensors: on the CPU; not to be written to until the answer is there.
            timeout_s: deadline; the default is the connection's own.

        The future raises what the service raised (a `ShadowSyncError` of the same class), `PeerLost` when the peer is
        given up or the connection is closed, or `CallTimeout`.
        """

    def call_along(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """As `call`, and there is no hurry: it may wait a few hundredths of a second for a call that it travels with.

        The server runs what travels together in order, and answers it together.
        """
        return self.call(method, meta, tensors, timeout_s)

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


def new_client() -> str:
    """A random id of a connection."""
    return secrets.token_hex(16)


class Connector(Protocol):
    """Connects a process to roles, wherever they are."""

    def connect(self, address: str) -> Connection:
        """A connection to the role at an address; it need not be there yet."""

    def close(self) -> None:
        """Closes all connections."""


class Direct(Connection):
    """A connection to a role in this process: `rpc.served` calls its methods with the objects as they are.

    Args:
        part: gives what the role serves now; raises `PeerLost` where it has ended.
    """

    def __init__(self, part: Callable[[], Service]) -> None:
        self.client = new_client()
        self.part = part

    def call(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """As `Connection.call`, of methods that are served in messages only."""
        return DirectConnection(self.part()).call(method, meta, tensors, timeout_s)

    def close(self) -> None:
        """Nothing is under way."""


class DirectConnection(Connection):
    """The in-process twin: the method runs in the caller's thread, before `call` returns; no tensor is copied.

    A call in process ends by itself, so its deadline is reached only where the service replies later.
    """

    def __init__(self, service: Service) -> None:
        self.client = new_client()
        self._service = service
        self._closed = threading.Event()

    def call(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """As `Connection.call`, already done unless the service replies later."""
        future: Future[Answer] = Future()
        try:
            outcome = self._outcome(Request(method, encode_meta(meta), tuple(tensors), self.client))
            if isinstance(outcome, Future):
                outcome.add_done_callback(lambda later: _pass_on(method, later, future))
            else:
                future.set_result(_answer(outcome))
        except ShadowSyncError as error:
            future.set_exception(error)
        return future

    def _outcome(self, request: Request) -> Outcome:
        if self._closed.is_set():
            raise PeerLost("the connection is closed")
        return perform(self._service, request)

    def close(self) -> None:
        """As `Connection.close`; the service learns of it the first time."""
        if not self._closed.is_set():
            self._closed.set()
            self._service.client_gone(self.client)


def _answer(reply: Reply) -> Answer:
    return Answer(encode_meta(reply.meta), reply.tensors)


def _pass_on(method: str, later: "Future[Reply]", future: "Future[Answer]") -> None:
    try:
        future.set_result(_answer(later.result()))
    except BaseException as error:  # also of one that was cancelled
        future.set_exception(known_error(method, error))
