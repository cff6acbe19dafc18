"""One role's process on this machine, from its fork to its end."""

import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from shadowsync.rpc.errors import Fault
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.service import known_error
from shadowsync.runtime import control
from shadowsync.runtime.host import RoleHost, take_up
from shadowsync.runtime.runtime import Builder, Order, Place

_LOG = logging.getLogger(__name__)
DIED = 70
"""Exit status of a process one of whose threads died."""


@dataclass(frozen=True)
class Begin:
    """The first message to a child: its role, and where it serves (see `RoleHost`)."""

    job: str
    order: Order
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

    log = take_up(begin.job, begin.order.role, died)
    host = RoleHost(begin.order.role, begin.keys, begin.folder, begin.order.threads, begin.order.forget_s)
    control.send(end, Place(host.address, MACHINE, socket.gethostname(), os.getpid(), log))
    while True:
        build = control.receive(end)
        built = Built(_fault(host, build))
        with turn:
            control.send(end, built)


def _fault(host: RoleHost, build: Build) -> Fault | None:
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
