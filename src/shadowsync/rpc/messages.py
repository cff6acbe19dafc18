"""What crosses the wire: one header frame in msgpack, then one raw frame per tensor (several where it is long).

A message of calls holds one or several, and so does one of answers: what goes to the same peer travels together.
Without any, both are signs of life.

A client opens with `Hello` and sends calls only once it was welcomed. A session is a random number that the server
gives out, so that a message caught earlier means nothing to a server that has forgotten its client, or to another one.
Every server draws a random `incarnation`: it tells a client whether the server that does not know its session any
more has forgotten it or is a replacement that never knew it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from shadowsync.errors import RunError
from shadowsync.rpc.connection import Payload
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.tensors import Malformed, Spec, bytes_of, frames_of, spec_of

META_BYTES = 1 << 20
"""Longest typed part of a message."""
HEADER_BYTES = META_BYTES + (1 << 19)
"""Longest header that is looked at: the typed part, and what it says of the tensors."""
MAX_TENSOR_BYTES = 1 << 30
"""Longest tensor that is sent."""
MAX_TENSORS = 1024
"""Most tensors of one message."""
MAX_FRAMES = 1 << 14
"""Most frames behind a header; a long tensor has several."""

Frames: TypeAlias = list[Any]
"""A message ready to be sent: its header and the memory of its tensors."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Opens a connection, or takes up the client's session again over a new one."""

    client: Annotated[str, msgspec.Meta(min_length=32, max_length=32, pattern="^[0-9a-f]*$")]


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request; `number` ascends from 1 for one client, and is the same when it is sent again."""

    number: _Number
    method: str
    meta: bytes
    tensors: tuple[Spec, ...]


class Calls(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Requests, to be run in their order; behind the header the frames of each, in the same order. `low` is the lowest
    number whose answer the client still wants; answers below it need not be kept."""

    session: _Number
    low: _Number
    calls: tuple[Call, ...] = ()


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The client will not come back."""

    session: _Number


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Answers `Hello`."""

    session: int
    incarnation: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answers a `Call`, `served_s` after it was there, or says what went wrong."""

    number: int
    meta: bytes = b""
    tensors: tuple[Spec, ...] = ()
    served_s: float = 0.0
    fault: Fault | None = None


class Answers(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answers to some of the calls that came, with the frames of each behind."""

    answers: tuple[Answer, ...] = ()


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answers `Calls` of a session that the server does not know on this connection."""

    session: int


FromClient: TypeAlias = Hello | Calls | Bye
FromServer: TypeAlias = Welcome | Answers | Unknown
FROM_CLIENT: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
FROM_SERVER: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)

encode = msgspec.msgpack.Encoder().encode
H = TypeVar("H")


def pack(payload: Payload) -> tuple[tuple[Spec, ...], Frames]:
    """What a header says of the tensors, and their own memory; none is copied that is contiguous.

    Raises:
        RunError: a tensor or the typed part is too long, there are too many tensors, or a type cannot cross.
    """
    tensors = payload.tensors
    if len(tensors) > MAX_TENSORS:
        raise RunError(f"a message has {len(tensors)} tensors, and at most {MAX_TENSORS} are allowed")
    if len(payload.meta) > META_BYTES:
        raise RunError(f"a typed part has {len(payload.meta)} bytes, and at most {META_BYTES} are allowed on the wire")
    memory = [bytes_of(tensor) for tensor in tensors]
    if (longest := max(map(len, memory), default=0)) > MAX_TENSOR_BYTES:
        raise RunError(f"a tensor has {longest} bytes, and at most {MAX_TENSOR_BYTES} are allowed on the wire")
    return tuple(map(spec_of, tensors)), [frame for tensor in memory for frame in frames_of(tensor)]


def header_of(frames: Sequence[Any], decoder: "msgspec.msgpack.Decoder[H]") -> H:
    """The header of a message, given its frames without a routing id.

    Raises:
        Malformed: it is none, is too long or has too many frames.
    """
    if not 0 < len(frames) <= MAX_FRAMES + 1:
        raise Malformed(f"{len(frames)} frames")
    header = memoryview(frames[0])
    if header.nbytes > HEADER_BYTES:
        raise Malformed(f"a header of {header.nbytes} bytes")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from error
