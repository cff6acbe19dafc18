"""A process that has loaded what roles need, and forks one of them in milliseconds whenever it is asked to.

It is started by `processes.Processes`, which gives it its end of a pair of sockets. It has one thread (what it loads
starts none that does not survive a fork), so that its children begin in a known state. A request comes with a socket,
over which the child and the driver talk from then on. It tells the driver how each of its children ended, and ends with
the driver.
"""

import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator

PRELOADED = ("torch", "numpy", "msgspec", "pydantic", "omegaconf", "safetensors.torch", "zmq", "cloudpickle")
"""What every role needs and takes long to import. Not polars, which starts threads when it is imported."""
EXTRAS = ("fbgemm_gpu",)

FORK, KILL = b"f", b"k"
ENDED = struct.Struct("!ii")
"""Process and its status, as `os.waitpid` gives it."""
NUMBER = struct.Struct("!i")


def run(end: socket.socket) -> None:
    """Serves until the driver closes its end. Returns in the children only."""
    for name in PRELOADED:
        importlib.import_module(name)
    for name in EXTRAS:
        _import_if_there(name)
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to see to
    children: set[int] = set()
    for message, given in _messages(end, woken, children):
        if message[:1] == KILL:
            (pid,) = NUMBER.unpack(message[1:])
            if pid in children:  # it was not waited for yet, so that nobody else has its number
                os.kill(pid, signal.SIGKILL)
            continue
        pid = os.fork()
        if pid:
            children.add(pid)
            os.close(given)
            continue
        _forget_server(end, woken, waker)
        from shadowsync.runtime.child import live  # noqa: PLC0415 (only after the fork: it imports polars)

        live(socket.socket(fileno=given))


def _messages(end: socket.socket, woken: socket.socket, children: set[int]) -> Iterator[tuple[bytes, int]]:
    """What the driver asks for, each with the socket that came along; meanwhile children that end are told of."""
    while True:
        ready, _, _ = select.select([end, woken], [], [])
        if woken in ready:
            woken.recv(1 << 12)
            _tell_of_ended(end, children)
        if end in ready:
            message, given, _, _ = socket.recv_fds(end, 64, 1)
            if not message:
                os._exit(0)
            yield message, given[0] if given else -1


def _tell_of_ended(end: socket.socket, children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        children.discard(pid)
        try:
            end.send(ENDED.pack(pid, status))
        except OSError:
            os._exit(0)


def _forget_server(*ends: socket.socket) -> None:
    """A child has no part in what the server hears and says."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in ends:
        end.close()


def _import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # an extra that is missing, or does not fit this torch: whoever needs it says so
        sys.stderr.write(f"{name} is not loaded: {error}\n")
