"""Whole jobs whose roles are reached through the wire only."""

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from cluster_jobs import Cluster, SignalInCluster, Tower, cluster_settings, events_of, everything, interrupted
from job_helpers import (
    METHODS,
    SMALL_DLRM,
    Ledger,
    Witness,
    beside_own_model,
    checkpoints,
    error_of,
    name_of,
    settings,
    train_counted,
    write_rows,
)
from safetensors.torch import load_file
from torch import Tensor

from shadowsync import Job, Trained, TrainerLost
from shadowsync.cluster import session, trainer, trainer_dense
from shadowsync.config import merge
from shadowsync.data.leases import Lease
from shadowsync.data.reader import Parsed, Parser
from shadowsync.errors import ConfigError, DataError, NonFiniteLoss, RunError
from shadowsync.report.files import read_events
from shadowsync.runtime import runtime
from shadowsync.training.kernels import Computing
from shadowsync.training.worker import LocalUpdate

pytestmark = pytest.mark.usefixtures("cluster")
EXACT = {"prefetch": 0, "optimizer": "adagrad", "warmup_samples": 0}
"""Learning rates do not depend on how soon the lease service says how much was trained."""


@pytest.fixture
def pushes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker waits for its push before its next pull, as if there were no wire in between."""
    monkeypatch.setattr(trainer_dense, "LocalUpdate", partial(LocalUpdate, most_under_way=0))


@pytest.mark.parametrize("sync", METHODS, ids=name_of)
@pytest.mark.parametrize("trainers", [3])
def test_every_row_is_trained_once_per_epoch(tmp_path: Path, sync: dict[str, Any], trainers: int) -> None:
    data = write_rows(tmp_path / "rows.parquet", 23)
    config = cluster_settings(data, data, sync=sync, data={"epochs": 2}, train={"trainers": trainers, "workers": 2})
    result, counts = train_counted(config, tmp_path / "out")
    assert counts == dict.fromkeys(range(23), 2)
    assert result.data.trained_samples == 46
    assert result.sync.method == sync["method"]
    assert result.recovery.failures == 0
    assert result.train.auc is not None
    assert (result.sync.count > 0) == (sync["method"] != "none" and (trainers > 1 or result.sync.count > 0))


@pytest.mark.parametrize("sync", [METHODS[2], METHODS[6]], ids=name_of)
@pytest.mark.parametrize("rows", [10])
def test_fewer_slices_than_trainers(tmp_path: Path, sync: dict[str, Any], rows: int) -> None:
    data = write_rows(tmp_path / "rows.parquet", rows)
    result, counts = train_counted(cluster_settings(data, sync=sync, train={"trainers": 8}), tmp_path / "out")
    assert result.data.trained_samples == rows
    assert counts == dict.fromkeys(range(rows), 1)


@pytest.mark.parametrize("processor", ["the driver's", "another"])
def test_trainers_compute_as_the_driver_has_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    """Several who find out at once disturb each other; on another processor a trainer has to find out by itself."""
    monkeypatch.setattr(session, "computing_here", lambda *_: Computing(why="found by the driver"))
    monkeypatch.setattr(trainer, "computing_here", lambda *_: Computing(why="found by a trainer"))
    if processor == "another":
        monkeypatch.setattr(trainer, "processor", lambda: processor)
    data = write_rows(tmp_path / "rows.parquet", 23)
    result = Job(cluster_settings(data, train={"trainers": 2}), out=tmp_path / "out").run()
    assert result.computing is not None
    assert result.computing.why == ("found by a trainer" if processor == "another" else "found by the driver")


SHAPES: dict[str, dict[str, Any]] = {
    "two readers": {"cluster": {"readers": 2}},
    "three dense servers": {"cluster": {"dense_servers": 3}, "sync": {"method": "easgd"}},
    "more dense servers than parameters": {"cluster": {"dense_servers": 40}, "sync": {"method": "easgd"}},
    "three embedding servers": {"embedding": {"servers": 3}},
    "split tables": {"embedding": {"servers": 2, "split_rows": 7}},
    "each row once": {"embedding": {"servers": 2, "unique_rows": "always"}},
    "a pull at a time": {"train": {"prefetch": 0}},
    "many pulls ahead": {"train": {"prefetch": 5, "workers": 2}},
    "bf16 codecs": {"compression": {"pull": "bf16", "push": "bf16", "dense": "bf16"}, "sync": {"method": "easgd"}},
    "differences": {
        "compression": {"dense": {"name": "threshold", "keep": 0.1}},
        "cluster": {"dense_servers": 2},
        "sync": {"method": "easgd", "schedule": "every_k", "k": 1},
        "train": {"trainers": 2, "workers": 2},
    },
    "averages of differences": {
        "compression": {"dense": {"name": "threshold", "keep": 0.1, "values": "int8"}},
        "sync": {"method": "ma", "schedule": "every_k", "k": 1},
        "train": {"trainers": 3},
    },
    "bf16 averages": {"compression": {"dense": "bf16"}, "sync": {"method": "ma", "schedule": "every_k", "k": 2}},
    "bf16 steps": {"train": {"precision": "bf16"}},
    "threads of readers": {"data": {"readers": 3}},
    "apart": {"cluster": {"placement": "apart"}},
}


ANYWHERE = [
    pytest.param(runtime, shape, id=f"{runtime}, {name}")
    for name, shape in SHAPES.items()
    for runtime in ("ray", "inprocess")
    if runtime == "ray" or shape.get("cluster", {}).keys() <= {"dense_servers"}
]
"""Through the wire, and as objects of this process where there is such a shape."""


@pytest.mark.parametrize(("runtime", "shape"), ANYWHERE)
def test_any_shape_trains_every_row_once(tmp_path: Path, cluster: Cluster, runtime: str, shape: dict[str, Any]) -> None:
    cluster.machines = 2
    data = write_rows(tmp_path / "rows.parquet", 61)
    config = merge(cluster_settings(data, data, train={"trainers": 2}), shape, [])
    config["sync"] = shape.get("sync", config["sync"])
    config["cluster"]["runtime"] = runtime
    result, counts = train_counted(config, tmp_path / "out")
    assert counts == dict.fromkeys(range(61), 1)
    assert result.test is not None
    assert result.test.logloss is not None
    assert 0 < result.test.logloss < 5


def test_emulated_steps_compute_nothing_and_count_all(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 61)
    train = {"trainers": 2, "emulate_step_ms": 3.0, "emulate_compute": False}
    result, counts = train_counted(cluster_settings(data, data, train=train), tmp_path / "out")
    assert not counts
    assert result.data.trained_samples == 61
    assert result.throughput.emulated_step_ms == 3.0


def one_of_each(config: dict[str, Any], out: Path) -> Any:
    return Job(beside_own_model(config), model=Tower(), out=out).run()


@pytest.mark.usefixtures("pushes_in_turn")
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_gives_the_same_model_as_in_process_bit_by_bit(tmp_path: Path, servers: int) -> None:
    data = write_rows(tmp_path / "rows.parquet", 120)
    sections = {
        "train": EXACT | {"batch_size": 8},
        "data": {"slice_rows": 16, "epochs": 2},
        "embedding": {"servers": servers, "unique_rows": "never"},
    }
    near = one_of_each(settings(data, data, **sections), tmp_path / "near")
    far = one_of_each(cluster_settings(data, data, **sections), tmp_path / "far")
    expected, found = everything(tmp_path / "near"), everything(tmp_path / "far")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert far.test == near.test
    assert far.train.ne_lifetime == pytest.approx(near.train.ne_lifetime, abs=1e-3)
    assert far.train.auc == pytest.approx(near.train.auc, abs=1e-3)
    assert far.wire.bytes["pull"] > 0


@pytest.mark.usefixtures("pushes_in_turn")
def test_a_configured_model_is_the_same_too_and_evaluates_to_the_result(tmp_path: Path) -> None:
    data, test = write_rows(tmp_path / "rows.parquet", 120), write_rows(tmp_path / "test.parquet", 60, 1)
    sections: dict[str, Any] = {"train": EXACT | {"batch_size": 8}, "model": SMALL_DLRM}
    near = Job(settings(data, test, **sections), out=tmp_path / "near").run()
    far = Job(cluster_settings(data, test, **sections), out=tmp_path / "far").run()
    assert near.test is not None
    assert far.test is not None
    assert far.test.logloss == pytest.approx(near.test.logloss, rel=1e-5)
    assert near.units is not None
    assert far.units == near.units
    measured = Trained(tmp_path / "far").evaluate()
    found = (measured.auc, measured.ne, measured.logloss, measured.calibration, measured.samples)
    assert found == (far.test.auc, far.test.ne, far.test.logloss, far.test.calibration, 60)


@pytest.mark.parametrize("sync", METHODS[2::3], ids=name_of)
def test_an_interrupted_job_is_resumed_where_it_was(tmp_path: Path, sync: dict[str, Any]) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 61), tmp_path / "out"
    config = cluster_settings(data, data, sync=sync, train={"trainers": 2, "workers": 2}, data={"epochs": 2})
    before, said = interrupted(config, out)
    assert f"stopped by SIGTERM after {before.total()} samples" in said
    assert f"--resume {out}" in said
    assert [folder.name for folder in checkpoints(out)] == [f"samples-{before.total():012d}"]
    result, after = train_counted(config, out, resume=out)
    assert before + after == dict.fromkeys(range(61), 2)
    assert result.data.trained_samples == 122


CHANGES: dict[str, dict[str, Any]] = {
    "fewer trainers": {"train": {"trainers": 1}},
    "more trainers": {"train": {"trainers": 5}},
    "more servers": {"embedding": {"servers": 3}, "cluster": {"dense_servers": 3}},
    "fewer servers": {"embedding": {"servers": 1}, "cluster": {"dense_servers": 1}},
    "split tables": {"embedding": {"servers": 2, "split_rows": 7}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_checkpoint_goes_on_in_either_session_in_another_shape(
    tmp_path: Path, way: str, change: dict[str, Any]
) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 61), tmp_path / "out"
    sections: dict[str, Any] = {
        "train": {"trainers": 2},
        "embedding": {"servers": 2},
        "sync": {"method": "easgd"},
        "cluster": {"dense_servers": 2},
    }
    near, far = settings(data, data, **sections), cluster_settings(data, data, **sections)
    first, then = {"there": (near, far), "back": (far, near)}[way]
    before, _ = interrupted(first, out)
    result, after = train_counted(merge(then, change, []), out, resume=out)
    assert before + after == dict.fromkeys(range(61), 1)
    assert result.data.trained_samples == 61
    assert result.test is not None
    assert result.test.logloss is not None
    assert result.test.logloss < 5


@pytest.mark.usefixtures("pushes_in_turn")
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_job_that_changes_sessions_equals_an_undisturbed_one_bit_by_bit(tmp_path: Path, way: str) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 75), tmp_path / "out"
    sections = {
        "data": {"epochs": 2, "slice_rows": 12},
        "train": EXACT | {"batch_size": 4},
        "embedding": {"unique_rows": "never"},
    }
    near, far = settings(data, data, **sections), cluster_settings(data, data, **sections)
    whole = one_of_each(near, tmp_path / "whole")
    first, then = (near, far) if way == "there" else (far, near)
    script = SignalInCluster(9)
    script.run(Job(beside_own_model(first), model=Tower(), out=out, failures=script))
    resumed = Job(beside_own_model(then), model=Tower(), out=out, resume=out).run()
    expected, found = everything(tmp_path / "whole"), everything(out)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert resumed.test == whole.test
    assert resumed.train.ne_lifetime == pytest.approx(whole.train.ne_lifetime, abs=1e-3)


@pytest.mark.parametrize("sync", [METHODS[2], METHODS[5], METHODS[6], METHODS[8]], ids=name_of)
def test_checkpoints_while_training_are_whole(tmp_path: Path, sync: dict[str, Any]) -> None:
    """Saves as often as it can, and goes on from a checkpoint in the middle as `kill -9` would leave it."""
    data, out = write_rows(tmp_path / "rows.parquet", 61), tmp_path / "out"
    train = {"trainers": 2, "workers": 2, "save_every_s": 0.02, "keep": 1000, "emulate_step_ms": 3.0}
    config = cluster_settings(data, data, sync=sync, train=train, data={"epochs": 3}, embedding={"servers": 2})
    result, counts = train_counted(config, out)
    assert counts == dict.fromkeys(range(61), 3)
    found = checkpoints(out)
    assert len(found) == result.recovery.saves >= 2
    assert found[-1].name.startswith("samples-000000000183")  # one of that moment may have been taken beside training
    middle = found[len(found) // 2 - 1]
    for other in found[len(found) // 2 :]:
        shutil.rmtree(other)
    resumed, rows = train_counted(config, out, resume=out)
    assert resumed.data.trained_samples == 183
    assert rows.total() == 183 - int(middle.name.split("-")[1])


class ScriptedDeath:
    """Trainer 1 dies before its third step; the others cannot finish before that."""

    def __init__(self) -> None:
        self.died = threading.Event()

    def __call__(self, rank: int, iteration: int) -> None:
        if rank != 1 and iteration > 3:
            assert self.died.wait(120), "the trainer that should die did not get so far"
        if rank == 1 and iteration == 3:
            self.died.set()
            raise TrainerLost("trainer 1 dies")


@pytest.mark.parametrize("sync", METHODS[2::3], ids=name_of)
def test_who_dies_by_script_stays_dead_and_the_others_train_its_rows(tmp_path: Path, sync: dict[str, Any]) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 61), tmp_path / "out"
    config = cluster_settings(data, data, sync=sync, train={"trainers": 3, "workers": 2}, data={"epochs": 2})
    script = ScriptedDeath()
    result, counts = train_counted(config, out, failures=script)
    assert script.died.is_set()
    assert result.data.trained_samples == 122
    assert set(counts) == set(range(61))
    assert min(counts.values()) == 2
    assert result.recovery.failures == 1
    assert events_of(out)["trainer-1"] == ["alive", "dead"]


def _everybody_dies(rank: int, iteration: int) -> None:
    if iteration == 3:
        raise TrainerLost(f"trainer {rank} dies")


def test_when_all_trainers_die_by_script_the_run_fails_in_one_sentence(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 40), tmp_path / "out"
    config = cluster_settings(data, train={"trainers": 2, "workers": 2}, sync={"method": "ma"})
    error = error_of(lambda: train_counted(config, out, failures=_everybody_dies))
    assert isinstance(error, RunError)
    assert "every trainer died" in str(error)
    assert not (out / "result.json").exists()
    assert ("a checkpoint is written" in str(error)) == bool(checkpoints(out))


class Broken(Witness):
    """Fails in the given way after some rows, in a worker that has trained some of them."""

    def __init__(self, ledger: Ledger, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__(ledger)
        self.fault = fault
        self.steps = 0

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        self.steps += 1
        return self.fault(logits) if self.ledger.rows.total() > 12 and self.steps > 1 else logits


def _raise(logits: Tensor) -> Tensor:
    raise ZeroDivisionError("the user's own mistake\nin two lines")


class Panic(BaseException):
    """As libraries written in Rust raise it."""


def test_a_panic_in_a_reader_ends_the_job_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, count = Parser.parse, itertools.count()

    @wraps(parse)
    def panics(parser: Parser, lease: Lease) -> Parsed:
        if next(count) >= 2:
            raise Panic("range end index 8 out of range\nnote: run with a backtrace")
        return parse(parser, lease)

    monkeypatch.setattr(Parser, "parse", panics)
    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    config = cluster_settings(data, data={"slice_rows": 8}, train={"trainers": 2}, sync={"method": "easgd"})
    error = error_of(Job(beside_own_model(config), model=Witness(Ledger()), out=out).run)
    assert isinstance(error, RunError)
    assert str(error) == "parse failed with Panic: range end index 8 out of range"


def test_who_gets_no_answer_of_a_living_peer_is_told_of(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = Parser.parse

    @wraps(parse)
    def slow(parser: Parser, lease: Lease) -> Parsed:
        assert cluster.wait_for("trainer-0", "waiting")
        return parse(parser, lease)

    monkeypatch.setattr(Parser, "parse", slow)
    monkeypatch.setattr(runtime, "LONG_S", 0.05)
    data, out = write_rows(tmp_path / "rows.parquet", 20), tmp_path / "out"
    config = cluster_settings(data, sync={"method": "easgd"})
    Job(beside_own_model(config), model=Witness(Ledger()), out=out).run()
    told = [event for event in read_events(out) if event.event == "waiting" and event.role == "trainer-0"]
    assert "parse of reader-0" in told[0].detail


@pytest.mark.parametrize("sync", METHODS[2::3], ids=name_of)
def test_an_exception_in_a_worker_ends_the_job_with_it(tmp_path: Path, sync: dict[str, Any]) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    config = cluster_settings(data, sync=sync, train={"trainers": 3, "workers": 2})
    error = error_of(Job(beside_own_model(config), model=Broken(Ledger(), _raise), out=out).run)
    assert isinstance(error, RunError)
    assert "the model Broken failed on a batch: ZeroDivisionError: the user's own mistake (" in str(error)
    assert not (out / "result.json").exists()
    assert checkpoints(out) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_place(tmp_path: Path, value: float) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    config = cluster_settings(data, train={"trainers": 2, "workers": 2})
    error = error_of(Job(beside_own_model(config), model=Broken(Ledger(), lambda x: x * value), out=out).run)
    assert isinstance(error, NonFiniteLoss)
    assert error.exit_status == 1
    assert f"{data}, row " in str(error)
    assert "train.lr" in str(error)
    assert not (out / "result.json").exists()


def test_a_row_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    with_bad_labels(data, [46])
    config = cluster_settings(data, train={"trainers": 2, "workers": 2}, sync={"method": "ma"})
    error = error_of(lambda: train_counted(config, out))
    assert isinstance(error, DataError)
    assert f"{data}, row 47" in str(error)
    assert "\n" not in str(error)
    assert not (out / "result.json").exists()


def with_bad_labels(data: Path, rows: list[int]) -> None:
    frame = pl.read_parquet(data)
    label = pl.when(pl.int_range(pl.len()).is_in(rows)).then(7).otherwise("label").alias("label")
    frame.with_columns(label).write_parquet(data)


def test_skipped_rows_are_counted_and_the_others_trained_once(tmp_path: Path) -> None:
    data, bad = write_rows(tmp_path / "rows.parquet", 60), [0, 17, 18, 59]
    with_bad_labels(data, bad)
    config = cluster_settings(data, data={"on_bad_row": "skip"}, train={"trainers": 3})
    result, counts = train_counted(config, tmp_path / "out")
    assert counts == dict.fromkeys(set(range(60)) - set(bad), 1)
    assert (result.data.trained_samples, result.data.skipped_rows) == (56, 4)


def test_rows_that_changed_on_a_readers_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shadowsync.cluster import roles  # noqa: PLC0415 the module is patched

    data, out = write_rows(tmp_path / "rows.parquet", 20), tmp_path / "out"
    build = roles.build_reader

    def elsewhere(*given: Any) -> Any:
        write_rows(data, 19)
        return build(*given)

    monkeypatch.setattr(roles, "build_reader", elsewhere)
    error = error_of(lambda: train_counted(cluster_settings(data), out))
    assert isinstance(error, DataError)
    assert "reader-0 finds 19 training rows on its machine, the driver 20" in str(error)


def test_a_cluster_without_room_is_an_error_before_anything_starts(tmp_path: Path, cluster: Cluster) -> None:
    data = write_rows(tmp_path / "rows.parquet", 20)
    config = cluster_settings(data, train={"trainers": 2}, cluster={"trainer_cpus": 40})
    error = error_of(lambda: train_counted(config, tmp_path / "out"))
    assert isinstance(error, RunError)
    assert "trainer-1 needs a machine with 40 free CPU(s)" in str(error)
    assert cluster.runtime.processes == []
    assert not (tmp_path / "out").exists()


def test_tables_larger_than_servers_are_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 20)
    config = cluster_settings(data, cluster={"server_memory_gib": 1e-7})
    assert isinstance(error_of(lambda: train_counted(config, tmp_path / "out")), ConfigError)


def test_a_run_says_where_its_roles_are_and_what_happened_to_them(tmp_path: Path, cluster: Cluster) -> None:
    cluster.machines = 2
    data, out = write_rows(tmp_path / "rows.parquet", 20), tmp_path / "out"
    config = cluster_settings(data, train={"trainers": 2}, embedding={"servers": 2}, sync={"method": "easgd"})
    train_counted(config, out)
    roles = ["dense-0", "embedding-0", "embedding-1", "reader-0", "reader-1", "trainer-0", "trainer-1"]
    places = json.loads((out / "roles.json").read_text())
    assert sorted(places) == roles
    assert all(place["incarnation"] == 0 and place["host"].startswith("machine-") for place in places.values())
    events = events_of(out)
    assert sorted(set(events) - {"driver"}) == roles
    assert all(events[role] == ["alive"] for role in roles)
    frames = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert frames[-1]["samples"] == 20
    assert frames[-1]["roles"]["trainer-1"] == "alive"


def test_a_resumed_run_that_was_finished_trains_nothing(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 31), tmp_path / "out"
    config = cluster_settings(data, data, train={"trainers": 2})
    first, _ = train_counted(config, out)
    result, after = train_counted(config, out, resume=out)
    assert not after
    assert result.test == first.test
    assert len(checkpoints(out)) == 1


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    config = cluster_settings(write_rows(tmp_path / "rows.parquet", 30), sync={"method": "ma"}, train={"trainers": 3})
    train_counted(config, tmp_path / "one")
    broken = Broken(Ledger(), lambda x: x * float("nan"))
    error_of(Job(beside_own_model(config), model=broken, out=tmp_path / "two").run)
    left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    for thread in left:
        thread.join(120)
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_the_central_copy_has_everything_of_the_replica_at_the_end(tmp_path: Path) -> None:
    """After an exchange with alpha 0.5 of which nothing was left out the two are one, and its bytes are counted."""
    data = write_rows(tmp_path / "rows.parquet", 96)
    config = cluster_settings(
        data,
        model={"name": "dlrm", "bottom": [64], "top": [64, 32]},
        train={"batch_size": 8, "trainers": 1},
        compression={"dense": {"name": "threshold", "keep": 0.01}},
    )
    config["sync"] = {"method": "easgd", "schedule": "every_k", "k": 1, "alpha": 0.5}
    result = Job(config, out=tmp_path / "out").run()
    stored = load_file(checkpoints(tmp_path / "out")[-1] / "dense.safetensors")
    torch.testing.assert_close(stored["replica.0.weight"], stored["center"], atol=1e-6, rtol=0)
    assert result.wire is not None
    assert result.wire.raw_bytes["dense"] == (12 + 1) * 2 * 4 * stored["center"].numel()
