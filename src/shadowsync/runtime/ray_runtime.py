"""Hosts on a Ray cluster: one actor on each machine starts and watches the job's processes there; Ray places the actors
and says when a machine is gone. Tensors do not pass through it."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shadowsync.errors import ConfigError, MissingExtra, RunError
from shadowsync.memory.shared import FileBeside, can_share
from shadowsync.rpc.connection import JobKeys, known_error
from shadowsync.rpc.errors import Fault, PeerLost
from shadowsync.runtime.child import folder_of_output
from shadowsync.runtime.processes import ForkedRole, Host, job_name, make_folder, packed_builder, remove_sockets
from shadowsync.runtime.runtime import Builder, Endpoint, HeldMemory, LaunchRequest, Machine, RoleProcess, Runtime

_LOG = logging.getLogger(__name__)
OBJECTS_BYTES = 96 << 20
"""Shared memory of a Ray of our own: specifications pass through it, tensors do not."""
PINNED = 0.001
"""Share of a machine's own resource (or of a custom one) that a role takes to be put there."""
KNOWN_RAY = "ray[default]>=2.56,<2.61"
"""Versions whose inside is what is used here."""
ANSWER_S = 5.0
START_S = 120.0
PING_S = 10.0
READ_S = 2.0
REFUSED_S = 0.5
PROBE_S = 1.0
"""Without an answer for so long, somebody looks whether there is a Ray at all on that machine."""
FILLED_PER_S = 100 << 20
"""Bytes of new memory that a machine gives in a second, at least."""
AGAIN_S = 0.5
DOUBT_S = 30.0
"""Ray may take as long to say that a machine is gone, all roles of which are."""
RAY_FOLDER = "ray"
CALLS = 128
"""Calls that a host's actor runs at a time: one watches, and each role may be starting or building its part."""

T = TypeVar("T")


