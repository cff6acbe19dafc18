"""Role processes as Ray actors: Ray places them, starts them and says when they die; tensors do not pass through it."""

import contextlib
import importlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from shadowsync.errors import ConfigError, MissingExtra, RunError
from shadowsync.memory.shared import can_share
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import Fault, PeerLost
from shadowsync.rpc.service import known_error
from shadowsync.runtime.host import RoleHost, take_up
from shadowsync.runtime.own_folder import make_folder, remove_sockets
from shadowsync.runtime.runtime import Builder, Endpoint, LaunchRequest, Machine, RoleProcess, Runtime

_LOG = logging.getLogger(__name__)
OBJECTS_BYTES = 96 << 20
"""Shared memory of a Ray of our own: specifications pass through it, tensors do not."""
PINNED = 0.001
"""Share of a machine's own resource (or of a custom one) that a role takes to be put there."""
KNOWN_RAY = "ray[default]>=2.56,<2.61"
"""Versions whose inside is what is used here."""
ANSWER_S = 5.0
RAY_FOLDER = "ray"
CALLS = 8
"""Calls that an actor runs at a time; one of them is the watch."""


class RoleActor:
    """What Ray runs: one role's process."""

    def __init__(self, job: str, request: LaunchRequest, keys: JobKeys, folder: str | None) -> None:
        self._ended: Future[str] = Future()
        self._log = take_up(job, request.role, self._died)
        host = folder or _ray().util.get_node_ip_address()
        self._host = RoleHost(request.role, keys, host, request.threads, request.forget_s)

    def endpoint(self) -> Endpoint:
        """Where it is."""
        machine = _ray().get_runtime_context().get_node_id()
        return Endpoint(self._host.address, machine, socket.gethostname(), os.getpid(), self._log)

    def build(self, builder: Builder, spec: Any) -> Fault | None:
        """Has a part made; what is wrong comes back as it would over the wire."""
        try:
            self._host.build(builder, spec)
        except BaseException as error:  # a panic of a library written in Rust is no Exception, and Ray would not see it
            return Fault.of(known_error("build", error))
        return None

    def watch(self) -> str:
        """Returns when this process cannot go on, and says why; whoever waits for it hears of its end, too."""
        return self._ended.result()

    def _died(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):  # only the first one counts
            self._ended.set_result(reason)


