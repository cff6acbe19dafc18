"""Role processes as Ray actors: Ray places them, starts them and says when they die; tensors do not pass through it."""

import contextlib
import importlib
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from shadowsync.embedding.pages import keep_freed_memory
from shadowsync.errors import ConfigError, MissingExtra, RunError, ShadowSyncError
from shadowsync.runtime.host import RoleHost
from shadowsync.runtime.role_logging import log_to
from shadowsync.runtime.runtime import Builder, Machine, Order, Place, RoleProcess, Runtime
from shadowsync.runtime.wire.errors import Fault, PeerLost
from shadowsync.runtime.wire.keys import JobKeys

OBJECTS_BYTES = 96 << 20
"""Shared memory of a Ray of our own: specifications pass through it, tensors do not."""
PINNED = 0.001
"""Share of a machine's own resource (or of a custom one) that a role takes to be put there."""
ANSWER_S = 5.0
CALLS = 8
"""Calls that an actor runs at a time; one of them is the watch."""


class RoleActor:
    """What Ray runs: one role's process."""

    def __init__(self, job: str, order: Order, keys: JobKeys, folder: str | None) -> None:
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)  # workers are the parallelism
        keep_freed_memory()
        self._log = log_to(job, order.role)
        host = folder or _ray().util.get_node_ip_address()
        self._host = RoleHost(order.role, keys, host, order.threads, order.forget_s)

    def place(self) -> Place:
        """Where it is."""
        machine = _ray().get_runtime_context().get_node_id()
        return Place(self._host.address, machine, socket.gethostname(), os.getpid(), self._log)

    def build(self, builder: Builder, spec: Any) -> Fault | None:
        """Has a part made; what is wrong comes back as it would over the wire."""
        try:
            self._host.build(builder, spec)
        except ShadowSyncError as error:
            return Fault.of(error)
        return None

    def watch(self) -> None:
        """Never returns: whoever waits for it hears of the end of this process."""
        threading.Event().wait()


class RayRole(RoleProcess):
    """An actor."""

    def __init__(self, order: Order, actor: Any) -> None:
        self.order = order
        self._actor = actor
        self._watched = actor.watch.remote()
        self._killed = False

    def place(self, timeout_s: float) -> Place:
        ray = _ray()
        try:
            place: Place = ray.get(self._actor.place.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise PeerLost(f"{self.order.role} did not start within {timeout_s:g} s: is there room for it?") from error
        except ray.exceptions.RayError as error:
            raise PeerLost(f"{self.order.role} did not start: {_in_one_line(error)}") from error
        return place

    def build(self, builder: Builder, spec: Any) -> "Future[None]":
        built: Future[None] = Future()
        try:
            asked: Future[Any] = self._actor.build.remote(builder, spec).future()
        except TypeError as error:  # a user's own model or script of failures
            raise ConfigError(
                f"what {self.order.role} is made from cannot be sent to another process: {_in_one_line(error)}"
            ) from error
        asked.add_done_callback(lambda answered: self._pass_on(answered, built))
        return built

    def _pass_on(self, answered: "Future[Any]", built: "Future[None]") -> None:
        error = answered.exception()
        if error is not None:
            cause = getattr(error, "cause", None)
            what = f"{type(cause).__name__}: {cause}" if cause is not None else _in_one_line(error)
            kind = RunError if cause is not None else PeerLost
            built.set_exception(kind(f"{self.order.role} failed: {what}"))
        elif (fault := answered.result()) is not None:
            built.set_exception(fault.error())
        else:
            built.set_result(None)

    def ended(self) -> str | None:
        if self._killed:
            return "it was given up"
        ray = _ray()
        ready, _ = ray.wait([self._watched], timeout=0)
        if not ready:
            return None
        try:
            ray.get(self._watched)
        except ray.exceptions.RayError as error:
            return _in_one_line(error)
        return "it ended"

    def kill(self) -> None:
        self._killed = True
        ray = _ray()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor, no_restart=True)