class HostActor:
    """What Ray runs on a machine. What is wrong comes back as it would over the wire."""

    def __init__(self, job: str, keys: JobKeys, machine: str, folder: str | None) -> None:
        address = folder or _ray().util.get_node_ip_address()
        self._changed = threading.Condition()
        self._roles: dict[int, ForkedRole] = {}
        self._killed: set[int] = set()
        self._host = Host(job, keys, machine, address, folder_of_output(), self._wake)

    def start(self, number: int, request: LaunchRequest, timeout_s: float) -> Endpoint | Fault:
        """Starts a process, which has that number from now on, and waits until it is there."""

        def started() -> Endpoint:
            self._roles[number] = role = self._host.start(request)
            if number in self._killed:
                role.kill()
            return role.endpoint(timeout_s)

        return _or_fault(started)

    def build(self, number: int, data: bytes) -> Fault | None:
        """Has a part made, as `ForkedRole.build_from`."""
        return _or_fault(lambda: self._roles[number].build_from(data).result())

    def kill(self, number: int) -> None:
        """Ends a process, also one that is only about to start."""
        self._killed.add(number)
        if number in self._roles:
            self._roles[number].kill()

    def ended(self, known: int) -> dict[int, str]:
        """Those that have ended and why, as soon as they are more than that."""
        found: dict[int, str] = {}

        def more() -> bool:
            found.update((n, why) for n, role in list(self._roles.items()) if (why := role.ended()) is not None)
            return len(found) > known

        with self._changed:
            self._changed.wait_for(more)
        return found

    def create_memory(self, size: int, what: str, file: FileBeside | None = None) -> str | Fault:
        return _or_fault(lambda: self._host.create_memory(size, what, file))

    def read_memory(self, path: str) -> bytes | Fault:
        return _or_fault(lambda: self._host.read_memory(path))

    def release_memory(self, path: str) -> None:
        self._host.release_memory(path)

    def answers(self) -> None:
        """It does."""

    def close(self) -> None:
        self._host.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def nobody_listens(at: tuple[str, int]) -> bool:
    """The system of a machine says so itself; of one that does not answer nothing is known."""
    try:
        socket.create_connection(at, REFUSED_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _place_of(node: Mapping[str, Any]) -> tuple[str, int]:
    """Where Ray's own process on a machine listens."""
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _gone(nodes: Sequence[Mapping[str, Any]]) -> set[str]:
    """The nodes that Ray counts as alive, as it does for a quarter of a minute, and whose machines know better."""
    if not nodes:
        return set()
    with ThreadPoolExecutor(min(len(nodes), CALLS)) as pool:
        answers = pool.map(nobody_listens, map(_place_of, nodes))
        return {node["NodeID"] for node, refused in zip(nodes, answers, strict=True) if refused}


def _or_fault(action: Callable[[], T]) -> T | Fault:
    try:
        return action()
    except BaseException as error:
        return Fault.of(known_error("what a host was asked for", error))


class RayHost:
    """The driver's end of a machine's actor.

    Args:
        node: where Ray's own process on that machine listens, if that is known.
        lost_at: when the one before was lost, as `time.monotonic`; it stands until this one is.

    Attributes:
        lost: why it is gone, once it is, and with it its processes and the memory that they had in common.
        answered: it has, so that it will at once while its machine can be reached.
        ended: why processes have ended, by number.
    """

    def __init__(self, actor: Any, node: tuple[str, int] | None, lost_at: float) -> None:
        self.actor, self._node = actor, node
        self.lost: str | None = None
        self.lost_at = lost_at
        self.answered = False
        self.ended: Mapping[int, str] = {}
        self._thread = threading.Thread(target=self._watch, name="watches a host", daemon=True)
        self._thread.start()

    @property
    def answers(self) -> bool:
        """It has, and nothing is known against it since."""
        return self.answered and self.lost is None

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None, vital: bool = True) -> Any:
        """Calls the actor and waits.

        Raises:
            PeerLost: it is gone, or, where the answer is `vital`, counts as gone from now on, since there is none in
                time.
            ShadowSyncError: what it found wrong.
        """
        if self.lost is not None:
            raise PeerLost(self.lost)
        ray = _ray()
        try:
            answer = self._answer(getattr(self.actor, method).remote(*arguments), timeout_s)
        except ray.exceptions.RayError as error:
            reason = f"a machine of the cluster does not answer: {_in_one_line(error)}"
            if vital:
                self.give_up(reason)
            raise PeerLost(reason) from error
        self.answered = True
        if isinstance(answer, Fault):
            raise answer.error()
        return answer

    def _answer(self, asked: Any, timeout_s: float | None) -> Any:
        """Waits, but not for a machine that is gone: of an actor that is to start there Ray says nothing for long."""
        ray, until = _ray(), math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            try:
                return ray.get(asked, timeout=max(0.0, min(left_s, PROBE_S)))
            except ray.exceptions.GetTimeoutError:
                if left_s <= PROBE_S or self._nobody_listens():
                    raise

    def has_room(self, group: Any, timeout_s: float) -> bool:
        """Whether Ray gave room for a group of resources there in time, or up to a second later.

        Raises:
            PeerLost: the machine is gone, for whose room Ray would wait.
        """
        until = time.monotonic() + timeout_s
        while self.lost is None:
            if group.wait(PROBE_S):  # in whole seconds: Ray drops what is less
                return True
            if self._nobody_listens():
                self.give_up("there is no Ray on its machine any more")
            elif time.monotonic() >= until:
                return False
        raise PeerLost(self.lost)

    def _nobody_listens(self) -> bool:
        return self._node is not None and nobody_listens(self._node)

    def give_up(self, reason: str) -> None:
        """Ends it and all its processes."""
        if self.lost is None:
            self.lost, self.lost_at = reason, time.monotonic()
        ray = _ray()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)

    def join(self) -> None:
        self._thread.join(ANSWER_S)

    def _watch(self) -> None:
        ray = _ray()
        while self.lost is None:
            try:
                self.ended = ray.get(self.actor.ended.remote(len(self.ended)))
            except ray.exceptions.ActorUnavailableError as error:
                if self._nobody_listens():  # which Ray takes a quarter of a minute to say
                    self.give_up(f"there is no Ray on its machine any more: {_in_one_line(error)}")
                else:  # its network is cut: Ray says when it is gone for good
                    time.sleep(AGAIN_S)
            except Exception as error:  # also of a Ray that was shut down meanwhile
                if self.lost is None:
                    self.give_up(f"its machine or the host process there is gone: {_in_one_line(error)}")


