"""Whole jobs whose servers change their machine while they train."""

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_jobs import Cluster, Tower, cluster_settings, events_of, everything, soon
from job_helpers import ROWS, Ledger, Witness, beside_own_model, by_gradients, error_of, fails, write_rows
from wired_roles import Wired

from shadowsync import Job
from shadowsync.cluster import manager, moves
from shadowsync.draining import ask_to_leave, to_leave, wait_until_left
from shadowsync.embedding.moving import ArrivingService
from shadowsync.errors import ConfigError
from shadowsync.report.files import read_events
from shadowsync.rpc.connection import JobKeys
from shadowsync.runtime.runtime import Machine

EPOCHS = 2
STEPS_MS = 5.0


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "LOOK_S", 0.05)
    monkeypatch.setattr(moves, "RETRY_S", 0.2)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers do one thing after the other, so that a pull never overtakes the push before it."""
    monkeypatch.setattr(manager, "THREADS", 1)


def moving_settings(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """One trainer of one worker, which does the same in every run; two embedding servers that may move."""
    base: dict[str, dict[str, Any]] = {
        "train": {"batch_size": 4, "lr": 0.1, "prefetch": 0, "emulate_step_ms": STEPS_MS},
        "data": {"slice_rows": 16, "epochs": EPOCHS},
        "embedding": {"servers": 2},
        "cluster": {"max_servers": 2},
    }
    data, test = write_rows(tmp_path / "rows.parquet", ROWS), write_rows(tmp_path / "test.parquet", 300, 1)
    merged = {name: base.get(name, {}) | dict(sections.get(name, {})) for name in {**base, **sections}}
    return cluster_settings(data, test, **merged)


class Script:
    """Does something at an iteration, and makes steps long until something has happened, so that the job goes on."""

    def __init__(self, act: Callable[[], None], until: Callable[[], bool], iteration: int = 5) -> None:
        self.act, self.until, self.iteration, self.done = act, until, iteration, False

    def __call__(self, rank: int, iteration: int) -> None:
        if iteration < self.iteration:
            return
        first, self.done = not self.done, True
        if first:
            self.act()
        soon(self.until)


def places_of(out: Path) -> dict[str, str]:
    places: dict[str, dict[str, str]] = json.loads((out / "roles.json").read_text())
    return {role: place["host"] for role, place in places.items()}


class Named(Wired):
    """Machines of which each has its own name in `roles.json`, with one that comes later."""

    def come(self) -> None:
        number = len(self._machines)
        self._machines.append(Machine(f"machine-{number}", f"machine-{number}", 64.0, 1 << 40))


def asking_to_leave(out: Path, machine: str) -> Callable[[], None]:
    """Asks as soon as it is known where roles are."""

    def ask() -> None:
        assert soon((out / "roles.json").exists)
        ask_to_leave(out, [machine])

    return ask


def moved(out: Path) -> list[str]:
    return [event.detail for event in read_events(out) if event.event == "moved"]


@pytest.mark.parametrize("method", ["none", "sync"])
@pytest.mark.parametrize("shares", [False, True], ids=["by-wire", "in-memory"])
def test_a_server_moves_onto_a_machine_that_comes_and_nothing_is_changed_by_it(
    tmp_path: Path, cluster: Cluster, in_turn: None, method: str, shares: bool
) -> None:
    """The same rows, optimizer state and dense part, bit for bit, as of a run on one machine."""

    def config_of(**more: Any) -> dict[str, Any]:
        config = moving_settings(tmp_path, **more)
        if method == "sync":
            return by_gradients(config, "sync")
        return config | {"sync": {"method": method}}

    still, out = tmp_path / "still", tmp_path / "moved"
    Job(beside_own_model(config_of()), model=Tower(), out=still).run()
    cluster.make = lambda: Named(JobKeys.make(), 1, shares_memory=shares)
    result = Job(beside_own_model(config_of()), model=Tower(), out=out, failures=comes_and_moves(cluster)).run()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == 0
    assert result.recovery.moves == len(moved(out)) == 1
    assert "standing still" in moved(out)[0]
    before, after = everything(still), everything(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, msg=name)


DYNAMIC = {name: {"kind": "dynamic", "capacity": 16, "admit": 1} for name in ("c0", "c1")}
KINDS = [
    pytest.param({"data": {"columns": DYNAMIC}}, id="dynamic"),
    pytest.param({"embedding": {"storage": "mapped", "memory_gib": 0.001}}, id="mapped"),
]


@pytest.mark.parametrize("sections", KINDS)
@pytest.mark.parametrize("shares", [False, True], ids=["by-wire", "in-memory"])
def test_whatever_holds_the_rows(
    tmp_path: Path, cluster: Cluster, in_turn: None, shares: bool, sections: dict[str, Any]
) -> None:
    config = moving_settings(tmp_path, **sections)
    if "data" in sections:
        config["data"]["categorical"] = ["many"]
    still, out = tmp_path / "still", tmp_path / "moved"
    Job(beside_own_model(config), model=Tower(), out=still).run()
    cluster.make = lambda: Named(JobKeys.make(), 1, shares_memory=shares)
    Job(beside_own_model(config), model=Tower(), out=out, failures=comes_and_moves(cluster)).run()
    assert len(moved(out)) == 1
    before, after = everything(still), everything(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # FBGEMM's storages choose between two codes by their speed
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def comes_and_moves(cluster: Cluster) -> Script:
    """A machine comes, and the job goes on at least until a server has moved there."""

    def come() -> None:
        runtime = cluster.runtime
        assert isinstance(runtime, Named)
        runtime.come()

    seen = [(f"embedding-{index}", event) for index in range(2) for event in ("moved", "restored")]
    return Script(come, lambda: any(cluster.happened(*each) for each in seen))


@pytest.mark.parametrize("method", ["easgd", "ma", "gba", "sync"])
@pytest.mark.parametrize("shares", [False, True], ids=["by-wire", "in-memory"])
def test_a_machine_that_is_to_be_shut_down_is_emptied_of_all_roles(
    tmp_path: Path, cluster: Cluster, method: str, shares: bool
) -> None:
    """And everything goes on elsewhere, with every row trained as often as there are epochs."""
    out, ledger = tmp_path / "out", Ledger()
    cluster.make = lambda: Named(JobKeys.make(), 2, shares_memory=shares)
    sections = {
        "train": {"trainers": 4},
        "data": {"epochs": 6},
        "cluster": {"dense_servers": 1 if method == "ma" else 2},
    }
    config = moving_settings(tmp_path, **sections)
    if method in ("gba", "sync"):
        config = by_gradients(config, method)
    else:
        config |= {"sync": {"method": method}}
    script = Script(asking_to_leave(out, "machine-0"), lambda: any("is empty" in told for told in moved(out)))
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert result.data.trained_samples == ROWS * 6
    assert set(ledger.rows) == set(range(ROWS))
    assert min(ledger.rows.values()) >= 6
    assert result.recovery.failures == 0
    assert "machine-0 is empty and may be shut down" in moved(out)
    assert set(places_of(out).values()) == {"machine-1"}
    events = events_of(out)
    assert sum(role_events.count("left") for role, role_events in events.items() if role.startswith("trainer")) == 2
    assert not any("dead" in role_events for role_events in events.values())


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("when", ["take_all", "take_over"])
def test_a_server_that_dies_on_the_way_is_no_loss(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, victim: str, when: str
) -> None:
    """The source's death is a death as any; the target's is told, and it is tried again."""
    out, struck = tmp_path / "out", []
    method = getattr(ArrivingService, when)

    @functools.wraps(method)
    def strike(self: ArrivingService) -> Any:
        manager = cluster.session._manager
        (target,) = manager.supervisor.coming.values()
        if not struck:
            struck.append(target.role)
            (target if victim == "target" else manager.supervisor.members[target.role]).process.kill()
        return method(self)

    monkeypatch.setattr(ArrivingService, when, strike)
    cluster.make = lambda: Named(JobKeys.make(), 1)
    config = moving_settings(tmp_path, recovery={"mode": "partial"}, data={"epochs": 4})
    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=comes_and_moves(cluster)).run()
    assert struck
    assert result.data.trained_samples == ROWS * 4
    assert {host for role, host in places_of(out).items() if "embedding" in role} == {"machine-0", "machine-1"}
    assert result.recovery.failures == (victim == "source")
    told = [event.detail for event in read_events(out) if event.event == "decided" and event.role == struck[0]]
    assert any("stays where it is" in sentence for sentence in told) == (victim == "target")


def test_a_job_that_ends_or_stops_meanwhile_ends_as_any(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that would take for ever holds nobody up."""
    begun = threading.Event()
    method = ArrivingService.take_all

    @functools.wraps(method)
    def for_ever(self: ArrivingService) -> Any:
        begun.set()
        threading.Event().wait(600)
        return method(self)

    monkeypatch.setattr(ArrivingService, "take_all", for_ever)
    cluster.make = lambda: Named(JobKeys.make(), 1)

    def come() -> None:
        runtime = cluster.runtime
        assert isinstance(runtime, Named)
        runtime.come()

    out = tmp_path / "out"
    script = Script(come, begun.is_set)
    result = Job(beside_own_model(moving_settings(tmp_path)), model=Tower(), out=out, failures=script).run()
    assert begun.is_set()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert not moved(out)


