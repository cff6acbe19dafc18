"""Roles as processes on this machine, forked from one that has loaded what they need."""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from shadowsync.errors import ConfigError, RunError
from shadowsync.memory.pages import memory_bytes
from shadowsync.memory.shared import can_share
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime import control
from shadowsync.runtime.child import MACHINE, Begin, Build, Built, Died
from shadowsync.runtime.fork_server import ENDED, FORK
from shadowsync.runtime.own_folder import make_folder, remove_sockets
from shadowsync.runtime.runtime import Builder, Endpoint, LaunchRequest, Machine, RoleProcess, Runtime

_LOG = logging.getLogger(__name__)
_PROGRAM = (
    "import json, socket, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from shadowsync.runtime.fork_server import run; run(socket.socket(fileno=int(sys.argv[1])))"
)
LOG = "roles.log"
"""Of the process that the others are forked from, and of those that have no role yet."""
STATUS_S = 1.0
"""How long the end of a process waits for the word how it ended."""
END_S = 5.0


class ForkServer:
    """The process that roles are forked from.

    Args:
        folder: where it logs to; roles log beside it.
    """

    def __init__(self, folder: str) -> None:
        self._end, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        self._changed = threading.Condition()
        path = json.dumps([str(entry) for entry in sys.path])
        # -P: what lies in the working directory must not be taken for a module of Python's before the path is set.
        # A session of its own: a signal to the group of the driver is the driver's to see to
        command = [sys.executable, "-P", "-c", _PROGRAM, str(its.fileno()), path]
        with its, Path(folder, LOG).open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._hear, name="fork server", daemon=True)
        self._thread.start()

    def fork(self) -> socket.socket:
        """Has a process forked; this end of the way to it.

        Raises:
            PeerLost: the server is gone.
        """
        mine, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(self._end, [FORK], [its.fileno()])
            except OSError as error:
                mine.close()
                raise PeerLost(f"the process that starts the others has ended: {error}") from error
        return mine

    def status(self, pid: int, timeout_s: float) -> int | None:
        """How a process ended, as `os.waitpid` gives it; None where that is not heard in time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._statuses, timeout_s)
            return self._statuses.get(pid)

    def close(self) -> None:
        """Ends it; its children end with their own ways to the driver."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._end.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self) -> None:
        with suppress(OSError):
            while data := self._end.recv(64):
                pid, status = ENDED.unpack(data)
                with self._changed:
                    self._statuses[pid] = status
                    self._changed.notify_all()