class RayRole(RoleProcess):
    """A process of a host, by its number there; `group` is the one of Ray's reservations that it has for itself, which
    `release` gives back."""

    def __init__(
        self, request: LaunchRequest, host: RayHost, number: int, group: Any, release: Callable[[Any], None]
    ) -> None:
        self.request = request
        self.group = group
        self._host, self._number, self._release = host, number, release
        self._killed = False

    def endpoint(self, timeout_s: float) -> Endpoint:
        role, until = self.request.role, time.monotonic() + timeout_s
        if self.group is not None and not self._host.has_room(self.group, timeout_s):
            raise PeerLost(f"{role} did not start within {timeout_s:g} s: is there room for it?")
        if self._host.answered:
            self._host.ask("answers", timeout_s=PING_S)
        left_s = max(1.0, until - time.monotonic())
        endpoint: Endpoint = self._host.ask("start", self._number, self.request, left_s, timeout_s=left_s + PING_S)
        return endpoint

    def build(self, builder: Builder) -> "Future[None]":
        built: Future[None] = Future()
        if self._host.lost is not None:
            built.set_exception(PeerLost(f"{self.request.role} ended: {self._host.lost}"))
            return built
        asked = self._host.actor.build.remote(self._number, packed_builder(self.request.role, builder)).future()
        asked.add_done_callback(lambda answered: self._pass_on(answered, built))
        return built

    def _pass_on(self, answered: "Future[Fault | None]", built: "Future[None]") -> None:
        error = answered.exception()
        if error is not None:
            built.set_exception(PeerLost(f"{self.request.role} failed: {_in_one_line(error)}"))
        elif (fault := answered.result()) is not None:
            built.set_exception(fault.error())
        else:
            built.set_result(None)

    def ended(self) -> str | None:
        return "it was given up" if self._killed else self._host.ended.get(self._number, self._host.lost)

    def kill(self) -> None:
        self._killed = True
        if self._host.lost is None:  # or Ray may be gone, and a call would start another one
            with contextlib.suppress(_ray().exceptions.RayError):
                self._host.actor.kill.remote(self._number)
        if self.group is not None:  # also of a machine that is gone: where it comes back Ray would reserve it again
            self._release(self.group)


