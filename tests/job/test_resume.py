"""Interrupted and resumed jobs: nothing trained twice, nothing lost, whatever changes on the way."""

import errno
import hashlib
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from job_helpers import (
    METHODS,
    Ledger,
    Witness,
    beside_own_model,
    checkpoints,
    fails,
    name_of,
    result_of,
    settings,
    train_counted,
    write_rows,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from shadowsync import Interrupted, Job, Trained
from shadowsync.checkpoint.files import LocalFiles
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.cluster.session import Session
from shadowsync.config import merge
from shadowsync.errors import ConfigError, SaveError


class SignalAt:
    """Sends a signal to this process before an iteration of a worker, and holds everybody until it was seen."""

    def __init__(self, iteration: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.iteration, self.number = iteration, number
        self.sent, self.seen = threading.Event(), threading.Event()

    def __call__(self, rank: int, iteration: int) -> None:
        if rank == 0 and iteration == self.iteration and not self.sent.is_set():
            self.sent.set()
            signal.raise_signal(self.number)
        if self.sent.is_set():
            assert self.seen.wait(120), "nobody asked the workers to stop"

    def run(self, job: Job) -> str:
        """Runs a job of which this is the script until the signal; returns what was said."""

        def stop(session: Session) -> None:
            original(session)
            self.seen.set()

        original = Session.stop
        with mock.patch.object(Session, "stop", stop):
            error = fails(job.run, Interrupted)
        return str(error)


def interrupt(config: dict[str, Any], out: Path, iteration: int = 4, **own: Any) -> tuple[Counter[int], str]:
    """Trains the witness until a signal; returns what was trained and what was said."""
    ledger, script = Ledger(), SignalAt(iteration)
    said = script.run(Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script, **own))
    assert not (out / "result.json").exists()
    return ledger.rows, said


@pytest.mark.parametrize("sync", METHODS, ids=name_of)
def test_an_interrupted_job_is_resumed_where_it_was(tmp_path: Path, sync: dict[str, Any]) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "out"
    config = settings(data, data, sync=sync, train={"trainers": 2, "workers": 2}, data={"epochs": 2})
    before, said = interrupt(config, out)
    assert f"stopped by SIGTERM after {before.total()} samples" in said
    assert f"--resume {out}" in said
    assert [folder.name for folder in checkpoints(out)] == [f"samples-{before.total():012d}"]
    result, after = train_counted(config, out, resume=out)
    assert before + after == dict.fromkeys(range(101), 2)
    assert result.data.trained_samples == result_of(out)["data"]["trained_samples"] == 202


def rows_and_dense(out: Path) -> dict[str, Tensor]:
    """Everything that the newest checkpoint gives back."""
    loaded = CheckpointStore(str(out / "checkpoints")).load()
    rows = {
        f"{table.name}.{name}": tensor
        for table in loaded.tables
        for name, tensor in loaded.rows(table.name, 0, table.rows).items()
    }
    return rows | {f"dense.{name}": tensor for name, tensor in loaded.dense.items()}


@pytest.mark.parametrize("values", ["bf16", "int8", "int4"])
def test_a_job_goes_on_from_rows_in_fewer_bytes_as_often_as_one_likes(
    tmp_path: Path, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 40)
    config = settings(data, data, train={"save_values": values}, embedding={"optimizer": "adam"})
    before, _ = interrupt(config, tmp_path / "0")
    capsys.readouterr()
    result, after = train_counted(config, tmp_path / "1", resume=tmp_path / "0")
    assert before + after == dict.fromkeys(range(40), 1)
    assert result.test is not None
    told = "holds rows rounded (train.save_values), so they are close to what they were"
    assert told in " ".join(capsys.readouterr().err.split())
    first = rows_and_dense(tmp_path / "1")
    assert len(first) > 12
    for number in (2, 3):
        train_counted(config, tmp_path / str(number), resume=tmp_path / str(number - 1))
        again = rows_and_dense(tmp_path / str(number))
        assert again.keys() == first.keys()
        assert [name for name, tensor in first.items() if not torch.equal(again[name], tensor)] == []


CHANGES: dict[str, dict[str, Any]] = {
    "fewer trainers, more workers, other batches": {"train": {"trainers": 1, "workers": 3, "batch_size": 3}},
    "more trainers, bf16": {"train": {"trainers": 5, "precision": "bf16"}},
    "rates": {"train": {"decay": "cosine", "warmup_samples": 20, "lr": 0.1}},
    "more servers": {"embedding": {"servers": 5}},
    "split tables": {"embedding": {"servers": 2, "split_rows": 7}},
    "no method": {"sync": {"method": "none"}},
    "averaging": {"sync": {"method": "ma", "schedule": "every_k", "k": 2}},
    "elastic": {"sync": {"method": "easgd", "form": "sequential"}},
    "dense servers": {"cluster": {"dense_servers": 3}, "sync": {"method": "easgd"}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_job_goes_on_in_another_shape(tmp_path: Path, change: dict[str, Any]) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "out"
    config = settings(data, data, sync={"method": "bmuf"}, train={"trainers": 2, "workers": 2})
    before, _ = interrupt(config, out)
    changed = merge(config, {name: section for name, section in change.items() if name != "sync"}, [])
    result, after = train_counted(changed | {"sync": change.get("sync", config["sync"])}, out, resume=out)
    assert before + after == dict.fromkeys(range(101), 1)
    assert result.data.trained_samples == 101
    assert 0 < result.test.logloss < 5


def test_epochs_may_be_added_where_nothing_is_left(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 31), tmp_path / "out"
    config = settings(data, data, train={"trainers": 2})
    first, _ = train_counted(config, out)
    result, after = train_counted(config, out, resume=out)
    assert (after, result.data.trained_samples, result.test) == ({}, 31, first.test)
    assert len(checkpoints(out)) == 1
    result, after = train_counted(merge(config, {"data": {"epochs": 3}}, []), out, resume=out)
    assert after == dict.fromkeys(range(31), 2)
    assert result.data.trained_samples == 93


def test_a_job_is_resumed_again_and_again(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 401), tmp_path / "out"
    config = settings(data, train={"trainers": 2, "keep": 3}, sync={"method": "ma"})
    trained, resume = Counter[int](), None
    for _ in range(4):
        rows, _ = interrupt(config, out, 6, resume=resume)
        trained, resume = trained + rows, out
    _, rows = train_counted(config, out, resume=out)
    assert trained + rows == dict.fromkeys(range(401), 1)
    assert len(checkpoints(out)) == 3


def test_a_signal_at_the_last_step_changes_nothing(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 20), tmp_path / "out"
    script = SignalAt(10)
    script.seen.set()
    result, rows = train_counted(settings(data, data), out, failures=script)
    assert script.sent.is_set()
    assert rows == dict.fromkeys(range(20), 1)
    assert result.test is not None


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder with its digest."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_new_folder_leaves_the_old_one_untouched(tmp_path: Path) -> None:
    data, out, new = write_rows(tmp_path / "rows.parquet", 61), tmp_path / "out", tmp_path / "new"
    config = settings(data, data, train={"trainers": 2})
    before, _ = interrupt(config, out)
    untouched = contents(out)
    _, after = train_counted(config, new, resume=out)
    assert before + after == dict.fromkeys(range(61), 1)
    assert contents(out) == untouched
    assert result_of(new)["data"]["trained_samples"] == 61
    assert (new / "metrics.jsonl").read_text().startswith((out / "metrics.jsonl").read_text())


def test_checkpoints_of_another_run_are_not_touched(tmp_path: Path) -> None:
    data, shared = write_rows(tmp_path / "rows.parquet", 20), tmp_path / "shared"
    config = settings(data, train={"checkpoint_dir": str(shared)})
    train_counted(config, tmp_path / "one")
    untouched = contents(shared)
    for own in ({}, {"resume": tmp_path / "one"}):
        again = Job(beside_own_model(config), model=Witness(Ledger()), out=tmp_path / "two", **own)
        fails(again.run, ConfigError, f"train.checkpoint_dir={shared}")
        assert not (tmp_path / "two").exists()
    assert contents(shared) == untouched
    _, rows = train_counted(merge(config, {"data": {"epochs": 2}}, []), tmp_path / "one", resume=tmp_path / "one")
    assert rows.total() == 20


class Dropping(nn.Module):
    """A model with random numbers of its own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return self.tower(torch.cat([dense, *embeddings.values()], dim=1)).squeeze(1)


def everything(out: Path) -> dict[str, Tensor]:
    """Every number of the newest checkpoint of a run, optimizer state included."""
    trained = Trained(out, model=Dropping())
    rows = {
        f"{part.table.name}.{name}": tensor for part in trained.server.state() for name, tensor in part.tensors.items()
    }
    return rows | load_file(checkpoints(out)[-1] / "dense.safetensors")


@pytest.mark.parametrize(
    ("storage", "optimizer", "iteration"),
    [("torch", "adagrad", 1), ("torch", "adagrad", 25), ("fbgemm", "adam", 9), ("fbgemm", "adam", 37)],
)
def test_a_resumed_job_equals_an_undisturbed_one_bit_by_bit(
    tmp_path: Path, storage: str, optimizer: str, iteration: int
) -> None:
    if storage == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason="install the extra to test it: pip install 'shadowsync[fbgemm]'")
    data = write_rows(tmp_path / "rows.parquet", 75)
    config = settings(
        data,
        data,
        data={"epochs": 2, "slice_rows": 12},
        embedding={"storage": storage, "optimizer": "adam" if optimizer == "adam" else "rowwise_adagrad"},
        train={"batch_size": 4, "optimizer": optimizer, "warmup_samples": 30, "decay": "linear"},
    )
    torch.manual_seed(17)
    whole = Job(beside_own_model(config), model=Dropping(), out=tmp_path / "whole").run()
    torch.manual_seed(17)
    out = tmp_path / "out"
    script = SignalAt(iteration)
    script.run(Job(beside_own_model(config), model=Dropping(), out=out, failures=script))
    torch.manual_seed(99)
    resumed = Job(beside_own_model(config), model=Dropping(), out=out, resume=out).run()
    expected, found = everything(tmp_path / "whole"), everything(out)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert resumed.test == whole.test
    assert resumed.train.ne_lifetime == pytest.approx(whole.train.ne_lifetime, rel=1e-9)
    assert resumed.train.ne_window == pytest.approx(whole.train.ne_window, rel=1e-5)


@pytest.mark.parametrize("sync", METHODS[2::2], ids=name_of)
def test_checkpoints_while_training_are_whole(tmp_path: Path, sync: dict[str, Any]) -> None:
    """Saves as often as it can, and goes on from a checkpoint in the middle as `kill -9` would leave it."""
    data, out = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "out"
    train = {"trainers": 2, "workers": 2, "save_every_s": 0.005, "keep": 1000}
    config = settings(data, data, sync=sync, train=train, data={"epochs": 2})
    result, _ = train_counted(config, out)
    found = checkpoints(out)
    assert len(found) == result.recovery.saves >= 2
    assert [folder.name for folder in found][-1] == "samples-000000000202"
    middle = found[len(found) // 2 - 1]
    for other in found[len(found) // 2 :]:
        shutil.rmtree(other)
    resumed, rows = train_counted(config, out, resume=out)
    assert resumed.data.trained_samples == 202
    assert rows.total() == 202 - int(middle.name.removeprefix("samples-"))
    assert max(rows.values()) <= 2


def test_pauses_meet_prefetched_pulls(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "out"
    train = {"trainers": 3, "workers": 2, "save_every_s": 0.002, "prefetch": 3}
    result, rows = train_counted(settings(data, sync={"method": "ma"}, train=train, data={"epochs": 4}), out)
    assert rows == dict.fromkeys(range(101), 4)
    assert len(checkpoints(out)) == 2
    assert result.recovery.saves >= 2


def test_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 40), tmp_path / "out"
    interrupt(settings(data), out)
    for section, key, value in (("train", "seed", 5), ("data", "slice_rows", 64), ("data", "shuffle", False)):
        changed = merge(settings(data), {section: {key: value}}, [])
        fails(lambda config=changed: train_counted(config, out, resume=out), ConfigError, f"{section}.{key}={value}")


def test_a_full_disk_while_training_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint fits, the next does not: the first stays, and the error says so."""

    def full(self: LocalFiles, path: str, chunks: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    data, out = write_rows(tmp_path / "rows.parquet", 40), tmp_path / "out"
    config = settings(data, data, train={"trainers": 2})
    interrupt(config, out, 3)
    untouched = contents(out / "checkpoints")
    monkeypatch.setattr(LocalFiles, "write", full)
    error = fails(lambda: train_counted(config, out, resume=out), SaveError, "No space left on device")
    assert error.exit_status == 1
    assert not (out / "result.json").exists()
    assert contents(out / "checkpoints") == untouched


def test_a_second_signal_does_not_wait_for_a_model_that_hangs(tmp_path: Path) -> None:
    data, released, stopped = write_rows(tmp_path / "rows.parquet", 40), threading.Event(), threading.Event()

    def hang(rank: int, iteration: int) -> None:
        if rank == 0 and iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped.wait(120)
            os.kill(os.getpid(), signal.SIGINT)
            released.wait()

    def stop(session: Session) -> None:
        original(session)
        stopped.set()

    original = Session.stop
    job = Job(beside_own_model(settings(data)), model=Witness(Ledger()), out=tmp_path / "out", failures=hang)
    try:
        with mock.patch.object(Session, "stop", stop), pytest.raises(KeyboardInterrupt):
            job.run()
    finally:
        released.set()
