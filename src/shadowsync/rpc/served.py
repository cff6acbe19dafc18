"""Methods of a role that others call: marked where they are written, and asked for over any connection.

    class Parser:
        @served(once=False)
        def parse(self, lease: Lease) -> Parsed: ...

    WireServer(Served(parser), keys)                     # in the role's process
    parsed = ask(connection, Parser.parse, lease)        # in another; `later` does not wait

What crosses is written down nowhere else: arguments and results are what the method is annotated with, encoded by
msgspec (numbers, strings, tuples, dictionaries, frozen dataclasses), with the tensors in them as raw frames. What comes
in is checked against the annotations before the method sees it.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, Concatenate, NewType, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec
from torch import Tensor

from shadowsync.errors import DataError
from shadowsync.rpc.connection import Answer, Connection, Direct
from shadowsync.rpc.fetched import Fetched
from shadowsync.rpc.pending import Done, Pending, Promise
from shadowsync.rpc.service import Meta, Method, Outcome, Reply, Request, known_error

Client = NewType("Client", str)
"""The id of the connection that asks. A parameter of this type does not cross: the service fills it in, and whoever
calls the method without one in between passes any."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Packed(Meta, frozen=True):
    """Arguments or a result; the tensors in it cross beside it and stand here by their positions."""

    value: msgspec.Raw


@dataclass(frozen=True)
class _Mark:
    once: bool
    quick: bool
    timeout_s: float | None


@dataclass(frozen=True)
class _Plan:
    """How a marked method is called.

    Attributes:
        name: of the method.
        mark: as it was marked.
        arguments, result: decode what crosses.
        parameters: names of all.
        names: of those that cross.
        defaults: of the last ones.
        client: position of the client's id among all; None if there is none.
    """

    name: str
    mark: _Mark
    arguments: "msgspec.msgpack.Decoder[Any]"
    result: "msgspec.msgpack.Decoder[Any]"
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    client: int | None


def served(*, once: bool = True, quick: bool = False, timeout_s: float | None = None) -> Callable[[F], F]:
    """Marks a method that others may call.

    Args:
        once, quick: as in `rpc.service.Method`.
        timeout_s: deadline of a call; None leaves it to the connection.
    """

    def mark(method: F) -> F:
        method._served = _Mark(once, quick, timeout_s)  # type: ignore[attr-defined]
        return method

    return mark


class Served:
    """Serves all marked methods of a role (a `rpc.service.Service`).

    Args:
        role: whose; its `client_gone(client)` is called if it has one, and its `close()`.
    """

    def __init__(self, role: object) -> None:
        self.role = role
        found = ((name, getattr(type(role), name)) for name in dir(type(role)))
        plans = [_plan(method) for _, method in found if hasattr(method, "_served")]
        self.methods = {
            plan.name: Method(
                functools.partial(_perform, plan, own := getattr(role, plan.name)),
                plan.mark.once,
                plan.mark.quick,
                own,
            )
            for plan in plans
        }

    def client_gone(self, client: str) -> None:
        """Passed on to the role."""
        if (gone := getattr(self.role, "client_gone", None)) is not None:
            gone(client)

    def close(self) -> None:
        """Passed on to the role."""
        if (close := getattr(self.role, "close", None)) is not None:
            close()


def direct(role: object) -> Direct:
    """A connection to a role in this process."""
    service = Served(role)
    return Direct(lambda: service)