class RayRuntime(Runtime):
    """The processes of one job on the machines of a Ray cluster; its actors are in a namespace of the job's name.

    What roles need is reserved as Ray's resources, while the actors that start them take none.

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
        self.shares_memory = can_share()
        self.job = job_name()
        ray = _ray()
        self._joined = ray.is_initialized()
        self._folder = None if address or self._joined else make_folder()
        self._closed = False
        if self._folder is not None:
            own_cpus = max(os.cpu_count() or 1, math.ceil(cpus))
            _start_own(self.job, self._folder, own_cpus, dict(resources or {}))
        elif not self._joined:
            _check_address(str(address))
            _init(self.job, {"address": address}, f"there is no Ray cluster at {address}")
        self._lock = threading.Lock()
        self._hosts: dict[str, RayHost] = {}
        self._started = 0
        self._first: dict[str, dict[str, float]] = {}  # what the reservation of `reserve` holds, by role
        self._groups: set[Any] = set()  # Ray's reservations that were not given back

    def machines(self) -> Sequence[Machine]:
        nodes, now = [node for node in _ray().nodes() if node["Alive"]], time.monotonic()
        with self._lock:
            hosts = dict(self._hosts)
        answering = {machine for machine, host in hosts.items() if host.answers}
        doubtful = {machine for machine, host in hosts.items() if now - host.lost_at < DOUBT_S} - answering
        gone = _gone([node for node in nodes if node["NodeID"] not in answering])
        found = []
        for node in nodes:
            if (machine := node["NodeID"]) not in gone:
                offered = node["Resources"]
                custom = frozenset(name for name in offered if name not in ("CPU", "memory"))
                cpus, memory = offered.get("CPU", 0.0), int(offered.get("memory", 0))
                found.append(Machine(machine, node["NodeManagerHostname"], cpus, memory, custom, machine in doubtful))
        return found

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        group = self._placement_group(requests)
        if group is None:
            return
        if not group.wait(timeout_s):
            _ray().util.remove_placement_group(group)
            wanted = ", ".join(request.role for request in requests)
            raise RunError(f"the cluster did not give room for {wanted} within {timeout_s:g} s: is it in use?")
        self._groups.add(group)
        self._first = {request.role: self._needed(request) for request in requests}

    def _placement_group(self, requests: Sequence[LaunchRequest]) -> Any:
        """Ray's reservation of what they need; None if that is nothing."""
        bundles = [needed for request in requests if (needed := self._needed(request))]
        if not bundles:
            return None
        name = f"{self.job}-{secrets.token_hex(4)}"  # of two groups of one name Ray refuses the second
        return _ray().util.placement_group(bundles, strategy="PACK", name=name)

    def _needed(self, request: LaunchRequest) -> dict[str, float]:
        needed = {"CPU": request.cpus} if request.cpus else {}
        if request.resource is not None:
            needed[request.resource] = PINNED
        if needed:
            nodes = [node["NodeManagerAddress"] for node in _ray().nodes() if node["NodeID"] == request.machine]
            needed |= {f"node:{address}": PINNED for address in nodes}
        return needed

    def start(self, request: LaunchRequest) -> RoleProcess:
        with self._lock:
            group = None
            try:
                host = self._host(str(request.machine))
                # where a lost machine is back with its address, Ray reserves again what the first reservation has there
                if self._first.get(request.role) != self._needed(request):
                    group = self._placement_group([request])
            except _ray().exceptions.RayError as error:
                raise PeerLost(f"nothing can be had for {request.role}: {_in_one_line(error)}") from error
            if group is not None:
                self._groups.add(group)
            self._started += 1
            return RayRole(request, host, self._started, group, self._release)

    def _release(self, group: Any) -> None:
        ray = _ray()
        with self._lock:
            if group in self._groups and not self._closed and ray.is_initialized():  # or it would start another Ray
                with contextlib.suppress(ray.exceptions.RayError, ValueError, OSError):
                    ray.util.remove_placement_group(group)
                    self._groups.remove(group)

    def _host(self, machine: str) -> RayHost:
        """Of that machine; one that is gone is started anew. The lock is held."""
        if self._closed:  # a call would start another Ray
            raise PeerLost("the job has ended")
        found = self._hosts.get(machine)
        if found is None or found.lost is not None:
            ray = _ray()
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options = {
                "name": f"host-{machine}-{secrets.token_hex(2)}",
                "namespace": self.job,
                "max_concurrency": CALLS,
                "max_restarts": 0,
                "num_cpus": 0,
                "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(machine, soft=False),
            }
            actor = ray.remote(HostActor).options(**options).remote(self.job, self.keys, machine, self._folder)
            nodes = {node["NodeID"]: _place_of(node) for node in ray.nodes()}
            before = -math.inf if found is None else found.lost_at
            found = self._hosts[machine] = RayHost(actor, nodes.get(machine), before)
        return found

    def create_memory(self, machine: str, size: int, what: str, file: FileBeside | None = None) -> HeldMemory:
        with self._lock:
            host = self._host(machine)
        path = host.ask("create_memory", size, what, file, timeout_s=START_S + size / FILLED_PER_S)

        def close() -> None:
            if host.lost is None:
                host.actor.release_memory.remote(path)

        def read() -> bytes:
            found: bytes = host.ask("read_memory", path, timeout_s=READ_S, vital=False)
            return found

        return HeldMemory(machine, path, close, lambda: host.lost is None, read)

    def host(self) -> str:
        """An address, or on a Ray of our own a folder for Unix sockets: all roles are on this machine then."""
        address: str = self._folder or _ray().util.get_node_ip_address()
        return address

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            hosts = [host for host in self._hosts.values() if host.lost is None]
        ray = _ray()
        if hosts:  # roles are to end before those who started them
            closing = [host.actor.close.remote() for host in hosts]
            ray.wait(closing, num_returns=len(closing), timeout=ANSWER_S)
        for host in hosts:
            host.give_up("the job has ended")
        for group in self._groups:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)
        for host in hosts:
            host.join()
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
        # roles are the work itself, before which Ray would let all else go; and the one worker that it sees, and would
        # end where memory gets short, is the host of all of them
        "_system_config": {"worker_niceness": 0, "memory_monitor_refresh_ms": 0},
    }
    try:
        with _new_token(), _loopback_only():
            _init(job, options, "a Ray of its own cannot be started")
    except BaseException:
        _forget_token()
        raise


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


def _in_one_line(error: BaseException) -> str:
    """The first sentence, and the kind of exit where Ray tells it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next(
        (line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))), ""
    )
    return (cause or (lines[0] if lines else type(error).__name__)).split(". ")[0][:200]
