"""One role's process, from its fork to its end: a server on the wire whose service is the part that was built last."""

import contextlib
import gc
import importlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shadowsync.errors import ConfigError
from shadowsync.memory.pages import keep_freed_memory
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import JobKeys, known_error
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.served import NOTHING
from shadowsync.rpc.server import WireServer
from shadowsync.rpc.sockets import is_folder
from shadowsync.runtime import control
from shadowsync.runtime.runtime import CALL_S, LOOPBACK, Builder, Endpoint, LaunchRequest, ProcessContext

_LOG = logging.getLogger(__name__)
DIED = 70
"""Exit status of a process one of whose threads died."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class Built:
    """Answers a `Builder`: the fault is what was wrong, if anything was."""

    fault: Fault | None


@dataclass(frozen=True)
class Died:
    """The child cannot go on, and ends."""

    reason: str


def live(end: socket.socket) -> None:
    """Does what the driver says until that is gone; never returns."""
    try:
        _live(end)
    except EOFError:
        os._exit(0)
    except BaseException as error:
        _LOG.exception("the process fails")
        _tell(end, Died(f"{type(error).__name__}: {error}"))
    os._exit(DIED)


def _live(end: socket.socket) -> None:
    job, request, keys, machine, address = control.receive(end)  # as `processes.Host.start` sends it
    turn = threading.Lock()

    def died(reason: str) -> None:
        with turn:
            _tell(end, Died(reason))
        os._exit(DIED)

    log = take_up(job, request.role, died)
    host = RoleHost(request, keys, address)
    control.send(end, Endpoint(host.address, machine, socket.gethostname(), os.getpid(), log))
    while True:
        data = control.receive_bytes(end)
        built = Built(_fault(host, request.role, data))
        with turn:
            control.send(end, built)


def _fault(host: "RoleHost", role: str, data: bytes) -> Fault | None:
    try:
        builder = control.unpacked(data)
    except BaseException as error:  # a user's own model may come from a module that is not found here
        return Fault.of(
            ConfigError(
                f"what {role} is made from cannot be read in its process ({type(error).__name__}: {error}): put the "
                "module of your model where Python finds it, or define it in the script that starts the job"
            )
        )
    try:
        host.build(builder)
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        return Fault.of(known_error("build", error))
    return None


def _tell(end: socket.socket, died: Died) -> None:
    try:
        control.send(end, died)
    except OSError:
        _LOG.warning("the driver is gone, too")


def take_up(job: str, role: str, died: Callable[[str], None]) -> str:
    """Makes this process one of a role's; the path of its log.

    Args:
        died: called with the reason when a thread died without which the role would only seem to be alive; one that
            exits (`SystemExit`) wants to end.
    """
    importlib.import_module("torch").set_num_threads(1)  # workers are the parallelism
    keep_freed_memory()

    def thread_died(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit:
            return
        name = "a thread" if args.thread is None else args.thread.name
        _LOG.error("thread %s died", name, exc_info=args.exc_value)
        error = args.exc_value or args.exc_type()
        died(f"its thread {name} died of {type(error).__name__}: {error}")

    threading.excepthook = thread_died
    return log_to(job, role)


class RoleHost:
    """One role's process from start to end; it serves at `host` (see `WireServer`)."""

    def __init__(self, request: LaunchRequest, keys: JobKeys, host: str) -> None:
        connector = WireClient(keys, timeout_s=CALL_S)
        self._context = ProcessContext(request.role, connector, LOOPBACK if is_folder(host) else host)
        self._lock = threading.Lock()
        self._server = WireServer(NOTHING, keys, host, threads=request.threads, forget_client_after_s=request.forget_s)
        self._server.start()

    @property
    def address(self) -> str:
        return self._server.address

    def build(self, builder: Builder) -> None:
        """Ends the part in place and puts a new one there; meanwhile nothing is served."""
        with self._lock:
            if self._end():
                gc.collect()  # a part may refer to itself, and would keep memory mapped that is to be taken anew
            self._server.service = builder(self._context)

    def close(self) -> None:
        with self._lock:
            self._end()
        self._server.close()
        self._context.connector.close()

    def _end(self) -> bool:
        """Whether there was a part."""
        before, self._server.service = self._server.service, NOTHING
        before.close()
        return before is not NOTHING


def log_to(job: str, role: str) -> str:
    """Sends this process's log to a file named after job and role; its path.

    It lies beside what the process prints: on a cluster of Ray's in the folder that its dashboard shows.
    """
    path = folder_of_output() / f"{job}-{role}.log"
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger("shadowsync")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.info("%s of %s is process %d", role, job, os.getpid())
    return str(path)


def folder_of_output() -> Path:
    """Where this process prints to, if that is a file; else a new folder that only this user may enter."""
    with contextlib.suppress(OSError):
        printed = Path("/proc/self/fd/1").readlink()
        if printed.is_file():
            return printed.parent
    return Path(tempfile.mkdtemp(prefix="shadowsync-"))
