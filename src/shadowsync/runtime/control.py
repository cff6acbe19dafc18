"""Messages between the driver and a process that it has started, over a pair of sockets that nobody else has.

They hold classes and functions, a user's own model among them, so they are pickled: both ends are this user's own
processes, and there is no way for anybody else to get at the sockets.
"""

import pickle
import socket
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

_LENGTH = 8


class Unsendable(Exception):
    """What is to be sent holds something that cannot cross to another process."""


def send(end: socket.socket, message: Any) -> None:
    """Sends any object; what stands in `__main__` or in a notebook goes along as a whole.

    Raises:
        OSError: the other end is closed.
        Unsendable: nothing was sent.
    """
    send_bytes(end, packed(message))


def send_bytes(end: socket.socket, data: bytes) -> None:
    """Sends what `packed` made; raises as `send`."""
    end.sendall(len(data).to_bytes(_LENGTH, "big"))
    end.sendall(data)


def packed(message: Any) -> bytes:
    """What crosses for it; raises `Unsendable`."""
    try:
        data: bytes = cloudpickle.dumps(message)
    except Exception as error:  # whatever an object raises that does not want to be pickled
        raise Unsendable(str(error)) from error
    return data


def receive(end: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other end is closed.
    """
    return unpacked(receive_bytes(end))


def receive_bytes(end: socket.socket) -> bytes:
    """The next message as it crossed; raises as `receive`."""
    return _exactly(end, int.from_bytes(_exactly(end, _LENGTH), "big"))


def unpacked(data: bytes) -> Any:
    """The inverse of `packed`; raises whatever the objects in it raise."""
    return pickle.loads(data)  # noqa: S301 (see above)


def _exactly(end: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = end.recv(min(count - len(data), 1 << 20))
        except OSError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)
