"""Whole jobs under gradient methods whose roles are reached through the wire only."""

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cluster_jobs import Cluster, Killing, SignalInCluster, cluster_settings, events_of, interrupted
from job_helpers import (
    SMALL_DLRM,
    Ledger,
    Witness,
    beside_own_model,
    by_gradients,
    checkpoints,
    error_of,
    result_of,
    settings,
    train_counted,
    weights,
    write_rows,
)

from shadowsync import Job
from shadowsync.aggregation.aggregator import Switch
from shadowsync.aggregation.auto import Auto
from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.counts import AggregationState
from shadowsync.aggregation.stepping import DenseStep, DenseStepper
from shadowsync.aggregation.update import DenseClient, GradientUpdate
from shadowsync.checkpoint.job_state import job_state
from shadowsync.cluster import dense_side, trainer_dense
from shadowsync.compression.threshold import Threshold
from shadowsync.data.leases import Lease
from shadowsync.embedding.server import RowStep
from shadowsync.errors import DataError
from shadowsync.runs import load_checkpoint
from shadowsync.training.optimizers import Rates
from shadowsync.training.worker import TrainerLost

pytestmark = pytest.mark.usefixtures("cluster")
ROWS, EPOCHS = 240, 2


def gradient_settings(path: Path, method: str, test_path: Path | None = None, **sections: Any) -> dict[str, Any]:
    return by_gradients(cluster_settings(path, test_path or path, **sections), method)


@pytest.mark.parametrize(("method", "prefetch"), [("sync", None), ("hop_bs", None), ("gba", 3)])
def test_every_row_is_trained_once_and_no_thread_is_left(tmp_path: Path, method: str, prefetch: int | None) -> None:
    threads = set(threading.enumerate())
    data = write_rows(tmp_path / "rows.parquet", 51)
    config = gradient_settings(
        data,
        method,
        train={"trainers": 3, "workers": 2, "prefetch": prefetch},
        data={"epochs": 2},
        embedding={"servers": 2},
    )
    result, rows = train_counted(config, tmp_path / "out")
    assert rows == dict.fromkeys(range(51), 2)
    assert result.data.trained_samples == 102
    assert result.sync is None
    assert result.aggregation is not None
    assert result.aggregation.global_steps > 0
    assert (result.aggregation.most_held_bytes or 0) > 0
    assert result_of(tmp_path / "out")["aggregation"]["dropped"] == result.aggregation.dropped
    assert result.recovery.failures == 0
    assert result.wire.bytes["dense"] > 0
    for thread in (left := set(threading.enumerate()) - threads):
        thread.join(120)
    assert [thread.name for thread in left if thread.is_alive()] == []


EXACT: dict[str, Any] = {"data": {"slice_rows": 16, "epochs": 2}, "model": SMALL_DLRM}
"""Batches do not depend on who asks first."""


class Inline:
    """Stands in for a pool: whoever submits does it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, act: Callable[[], None]) -> None:
        act()

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.fixture
def steps_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker waits for the step that its gradient completes, as if there were no wire in between."""
    monkeypatch.setattr(trainer_dense, "GradientUpdate", partial(GradientUpdate, most_under_way=0))
    monkeypatch.setattr(dense_side, "ThreadPoolExecutor", Inline)


def assert_same(ours: Path, theirs: Path) -> None:
    """Bit by bit, what two jobs have trained."""
    found, expected = weights(ours), weights(theirs)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.usefixtures("steps_in_turn")
@pytest.mark.parametrize(("method", "optimizer", "servers"), [("sync", "adagrad", 1), ("gba", "adam", 3)])
def test_one_worker_gives_the_same_model_as_in_process_bit_by_bit(
    tmp_path: Path, method: str, optimizer: str, servers: int
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 64)
    sections = EXACT | {
        "cluster": {"dense_servers": servers},
        "train": {"batch_size": 2, "optimizer": optimizer, "prefetch": 0, "warmup_samples": 40},
        "embedding": {"servers": 2},
        "aggregation": {"global_batch": 8},
    }
    near = settings(data, data, **in_process(sections)) | {"aggregation": {"method": method, "global_batch": 8}}
    del near["sync"]
    Job(near, out=tmp_path / "near").run()
    result = Job(gradient_settings(data, method, **sections), out=tmp_path / "far").run()
    assert result.aggregation is not None
    assert (result.aggregation.global_steps, result.aggregation.max_staleness) == (16, 0)
    assert_same(tmp_path / "far", tmp_path / "near")