class RayRole(RoleProcess):
    """An actor."""

    def __init__(self, request: LaunchRequest, actor: Any) -> None:
        self.request = request
        self._actor = actor
        self._watched = actor.watch.remote()
        self._killed = False

    def endpoint(self, timeout_s: float) -> Endpoint:
        ray = _ray()
        try:
            endpoint: Endpoint = ray.get(self._actor.endpoint.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise PeerLost(
                f"{self.request.role} did not start within {timeout_s:g} s: is there room for it?"
            ) from error
        except ray.exceptions.RayError as error:
            raise PeerLost(f"{self.request.role} did not start: {_in_one_line(error)}") from error
        return endpoint

    def build(self, builder: Builder, spec: Any) -> "Future[None]":
        built: Future[None] = Future()
        try:
            asked: Future[Any] = self._actor.build.remote(builder, spec).future()
        except TypeError as error:  # a user's own model or script of failures
            raise ConfigError(
                f"what {self.request.role} is made from cannot be sent to another process: {_in_one_line(error)}"
            ) from error
        asked.add_done_callback(lambda answered: self._pass_on(answered, built))
        return built

    def _pass_on(self, answered: "Future[Any]", built: "Future[None]") -> None:
        error = answered.exception()
        if error is not None:
            cause = getattr(error, "cause", None)
            what = _said(cause) if cause is not None else _in_one_line(error)
            kind = RunError if cause is not None else PeerLost
            built.set_exception(kind(f"{self.request.role} failed: {what}"))
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
            reason: str = ray.get(self._watched)
        except ray.exceptions.RayError as error:
            return _in_one_line(error)
        return reason

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

    def __init__(self, address: str | None, cpus: float = 1.0, resources: Mapping[str, float] | None = None) -> None:
        self.keys = JobKeys.make()
        self.job = f"shadowsync-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"
        ray = _ray()
        self._joined = ray.is_initialized()
        self._folder = None if address or self._joined else make_folder()
        self.shares_memory = self._folder is not None and can_share()
        self._closed = False
        if self._folder is not None:
            own_cpus = max(os.cpu_count() or 1, math.ceil(cpus))
            _start_own(self.job, self._folder, own_cpus, dict(resources or {}))
        elif not self._joined:
            _join(str(address), self.job)
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

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        ray = _ray()
        bundles = [self._needed(request) for request in requests]
        group = ray.util.placement_group(bundles, strategy="PACK", name=self.job)
        if not group.wait(timeout_s):
            ray.util.remove_placement_group(group)
            wanted = ", ".join(request.role for request in requests)
            raise RunError(f"the cluster did not give room for {wanted} within {timeout_s:g} s: is it in use?")
        self._group = group
        self._bundles = {(request.role, request.machine): index for index, request in enumerate(requests)}

    def start(self, request: LaunchRequest) -> RoleProcess:
        if self._closed:  # a call would start another Ray
            raise PeerLost("the job has ended")
        ray = _ray()
        count = self._names[request.role] = self._names.get(request.role, -1) + 1
        name = f"{request.role}.{count}" if count else request.role
        options = {
            "name": name,
            "namespace": self.job,
            "max_concurrency": CALLS,
            "max_restarts": 0,
            "num_cpus": request.cpus,
            "resources": {} if request.resource is None else {request.resource: PINNED},
            "scheduling_strategy": self._strategy(request),
        }
        made_of = (self.job, request, self.keys, self._folder)
        self._roles.append(RayRole(request, ray.remote(RoleActor).options(**options).remote(*made_of)))
        return self._roles[-1]

    def _strategy(self, request: LaunchRequest) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = self._bundles.get((request.role, request.machine))
        if bundle is not None:
            return strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        if request.machine is None:
            return "DEFAULT"
        return strategies.NodeAffinitySchedulingStrategy(request.machine, soft=False)

    def _needed(self, request: LaunchRequest) -> dict[str, float]:
        needed = {"CPU": request.cpus} if request.cpus else {}
        if request.resource is not None:
            needed[request.resource] = PINNED
        if request.machine is not None:
            nodes = [node["NodeManagerAddress"] for node in _ray().nodes() if node["NodeID"] == request.machine]
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
                _forget_token()
                _leave_logs(self._folder)


def _leave_logs(folder: str) -> None:
    """Removes everything of a Ray that has ended but the logs of its roles."""
    remove_sockets(folder)
    for path in Path(folder, RAY_FOLDER).glob("session_*/*"):
        if path.is_dir() and path.name != "logs":
            shutil.rmtree(path, ignore_errors=True)


def _start_own(job: str, folder: str, cpus: int, resources: Mapping[str, float]) -> None:
    """Starts a Ray that only this user reaches: it listens on loopback, asks for a token made for it, and its files
    lie below `folder`."""
    shared = Path(folder, RAY_FOLDER)  # Ray lets everybody into its own folder, so that one lies within ours
    shared.mkdir()
    options = {
        "address": "local",
        "num_cpus": cpus,
        "resources": resources,
        "include_dashboard": False,
        "object_store_memory": OBJECTS_BYTES,
        "_temp_dir": str(shared),
        "_system_config": {"worker_niceness": 0},  # roles are the work itself; Ray would let all else go first
    }
    try:
        with _new_token(), _loopback_only():
            _init(job, options, "a Ray of its own cannot be started")
    except BaseException:
        _forget_token()
        raise


def _join(address: str, job: str) -> None:
    _check_address(address)
    _init(job, {"address": address}, f"there is no Ray cluster at {address}")


def _init(job: str, options: Mapping[str, Any], failure: str) -> None:
    config = importlib.import_module("ray.job_config").JobConfig(metadata={"job_name": job})
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        with _own_signals():
            _ray().init(job_config=config, namespace=job, **quiet, **options)
    except (AssertionError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise RunError(f"{failure}: {_in_one_line(error)}") from error


@contextlib.contextmanager
def _new_token() -> Iterator[None]:
    """Ray takes its token from the environment only; the processes that it starts meanwhile inherit it."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        _forget_token()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _forget_token() -> None:
    """Has Ray look at the environment again, which it does once in a process otherwise."""
    _inside_ray("ray._raylet", "Config").initialize("")
    _inside_ray("ray._raylet", "AuthenticationTokenLoader").instance().reset_cache()


def _inside_ray(module: str, name: str) -> Any:
    """A part of Ray that has no public name, without which a Ray of one's own would be open to others.

    Raises:
        RunError: this version of Ray does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"Ray {_ray().__version__} has no {module}.{name}, without which a Ray of the job's own would be open to "
            f"others: install one that has it (pip install '{KNOWN_RAY}'), or join a cluster with cluster.address"
        ) from error


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray's servers listen on loopback where it takes its node for a lone one, as it does on macOS and Windows; there
    is no option for that, and an address of loopback that is given it replaces by another."""
    before = _inside_ray("ray._private.ray_constants", "ENABLE_RAY_CLUSTER")
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


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


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_one_line(error: BaseException) -> str:
    """The first sentence, and the kind of exit where Ray tells it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next(
        (line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))), ""
    )
    return (cause or (lines[0] if lines else type(error).__name__)).split(". ")[0][:200]
