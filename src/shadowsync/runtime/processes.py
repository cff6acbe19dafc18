"""Roles as processes of a machine, forked from one that has loaded what they need, and the memory that they share."""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shadowsync.errors import ConfigError, RunError
from shadowsync.memory.pages import memory_bytes
from shadowsync.memory.shared import FileBeside, SharedMemory, can_share
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime import control
from shadowsync.runtime.child import Built, Died
from shadowsync.runtime.fork_server import ENDED, FORK
from shadowsync.runtime.runtime import Builder, Endpoint, HeldMemory, LaunchRequest, Machine, RoleProcess, Runtime

_LOG = logging.getLogger(__name__)
_PROGRAM = (
    "import json, socket, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from shadowsync.runtime.fork_server import run; run(socket.socket(fileno=int(sys.argv[1])))"
)
HERE = "here"
"""Name of the only machine there is."""
USUAL_LENGTH = 15
"""Longest path of a folder for temporary files below which the paths of sockets are not too long."""
STATUS_S = 1.0
"""How long the end of a process waits for the word how it ended."""
END_S = 5.0


class ForkServer:
    """The process that roles are forked from.

    Args:
        log: of it, and of those that have no role yet; roles log beside it.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._end, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        self._changed = threading.Condition()
        path = json.dumps([str(entry) for entry in sys.path])
        # -P: what lies in the working directory must not be taken for a module of Python's before the path is set.
        # A session of its own: a signal to the group of the driver is the driver's to see to
        command = [sys.executable, "-P", "-c", _PROGRAM, str(its.fileno()), path]
        with its, log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
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

    def last_words(self) -> str:
        """What was last said by it or a process that had no role yet, for a message."""
        with suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            if said := [line for line in lines if line.strip()]:
                return f": {said[-1].strip()[:300]}"
        return ""

    def close(self) -> None:
        """Ends it; its children end with their own ways to whoever started them."""
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
    """A role in a process of its own; `end` is this end of the way to it, `over` is called once it has ended."""

    def __init__(
        self, request: LaunchRequest, server: ForkServer, end: socket.socket, over: Callable[[], None]
    ) -> None:
        self.request = request
        self._server, self._end, self._told = server, end, over
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

    def build(self, builder: Builder) -> "Future[None]":
        return self.build_from(packed_builder(self.request.role, builder))

    def build_from(self, data: bytes) -> "Future[None]":
        """As `build`, of what `packed_builder` made."""
        built: Future[None] = Future()
        with self._sending:
            with self._lock:
                if self._reason is not None:
                    built.set_exception(PeerLost(f"{self.request.role} ended: {self._reason}"))
                    return built
                self._building.append(built)
            with suppress(OSError):  # whoever hears its end tells
                control.send_bytes(self._end, data)
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
        self._thread.join(END_S)

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
            self._reason = reason or f"it ended before it had begun{self._server.last_words()}"
            self._end.close()
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
        lost = PeerLost(f"{self.request.role} ended: {self._reason}")
        if not self._endpoint.done():
            self._endpoint.set_exception(lost)
        for built in self._building:
            built.set_exception(lost)
        self._told()


class Host:
    """The processes of a job on this machine, and the memory that they have in common.

    Args:
        machine: what the job calls this machine.
        address: where roles serve, see `WireServer`.
        over: called when a process has ended.
    """

    def __init__(
        self, job: str, keys: JobKeys, machine: str, address: str, logs: Path, over: Callable[[], None] = lambda: None
    ) -> None:
        self._job, self._keys, self._machine, self._address, self._over = job, keys, machine, address, over
        self._log = logs / f"{job}-roles.log"
        self._server = ForkServer(self._log)
        self._roles: list[ForkedRole] = []
        self._memory: dict[str, SharedMemory] = {}
        self._lock = threading.Lock()
        self._closed = False

    def start(self, request: LaunchRequest) -> ForkedRole:
        with self._lock:
            if self._closed:
                raise PeerLost("the job has ended")
            try:
                end = self._server.fork()
            except PeerLost as error:
                _LOG.warning("%s%s; another one is started", error, self._server.last_words())
                self._server.close()
                self._server = ForkServer(self._log)
                end = self._server.fork()
            role = ForkedRole(request, self._server, end, self._over)
            self._roles.append(role)
        with suppress(OSError):  # whoever hears its end tells
            control.send(end, (self._job, request, self._keys, self._machine, self._address))
        return role

    def create_memory(self, size: int, what: str, file: FileBeside | None = None) -> str:
        """As `Runtime.create_memory`; its path."""
        made = SharedMemory.create(size, what, file)
        self._memory[made.path] = made
        return made.path

    def read_memory(self, path: str) -> bytes:
        """What stands in it now; raises `PeerLost` if it was let go of."""
        if (held := self._memory.get(path)) is None:
            raise PeerLost("that memory is there no more")
        return held.read()

    def release_memory(self, path: str) -> None:
        """Nobody here holds it any more, but who has opened it."""
        if (held := self._memory.pop(path, None)) is not None:
            held.close()

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
        for path in list(self._memory):
            self.release_memory(path)


class Processes(Runtime):
    """The processes of one job on this machine.

    Args:
        cpus: what this machine offers; more than it has is no harm, since roles are only counted.
    """

    def __init__(self, cpus: float = 1.0) -> None:
        self.keys = JobKeys.make()
        self.shares_memory = can_share()
        self.job = job_name()
        self._cpus = max(float(os.cpu_count() or 1), cpus)
        self._folder = make_folder()
        self._host = Host(self.job, self.keys, HERE, self._folder, Path(self._folder))

    def machines(self) -> Sequence[Machine]:
        return [Machine(HERE, socket.gethostname(), self._cpus, memory_bytes() or 1 << 50)]

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        if named := [request for request in requests if request.resource is not None]:
            raise RunError(f"{named[0].role} needs the resource {named[0].resource}: only Ray's machines have such")

    def start(self, request: LaunchRequest) -> RoleProcess:
        return self._host.start(request)

    def host(self) -> str:
        return self._folder

    def create_memory(self, machine: str, size: int, what: str, file: FileBeside | None = None) -> HeldMemory:
        host, path = self._host, self._host.create_memory(size, what, file)
        close, read = partial(host.release_memory, path), partial(host.read_memory, path)
        return HeldMemory(machine, path, close, lambda: True, read)

    def close(self) -> None:
        self._host.close()
        remove_sockets(self._folder)


def job_name() -> str:
    """For people, and apart from those of other jobs."""
    return f"shadowsync-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"


def make_folder() -> str:
    """A new folder that only this user may enter, for sockets and logs of a job whose roles are all on this machine.

    The path of a Unix socket has room for 103 bytes, and those of Ray's take 88 behind the place of this folder.
    """
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="shadowsync-", dir=usual if len(usual) <= USUAL_LENGTH else "/tmp")  # noqa: S108


def remove_sockets(folder: str) -> None:
    """Removes the sockets that processes have left which were killed."""
    for path in Path(folder).glob("*"):
        if path.is_socket():
            path.unlink(missing_ok=True)


def packed_builder(role: str, builder: Builder) -> bytes:
    """As it crosses to a role's process.

    Raises:
        ConfigError: it cannot cross: a user's own model or script of failures.
    """
    try:
        return control.packed(builder)
    except control.Unsendable as error:
        raise ConfigError(f"what {role} is made from cannot be sent to another process: {error}") from error


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


def _in_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return f"its process was ended by {name}"
    return f"its process ended with status {os.waitstatus_to_exitcode(status)}"
