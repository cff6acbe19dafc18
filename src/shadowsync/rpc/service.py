"""What is served: an object with named methods that take and return payloads."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from torch import Tensor

from shadowsync.errors import DataError, RunError, ShadowSyncError
from shadowsync.rpc.pending import Pending

_LOG = logging.getLogger(__name__)
_ENCODER = msgspec.msgpack.Encoder()

M = TypeVar("M", bound="Meta")


class Meta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the small typed parts of payloads; fields cross in their order, without their names."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a request or its answer carries.

    Attributes:
        meta: a small typed part in msgpack, see `read`.
        tensors: on the CPU, of any shape. They are sent later and without a copy, so their giver does not write to them
            any more; in process they are the giver's own, so a service does not write into those of a request.
        client: of a request as the service sees it, the id of the connection that asks, the same for all its calls.
        served_s: of an answer that crossed a wire, what the server says that it took itself.
    """

    meta: bytes = _ENCODER.encode(None)
    tensors: tuple[Tensor, ...] = ()
    client: str = ""
    served_s: float = 0.0

    @classmethod
    def of(cls, meta: Meta, tensors: tuple[Tensor, ...] = ()) -> "Payload":
        return cls(_ENCODER.encode(meta), tensors)

    def read(self, kind: type[M]) -> M:
        """The typed part.

        Raises:
            DataError: it is not of that kind.
        """
        try:
            return msgspec.msgpack.decode(self.meta, type=kind)
        except msgspec.DecodeError as error:  # also what does not fit the type
            raise DataError(f"a message does not hold a {kind.__name__}: {error}") from error


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
