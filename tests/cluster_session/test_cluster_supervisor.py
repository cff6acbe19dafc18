"""Processes are launched, watched and given up."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from wired_roles import Wired

from shadowsync.cluster import supervisor
from shadowsync.cluster.context import EventLog
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.supervisor import Member, Supervisor, first_error
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime.runtime import Builder, Endpoint, LaunchRequest, Machine, RoleProcess, Runtime

LOST_AFTER_S = 60.0


class Process(RoleProcess):
    """Ends when told to."""

    def __init__(self, request: LaunchRequest, pid: int) -> None:
        self.request, self.pid = request, pid
        self.why: str | None = None
        self.killed = False
        self.starts: BaseException | None = None
        self.built: Future[None] = Future()

    def endpoint(self, timeout_s: float) -> Endpoint:
        if self.starts is not None:
            raise self.starts
        return Endpoint(
            f"tcp://{self.request.role}:{self.pid}", "machine-0", "somewhere", self.pid, f"/logs/{self.pid}"
        )

    def build(self, builder: Builder) -> Future[None]:
        return self.built

    def ended(self) -> str | None:
        return self.why

    def kill(self) -> None:
        self.killed = True


class Processes(Runtime):
    """Starts such processes."""

    name: ClassVar[str] = "scripted"

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.next_fails: BaseException | None = None

    def machines(self) -> Sequence[Machine]:
        return []

    def reserve(self, requests: Sequence[LaunchRequest], timeout_s: float) -> None:
        """There is room."""

    def start(self, request: LaunchRequest) -> Process:
        self.started.append(Process(request, len(self.started)))
        self.started[-1].starts, self.next_fails = self.next_fails, None
        return self.started[-1]

    def host(self) -> str:
        return "here"

    def close(self) -> None:
        """They are gone."""


class Line:
    """A connection that is silent for as long as it is told."""

    def __init__(self, address: str) -> None:
        self.address: str | None = address
        self.silence_s = 0.0

    def silent_s(self) -> float:
        return self.silence_s

    def redirect(self, address: str | None) -> None:
        self.address = address


class Lines:
    """A connector of such connections."""

    def connect(self, address: str) -> Line:
        return Line(address)


class Fixture:
    """A supervisor whose watch is done by hand."""

    def __init__(self) -> None:
        self.runtime, self.woken, self.events = Processes(), threading.Event(), EventLog()
        self.supervisor = Supervisor(self.runtime, Lines(), LOST_AFTER_S, self.events, self.woken.set)
        self.now_s = 1000.0

    def launch(self, role: str) -> Member:
        return self.supervisor.launch(LaunchRequest(role))

    def look(self, after_s: float = 0.1) -> None:
        self.now_s += after_s
        self.supervisor.look_round(self.now_s)

    def told(self) -> list[tuple[str, str, str]]:
        return [(happened.role, happened.event, happened.detail) for happened in self.events.take()]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr(supervisor, "WATCH_S", 3600.0)
    made = Fixture()
    yield made
    made.supervisor.close()


def process_of(member: Member) -> Process:
    assert isinstance(member.process, Process)
    return member.process


def line_of(member: Member) -> Any:
    return member.connection


def test_who_is_launched_is_there_and_in_order(job: Fixture) -> None:
    for role in ("trainer-10", "trainer-9", "reader-0", "embedding-1"):
        job.launch(role)
    assert [member.role for member in job.supervisor.of_kind("trainer")] == ["trainer-9", "trainer-10"]
    assert [(m.kind, m.index) for m in job.supervisor.of_kind("embedding")] == [("embedding", 1)]
    assert job.told()[0] == ("trainer-10", "alive", "somewhere")
    places = job.supervisor.places()
    assert list(places) == sorted(["trainer-10", "trainer-9", "reader-0", "embedding-1"])
    assert places["reader-0"] == {
        "pid": 2,
        "host": "somewhere",
        "machine": "machine-0",
        "incarnation": 0,
        "log": "/logs/2",
    }
    assert all(place["incarnation"] == 0 for place in places.values())


def test_a_process_that_ended_is_noticed_once(job: Fixture) -> None:
    member, other = job.launch("trainer-0"), job.launch("trainer-1")
    job.told()
    process_of(member).why = "it was shot"
    job.look()
    job.look()
    assert member.state == "dead"
    assert not member.living
    assert job.supervisor.of_kind("trainer") == [other]
    assert job.told() == [("trainer-0", "dead", "it was shot")]
    assert job.woken.is_set()
    assert job.supervisor.anybody_died
    assert job.supervisor.take_dead() == [member]
    assert job.supervisor.take_dead() == []
    assert not job.supervisor.anybody_died


def test_who_is_given_up_is_ended_and_reached_no_more(job: Fixture) -> None:
    member = job.launch("embedding-0")
    job.supervisor.give_up(member, "it lied")
    assert process_of(member).killed
    assert line_of(member).address is None
    assert job.supervisor.places()["embedding-0"]["pid"] == 0  # where it was, until somebody has its place


def test_who_was_not_listened_to_was_not_silent(job: Fixture) -> None:
    """The driver was stopped for longer than anybody may be silent."""
    member = job.launch("trainer-0")
    job.told()
    job.look()
    line_of(member).silence_s = LOST_AFTER_S + 10
    job.look(after_s=LOST_AFTER_S + 10)
    assert member.state == "alive"
    for _ in range(int(LOST_AFTER_S) + 1):
        assert member.living
        line_of(member).silence_s += 1
        job.look(after_s=1.0)
    assert member.state == "dead", "it says nothing now that it is heard"


def test_silence_makes_unreachable_and_a_word_reachable(job: Fixture) -> None:
    member = job.launch("dense-0")
    job.told()
    for silence_s, state in (
        (supervisor.UNREACHABLE_S - 0.1, "alive"),
        (supervisor.UNREACHABLE_S + 0.1, "unreachable"),
        (LOST_AFTER_S - 1, "unreachable"),
        (0.2, "alive"),
        (30.0, "unreachable"),
    ):
        line_of(member).silence_s = silence_s
        job.look()
        assert member.state == state
        assert member.living
    assert [event for _, event, _ in job.told()] == ["unreachable", "reachable", "unreachable"]
    assert not job.woken.is_set()
    assert not process_of(member).killed
    assert job.supervisor.of_kind("dense") == [member]


def test_silence_for_too_long_is_death(job: Fixture) -> None:
    member = job.launch("dense-0")
    line_of(member).silence_s = 10
    job.look()
    line_of(member).silence_s = LOST_AFTER_S + 1
    job.look()
    assert member.state == "dead"
    assert process_of(member).killed
    assert [event for _, event, _ in job.told()] == ["alive", "unreachable", "dead"]
    assert job.supervisor.take_dead() == [member]


def test_the_next_one_takes_the_place(job: Fixture) -> None:
    first = job.launch("reader-0")
    job.supervisor.give_up(first, "it was slow")
    second = job.launch("reader-0")
    assert (first.incarnation, second.incarnation) == (0, 1)
    assert job.supervisor.of_kind("reader") == [second]
    assert job.supervisor.places()["reader-0"]["incarnation"] == 1
    assert [event for _, event, _ in job.told()] == ["alive", "dead", "restarted"]


def test_who_does_not_start_is_ended_and_takes_no_place(job: Fixture) -> None:
    before = job.launch("trainer-0")
    job.supervisor.give_up(before, "it died")
    job.told()
    job.runtime.next_fails = PeerLost("trainer-0 did not start")
    with pytest.raises(PeerLost, match="did not start"):
        job.launch("trainer-0")
    assert job.runtime.started[-1].killed
    assert job.supervisor.members["trainer-0"] is before
    assert job.told() == []


def test_after_the_end_nobody_is_launched_and_nobody_mourned(job: Fixture) -> None:
    member = job.launch("trainer-0")
    job.told()
    job.supervisor.close()
    job.supervisor.give_up(member, "the job ended it")
    assert job.told() == []
    assert not job.supervisor.anybody_died
    with pytest.raises(PeerLost, match="the job has ended"):
        job.launch("trainer-0")
    assert job.runtime.started[-1].killed


def test_a_part_that_is_never_ready_is_a_lost_peer(job: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BUILD_S", 0.01)
    member = job.launch("trainer-0")
    with pytest.raises(PeerLost, match=r"trainer-0 did not get ready within 0.01 s"):
        member.build(_no_part)
    process_of(member).built.set_exception(DataError("its rows are others"))
    with pytest.raises(DataError, match="its rows are others"):
        member.build(_no_part)


def _no_part(_: Any) -> Any:
    raise AssertionError("nobody builds here")


def test_the_watch_finds_the_dead_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WATCH_S", 0.01)
    job = Fixture()
    member = job.launch("trainer-0")
    process_of(member).why = "it was shot"
    assert job.woken.wait(120)
    job.supervisor.close()
    assert member.state == "dead"


def test_calls_to_who_is_given_up_fail_at_once() -> None:
    """Over the real wire: what waits for an answer, and what is asked later."""
    runtime, woken = Wired(JobKeys.make()), threading.Event()
    with closing(runtime), closing(WireClient(runtime.keys)) as connector:
        launched = Supervisor(runtime, connector, LOST_AFTER_S, EventLog(), woken.set)
        with closing(launched):
            member = launched.launch(LaunchRequest("reader-0"))
            runtime.processes[0].kill()  # nobody serves now
            waiting = member.connection.call("parse", timeout_s=120)
            assert woken.wait(120)
            with pytest.raises(PeerLost, match="given up"):
                waiting.result(120)
            with pytest.raises(PeerLost, match="given up"):
                member.connection.call("parse", timeout_s=120).result(120)


LOST, WRONG = PeerLost("somebody is gone"), DataError("these rows are bad")
FIRST: list[tuple[list[BaseException | None], BaseException | None]] = [
    ([], None),
    ([None, None], None),
    ([None, LOST], LOST),
    ([LOST, None, WRONG, RunError("later")], WRONG),
]


@pytest.mark.parametrize(("errors", "raised"), FIRST)
def test_what_is_wrong_comes_before_who_is_gone(
    errors: list[BaseException | None], raised: BaseException | None
) -> None:
    assert first_error(errors) is raised


def test_many_deaths_at_once_are_all_noticed(job: Fixture) -> None:
    members = [job.launch(f"trainer-{rank}") for rank in range(20)]
    threads = [threading.Thread(target=_give_up(job.supervisor, member)) for member in members for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(member.index for member in job.supervisor.take_dead()) == list(range(20))
    assert sum(event == "dead" for _, event, _ in job.told()) == 20


def _give_up(launched: Supervisor, member: Member) -> Callable[[], None]:
    return lambda: launched.give_up(member, "all at once")


def test_who_ends_while_it_starts_is_started_again_a_few_times() -> None:
    ends = iter([PeerLost("it was shot"), PeerLost("it was shot"), None])
    launched: list[str] = []

    class Reluctant:
        def launch(self, request: LaunchRequest) -> None:
            if (error := next(ends, PeerLost("once more"))) is not None:
                raise error
            launched.append(request.role)

    def one_by_one(actions: Sequence[Callable[[], None]]) -> None:
        for action in actions:
            action()

    stub: Any = SimpleNamespace(supervisor=Reluctant(), all_at_once=one_by_one)
    ClusterManager.launch(stub, [LaunchRequest("dense-0")])
    assert launched == ["dense-0"]
    with pytest.raises(PeerLost, match="once more"):
        ClusterManager.launch(stub, [LaunchRequest("dense-1")])
