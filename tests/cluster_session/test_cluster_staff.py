"""Processes are hired, watched and given up."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, ClassVar

import pytest

from shadowsync.cluster import staff
from shadowsync.cluster.staff import Member, Staff, first_error
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.client import Courier
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.keys import JobKeys
from shadowsync.runtime.inprocess import InProcess
from shadowsync.runtime.runtime import Builder, Machine, Order, Place, RoleProcess, Runtime
from shadowsync.session import Happenings

LOST_AFTER_S = 60.0


class Process(RoleProcess):
    """Ends when told to."""

    def __init__(self, order: Order, pid: int) -> None:
        self.order, self.pid = order, pid
        self.why: str | None = None
        self.killed = False
        self.starts: BaseException | None = None
        self.built: Future[None] = Future()

    def place(self, timeout_s: float) -> Place:
        if self.starts is not None:
            raise self.starts
        return Place(f"tcp://{self.order.role}:{self.pid}", "machine-0", "somewhere", self.pid, f"/logs/{self.pid}")

    def build(self, builder: Builder, spec: Any) -> Future[None]:
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

    def reserve(self, orders: Sequence[Order], timeout_s: float) -> None:
        """There is room."""

    def start(self, order: Order) -> Process:
        self.started.append(Process(order, len(self.started)))
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
    """A courier of such connections."""

    def connect(self, address: str) -> Line:
        return Line(address)


class Fixture:
    """A staff whose watch is done by hand."""

    def __init__(self) -> None:
        self.runtime, self.woken, self.happenings = Processes(), threading.Event(), Happenings()
        self.staff = Staff(self.runtime, Lines(), LOST_AFTER_S, self.happenings, self.woken.set)

    def hire(self, role: str) -> Member:
        return self.staff.hire(Order(role))

    def look(self) -> None:
        for member in list(self.staff.members.values()):
            if member.living:
                self.staff._look_at(member)

    def told(self) -> list[tuple[str, str, str]]:
        return [(happened.role, happened.event, happened.detail) for happened in self.happenings.take()]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr(staff, "WATCH_S", 3600.0)
    made = Fixture()
    yield made
    made.staff.close()


def process_of(member: Member) -> Process:
    assert isinstance(member.process, Process)
    return member.process


def line_of(member: Member) -> Any:
    return member.connection


def test_who_is_hired_is_there_and_in_order(job: Fixture) -> None:
    for role in ("trainer-10", "trainer-9", "reader-0", "embedding-1"):
        job.hire(role)
    assert [member.role for member in job.staff.of_kind("trainer")] == ["trainer-9", "trainer-10"]
    assert [(m.kind, m.index) for m in job.staff.of_kind("embedding")] == [("embedding", 1)]
    assert job.told()[0] == ("trainer-10", "alive", "somewhere")
    places = job.staff.places()
    assert list(places) == sorted(["trainer-10", "trainer-9", "reader-0", "embedding-1"])
    assert (places["reader-0"].pid, places["reader-0"].host, places["reader-0"].log) == (2, "somewhere", "/logs/2")
    assert all(place.incarnation == 0 for place in places.values())


def test_a_process_that_ended_is_noticed_once(job: Fixture) -> None:
    member, other = job.hire("trainer-0"), job.hire("trainer-1")
    job.told()
    process_of(member).why = "it was shot"
    job.look()
    job.look()
    assert member.state == "dead"
    assert not member.living
    assert job.staff.of_kind("trainer") == [other]
    assert job.told() == [("trainer-0", "dead", "it was shot")]
    assert job.woken.is_set()
    assert job.staff.anybody_died
    assert job.staff.take_dead() == [member]
    assert job.staff.take_dead() == []
    assert not job.staff.anybody_died


def test_who_is_given_up_is_ended_and_reached_no_more(job: Fixture) -> None:
    member = job.hire("embedding-0")
    job.staff.give_up(member, "it lied")
    assert process_of(member).killed
    assert line_of(member).address is None
    assert job.staff.places()["embedding-0"].pid == 0  # where it was, until somebody has its place


def test_silence_makes_unreachable_and_a_word_reachable(job: Fixture) -> None:
    member = job.hire("dense-0")
    job.told()
    for silence_s, state in (
        (staff.UNREACHABLE_S - 0.1, "alive"),
        (staff.UNREACHABLE_S + 0.1, "unreachable"),
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
    assert job.staff.of_kind("dense") == [member]


def test_silence_for_too_long_is_death(job: Fixture) -> None:
    member = job.hire("dense-0")
    line_of(member).silence_s = 10
    job.look()
    line_of(member).silence_s = LOST_AFTER_S + 1
    job.look()
    assert member.state == "dead"
    assert process_of(member).killed
    assert [event for _, event, _ in job.told()] == ["alive", "unreachable", "dead"]
    assert job.staff.take_dead() == [member]


def test_the_next_one_takes_the_place(job: Fixture) -> None:
    first = job.hire("reader-0")
    job.staff.give_up(first, "it was slow")
    second = job.hire("reader-0")
    assert (first.incarnation, second.incarnation) == (0, 1)
    assert job.staff.of_kind("reader") == [second]
    assert job.staff.places()["reader-0"].incarnation == 1
    assert [event for _, event, _ in job.told()] == ["alive", "dead", "restarted"]


def test_who_does_not_start_is_ended_and_takes_no_place(job: Fixture) -> None:
    before = job.hire("trainer-0")
    job.staff.give_up(before, "it died")
    job.told()
    job.runtime.next_fails = PeerLost("trainer-0 did not start")
    with pytest.raises(PeerLost, match="did not start"):
        job.hire("trainer-0")
    assert job.runtime.started[-1].killed
    assert job.staff.members["trainer-0"] is before
    assert job.told() == []


def test_after_the_end_nobody_is_hired_and_nobody_mourned(job: Fixture) -> None:
    member = job.hire("trainer-0")
    job.told()
    job.staff.close()
    job.staff.give_up(member, "the job ended it")
    assert job.told() == []
    assert not job.staff.anybody_died
    with pytest.raises(PeerLost, match="the job has ended"):
        job.hire("trainer-0")
    assert job.runtime.started[-1].killed


def test_a_part_that_is_never_ready_is_a_lost_peer(job: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staff, "BUILD_S", 0.01)
    member = job.hire("trainer-0")
    with pytest.raises(PeerLost, match=r"trainer-0 did not get ready within 0.01 s"):
        member.build(_no_part, None)
    process_of(member).built.set_exception(DataError("its rows are others"))
    with pytest.raises(DataError, match="its rows are others"):
        member.build(_no_part, None)


def _no_part(spec: Any, home: Any) -> Any:
    raise AssertionError("nobody builds here")


def test_the_watch_finds_the_dead_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staff, "WATCH_S", 0.01)
    job = Fixture()
    member = job.hire("trainer-0")
    process_of(member).why = "it was shot"
    assert job.woken.wait(120)
    job.staff.close()
    assert member.state == "dead"


def test_calls_to_who_is_given_up_fail_at_once() -> None:
    """Over the real wire: what waits for an answer, and what is asked later."""
    runtime, woken = InProcess(JobKeys.make()), threading.Event()
    with closing(runtime), closing(Courier(runtime.keys)) as courier:
        hired = Staff(runtime, courier, LOST_AFTER_S, Happenings(), woken.set)
        with closing(hired):
            member = hired.hire(Order("reader-0"))
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
    members = [job.hire(f"trainer-{rank}") for rank in range(20)]
    threads = [threading.Thread(target=_give_up(job.staff, member)) for member in members for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(member.index for member in job.staff.take_dead()) == list(range(20))
    assert sum(event == "dead" for _, event, _ in job.told()) == 20


def _give_up(hired: Staff, member: Member) -> Callable[[], None]:
    return lambda: hired.give_up(member, "all at once")
