"""Roles die in mid-run: the job goes on by itself, with every row trained, or ends with a sentence."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import DEADLINE_S, Cluster, Killing, Tower, cluster_settings, events_of, soon
from job_helpers import METHODS, Ledger, Witness, beside_own_model, checkpoints, error_of, name_of, write_rows
from wired_roles import Wired

from shadowsync import Job, Result, TrainerLost
from shadowsync.cluster.images import Images
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.roles import EmbeddingRole, TrainerRole
from shadowsync.cluster.supervisor import Member
from shadowsync.errors import RunError
from shadowsync.rpc.connection import JobKeys
from shadowsync.runtime.runtime import Machine

ROWS, EPOCHS = 240, 2
PATIENCE_S = 2.5
"""Silence of a second is no news: peers ask each other once a second for a sign of life."""
UNTOLD = 64
"""Samples between two messages of a trainer here, at most."""


def job_settings(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """Three trainers of two workers, two servers of either kind."""
    base: dict[str, dict[str, Any]] = {
        "train": {"trainers": 3, "workers": 2, "batch_size": 4, "lr": 0.1},
        "data": {"slice_rows": 16, "epochs": EPOCHS},
        "embedding": {"servers": 2},
        "sync": {"method": "easgd"},
        "cluster": {"dense_servers": 2},
    }
    data, test = write_rows(tmp_path / "rows.parquet", ROWS), write_rows(tmp_path / "test.parquet", 300, 1)
    merged = {name: base.get(name, {}) | dict(sections.get(name, {})) for name in {**base, **sections}}
    return cluster_settings(data, test, **merged)


def survive(config: dict[str, Any], out: Path, script: Killing) -> Result:
    """Runs the job with its deaths; checks that all rows were trained and that something was learnt."""
    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert script.done
    assert result.data.train_samples == ROWS
    assert result.data.trained_samples == ROWS * EPOCHS
    assert set(ledger.rows) == set(range(ROWS))
    assert min(ledger.rows.values()) >= EPOCHS
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.7
    frames = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trainers = sum(role.startswith("trainer") for role in script.roles)
    assert abs(frames[-1]["samples"] - ROWS * EPOCHS) <= trainers * UNTOLD  # what a dead trainer did not live to tell
    assert frames[-1]["failures"] == result.recovery.failures
    return result


def killing_before(
    monkeypatch: pytest.MonkeyPatch,
    cluster: Cluster,
    owner: type,
    method: str,
    role: str,
    when: Callable[[Any], bool] = lambda _: True,
) -> threading.Event:
    """Kills a role once, right before a method of some object; set when that was done."""
    original, struck = getattr(owner, method), threading.Event()

    def disturbed(own: Any, *given: Any) -> Any:
        if when(own) and not struck.is_set():
            struck.set()
            cluster.kill(role)
            assert cluster.wait_for(role, "dead")
        return original(own, *given)

    monkeypatch.setattr(owner, method, disturbed)
    return struck


@pytest.mark.parametrize("role", ["trainer-1", "reader-0", "dense-1", "embedding-1"])
def test_whoever_dies_is_replaced(tmp_path: Path, cluster: Cluster, role: str) -> None:
    """A server of rows begins with the initial ones: nothing was saved, and what was trained so far is lost to them."""
    out, script = tmp_path / "out", Killing(cluster, [role], until="restored")
    result = survive(job_settings(tmp_path, recovery={"mode": "partial"}), out, script)
    events = events_of(out)
    assert events[role] == ["alive", "dead", "restarted", "restored"]
    assert all(events[other] == ["alive"] for other in events if other not in (role, "driver"))
    assert result.recovery.failures == 1
    places = json.loads((out / "roles.json").read_text())
    assert {name for name, place in places.items() if place["incarnation"]} == {role}
    assert (result.recovery.pls > 0.01) == (role == "embedding-1")
    assert result.recovery.seconds.wait > 0 or role != "embedding-1"


DIFFERENCES = {"dense": {"name": "threshold", "keep": 0.1, "values": "int8"}}
UNDER_METHODS = [
    *(("trainer-0", METHODS[number], {}) for number in (1, 4, 5, 8)),
    *(("trainer-0", METHODS[number], DIFFERENCES) for number in (6, 7)),
    ("embedding-0", METHODS[7], {}),
]


@pytest.mark.parametrize(
    ("role", "sync", "compression"),
    UNDER_METHODS,
    ids=[f"{role}-{name_of(sync)}{'-differences' * bool(sent)}" for role, sync, sent in UNDER_METHODS],
)
def test_under_every_method(
    tmp_path: Path, cluster: Cluster, role: str, sync: dict[str, Any], compression: dict[str, Any]
) -> None:
    out, config = tmp_path / "out", job_settings(tmp_path, cluster={"dense_servers": 1}, compression=compression)
    config["sync"] = sync
    result = survive(config, out, Killing(cluster, [role]))
    assert "dead" in events_of(out)[role]
    assert not compression or result.wire.kept_share["dense"] > 0


@pytest.mark.parametrize(
    "roles",
    [
        ("embedding-0", "embedding-1"),
        ("trainer-0", "trainer-1", "trainer-2", "dense-0"),
        ("trainer-0", "reader-0", "dense-1", "embedding-0"),
    ],
    ids="+".join,
)
def test_several_at_once(tmp_path: Path, cluster: Cluster, roles: Sequence[str]) -> None:
    out = tmp_path / "out"
    result = survive(job_settings(tmp_path), out, Killing(cluster, roles))
    assert result.recovery.failures >= len(roles)
    assert all("dead" in events_of(out)[role] for role in roles)


def test_a_new_trainer_waits_for_a_server_of_rows_that_is_not_there_yet(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no failure, and the trainer is not started again."""
    tried, out = threading.Event(), tmp_path / "out"
    part, join = TrainerRole.part, EmbeddingRole.on_join

    def made(role: TrainerRole, manager: ClusterManager, member: Member, *more: Any) -> Any:
        try:
            return part(role, manager, member, *more)
        finally:
            if member.incarnation:
                tried.set()

    def join_later(role: EmbeddingRole, manager: ClusterManager, member: Member, *more: Any) -> None:
        assert tried.wait(DEADLINE_S)
        join(role, manager, member, *more)

    monkeypatch.setattr(TrainerRole, "part", made)
    monkeypatch.setattr(EmbeddingRole, "on_join", join_later)
    script = Killing(cluster, ["embedding-0", "trainer-1"], until="restored")
    result = survive(job_settings(tmp_path, recovery={"mode": "partial"}), out, script)
    assert result.recovery.failures == 2
    assert events_of(out)["trainer-1"] == ["alive", "dead", "restarted", "restored"]