WIDE_DLRM = {"name": "dlrm", "bottom": [64], "top": [64, 32]}
"""Some of its parameters have 256 elements and more."""


def sparse_sections(keep: float, batch_size: int, push: str = "int8") -> dict[str, Any]:
    """Of a job that no timing changes: its rows are one slice, and its tables one server (placed by measured cost)."""
    threshold = {"name": "threshold", "keep": keep}
    return {
        "data": {"slice_rows": 256},
        "model": WIDE_DLRM,
        "train": {"batch_size": batch_size, "prefetch": 0},
        "embedding": {"servers": 1},
        "compression": {"pull": threshold, "push": push, "dense": threshold},
    }


def in_process(config: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in config.items() if name != "cluster"}


@pytest.mark.usefixtures("steps_in_turn")
def test_what_was_not_sent_of_gradients_goes_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parameters that always come whole, as they do after a resume; what they leave out is not in checkpoints."""
    monkeypatch.setattr(Threshold, "of_differences", lambda codec: replace(codec, keep=1.0, feedback=False))
    data, script = write_rows(tmp_path / "rows.parquet", 256), SignalInCluster(9)
    config = gradient_settings(data, "sync", **sparse_sections(0.1, 16), cluster={"dense_servers": 3})
    del config["compression"]["pull"], config["compression"]["push"]
    Job(in_process(config), out=tmp_path / "near").run()
    script.run(Job(config, out=tmp_path / "far", failures=script))
    stopped = weights(tmp_path / "far")
    assert any(bool(tensor.any()) for name, tensor in stopped.items() if name.endswith(".residual"))
    config["cluster"]["dense_servers"] = 2
    Job(config, out=tmp_path / "far", resume=tmp_path / "far").run()
    assert_same(tmp_path / "far", tmp_path / "near")


@pytest.mark.usefixtures("steps_in_turn")
def test_what_a_codec_draws_is_in_checkpoints_as_it_is_in_process(tmp_path: Path) -> None:
    """Of codecs that leave nothing out as well."""
    data = write_rows(tmp_path / "rows.parquet", 256)
    config = gradient_settings(data, "sync", **sparse_sections(1.0, 64))
    config["compression"] = {"dense": {"name": "int8", "rounding": "stochastic"}}
    Job(in_process(config), out=tmp_path / "near").run()
    Job(config, out=tmp_path / "far").run()
    assert any(name.startswith("feedback.") for name in weights(tmp_path / "near"))
    assert_same(tmp_path / "far", tmp_path / "near")


@pytest.mark.usefixtures("steps_in_turn")
@pytest.mark.parametrize(("keep", "servers"), [(1.0, 1), (0.1, 2)])
def test_a_threshold_does_on_a_cluster_what_it_does_in_process(tmp_path: Path, keep: float, servers: int) -> None:
    """Bit by bit and byte by byte; keeping everything it is the plain job."""
    data = write_rows(tmp_path / "rows.parquet", 256)
    sections = sparse_sections(keep, 64, "plain" if keep == 1 else "int8")
    config = gradient_settings(data, "sync", **sections, cluster={"dense_servers": servers})
    near = in_process(config) | ({"compression": {}} if keep == 1 else {})
    here = Job(near, out=tmp_path / "near").run()
    there = Job(config, out=tmp_path / "far").run()
    expected, found = weights(tmp_path / "near"), weights(tmp_path / "far")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert there.wire is not None
    assert here.wire is not None
    if keep < 1:
        assert found.keys() == expected.keys()
        assert there.wire.kept_share == here.wire.kept_share
        assert there.wire.bytes == here.wire.bytes


def test_the_norm_of_a_gradient_is_that_of_all_dense_servers(tmp_path: Path) -> None:
    data, train = write_rows(tmp_path / "rows.parquet", 64), {"batch_size": 8, "prefetch": 0, "clip_norm": 0.01}
    config = gradient_settings(data, "sync", **EXACT, train=train)
    Job(in_process(config), out=tmp_path / "near").run()
    Job(in_process(config) | {"train": train | {"clip_norm": None}}, out=tmp_path / "unclipped").run()
    for servers in (2, 40):
        config["cluster"] |= {"dense_servers": servers}
        Job(config, out=tmp_path / f"far-{servers}").run()
        assert_close(weights(tmp_path / f"far-{servers}"), weights(tmp_path / "near"))
    with pytest.raises(AssertionError):
        assert_close(weights(tmp_path / "near"), weights(tmp_path / "unclipped"))


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_sync_is_large_batch_training(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 64)
    large = settings(data, data, **EXACT, train={"batch_size": 8, "optimizer": "adam"})
    Job(large, out=tmp_path / "large").run()
    config = gradient_settings(
        data,
        "sync",
        **EXACT,
        train={"batch_size": 2, "optimizer": "adam", "workers": 4, "prefetch": 2},
        aggregation={"global_batch": 8, "rows": "buffer"},
        embedding={"servers": 2},
    )
    result = Job(config, out=tmp_path / "out").run()
    assert result.aggregation is not None
    assert (result.aggregation.global_steps, result.aggregation.max_staleness) == (16, 0)
    assert_close(weights(tmp_path / "out"), weights(tmp_path / "large"))


def test_a_round_of_several_trainers_is_one_large_batch(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 64)
    data_section = {"slice_rows": 64, "epochs": 1}
    train = {"batch_size": 64, "optimizer": "adagrad"}
    Job(settings(data, data, model=SMALL_DLRM, data=data_section, train=train), out=tmp_path / "large").run()
    config = gradient_settings(
        data,
        "sync",
        model=SMALL_DLRM,
        data={"slice_rows": 4, "epochs": 1},
        train={"batch_size": 2, "optimizer": "adagrad", "trainers": 3},
        aggregation={"global_batch": 64, "rows": "buffer"},
        embedding={"servers": 2},
    )
    result = Job(config, out=tmp_path / "out").run()
    assert result.aggregation is not None
    assert (result.aggregation.global_steps, result.aggregation.dropped) == (1, 0)
    assert_close(weights(tmp_path / "out"), weights(tmp_path / "large"))


def test_rounds_compute_with_nothing_stale(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 120)
    train = {"trainers": 3, "workers": 2, "prefetch": 1}
    config = gradient_settings(data, "sync", train=train, aggregation={"global_batch": 12})
    result, rows = train_counted(config, tmp_path / "out")
    assert rows == dict.fromkeys(range(120), 1)
    assert result.aggregation is not None
    assert (result.aggregation.max_staleness, result.aggregation.dropped) == (0, 0)


@pytest.mark.usefixtures("steps_in_turn")
@pytest.mark.parametrize("rows", ["containing", "buffer"])
def test_without_delay_gba_is_synchronous_training_to_the_bit(tmp_path: Path, rows: str) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    for method in ("sync", "gba"):
        config = gradient_settings(
            data,
            method,
            model=SMALL_DLRM,
            data={"slice_rows": 12},
            train={"prefetch": 0},
            aggregation={"global_batch": 8, "rows": rows},
            embedding={"servers": 2},
        )
        Job(config, out=tmp_path / method).run()
    assert_same(tmp_path / "sync", tmp_path / "gba")


def job_settings(tmp_path: Path, method: str, **sections: Any) -> dict[str, Any]:
    """Three trainers of two workers, two embedding servers."""
    base: dict[str, dict[str, Any]] = {
        "train": {"trainers": 3, "workers": 2, "batch_size": 4, "lr": 0.03},
        "data": {"slice_rows": 16, "epochs": EPOCHS},
        "embedding": {"servers": 2},
    }
    data, test = write_rows(tmp_path / "rows.parquet", ROWS), write_rows(tmp_path / "test.parquet", 300, 1)
    merged = {name: base.get(name, {}) | dict(sections.get(name, {})) for name in {**base, **sections}}
    return gradient_settings(data, method, test, **merged)


def applied_once(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Generation and number of each gradient that a dense server applied, as they are applied."""
    applied: list[tuple[int, int]] = []
    commit = DenseStepper.commit

    @functools.wraps(commit)
    def noted(stepper: DenseStepper, step: DenseStep, generation: int) -> int:
        before = stepper.newest.number
        held_bytes = commit(stepper, step, generation)
        if stepper.newest.number > before:
            applied.extend((generation, number) for number in step.weights)
        return held_bytes

    monkeypatch.setattr(DenseStepper, "commit", noted)
    return applied


