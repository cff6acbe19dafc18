"""A process that has loaded what roles need, and has one of them ready whenever it is asked to.

It is started by `processes.Processes`, which gives it its end of a pair of sockets. It has one thread (what it loads
starts none that does not survive a fork), so that its children begin in a known state. One child is always ready: it
has also loaded what starts threads, and waits to hear whose role it is. A request comes with a socket, over which that
child and the driver talk from then on. The server tells the driver how each of its children ended, and ends with it.
"""

import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys

PRELOADED = (
    *("torch", "numpy", "msgspec", "pydantic", "omegaconf", "safetensors.torch", "zmq", "cloudpickle"),
    "shadowsync.config",
)
"""What every role needs and takes long to import. Not polars, which starts threads when it is imported."""
EXTRAS = ("fbgemm_gpu",)
CHILD, PARTS = "shadowsync.runtime.child", "shadowsync.cluster.trainer"
"""What a child imports while it waits: what it will run, and what makes parts of roles (`get_ready` has all of that
loaded)."""

FORK = b"f"
ENDED = struct.Struct("!ii")
"""Process and its status, as `os.waitpid` gives it."""


def run(end: socket.socket) -> None:
    """Serves until the driver closes its end.

    Signals that mean the whole job are the driver's to see to: it has a checkpoint written, and roles end with it.
    Nothing of what is loaded is garbage, and it is not looked for: that takes half as long as importing does, and a
    child that looked would copy the memory it shares.
    """
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    for name in EXTRAS:
        try:
            importlib.import_module(name)
        except Exception as error:  # it is missing, or does not fit this torch: whoever needs it says so
            sys.stderr.write(f"{name} is not loaded: {error}\n")
    gc.freeze()
    _ForkServer(end).serve()


class _ForkServer:
    """The server; `end` is of the way to the driver."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.children: set[int] = set()  # that have not ended, as far as is known
        self._ready: socket.socket | None = None
        self._woken, self._waker = socket.socketpair()
        for one in (self._woken, self._waker):
            one.setblocking(False)

    def serve(self) -> None:
        """Does what the driver asks for, and tells of children that end meanwhile."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._make_ready()
        while True:
            ready, _, _ = select.select([self.end, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(1 << 12)
                self._tell_of_ended()
            if self.end in ready:
                message, given, _, _ = socket.recv_fds(self.end, 64, 1)
                if not message:
                    os._exit(0)
                self._hand_over(given[0])

    def _hand_over(self, handle: int) -> None:
        """The child that is ready becomes a role; another one gets ready."""
        for _ in range(2):  # the first one may have been killed while it waited
            try:
                assert self._ready is not None
                socket.send_fds(self._ready, [FORK], [handle])
                break
            except OSError:
                self._make_ready()
        os.close(handle)
        self._make_ready()

    def _make_ready(self) -> None:
        if self._ready is not None:
            self._ready.close()
        mine, its = socket.socketpair()
        pid = os.fork()
        if not pid:
            self._forget(mine)
            _wait_for_role(its)
        its.close()
        self.children.add(pid)
        self._ready = mine

    def _tell_of_ended(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self.children.discard(pid)
            try:
                self.end.send(ENDED.pack(pid, status))
            except OSError:
                os._exit(0)

    def _forget(self, mine: socket.socket) -> None:
        """A child has no part in what the server hears and says."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self.end, self._woken, self._waker, mine):
            one.close()


def _wait_for_role(way: socket.socket) -> None:
    """Gets ready, takes the way to the driver, and becomes the role that the driver says; never returns."""
    child = importlib.import_module(CHILD)
    importlib.import_module(PARTS).get_ready()
    gc.freeze()
    gc.enable()
    message, given, _, _ = socket.recv_fds(way, 1, 1)
    if not message:
        os._exit(0)  # nobody wants it any more
    way.close()
    child.live(socket.socket(fileno=given[0]))
