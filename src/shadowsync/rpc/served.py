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
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, Concatenate, NewType, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec
from torch import Tensor

from shadowsync.errors import DataError
from shadowsync.rpc.connection import Connection, Direct, Method, Payload, known_error
from shadowsync.rpc.pending import Done, Mapped, Pending, Promise, failed

Client = NewType("Client", str)
"""The id of the connection that asks. A parameter of this type does not cross: the service fills it in, and whoever
calls the method without one in between passes any."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Plan:
    """How a marked method is called: `parameters` are the names of all, `names` of those that cross, decoded by
    `arguments`; `client` is the position of the client's id among all, if there is one."""

    name: str
    arguments: "msgspec.msgpack.Decoder[Any]"
    result: "msgspec.msgpack.Decoder[Any]"
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    client: int | None
    once: bool
    quick: bool
    along: bool
    timeout_s: float | None


def served(
    *, once: bool = True, quick: bool = False, along: bool = False, timeout_s: float | None = None
) -> Callable[[F], F]:
    """Marks a method that others may call.

    Args:
        once, quick: as in `rpc.connection.Method`.
        along: a call is in no hurry, as `Connection.call_along`.
        timeout_s: deadline of a call; None leaves it to the connection.
    """

    def mark(method: F) -> F:
        method._served = {"once": once, "quick": quick, "along": along, "timeout_s": timeout_s}  # type: ignore[attr-defined]
        return method

    return mark


class Served:
    """Serves all marked methods of a role (a `rpc.connection.Service`), whose `client_gone(client)` and `close()` are
    called if it has them."""

    def __init__(self, role: object) -> None:
        self.role = role
        found = ((name, getattr(type(role), name)) for name in dir(type(role)))
        plans = {name: _plan(method) for name, method in found if hasattr(method, "_served")}
        own = {name: getattr(role, name) for name in plans}
        self.methods = {
            name: Method(functools.partial(_perform, plan, own[name]), plan.once, plan.quick, own[name])
            for name, plan in plans.items()
        }

    def client_gone(self, client: str) -> None:
        if (gone := getattr(self.role, "client_gone", None)) is not None:
            gone(client)

    def close(self) -> None:
        if (close := getattr(self.role, "close", None)) is not None:
            close()


NOTHING = Served(None)
"""Has no methods."""


def direct(role: object) -> Direct:
    """A connection to a role in this process."""
    service = Served(role)
    return Direct(lambda: service)


def each(connection: Connection, method: Callable[[Any, int], R | None]) -> Iterator[R]:
    """What a role has several of: asks for those at positions 0, 1, … until there is none."""
    for position in itertools.count():
        found: R | None = ask(connection, method, position)
        if found is None:
            return
        yield found


@overload
def later(
    connection: Connection, method: Callable[Concatenate[Any, P], Pending[R]], /, *args: P.args, **kwargs: P.kwargs
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
    call = connection.call_along if plan.along else connection.call
    answer = call(plan.name, _pack(tuple(given[name] for name in plan.names)), plan.timeout_s)
    return Mapped(functools.partial(_unpack, plan.result, f"the answer of {plan.name}"), answer)


def _call_direct(connection: Direct, plan: _Plan, given: dict[str, Any]) -> Pending[Any]:
    """With what it is given as it is; its errors as they are."""
    try:
        own = connection.part().methods[plan.name].own
        assert own is not None, f"{plan.name} is served in messages only"
        if plan.client is not None:
            given[plan.parameters[plan.client]] = connection.client
        result = own(*[given[name] for name in plan.parameters])
    except Exception as error:
        return failed(error)
    return result if isinstance(result, Pending) else Done(result)


def ask(connection: Connection, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """As `later`, and waits for the result."""
    return later(connection, method, *args, **kwargs).result()


def _perform(plan: _Plan, method: Callable[..., Any], request: Payload) -> Payload | Pending[Payload]:
    values = list(_unpack(plan.arguments, f"a call of {plan.name}", request))
    if plan.client is not None:
        values.insert(plan.client, request.client)
    result = method(*values)
    if not isinstance(result, Pending):
        return _pack(result)
    answer: Promise[Payload] = Promise()

    def pass_on(_: BaseException | None) -> None:
        try:
            answer.keep(_pack(result.result()))
        except BaseException as error:  # whoever asked waits for an answer
            answer.fail(known_error(plan.name, error))

    result.then(pass_on)
    return answer


@functools.cache
def _plan(method: Callable[..., Any]) -> _Plan:
    hints = get_type_hints(method)
    result = hints.pop("return")
    if isinstance(get_origin(result), type) and issubclass(get_origin(result), Pending):
        (result,) = get_args(result)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    crossing = [parameter for parameter in parameters if hints[parameter.name] is not Client]
    client = next((at for at, parameter in enumerate(parameters) if hints[parameter.name] is Client), None)
    arguments: Any = GenericAlias(tuple, tuple(hints[parameter.name] for parameter in crossing))
    return _Plan(
        method.__name__,
        msgspec.msgpack.Decoder(arguments, dec_hook=_tensor),
        msgspec.msgpack.Decoder(result, dec_hook=_tensor),
        tuple(parameter.name for parameter in parameters),
        tuple(parameter.name for parameter in crossing),
        {p.name: p.default for p in crossing if p.default is not inspect.Parameter.empty},
        client,
        **method._served,  # type: ignore[attr-defined]
    )


_BESIDE = threading.local()
"""`tensors`: those beside what this thread decodes."""


def _pack(value: Any) -> Payload:
    """The tensors in it stand in the typed part by their positions."""
    tensors: list[Tensor] = []

    def position(found: Any) -> int:
        if not isinstance(found, Tensor):
            raise DataError(f"a {type(found).__name__} cannot cross to another role")
        tensors.append(found.contiguous())
        return len(tensors) - 1

    return Payload(msgspec.msgpack.encode(value, enc_hook=position), tuple(tensors))


def _unpack(decoder: "msgspec.msgpack.Decoder[R]", what: str, payload: Payload) -> R:
    _BESIDE.tensors = payload.tensors
    try:
        return decoder.decode(payload.meta)
    except msgspec.DecodeError as error:  # also what does not fit the type
        raise DataError(f"{what} is not what it should be: {error}") from error
    finally:
        _BESIDE.tensors = ()


def _tensor(kind: type[Any], position: Any) -> Tensor:
    if kind is not Tensor or not isinstance(position, int) or not 0 <= position < len(_BESIDE.tensors):
        raise ValueError(f"there is no tensor {position!r}")
    found: Tensor = _BESIDE.tensors[position]
    return found
