"""A role's process: parts are built there, served, replaced, and gone when it is killed."""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from role_parts import CLOSED, Greeter, greeter, panics, refuses
from wired_roles import Wired

from shadowsync.errors import ConfigError, RunError
from shadowsync.memory.shared import SharedMemory
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import CallTimeout, Fault, PeerLost
from shadowsync.rpc.served import ask
from shadowsync.runtime import ray_runtime
from shadowsync.runtime.processes import packed_builder
from shadowsync.runtime.ray_runtime import HostActor, RayHost, RayRole, RayRuntime, nobody_listens
from shadowsync.runtime.runtime import Endpoint, LaunchRequest

ray_exceptions = pytest.importorskip(
    "ray.exceptions", reason="hosts on a cluster need Ray: pip install shadowsync[ray]"
)


@pytest.fixture
def runtime() -> Iterator[Wired]:
    CLOSED.clear()
    made = Wired(JobKeys.make(), machines=2)
    yield made
    made.close()


@pytest.fixture
def connector(runtime: Wired) -> Iterator[WireClient]:
    made = WireClient(runtime.keys)
    yield made
    made.close()


def test_a_part_is_served_and_another_takes_its_place(runtime: Wired, connector: WireClient) -> None:
    process = runtime.start(LaunchRequest("reader-0", "machine-1"))
    connection = connector.connect(process.endpoint(10).address)
    for spec in ("first", "second"):
        process.build(greeter(spec)).result(120)
        assert ask(connection, Greeter.greet) == f"{spec} from reader-0"
    assert CLOSED == ["first from reader-0"]
    assert process.ended() is None
    process.kill()
    assert CLOSED == ["first from reader-0", "second from reader-0"]
    assert process.ended() == "it was killed"


def test_a_part_that_cannot_be_built_says_why_and_the_process_goes_on(runtime: Wired, connector: WireClient) -> None:
    process = runtime.start(LaunchRequest("trainer-3"))
    with pytest.raises(ConfigError, match="trainer-3 cannot be built from sand"):
        process.build(partial(refuses, "sand")).result(120)
    process.build(greeter("stone")).result(120)
    connection = connector.connect(process.endpoint(10).address)
    assert ask(connection, Greeter.greet) == "stone from trainer-3"


def test_a_killed_process_answers_nobody_and_has_no_place(runtime: Wired, connector: WireClient) -> None:
    process = runtime.start(LaunchRequest("dense-0"))
    process.build(greeter("one")).result(120)
    connection = connector.connect(process.endpoint(10).address)
    process.kill()
    with pytest.raises((CallTimeout, PeerLost)):
        connection.call("greet", timeout_s=0.5).result(120)
    with pytest.raises(PeerLost, match="dense-0 ended: it was killed"):
        process.endpoint(1)


def test_what_no_machine_has_is_refused_before_anything_starts(runtime: Wired) -> None:
    requests = [LaunchRequest("trainer-0", "machine-0"), LaunchRequest("trainer-1", "machine-7")]
    with pytest.raises(RunError, match="trainer-1 needs machine machine-7"):
        runtime.reserve(requests, 1)
    assert not runtime.processes


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostActor]:
    """What Ray would run on a machine, without Ray."""
    made = HostActor("job", JobKeys.make(), "machine-1", str(tmp_path_factory.mktemp("host")))
    yield made
    made.close()


def started(actor: HostActor, number: int, role: str) -> Endpoint:
    found = actor.start(number, LaunchRequest(role, "machine-1"), 120)
    assert isinstance(found, Endpoint)
    return found


def test_a_host_says_which_of_its_processes_have_ended(actor: HostActor) -> None:
    ends = {number: started(actor, number, f"reader-{number}") for number in (1, 2)}
    assert {end.machine for end in ends.values()} == {"machine-1"}
    os.kill(ends[2].pid, signal.SIGKILL)
    assert actor.ended(0) == {2: "its process was ended by SIGKILL"}
    actor.kill(1)
    assert actor.ended(1) == {1: "it was given up", 2: "its process was ended by SIGKILL"}
    actor.kill(7)  # it was given up before it was there


def test_what_a_host_cannot_build_comes_back(actor: HostActor) -> None:
    started(actor, 3, "reader-0")
    fault = actor.build(3, packed_builder("reader-0", panics))
    assert fault is not None
    assert str(fault.error()) == "build failed with Panic: reader-0 met sand"
    fault = actor.build(3, packed_builder("reader-0", partial(refuses, "sand")))
    assert fault is not None
    assert isinstance(fault.error(), ConfigError)
    assert actor.build(3, packed_builder("reader-0", greeter("stone"))) is None


def test_memory_of_a_host_outlives_its_processes_until_it_is_released(actor: HostActor) -> None:
    path = actor.create_memory(4096, "the rows")
    assert isinstance(path, str)
    memory = SharedMemory.open(path)
    memory.take(8, torch.float32).fill_(2.0)
    memory.close()
    assert SharedMemory.open(path).take(8, torch.float32).tolist() == [2.0] * 8
    actor.release_memory(path)
    with pytest.raises(RunError, match="cannot be opened"):
        SharedMemory.open(path)
    fault = actor.create_memory(1 << 62, "the rows")
    assert isinstance(fault, Fault)
    assert "the rows take" in fault.message


