"""One role's process on this machine, from its fork to its end."""

import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from shadowsync.errors import ConfigError
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.service import known_error
from shadowsync.runtime import control
from shadowsync.runtime.host import RoleHost, take_up
from shadowsync.runtime.runtime import Builder, Endpoint, LaunchRequest

_LOG = logging.getLogger(__name__)
DIED = 70
"""Exit status of a process one of whose threads died."""


@dataclass(frozen=True)
class Begin:
    """The first message to a child: its role, and where it serves (see `RoleHost`)."""

    job: str
    request: LaunchRequest
    keys: JobKeys
    folder: str


@dataclass(frozen=True)
class Build:
    """Asks for a part."""

    builder: Builder
    spec: Any


@dataclass(frozen=True)
class Built:
    """Answers `Build`: the fault is what was wrong, if anything was."""

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
    begin = control.receive(end)
    assert isinstance(begin, Begin)
    turn = threading.Lock()

    def died(reason: str) -> None:
        with turn:
            _tell(end, Died(reason))
        os._exit(DIED)

    log = take_up(begin.job, begin.request.role, died)
    host = RoleHost(begin.request.role, begin.keys, begin.folder, begin.request.threads, begin.request.forget_s)
    control.send(end, Endpoint(host.address, MACHINE, socket.gethostname(), os.getpid(), log))
    while True:
        data = control.receive_bytes(end)
        built = Built(_fault(host, begin.request.role, data))
        with turn:
            control.send(end, built)


def _fault(host: RoleHost, role: str, data: bytes) -> Fault | None:
    try:
        build = control.unpacked(data)
    except BaseException as error:  # a user's own model may come from a module that is not found here
        return Fault.of(
            ConfigError(
                f"what {role} is made from cannot be read in its process ({type(error).__name__}: {error}): put the "
                "module of your model where Python finds it, or define it in the script that starts the job"
            )
        )
    try:
        host.build(build.builder, build.spec)
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        return Fault.of(known_error("build", error))
    return None


def _tell(end: socket.socket, died: Died) -> None:
    try:
        control.send(end, died)
    except OSError:
        _LOG.warning("the driver is gone, too")


MACHINE = "here"
"""Name of the only machine there is."""
