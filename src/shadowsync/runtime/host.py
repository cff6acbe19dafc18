"""The inside of a role's process: a server on the wire whose service is the part that was built last."""

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from shadowsync.memory.pages import keep_freed_memory
from shadowsync.rpc.client import ClientOptions, WireClient
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.server import ServerOptions, WireServer
from shadowsync.rpc.sockets import is_folder
from shadowsync.runtime.role_logging import log_to
from shadowsync.runtime.runtime import CALL_S, LOOPBACK, Builder, ProcessContext, Switch

_LOG = logging.getLogger(__name__)


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
        connector = WireClient(keys, ClientOptions(timeout_s=CALL_S))
        self._context = ProcessContext(role, connector, LOOPBACK if is_folder(host) else host)
        self._lock = threading.Lock()
        options = ServerOptions(host=host, threads=threads, forget_client_after_s=forget_s)
        self._server = WireServer(self._switch, keys, options)
        self._server.start()

    @property
    def address(self) -> str:
        """On which the part is served."""
        return self._server.address

    def build(self, builder: Builder, spec: Any) -> None:
        """Ends the part in place and puts a new one there; meanwhile nothing is served."""
        with self._lock:
            self._end()
            self._switch.part = builder(spec, self._context)

    def vanish(self) -> None:
        """As `close`, but what was asked for gets no answer, not even an error, as if the process were killed."""
        self._server.silence()
        self.close()

    def close(self) -> None:
        """Ends the part and the server."""
        with self._lock:
            self._end()
        self._server.close()
        self._context.connector.close()

    def _end(self) -> None:
        before, self._switch.part = self._switch.part, None
        if before is not None:
            before.close()