class SilentRay:
    """In place of Ray: answers nothing, as of an actor that is to start on a machine that Ray has not missed yet."""

    exceptions = ray_exceptions

    def __init__(self) -> None:
        self.asked, self.over = 0, threading.Event()

    def get(self, _: object, timeout: float | None = None) -> object:
        if timeout is None:  # the thread that watches
            self.over.wait()
            raise ray_exceptions.RayActorError
        self.asked += 1
        raise ray_exceptions.GetTimeoutError

    def kill(self, _: object, no_restart: bool) -> None:
        assert no_restart
        self.over.set()


@pytest.mark.parametrize("listening", [True, False])
def test_nobody_waits_for_a_machine_that_ray_has_not_missed(listening: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SilentRay()
    monkeypatch.setattr(ray_runtime, "_ray", lambda: ray)
    monkeypatch.setattr(ray_runtime, "nobody_listens", lambda _: ray.asked == 3 and not listening)
    host = RayHost(MagicMock(), ("10.0.0.2", 7), -math.inf)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="does not answer"):
        host.ask("start", timeout_s=0.5 if listening else 3600.0)
    assert host.lost is not None
    assert (ray.asked == 3) != listening
    assert time.monotonic() - began < 60
    host.join()


class NoRoom:
    """In place of a group of Ray's resources: there is never room."""

    def __init__(self) -> None:
        self.asked = 0

    def wait(self, timeout_seconds: float) -> bool:
        assert timeout_seconds == int(timeout_seconds) == ray_runtime.PROBE_S
        self.asked += 1
        return False


def test_nobody_waits_for_room_on_a_machine_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, group = SilentRay(), NoRoom()
    monkeypatch.setattr(ray_runtime, "_ray", lambda: ray)
    monkeypatch.setattr(ray_runtime, "nobody_listens", lambda _: group.asked >= 3)
    host = RayHost(MagicMock(), ("10.0.0.2", 7), -math.inf)
    role = RayRole(LaunchRequest("trainer-0"), host, 1, group, lambda _: None)
    with pytest.raises(PeerLost, match="is there room for it"):
        role.endpoint(0.0)
    for _ in range(2):  # while it is found out, and when it is known
        with pytest.raises(PeerLost, match="no Ray on its machine any more"):
            role.endpoint(60.0)
    assert group.asked == 3
    host.join()


class ReturningRay:
    """In place of Ray, of whose cluster one machine is lost and comes back with its address, as another node."""

    exceptions = ray_exceptions
    is_initialized = staticmethod(lambda: True)

    def __init__(self) -> None:
        self.node, self.groups = 56 * "a", []
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=self.groups.remove)

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": self.node, "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 7, "Alive": True}]

    def _group(self, bundles: list[dict[str, float]], **_: object) -> MagicMock:
        group = MagicMock(bundles=bundles)
        self.groups.append(group)
        return group

    def remote(self, _: object) -> MagicMock:
        return MagicMock()

    def get(self, *_: object, **__: object) -> object:
        raise ray_exceptions.RayActorError

    def kill(self, _: object, no_restart: bool) -> None:
        assert no_restart


def test_a_machine_that_is_lost_again_and_again_keeps_no_room_for_who_died_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = ReturningRay()
    monkeypatch.setattr(ray_runtime, "_ray", lambda: ray)
    made = RayRuntime("10.0.0.1:6379")

    def request(role: str) -> LaunchRequest:
        return LaunchRequest(role, cpus=1.0, machine=ray.node)

    made.reserve([request("trainer-0")], 1.0)
    (first,) = ray.groups
    for number in range(3):
        ray.node = 56 * str(number)
        beside, again = made.start(request("trainer-1")), made.start(request("trainer-0"))
        assert [group.bundles for group in ray.groups] == [first.bundles] * 2, "one for each that lives"
        made._hosts[ray.node].give_up("its machine is gone")
        beside.kill()
        again.kill()
        beside.kill()  # once more, as whoever kills it and whoever finds it dead do
        assert ray.groups == [first]
    monkeypatch.setattr(ray, "nodes", MagicMock(side_effect=ray_exceptions.RaySystemError("no answer")))
    with pytest.raises(PeerLost, match=r"nothing can be had for trainer-0: .*no answer"):
        made.start(request("trainer-0"))


def test_machines_that_are_gone_are_none_although_ray_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = server.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as ended:
            gone = ended.getsockname()[1]
        nodes = [
            {"NodeID": name, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            | {"NodeManagerHostname": "m", "Resources": {"CPU": 2.0, "memory": 1.0, "disk": 1.0}}
            for name, alive, port in (("there", True, here), ("gone", True, gone), ("missed", False, gone))
        ]
        ray = SimpleNamespace(nodes=lambda: nodes, is_initialized=lambda: True)
        monkeypatch.setattr(ray_runtime, "_ray", lambda: ray)
        (found,) = RayRuntime("10.0.0.1:6379").machines()
    assert (found.id, found.cpus, found.doubtful) == ("there", 2.0, False)


def test_only_a_system_that_answers_says_that_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        assert not nobody_listens(place)
    assert nobody_listens(place)
    assert not nobody_listens(("no.such.host.invalid", place[1]))
