"""A role's process: parts are built there, served, replaced, and gone when it is killed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from role_parts import CLOSED, Panic, Said, greeter, panics, refuses
from wired_roles import Wired

from shadowsync.errors import ConfigError, RunError
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import CallTimeout, PeerLost
from shadowsync.runtime import host
from shadowsync.runtime.ray_runtime import RoleActor
from shadowsync.runtime.runtime import LaunchRequest


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
        process.build(greeter, spec).result(120)
        assert connection.call("greet", timeout_s=120).result(120).read(Said).text == f"{spec} from reader-0"
    assert CLOSED == ["first from reader-0"]
    assert process.ended() is None
    process.kill()
    assert CLOSED == ["first from reader-0", "second from reader-0"]
    assert process.ended() == "it was killed"


def test_a_part_that_cannot_be_built_says_why_and_the_process_goes_on(runtime: Wired, connector: WireClient) -> None:
    process = runtime.start(LaunchRequest("trainer-3"))
    with pytest.raises(ConfigError, match="trainer-3 cannot be built from sand"):
        process.build(refuses, "sand").result(120)
    process.build(greeter, "stone").result(120)
    connection = connector.connect(process.endpoint(10).address)
    assert connection.call("greet", timeout_s=120).result(120).read(Said).text == "stone from trainer-3"


def test_a_killed_process_answers_nobody_and_has_no_place(runtime: Wired, connector: WireClient) -> None:
    process = runtime.start(LaunchRequest("dense-0"))
    process.build(greeter, "one").result(120)
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


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RoleActor]:
    """What Ray would run, without Ray; what it changes in its process is as before afterwards."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(host, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(host, "log_to", lambda job, role: "")
    made = RoleActor("job", LaunchRequest("reader-0"), JobKeys.make(), str(tmp_path))
    yield made
    made._host.close()


def test_a_thread_that_dies_ends_its_role_with_what_it_died_of(actor: RoleActor) -> None:
    def die(error: BaseException) -> None:
        raise error

    for error in (SystemExit(1), Panic("out of bounds"), ValueError("too late to count")):
        thread = threading.Thread(target=die, args=(error,), name="shadow")
        thread.start()
        thread.join()
    assert actor.watch() == "its thread shadow died of Panic: out of bounds"


def test_a_panic_while_a_part_is_built_comes_back(actor: RoleActor) -> None:
    fault = actor.build(panics, "sand")
    assert fault is not None
    assert str(fault.error()) == "build failed with Panic: reader-0 met sand"
    fault = actor.build(refuses, "sand")
    assert fault is not None
    assert isinstance(fault.error(), ConfigError)
