"""The inside of a role's process: a server on the wire whose service is the part that was built last."""

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shadowsync.memory.pages import keep_freed_memory
from shadowsync.rpc.client import Courier, CourierOptions, WireConnection
from shadowsync.rpc.clients import Limits
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.server import ServerOptions, WireServer
from shadowsync.rpc.service import Method
from shadowsync.rpc.sockets import is_folder
from shadowsync.runtime.role_logging import log_to
from shadowsync.runtime.runtime import Builder, Home, Part

_LOG = logging.getLogger(__name__)
CALL_S = 3600.0
"""Deadline of a role's calls. Who gives up a peer is the driver, which ends the wait by moving or ending the role."""
LONG_S = 60.0
"""A call that takes longer is told of: its peer lives, or the driver would have given it up, but may be stuck."""


LOOPBACK = "127.0.0.1"


def take_up(job: str, role: str, died: Callable[[str], None]) -> str:
    """Makes this process one of a role's; the path of its log.

    Args:
        job: name of the job.
        role: name of the role.
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


def waiting_for(peers: Iterable[tuple[str, WireConnection]]) -> str:
    """In words, what has had no answer for too long; empty for nothing.

    Args:
        peers: names and connections.
    """
    methods = [(name, connection.waiting(LONG_S)) for name, connection in peers]
    found = [f"{method} of {name}" for name, method in methods if method is not None]
    return f"waits for {', '.join(found)} for more than {LONG_S:g} s" if found else ""


class Switch:
    """Serves whichever part is in place (a `Service`)."""

    def __init__(self) -> None:
        self.part: Part | None = None

    @property
    def methods(self) -> Mapping[str, Method]:
        """Of the part in place."""
        return {} if self.part is None else self.part.methods

    def client_gone(self, client: str) -> None:
        """Passed on to the part."""
        if self.part is not None:
            self.part.client_gone(client)


class RoleHost:
    """One role's process from start to end.

    Args:
        role: its name.
        keys: of the job.
        host: address of this machine as the others see it, or a folder (see `ServerOptions`).
        threads: that answer requests.
        forget_s: silence after which a client is forgotten.
    """

    def __init__(self, role: str, keys: JobKeys, host: str, threads: int = 4, forget_s: float = 120.0) -> None:
        self._switch = Switch()
        courier = Courier(keys, CourierOptions(timeout_s=CALL_S))
        self._home = Home(role, courier, LOOPBACK if is_folder(host) else host)
        self._lock = threading.Lock()
        limits = Limits(forget_client_after_s=forget_s)
        self._server = WireServer(self._switch, keys, ServerOptions(host=host, threads=threads, limits=limits))
        self._server.start()

    @property
    def address(self) -> str:
        """On which the part is served."""
        return self._server.address

    def build(self, builder: Builder, spec: Any) -> None:
        """Ends the part in place and puts a new one there; meanwhile nothing is served."""
        with self._lock:
            self._end()
            self._switch.part = builder(spec, self._home)

    def vanish(self) -> None:
        """As `close`, but what was asked for gets no answer, not even an error, as if the process were killed."""
        self._server.silence()
        self.close()

    def close(self) -> None:
        """Ends the part and the server."""
        with self._lock:
            self._end()
        self._server.close()
        self._home.courier.close()

    def _end(self) -> None:
        before, self._switch.part = self._switch.part, None
        if before is not None:
            before.close()
