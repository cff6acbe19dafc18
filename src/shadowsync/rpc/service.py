"""What is served: an object with named methods that take and return small typed parts and tensors."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from torch import Tensor

from shadowsync.errors import DataError, RunError, ShadowSyncError

_LOG = logging.getLogger(__name__)
_ENCODER = msgspec.msgpack.Encoder()

M = TypeVar("M", bound="Meta")


class Meta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the small typed parts of requests and replies; fields cross in their order, without their names."""


def encode_meta(meta: Meta | None) -> bytes:
    """The bytes that cross for a small typed part, or for none."""
    return _ENCODER.encode(meta)


def decode_meta(meta: bytes, kind: type[M]) -> M:
    """A small typed part from its bytes.

    Raises:
        DataError: it is not of that kind.
    """
    try:
        return msgspec.msgpack.decode(meta, type=kind)
    except msgspec.DecodeError as error:  # also what does not fit the type
        raise DataError(f"a message does not hold a {kind.__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Request:
    """One call as the service sees it.

    Attributes:
        method: the name that was called.
        meta: the typed part in bytes, see `read`.
        tensors: of any shape; in process they are the caller's own, so a service does not write into them.
        client: the id of the connection that asks, the same for all its calls.
    """

    method: str
    meta: bytes
    tensors: tuple[Tensor, ...]
    client: str

    def read(self, kind: type[M]) -> M:
        """The typed part.

        Raises:
            DataError: it is not of that kind.
        """
        return decode_meta(self.meta, kind)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a method answers; the tensors are sent later and without a copy, so nobody may write to them any more."""

    meta: Meta | None = None
    tensors: tuple[Tensor, ...] = ()


Outcome: TypeAlias = "Reply | Future[Reply]"
"""A reply, or one that comes later: who asks waits for it, and no thread here does."""


@dataclass(frozen=True, slots=True)
class Method:
    """One named method.

    Attributes:
        handle: does it, in any thread, several at a time; calls of one client may overtake each other. Whoever ends a
            reply that comes later sends it, in its own thread.
        once: a request that is sent again is answered from the kept reply and never runs twice. False where running
            it again is harmless (reads): nothing is kept then.
        quick: it takes microseconds and waits for nobody, so that the thread that receives may run it itself.
        own: the role's method itself, for callers in its process; None where it is served in messages only.
    """

    handle: Callable[[Request], Outcome]
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


def perform(service: Service, request: Request) -> Outcome:
    """Runs one request.

    Raises:
        ShadowSyncError: as the method raised it; anything else that it raised becomes a `RunError` and is logged.
        KeyboardInterrupt, SystemExit: as they came, for the thread that calls.
    """
    method = service.methods.get(request.method)
    if method is None:
        known = ", ".join(sorted(service.methods)) or "none yet"
        raise RunError(f"there is no method {request.method!r} here; those that are: {known}")
    try:
        return method.handle(request)
    except (ShadowSyncError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        raise known_error(request.method, error) from error


def known_error(method: str, error: BaseException) -> ShadowSyncError:
    """What a method raised, as it crosses: anything but a `ShadowSyncError` becomes a `RunError` and is logged."""
    if isinstance(error, ShadowSyncError):
        return error
    _LOG.error("method %s failed", method, exc_info=error)
    reason = str(error).partition("\n")[0]
    return RunError(f"{method} failed with {type(error).__name__}: {reason}")