def test_a_server_of_rows_goes_back_to_the_newest_checkpoint(tmp_path: Path, cluster: Cluster) -> None:
    """What was trained since is trained again, and nothing else."""
    out = tmp_path / "out"
    config = job_settings(tmp_path, train={"save_every_s": 0.02, "keep": 1000}, recovery={"mode": "full"})
    ledger = Ledger()
    script = Killing(cluster, ["embedding-0"], when=lambda: len(checkpoints(out)) >= 2)
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert script.done
    assert result.data.trained_samples == ROWS * EPOCHS
    second = sorted(checkpoints(out))[1]
    assert ledger.rows.total() - ROWS * EPOCHS < ROWS * EPOCHS - int(second.name.removeprefix("samples-"))
    samples = [json.loads(line)["samples"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert samples[-1] == ROWS * EPOCHS
    assert result.recovery.failures == 1
    assert events_of(out)["trainer-0"].count("restored") >= 1


@pytest.mark.parametrize("priority", ["all", "mfu"])
def test_only_the_replacement_of_a_server_of_rows_goes_back(tmp_path: Path, cluster: Cluster, priority: str) -> None:
    """Nothing is trained twice, and what its rows have lost is accounted for."""
    out = tmp_path / "out"
    config = job_settings(
        tmp_path,
        train={"save_every_s": 1.0, "keep": 1000},
        data={"epochs": 2 * EPOCHS},
        recovery={"mode": "partial", "priority": priority, **({"min_rows": 1} if priority != "all" else {})},
    )
    ledger = Ledger()

    script = Killing(cluster, ["embedding-0"], until="restored")

    def with_something_to_lose(rank: int, iteration: int) -> None:
        if iteration < 5 or not soon(lambda: len(checkpoints(out)) >= 2):
            return
        saved = max(int(found.name.split("-")[1]) for found in checkpoints(out))
        if script.done or cluster.session.reader.leases.trained > saved:
            script(rank, iteration)

    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=with_something_to_lose).run()
    assert script.done
    assert ledger.rows == dict.fromkeys(range(ROWS), 2 * EPOCHS)
    assert result.data.trained_samples == ROWS * 2 * EPOCHS
    assert result.recovery.failures == 1
    assert result.recovery.mode == "partial"
    assert 0 < result.recovery.pls < 0.5
    assert result.recovery.seconds.lost == 0
    events = events_of(out)
    assert events["embedding-0"] == ["alive", "dead", "restarted", "restored"]
    assert events["trainer-0"] == ["alive"]
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.7


@pytest.mark.parametrize(
    ("method", "machine_too", "again"),
    [("easgd", False, False), ("easgd", True, False), ("bmuf", True, True)],
)
def test_rows_outlive_their_server_but_not_their_machine(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str, machine_too: bool, again: bool
) -> None:
    """Trainers reach the rows of their own machine in its memory, and those of the other one over the wire.

    Memory of a replacement that dies before it was filled (`again`) is not taken for what it should hold.
    """
    cluster.make = lambda: Wired(JobKeys.make(), 2, shares_memory=True)
    reached: list[bool] = []
    give_memory, given = ClusterManager.give_memory, []

    def dies_then(manager: ClusterManager, server: Member) -> None:
        give_memory(manager, server)
        given.append(server.role)
        if again and given.count("embedding-0") == 2:  # the first is that of the start
            server.process.kill()

    monkeypatch.setattr(ClusterManager, "give_memory", dies_then)

    class LosesTheMachine(Killing):
        def strike(self) -> None:
            manager = self.cluster.session._manager
            members, trainers = manager.supervisor.members, manager.trainers()
            servers = manager.serving("embedding")
            reached.extend(manager.address(s, t).memory is not None for s in servers for t in trainers)
            if machine_too:
                lost = members["embedding-0"].endpoint.machine
                self.cluster.runtime.lost.add(lost)
                self.roles = [role for role, member in members.items() if member.endpoint.machine == lost]
            super().strike()

    script = LosesTheMachine(cluster, ["embedding-0"], iteration=8, until="restored")
    cluster_of = {"dense_servers": 2 if method == "easgd" else 1}
    config = job_settings(tmp_path, recovery={"mode": "partial"}, sync={"method": method}, cluster=cluster_of)
    result = survive(config, tmp_path / "out", script)
    assert (sum(reached), len(reached)) == (3, 6)
    assert (result.recovery.pls > 0) == machine_too
    assert given.count("embedding-0") == 1 + machine_too + again
    assert result.recovery.failures >= len(script.roles) + again  # who waits for a server may be given up, too
    assert result.recovery.mode == "partial"
    assert any(role.startswith("trainer") for role in script.roles) == machine_too


def test_failures_by_script_are_real_deaths(tmp_path: Path, cluster: Cluster) -> None:
    out, ledger = tmp_path / "out", Ledger()
    config = job_settings(
        tmp_path,
        train={"emulate_step_ms": 30.0},
        recovery={"inject": "at:0.3,unit=epoch,index=1; at:0.6,unit=epoch,kind=dense,index=0"},
    )
    result = Job(beside_own_model(config), model=Witness(ledger), out=out).run()
    assert result.recovery.failures == 2
    assert ledger.rows == dict.fromkeys(range(ROWS), EPOCHS)
    assert "dead" in events_of(out)["embedding-1"]
    assert "dead" in events_of(out)["dense-0"]


def test_a_server_of_rows_may_die_again_and_again(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "out"
    scripts = [Killing(cluster, ["embedding-0"]), Killing(cluster, ["embedding-1"], iteration=8)]

    def failures(rank: int, iteration: int) -> None:
        scripts[cluster.happened("embedding-0", "restored")](rank, iteration)

    config = job_settings(tmp_path, recovery={"mode": "full"})
    result = Job(beside_own_model(config), model=Tower(), out=out, failures=failures).run()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == 2


def test_another_server_may_die_while_the_job_goes_back(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = killing_before(
        monkeypatch,
        cluster,
        ClusterManager,
        "build_servers",
        "embedding-1",
        when=lambda manager: manager.generation == 1,
    )
    survive(job_settings(tmp_path, recovery={"mode": "full"}), tmp_path / "out", Killing(cluster, ["embedding-0"]))
    assert struck.is_set()


@pytest.mark.parametrize("role", ["embedding-0", "trainer-1"])
def test_whoever_dies_before_the_job_has_begun_is_replaced(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    killing_before(monkeypatch, cluster, ClusterManager, "build_servers", role)
    result = Job(beside_own_model(job_settings(tmp_path)), model=Tower(), out=tmp_path / "out").run()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The settings of a job that has ended, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    config = job_settings(folder)
    with pytest.MonkeyPatch.context() as patch:
        Cluster(patch)
        Job(beside_own_model(config), model=Witness(Ledger()), out=folder / "out").run()
    return config, folder / "out"


@pytest.mark.parametrize("role", ["embedding-0", "dense-1", "trainer-1"])
def test_whoever_dies_while_a_run_is_resumed_is_replaced(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, finished: tuple[dict[str, Any], Path], role: str
) -> None:
    config, out = finished[0], shutil.copytree(finished[1], tmp_path / "out")
    killing_before(monkeypatch, cluster, Images, "load_rows", role)
    config = config | {"data": config["data"] | {"epochs": EPOCHS + 1}}
    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, resume=out).run()
    assert result.data.trained_samples == ROWS * (EPOCHS + 1)
    assert ledger.rows.total() == ROWS
    assert result.recovery.failures == 1
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.7


def test_a_death_before_a_run_is_resumed_whose_rows_are_older(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is a share of the rows on an older one, as `kill -9` leaves it."""
    recovery = {"mode": "partial", "priority": "mfu", "min_rows": 1}
    train = {"save_every_s": 0.1, "keep": 1000}
    out, config = tmp_path / "out", job_settings(tmp_path, train=train, recovery=recovery)

    def slow_until_saved(rank: int, iteration: int) -> None:
        if iteration >= 5:
            soon(lambda: len(checkpoints(out)) >= 2)

    Job(beside_own_model(config), model=Witness(Ledger()), out=out, failures=slow_until_saved).run()
    for newest in reversed(checkpoints(out)):
        body = json.loads((newest / "manifest.json").read_text())["body"]
        if body.get("parent") is not None and body["samples"] < ROWS * EPOCHS:
            break
        shutil.rmtree(newest)
    left = ROWS * EPOCHS - body["samples"]
    killing_before(monkeypatch, cluster, ClusterManager, "build_servers", "embedding-0")
    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, resume=out).run()
    assert 0 < left == ledger.rows.total()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == 1


def test_a_death_after_the_last_row_costs_nothing(tmp_path: Path, cluster: Cluster) -> None:
    """The last worker has nothing left to train, but its weights are needed."""
    out, ledger = tmp_path / "out", Ledger()
    config = job_settings(tmp_path, train={"trainers": 1, "workers": 1})
    steps = ROWS * EPOCHS // 4
    script = Killing(cluster, ["trainer-0"], iteration=steps)
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert script.done
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.test is not None


class Shrinking(Wired):
    """Its machines are gone once it has started everybody."""

    def __init__(self, kept: Callable[[Machine], bool] = lambda _: False) -> None:
        super().__init__(JobKeys.make())
        self.gone = False
        self.kept = kept

    def machines(self) -> Sequence[Machine]:
        return [machine for machine in self._machines if not self.gone or self.kept(machine)]


class Alone(Killing):
    """Nobody can be replaced."""

    def strike(self) -> None:
        assert isinstance(self.cluster.runtime, Shrinking)
        self.cluster.runtime.gone = True
        super().strike()


def test_a_dead_trainers_rows_are_trained_by_the_others_where_nobody_can_take_its_place(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.make = Shrinking
    out = tmp_path / "out"
    result = survive(job_settings(tmp_path), out, Alone(cluster, ["trainer-2"]))
    assert result.recovery.failures == 1
    assert events_of(out)["trainer-2"] == ["alive", "dead"]


def test_without_trainers_and_room_the_job_ends_with_a_sentence(tmp_path: Path, cluster: Cluster) -> None:
    cluster.make = Shrinking
    out = tmp_path / "out"
    train = {"trainers": 2, "save_every_s": 0.02}
    config = job_settings(tmp_path, train=train, cluster={"lost_after_s": PATIENCE_S})
    script = Alone(cluster, ["trainer-0", "trainer-1"], when=lambda: len(checkpoints(out)) >= 1)
    error = error_of(Job(beside_own_model(config), model=Tower(), out=out, failures=script).run)
    assert script.done
    assert isinstance(error, RunError), error
    assert "trainer" in str(error)
    assert "\n" not in str(error)
    assert f"of {ROWS * EPOCHS} samples" in str(error)
    assert "a checkpoint is written" in str(error)
    assert not (out / "result.json").exists()
    cluster.make = lambda: Wired(JobKeys.make())
    result = Job(beside_own_model(config), model=Tower(), out=out, resume=out).run()
    assert result.data.trained_samples == ROWS * EPOCHS


def test_fewer_trainers_than_are_wanted_end_the_job(tmp_path: Path, cluster: Cluster) -> None:
    cluster.make = Shrinking
    out = tmp_path / "out"
    train = {"trainers": 2, "emulate_step_ms": 200.0}
    config = job_settings(tmp_path, train=train, cluster={"lost_after_s": PATIENCE_S, "min_trainers": 2})
    script = Alone(cluster, ["trainer-1"], iteration=1)
    error = error_of(Job(beside_own_model(config), model=Tower(), out=out, failures=script).run)
    assert isinstance(error, RunError)
    assert "fewer than cluster.min_trainers=2 trainers are left" in str(error)
    assert len(checkpoints(out)) == 1
    cluster.make = lambda: Wired(JobKeys.make())
    config = job_settings(tmp_path, train={"trainers": 2})
    resumed = Job(beside_own_model(config), model=Tower(), out=out, resume=out).run()
    assert resumed.data.trained_samples == ROWS * EPOCHS


def test_a_server_of_rows_without_room_ends_the_job_with_a_sentence(tmp_path: Path, cluster: Cluster) -> None:
    cluster.make = Shrinking
    out = tmp_path / "out"
    config = job_settings(tmp_path, cluster={"lost_after_s": PATIENCE_S}, train={"emulate_step_ms": 100.0})
    script = Alone(cluster, ["embedding-1"], iteration=2)
    error = error_of(Job(beside_own_model(config), model=Tower(), out=out, failures=script).run)
    assert isinstance(error, RunError), error
    assert "embedding-1 needs a machine" in str(error)
    assert "none of the 0 has room" in str(error)
    assert ("a checkpoint is written" in str(error)) == bool(checkpoints(out))
    assert not (out / "result.json").exists()


def test_trainers_may_join_while_the_job_runs(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "out"
    config = job_settings(tmp_path, train={"trainers": 1}, cluster={"max_trainers": 3})

    def failures(rank: int, iteration: int) -> None:
        if iteration >= 5:
            assert cluster.wait_for("trainer-1", "alive")
            assert cluster.wait_for("trainer-2", "alive")

    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=failures).run()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert ledger.rows == dict.fromkeys(range(ROWS), EPOCHS)
    assert result.recovery.failures == 0
    assert sorted(role for role in events_of(out) if role.startswith("trainer")) == [f"trainer-{i}" for i in range(3)]


def test_a_scripted_death_and_a_real_one(tmp_path: Path, cluster: Cluster) -> None:
    """The one by script stays dead, the other is replaced."""
    out = tmp_path / "out"
    killing = Killing(cluster, ["trainer-0"], until="restored")

    def failures(rank: int, iteration: int) -> None:
        if rank == 2 and iteration == 2:
            raise TrainerLost("by script")
        if rank != 2:
            killing(rank, iteration)

    ledger = Ledger()
    result = Job(beside_own_model(job_settings(tmp_path)), model=Witness(ledger), out=out, failures=failures).run()
    assert result.data.trained_samples == ROWS * EPOCHS
    events = events_of(out)
    assert events["trainer-0"] == ["alive", "dead", "restarted", "restored"]
    assert "restarted" not in events["trainer-2"]
    assert result.recovery.failures == 2