class RayRuntime(Runtime):
    """The actors of one job, in a namespace of the job's name.

    Args:
        address: of the cluster to join; None starts a Ray of its own on this machine.
        cpus: what a Ray of its own offers; more than the machine has is no harm, since Ray only counts.
        resources: custom resources that it offers.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: the address is none.
        RunError: there is no cluster at it.
    """

    name: ClassVar[str] = "ray"

    def __init__(self, address: str | None, cpus: float = 1.0, resources: Mapping[str, float] | None = None) -> None:
        self.keys = JobKeys.make()
        self.job = f"shadowsync-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"
        ray = _ray()
        self._joined = ray.is_initialized()
        if not self._joined:
            _connect(address, self.job, {"cpus": max(os.cpu_count() or 1, math.ceil(cpus)), "resources": resources})
        self._folder = None if address or self._joined else tempfile.mkdtemp(prefix="shadowsync-")
        self._closed = False
        self._roles: list[RayRole] = []
        self._bundles: dict[tuple[str, str | None], int] = {}
        self._group: Any = None
        self._names: dict[str, int] = {}

    def machines(self) -> Sequence[Machine]:
        found = []
        for node in _ray().nodes():
            if node["Alive"]:
                offered = node["Resources"]
                custom = frozenset(name for name in offered if name not in ("CPU", "memory"))
                cpus, memory = offered.get("CPU", 0.0), int(offered.get("memory", 0))
                found.append(Machine(node["NodeID"], node["NodeManagerHostname"], cpus, memory, custom))
        return found

    def reserve(self, orders: Sequence[Order], timeout_s: float) -> None:
        ray = _ray()
        bundles = [self._needed(order) for order in orders]
        group = ray.util.placement_group(bundles, strategy="PACK", name=self.job)
        if not group.wait(timeout_s):
            ray.util.remove_placement_group(group)
            wanted = ", ".join(order.role for order in orders)
            raise RunError(f"the cluster did not give room for {wanted} within {timeout_s:g} s: is it in use?")
        self._group = group
        self._bundles = {(order.role, order.machine): index for index, order in enumerate(orders)}

    def start(self, order: Order) -> RoleProcess:
        if self._closed:  # a call would start another Ray
            raise PeerLost("the job has ended")
        ray = _ray()
        count = self._names[order.role] = self._names.get(order.role, -1) + 1
        name = f"{order.role}.{count}" if count else order.role
        options = {
            "name": name,
            "namespace": self.job,
            "max_concurrency": CALLS,
            "max_restarts": 0,
            "num_cpus": order.cpus,
            "resources": {} if order.resource is None else {order.resource: PINNED},
            "scheduling_strategy": self._strategy(order),
        }
        made_of = (self.job, order, self.keys, self._folder)
        self._roles.append(RayRole(order, ray.remote(RoleActor).options(**options).remote(*made_of)))
        return self._roles[-1]

    def _strategy(self, order: Order) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = self._bundles.get((order.role, order.machine))
        if bundle is not None:
            return strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        if order.machine is None:
            return "DEFAULT"
        return strategies.NodeAffinitySchedulingStrategy(order.machine, soft=False)

    def _needed(self, order: Order) -> dict[str, float]:
        needed = {"CPU": order.cpus} if order.cpus else {}
        if order.resource is not None:
            needed[order.resource] = PINNED
        if order.machine is not None:
            nodes = [node["NodeManagerAddress"] for node in _ray().nodes() if node["NodeID"] == order.machine]
            needed |= {f"node:{address}": PINNED for address in nodes}
        return needed

    def host(self) -> str:
        """An address, or on a Ray of our own a folder for Unix sockets: all roles are on this machine then."""
        address: str = self._folder or _ray().util.get_node_ip_address()
        return address

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for role in self._roles:
            role.kill()
        ray = _ray()
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(self._group)
        try:
            if not self._joined:
                ray.shutdown()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _connect(address: str | None, job: str, own: Mapping[str, Any]) -> None:
    options: dict[str, Any] = {"namespace": job, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": own["cpus"],
            "resources": dict(own["resources"] or {}),
            "include_dashboard": False,
            "object_store_memory": OBJECTS_BYTES,
            "_system_config": {"worker_niceness": 0},  # roles are the work itself; Ray would let all else go first
        }
    else:
        options["address"] = address
        _check_address(address)
    config = importlib.import_module("ray.job_config").JobConfig(metadata={"job_name": job})
    try:
        with _own_signals():
            _ray().init(job_config=config, **options)
    except (AssertionError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "a Ray of its own cannot be started" if address is None else f"there is no Ray cluster at {address}"
        raise RunError(f"{where}: {_in_one_line(error)}") from error


def _check_address(address: str) -> None:
    """Looks whether anybody listens at host:port: Ray itself would try for minutes.

    Raises:
        ConfigError: that is no address.
        RunError: nobody does.
    """
    if address == "auto":
        return  # for Ray to find
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address={address}: give host:port, or auto for the cluster of this machine")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"there is no Ray cluster at {address}: {error}") from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own in place of whatever was there for SIGTERM; it exits with the signal's number."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        if here and before is not None:
            signal.signal(signal.SIGTERM, before)


def _ray() -> Any:
    """Ray, imported late: it is an extra, and slow to import.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingExtra("Ray", "ray") from error


def _in_one_line(error: BaseException) -> str:
    """The first sentence, and the kind of exit where Ray tells it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next(
        (line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))), ""
    )
    return (cause or (lines[0] if lines else type(error).__name__)).split(". ")[0][:200]