class ForkedRole(RoleProcess):
    """A role in a process of its own.

    Args:
        request: what was asked for.
        server: that it was forked from.
        end: of the way to it.
        folder: with the log of what had no role yet.
    """

    def __init__(self, request: LaunchRequest, server: ForkServer, end: socket.socket, folder: str) -> None:
        self.request = request
        self._server, self._end, self._folder = server, end, folder
        self._endpoint: Future[Endpoint] = Future()
        self._building: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Held while something is sent, which takes as long as a stopped process is stopped; `kill` ends it."""
        self._handle: int | None = None
        self._reason: str | None = None
        self._died: str | None = None
        self._thread = threading.Thread(target=self._hear, name=f"hears {request.role}", daemon=True)
        self._thread.start()

    def endpoint(self, timeout_s: float) -> Endpoint:
        try:
            return self._endpoint.result(timeout_s)
        except TimeoutError as error:
            raise PeerLost(f"{self.request.role} did not start within {timeout_s:g} s") from error

    def build(self, builder: Builder, spec: Any) -> "Future[None]":
        built: Future[None] = Future()
        with self._sending:
            with self._lock:
                if self._reason is not None:
                    built.set_exception(PeerLost(f"{self.request.role} ended: {self._reason}"))
                    return built
                self._building.append(built)
            try:
                control.send(self._end, Build(builder, spec))
            except OSError:
                pass  # whoever hears its end tells
            except control.Unsendable as error:  # a user's own model or script of failures
                self._building.pop()
                raise ConfigError(
                    f"what {self.request.role} is made from cannot be sent to another process: {error}"
                ) from error
        return built

    def ended(self) -> str | None:
        return self._reason

    def kill(self) -> None:
        with self._lock:
            if self._reason is None:
                self._died = self._died or "it was given up"
            if self._handle is not None:
                with suppress(OSError):  # it has ended
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # one that has not said who it is ends at that

    def join(self) -> None:
        """Waits for the end of a process that was killed."""
        self._thread.join(END_S)

    def begin(self, begin: Begin) -> None:
        """Tells the process who it is."""
        with suppress(OSError):
            control.send(self._end, begin)

    def _hear(self) -> None:
        try:
            while True:
                self._heard(control.receive(self._end))
        except EOFError:
            self._over()

    def _heard(self, message: Any) -> None:
        if isinstance(message, Endpoint):
            with self._lock:
                self._handle = _handle_of(message.pid, self._end)
            self._endpoint.set_result(message)
        elif isinstance(message, Died):
            self._died = self._died or message.reason
        elif isinstance(message, Built):
            built = self._building.popleft()
            if message.fault is None:
                built.set_result(None)
            else:
                built.set_exception(message.fault.error())

    def _over(self) -> None:
        reason = self._died
        if reason is None and self._endpoint.done():
            status = self._server.status(self._endpoint.result().pid, STATUS_S)
            reason = "its end is not known" if status is None else _in_words(status)
        with self._lock:
            self._reason = reason or f"it ended before it had begun{_last_words(self._folder)}"
            self._end.close()
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
        lost = PeerLost(f"{self.request.role} ended: {self._reason}")
        if not self._endpoint.done():
            self._endpoint.set_exception(lost)
        for built in self._building:
            built.set_exception(lost)


class Processes(Runtime):
    """The processes of one job on this machine.

    Args:
        cpus: what this machine offers; more than it has is no harm, since roles are only counted.
    """

    def __init__(self, cpus: float = 1.0) -> None:
        self.keys = JobKeys.make()
        self.shares_memory = can_share()
        self.job = f"shadowsync-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"
        self._cpus = max(float(os.cpu_count() or 1), cpus)
        self._folder = make_folder()
        self._server = ForkServer(self._folder)
        self._roles: list[ForkedRole] = []
        self._lock = threading.Lock()
        self._closed = False

    def machines(self) -> Sequence[Machine]:
        return [Machine(MACHINE, socket.gethostname(), self._cpus, memory_bytes() or 1 << 50)]

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        if named := [request for request in requests if request.resource is not None]:
            raise RunError(f"{named[0].role} needs the resource {named[0].resource}: only Ray's machines have such")

    def start(self, request: LaunchRequest) -> RoleProcess:
        with self._lock:
            if self._closed:
                raise PeerLost("the job has ended")
            try:
                end = self._server.fork()
            except PeerLost as error:
                _LOG.warning("%s%s; another one is started", error, _last_words(self._folder))
                self._server.close()
                self._server = ForkServer(self._folder)
                end = self._server.fork()
            role = ForkedRole(request, self._server, end, self._folder)
            self._roles.append(role)
        role.begin(Begin(self.job, request, self.keys, self._folder))
        return role

    def host(self) -> str:
        return self._folder

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for role in self._roles:
            role.kill()
        for role in self._roles:
            role.join()
        self._server.close()
        remove_sockets(self._folder)


def _handle_of(pid: int, end: socket.socket) -> int | None:
    """What ends this process and no other one, whatever becomes of its number; None if it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    with suppress(BlockingIOError):
        if not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # by now the number may be another's
            os.close(handle)
            return None
    return handle


def _last_words(folder: str) -> str:
    """What was last said by a process that had no role yet, for a message."""
    with suppress(OSError):
        lines = Path(folder, LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        if said := [line for line in lines if line.strip()]:
            return f": {said[-1].strip()[:300]}"
    return ""


def _in_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return f"its process was ended by {name}"
    return f"its process ended with status {os.waitstatus_to_exitcode(status)}"