@overload
def later(
    connection: Connection, method: Callable[Concatenate[Any, P], "Future[R]"], /, *args: P.args, **kwargs: P.kwargs
) -> Pending[R]: ...
@overload
def later(
    connection: Connection, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> Pending[R]: ...
def later(connection: Connection, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Pending[Any]:
    """Starts a call of a marked method of the role at the other end; what it raises, whoever asks for the result hears.

    Of a role in this process (`Direct`) the method runs in this thread before this returns.

    Raises:
        DataError: an argument is of a type that cannot cross.
    """
    plan = _plan(method)
    given = dict(plan.defaults) | dict(zip(plan.parameters, args, strict=False)) | kwargs
    if isinstance(connection, Direct):
        return _call_direct(connection, plan, given)
    packed, tensors = _pack(tuple(given[name] for name in plan.names))
    return Fetched(
        connection.call(plan.name, packed, tensors, plan.mark.timeout_s),
        lambda answer: _unpack(plan.result, answer, f"the answer of {plan.name}"),
    )


def _call_direct(connection: Direct, plan: _Plan, given: Mapping[str, Any]) -> Pending[Any]:
    """Calls a method of a role in this process at once, with what it is given as it is; its errors as they are."""
    try:
        own = connection.part().methods[plan.name].own
        assert own is not None, f"{plan.name} is served in messages only"
        if plan.client is not None:
            given = {**given, plan.parameters[plan.client]: connection.client}
        result = own(*[given[name] for name in plan.parameters])
    except Exception as error:
        failed: Promise[Any] = Promise()
        failed.fail(error)
        return failed
    if not isinstance(result, Future):
        return Done(result)
    called: Promise[Any] = Promise()

    def pass_on(done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            called.fail(error)
        else:
            called.keep(done.result())

    result.add_done_callback(pass_on)
    return called


def ask(connection: Connection, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """As `later`, and waits for the result."""
    return later(connection, method, *args, **kwargs).result()


def _perform(plan: _Plan, method: Callable[..., Any], request: Request) -> Outcome:
    values = list(_unpack(plan.arguments, request, f"a call of {plan.name}"))
    if plan.client is not None:
        values.insert(plan.client, request.client)
    result = method(*values)
    if not isinstance(result, Future):
        return Reply(*_pack(result))
    reply: Future[Reply] = Future()
    result.add_done_callback(functools.partial(_pass_on, plan.name, reply))
    return reply


def _pass_on(name: str, reply: "Future[Reply]", result: "Future[Any]") -> None:
    try:
        reply.set_result(Reply(*_pack(result.result())))
    except BaseException as error:  # also of one that was cancelled
        reply.set_exception(known_error(name, error))


@functools.cache
def _plan(method: Callable[..., Any]) -> _Plan:
    hints = get_type_hints(method)
    result = hints.pop("return")
    if get_origin(result) is Future:
        (result,) = get_args(result)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    crossing = [parameter for parameter in parameters if hints[parameter.name] is not Client]
    client = next((at for at, parameter in enumerate(parameters) if hints[parameter.name] is Client), None)
    arguments: Any = GenericAlias(tuple, tuple(hints[parameter.name] for parameter in crossing))
    return _Plan(
        method.__name__,
        method._served,  # type: ignore[attr-defined]
        msgspec.msgpack.Decoder(arguments, dec_hook=_tensor),
        msgspec.msgpack.Decoder(result, dec_hook=_tensor),
        tuple(parameter.name for parameter in parameters),
        tuple(parameter.name for parameter in crossing),
        {p.name: p.default for p in crossing if p.default is not inspect.Parameter.empty},
        client,
    )


class _Frames(threading.local):
    """The tensors beside what this thread decodes."""

    tensors: Sequence[Tensor] = ()


_FRAMES = _Frames()


def _pack(value: Any) -> tuple[Packed, tuple[Tensor, ...]]:
    tensors: list[Tensor] = []

    def position(found: Any) -> int:
        if not isinstance(found, Tensor):
            raise DataError(f"a {type(found).__name__} cannot cross to another role")
        tensors.append(found.contiguous())
        return len(tensors) - 1

    return Packed(msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=position))), tuple(tensors)


def _unpack(decoder: "msgspec.msgpack.Decoder[R]", message: Request | Answer, what: str) -> R:
    packed = message.read(Packed)
    _FRAMES.tensors = message.tensors
    try:
        return decoder.decode(packed.value)
    except msgspec.DecodeError as error:  # also what does not fit the type
        raise DataError(f"{what} is not what it should be: {error}") from error
    finally:
        _FRAMES.tensors = ()


def _tensor(kind: type[Any], position: Any) -> Tensor:
    if kind is not Tensor or not isinstance(position, int) or not 0 <= position < len(_FRAMES.tensors):
        raise ValueError(f"there is no tensor {position!r}")
    return _FRAMES.tensors[position]