@pytest.mark.parametrize("role", ["reader-0", "dense-0", "embedding-1"])
def test_whoever_dies_holds_nobody_up(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """Trainers are killed below, at each point of their cycle."""
    applied, out, ledger = applied_once(monkeypatch), tmp_path / "out", Ledger()
    config = job_settings(tmp_path, "gba", recovery={"mode": "partial"})
    script = Killing(cluster, [role])
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert script.done
    assert result.data.trained_samples == ROWS * EPOCHS
    assert set(ledger.rows) == set(range(ROWS))
    assert min(ledger.rows.values()) >= EPOCHS
    assert len(set(applied)) == len(applied)
    assert result.recovery.failures == 1
    assert result.aggregation is not None
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.65  # 12 runs: 0.70 to 0.75, on 300 rows; who has learnt nothing is at 0.5
    events = events_of(out)
    assert events[role][:3] == ["alive", "dead", "restarted"]
    assert ("restored" in events["trainer-0"]) == (role == "dense-0")


@dataclass
class Stepped:
    """Which rows were in which gradient that a step named."""

    rows: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    trainers: dict[int, int] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on, of all jobs."""
        dispatch, carry_out = StepCoordinator.dispatch, dense_side.RemoteSteps.carry_out

        def dispatched(coordinator: StepCoordinator, lease: Lease, start: int, stop: int) -> int:
            number = dispatch(coordinator, lease, start, stop)
            self.trainers[number] = lease.trainer
            self.rows[number] = [(lease.epoch, lease.slice, row) for row in range(start, stop)]
            return number

        def carried_out(steps: dense_side.RemoteSteps, dense: DenseStep, rows: RowStep) -> None:
            self.named.extend(dense.weights)
            carry_out(steps, dense, rows)

        monkeypatch.setattr(StepCoordinator, "dispatch", dispatched)
        monkeypatch.setattr(dense_side.RemoteSteps, "carry_out", carried_out)

    def counts(self) -> Counter[tuple[int, int, int]]:
        """In how many gradients that a step took or dropped each row of each epoch was."""
        return Counter(row for number in self.named for row in self.rows[number])


@pytest.mark.parametrize(("method", "iteration", "prefetch"), [("sync", 1, None), ("gba", 5, 2)])
def test_a_trainer_that_dies_by_script_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, iteration: int, prefetch: int | None
) -> None:
    dead, done = list[int](), Stepped()
    done.watch(monkeypatch)

    def script(rank: int, step: int) -> None:
        if step == iteration and (not dead or rank in dead):
            dead.append(rank)
            raise TrainerLost("by script")

    config = job_settings(tmp_path, method, train={"prefetch": prefetch})
    result, rows = train_counted(config, tmp_path / "out", failures=script)
    assert result.data.trained_samples == ROWS * EPOCHS
    assert set(rows) == set(range(ROWS))
    assert result.recovery.failures == 1
    assert set(done.counts().values()) == {1}


Rank = Callable[..., int]
POINTS: dict[str, tuple[type, str, Rank]] = {
    "begin": (GradientUpdate, "begin", lambda update, *_: update.worker[0]),
    "compute": (GradientUpdate, "ready", lambda update, *_: update.worker[0]),
    "send": (GradientUpdate, "apply", lambda update, *_: update.worker[0]),
    "hold": (DenseClient, "hold", lambda dense, *_: dense.worker[0]),
    "tell": (GradientUpdate, "tell_arrived", lambda update, *_: update.worker[0]),
}
"""In the cycle of a worker: a call, and whose it is by what it is called with."""


@pytest.mark.parametrize(
    ("point", "after", "method"),
    [
        *((point, False, "gba") for point in POINTS if point != "hold"),
        *((point, True, "gba") for point in ("hold", "tell")),
        *((point, False, "sync") for point in ("compute", "tell")),
    ],
    ids=lambda value: {False: "before", True: "after"}.get(value, value),
)
def test_a_trainer_killed_at_any_point_of_its_cycle_counts_once(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, point: str, after: bool, method: str
) -> None:
    """No step waits for it, and every row of every epoch is in one gradient, no more, that a step took or dropped."""
    owner, call, rank_of = POINTS[point]
    done, counted, original = Stepped(), Counter[int](), getattr(owner, call)
    done.watch(monkeypatch)

    def kill() -> None:
        cluster.kill("trainer-1")
        assert cluster.wait_for("trainer-1", "dead")

    def disturbed(*given: Any) -> Any:
        counted.update([rank := rank_of(*given)])
        strike = rank == 1 and counted[1] == 3
        if strike and not after:
            kill()
        found = original(*given)
        if strike and after:
            kill()
        return found

    monkeypatch.setattr(owner, call, disturbed)
    out, ledger = tmp_path / "out", Ledger()
    result = Job(beside_own_model(job_settings(tmp_path, method)), model=Witness(ledger), out=out).run()
    assert "dead" in events_of(out)["trainer-1"]
    assert result.data.trained_samples == ROWS * EPOCHS
    assert set(done.counts().values()) == {1}
    assert done.counts().total() == ROWS * EPOCHS
    assert min(ledger.rows.values()) >= EPOCHS


@pytest.mark.parametrize(
    ("roles", "method"),
    [
        (("trainer-0", "trainer-1", "trainer-2"), "sync"),
        (("trainer-0", "trainer-1", "trainer-2", "dense-0", "embedding-1"), "gba"),
    ],
)
def test_several_at_once(tmp_path: Path, cluster: Cluster, roles: tuple[str, ...], method: str) -> None:
    out, ledger = tmp_path / "out", Ledger()
    config, script = job_settings(tmp_path, method, recovery={"mode": "partial"}), Killing(cluster, roles)
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert script.done
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures >= len(roles)
    assert min(ledger.rows.values()) >= EPOCHS


@pytest.mark.parametrize(("method", "role", "servers"), [("sync", "dense-0", 1), ("gba", "dense-1", 2)])
def test_a_dead_dense_server_takes_everybody_back_to_the_newest_checkpoint(
    tmp_path: Path, cluster: Cluster, method: str, role: str, servers: int
) -> None:
    out, ledger = tmp_path / "out", Ledger()
    train = {"save_every_s": 0.02, "keep": 1000}
    config = job_settings(tmp_path, method, train=train, cluster={"dense_servers": servers})
    script = Killing(cluster, [role], when=lambda: len(checkpoints(out)) >= 2)
    result = Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script).run()
    assert script.done
    assert result.data.trained_samples == ROWS * EPOCHS
    second = sorted(checkpoints(out))[1]
    again = ledger.rows.total() - ROWS * EPOCHS
    assert again < ROWS * EPOCHS - int(second.name.removeprefix("samples-"))


def test_while_everybody_goes_back_the_counts_stay_until_it_is_known_to_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise steps would fall to 0 for a moment, and `auto` would tell of every switch once more."""
    monkeypatch.setattr(dense_side.RemoteSteps, "restart", lambda *_: None)
    reader = cast("Any", SimpleNamespace(leases=SimpleNamespace(trained=0, number_by=lambda _: None)))
    rule, nobody = StepRule(4, 0.1, 0.1, Rates(0, "none", 0.0, 100), False), cast("Any", None)
    elsewhere = cast("Any", SimpleNamespace(spec=SimpleNamespace(direct=False)))
    side = dense_side.Stepped(Auto(), rule, elsewhere, nobody)
    last = AggregationState(global_steps=9, received=36, mode="sync", switches=(Switch(3, "gba", "slow"),))
    earlier = AggregationState(global_steps=2, received=8, mode="sync")
    side.open(reader, 0)
    assert side.aggregation.global_steps == 0
    side.restart(last)
    assert side.aggregation == last
    for generation in (1, 2):  # somebody dies while the first one begins
        side.open(reader, generation)
        assert side.aggregation == last
    side.restart(earlier)
    assert side.aggregation == earlier
    side.close()


def test_checkpoints_beside_training_hold_nobody_up(tmp_path: Path) -> None:
    config = job_settings(tmp_path, "sync", train={"save_every_s": 0.02, "keep": 1000})
    result, rows = train_counted(config, tmp_path / "out")
    assert rows == dict.fromkeys(range(ROWS), EPOCHS)
    assert result.recovery.saves > 1


Stopped = tuple[dict[str, Any], Path, Counter[int]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """The settings of a job that was stopped by a signal, its folder, and what it had trained."""
    folder = tmp_path_factory.mktemp("stopped")
    config = job_settings(folder, "gba", aggregation={"global_batch": 24})
    with pytest.MonkeyPatch.context() as patch:
        Cluster(patch)
        rows, said = interrupted(config, folder / "out")
    assert "stopped by SIGTERM after" in said
    return config, folder / "out", rows


def test_an_interrupted_job_is_resumed_where_it_was(tmp_path: Path, stopped: Stopped) -> None:
    config, out, before = stopped
    result, after = train_counted(config, tmp_path / "new", resume=out)
    assert set((before + after).values()) <= {EPOCHS, EPOCHS + 1}  # what waited for its step is trained anew
    assert min((before + after).values()) >= EPOCHS
    assert result.data.trained_samples == ROWS * EPOCHS


OTHERS: dict[str, dict[str, Any]] = {
    "gba": {
        "aggregation": {"method": "gba", "global_batch": 24},
        "train": {"trainers": 4},
        "embedding": {"servers": 1},
    },
    "easgd": {"sync": {"method": "easgd"}, "train": {"trainers": 2}},
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_goes_on_under_another_method_with_others(
    tmp_path: Path, stopped: Stopped, others: dict[str, Any]
) -> None:
    config, out, before = stopped
    steps = job_state(load_checkpoint(out)).aggregation.global_steps
    resumed = {name: section for name, section in config.items() if name != "aggregation"}
    resumed |= {name: {**config.get(name, {}), **section} for name, section in others.items()}
    result, after = train_counted(resumed, tmp_path / "new", resume=out)
    assert min((before + after).values()) >= EPOCHS
    assert result.data.trained_samples == ROWS * EPOCHS
    assert steps > 0
    assert (result.aggregation is None) == ("sync" in others)
    assert result.aggregation is None or result.aggregation.global_steps > steps


@pytest.mark.usefixtures("steps_in_turn")
def test_optimizer_state_and_steps_go_on_after_a_switch(tmp_path: Path) -> None:
    """Half in process under one method, half on a cluster under the other, is the whole under one."""
    data = write_rows(tmp_path / "rows.parquet", 64)

    def config(method: str, epochs: int) -> dict[str, Any]:
        return gradient_settings(
            data,
            method,
            model=SMALL_DLRM,
            train={"optimizer": "adam", "prefetch": 0},
            data={"slice_rows": 16, "epochs": epochs},
            aggregation={"global_batch": 8},
        )

    Job(config("sync", 2), out=tmp_path / "whole").run()
    half = {name: section for name, section in config("sync", 1).items() if name != "cluster"}
    Job(half, out=tmp_path / "half").run()
    result = Job(config("gba", 2), out=tmp_path / "other", resume=tmp_path / "half").run()
    assert_same(tmp_path / "whole", tmp_path / "other")
    assert result.aggregation is not None
    assert result.aggregation.global_steps == 16


def test_a_step_that_cannot_be_made_ends_the_job_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(DenseStepper.commit)
    def refuse(stepper: DenseStepper, step: DenseStep, generation: int) -> int:
        raise DataError("this step is none")

    monkeypatch.setattr(DenseStepper, "commit", refuse)
    error = error_of(lambda: train_counted(job_settings(tmp_path, "gba"), tmp_path / "out"))
    assert "this step is none" in str(error)


def test_trainers_may_join(tmp_path: Path, cluster: Cluster) -> None:
    """More of them compute the same global batch."""
    script = Killing(cluster, ["trainer-0"], until="restored")
    config = job_settings(tmp_path, "sync", cluster={"max_trainers": 5}, aggregation={"global_batch": 24})
    ledger = Ledger()
    result = Job(beside_own_model(config), model=Witness(ledger), out=tmp_path / "out", failures=script).run()
    assert result.data.trained_samples == ROWS * EPOCHS
    assert {f"trainer-{rank}" for rank in range(5)} <= events_of(tmp_path / "out").keys()
    assert result.aggregation is not None
    assert result.aggregation.max_staleness == 0