def test_what_cannot_be_emptied_is_said(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "out"
    cluster.make = lambda: Named(JobKeys.make(), 2)
    config = moving_settings(tmp_path, data={"epochs": 4})
    del config["cluster"]["max_servers"]

    def ask() -> None:
        assert soon((out / "roles.json").exists)
        fails(lambda: ask_to_leave(out, ["machine-0"]), ConfigError, "stay where they are, as cluster.max_servers")
        (out / "drain.json").write_text('["machine-0"]')

    script = Script(ask, lambda: bool(decided(out, "machine-0")))
    Job(beside_own_model(config), model=Tower(), out=out, failures=script).run()
    assert decided(out, "machine-0 cannot be emptied: this job's servers stay where they are")
    assert not moved(out)


def decided(out: Path, part: str) -> list[str]:
    found = [event.detail for event in read_events(out) if event.event == "decided"] if out.exists() else []
    return [sentence for sentence in found if part in sentence]


REFUSED = [
    ({"cluster": {"max_servers": 3}}, "cluster.max_servers=3 is above embedding.servers=2"),
    ({"cluster": {"min_servers": 3}}, "cluster.min_servers=3 is above embedding.servers=2"),
    ({"cluster": {"min_servers": 2, "max_servers": 1}}, "cluster.max_servers=1 is below cluster.min_servers=2"),
    ({"cluster": {"max_servers": 0}}, "cluster.max_servers"),
]


@pytest.mark.parametrize(("sections", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_numbers_of_machines_that_cannot_be(tmp_path: Path, sections: dict[str, Any], sentence: str) -> None:
    config = moving_settings(tmp_path, **sections)
    error = error_of(lambda: Job(beside_own_model(config), model=Tower(), out=tmp_path / "out").run())
    assert isinstance(error, ConfigError)
    assert sentence in str(error)


def test_too_few_machines_for_the_start(tmp_path: Path, cluster: Cluster) -> None:
    config = moving_settings(tmp_path, cluster={"min_servers": 2})
    error = error_of(lambda: Job(beside_own_model(config), model=Tower(), out=tmp_path / "out").run())
    assert "cluster.min_servers=2 and there is room for embedding servers on 1 machine(s) only" in str(error)


def test_the_memory_of_a_dense_server_that_has_moved_holds_the_central_copy(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers of its machine that start later exchange with it there."""
    out, held = tmp_path / "out", dict[str, bool]()
    tell_of_move = manager.ClusterManager.tell_of_move

    def told(self: manager.ClusterManager, server: Any) -> None:
        tell_of_move(self, server)
        held[server.role] = any(self.memory[server.role].read())

    monkeypatch.setattr(manager.ClusterManager, "tell_of_move", told)
    cluster.make = lambda: Named(JobKeys.make(), 2, shares_memory=True)
    config = moving_settings(tmp_path, train={"trainers": 2}, data={"epochs": 6}) | {"sync": {"method": "easgd"}}
    leaving: list[str] = []

    def leave() -> None:
        assert soon((out / "roles.json").exists)
        leaving.append(places_of(out)["dense-0"])
        ask_to_leave(out, leaving)

    script = Script(leave, lambda: bool(leaving) and bool(moved(out)) and "is empty" in moved(out)[-1])
    Job(beside_own_model(config), model=Tower(), out=out, failures=script).run()
    assert held["dense-0"]
    assert all(held.values())


def test_the_only_trainer_stays_until_another_is_there(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "out"
    cluster.make = lambda: Named(JobKeys.make(), 2)
    config = moving_settings(tmp_path, data={"epochs": 4})

    def leave() -> None:
        assert soon((out / "roles.json").exists)
        ask_to_leave(out, [places_of(out)["trainer-0"]])

    script = Script(leave, lambda: cluster.happened("driver", "waiting"))
    result = Job(beside_own_model(config), model=Tower(), out=out, failures=script).run()
    assert result.recovery.failures == 0
    (told,) = {event.detail for event in read_events(out) if event.event == "waiting" and event.role == "driver"}
    assert "for trainer-0 there is no room elsewhere, or no other trainer" in told
    assert "cluster.max_trainers" in told


def test_a_machine_that_was_emptied_and_shut_down_is_not_missed(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "out"
    cluster.make = lambda: Named(JobKeys.make(), 2)
    config = moving_settings(tmp_path, train={"trainers": 2}, data={"epochs": 6}) | {"sync": {"method": "easgd"}}
    looked: list[int] = []

    def empty() -> bool:
        if not any("is empty" in told for told in moved(out)):
            return False
        cluster.runtime.lost.add("machine-0")
        looked.append(0)
        return len(looked) > 10

    Job(
        beside_own_model(config), model=Tower(), out=out, failures=Script(asking_to_leave(out, "machine-0"), empty)
    ).run()
    assert looked
    assert not [event for event in read_events(out) if event.event == "waiting" and event.role == "driver"]


def test_several_may_ask_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.draining._check_goes_on", lambda _: None)
    names = [f"machine-{index}" for index in range(8)]
    roles = {f"trainer-{index}": {"host": name, "machine": name} for index, name in enumerate(names)}
    (tmp_path / "roles.json").write_text(json.dumps(roles))
    (tmp_path / "config.yaml").touch()
    threads = [threading.Thread(target=ask_to_leave, args=(tmp_path, [name])) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(to_leave(tmp_path)) == names


DAMAGED = ["{", '["a", 1]', '["\xff"]', "[" + " " * (1 << 20) + "]"]


@pytest.mark.parametrize("content", DAMAGED, ids=["cut", "numbers", "no text", "too long"])
def test_a_damaged_word_in_the_folder_is_told_once_and_ends_nothing(
    tmp_path: Path, cluster: Cluster, content: str
) -> None:
    out = tmp_path / "out"
    cluster.make = lambda: Named(JobKeys.make(), 1)

    def damage() -> None:  # all of it at once: the driver may look at any moment
        (tmp_path / "damaged").write_bytes(content.encode("latin-1"))
        (tmp_path / "damaged").replace(out / "drain.json")

    script = Script(damage, lambda: bool(decided(out, "does not name machines to leave")))
    Job(beside_own_model(moving_settings(tmp_path)), model=Tower(), out=out, failures=script).run()
    assert len(decided(out, "does not name machines to leave")) == 1


def test_what_the_command_refuses(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "out"
    fails(lambda: ask_to_leave(out, ["machine-0"]), ConfigError, "is not the folder of a run")
    cluster.make = lambda: Named(JobKeys.make(), 1)

    def ask() -> None:
        assert soon((out / "roles.json").exists)
        fails(lambda: ask_to_leave(out, ["mashine-0"]), ConfigError, "no role of the run is on mashine-0", "machine-0")
        assert ask_to_leave(out, ["machine-0"]) == ("machine-0",)
        assert ask_to_leave(out, ["machine-0"], stay=True) == ()

    Job(beside_own_model(moving_settings(tmp_path)), model=Tower(), out=out, failures=Script(ask, lambda: True)).run()
    fails(lambda: ask_to_leave(out, ["machine-0"]), ConfigError, "no run is going on in")
    fails(lambda: wait_until_left(out, ["machine-0"], 1.0), ConfigError, "no run is going on in")
