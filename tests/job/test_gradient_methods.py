"""Whole jobs under gradient methods: every row once, large-batch training to the bit, and switches in mid-run."""

import io
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import (
    SMALL_DLRM,
    Ledger,
    Witness,
    beside_own_model,
    by_gradients,
    checkpoints,
    decided,
    error_of,
    fails,
    result_of,
    settings,
    train_counted,
    weights,
    write_rows,
)
from rich.console import Console
from test_resume import interrupt

from shadowsync import Job, job
from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.choices import choose_all, resumed
from shadowsync.config import merge, parse
from shadowsync.embedding.client import EmbeddingClient, Prepared, Pulled
from shadowsync.errors import ConfigError, DataError
from shadowsync.job import given, train_from_command_line
from shadowsync.registry import members
from shadowsync.report.files import read_frames
from shadowsync.training.worker import TrainerLost

METHODS = sorted(members("shadowsync.aggregation", Aggregation))


def gradient_settings(path: Path, method: str, **sections: Any) -> dict[str, Any]:
    return by_gradients(settings(path, path, **sections), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("rows", "train", "global_batch"),
    [
        (49, {"trainers": 3, "workers": 2}, 2),
        (49, {"trainers": 3, "workers": 2}, 32),
        (10, {"trainers": 8, "batch_size": 4}, None),
    ],
    ids=["a step for each batch", "large steps", "more trainers than batches"],
)
def test_every_row_is_trained_once(
    tmp_path: Path, method: str, rows: int, train: dict[str, Any], global_batch: int | None
) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", rows), tmp_path / "out"
    aggregation = {"global_batch": global_batch} | ({"backups": 0} if (method, global_batch) == ("hop_bw", 2) else {})
    sections = {"train": train, "data": {"epochs": 2}, "embedding": {"servers": 2}, "aggregation": aggregation}
    result, trained = train_counted(gradient_settings(data, method, **sections), out)
    assert trained == dict.fromkeys(range(rows), 2)
    assert result.data.trained_samples == 2 * rows
    assert result.sync is None
    assert result.aggregation.global_steps > 0
    assert result_of(out)["aggregation"]["dropped"] == result.aggregation.dropped
    if method in ("sync", "async"):
        assert result.aggregation.dropped == 0
    assert {"auc", "ne"} <= result_of(out)["test"].keys()


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [("sync", "adagrad"), ("sync", "adam"), ("sync", "sgd"), ("gba", "adam"), ("bsp", "sgd"), ("auto", "adagrad")],
)
def test_with_nothing_stale_it_is_large_batch_training(tmp_path: Path, method: str, optimizer: str) -> None:
    data, spans = write_rows(tmp_path / "rows.parquet", 64), {"slice_rows": 16, "epochs": 2}
    at_once = {"batch_size": 8, "optimizer": optimizer}
    Job(settings(data, data, model=SMALL_DLRM, train=at_once, data=spans), out=tmp_path / "large").run()
    config = gradient_settings(
        data,
        method,
        model=SMALL_DLRM,
        train={"batch_size": 2, "optimizer": optimizer, "workers": 4 if method == "sync" else 1},
        data=spans,
        aggregation={"global_batch": 8, "rows": "buffer"},
    )
    result = Job(config, out=tmp_path / "out").run()
    assert (result.aggregation.global_steps, result.aggregation.max_staleness) == (16, 0)
    large, ours = weights(tmp_path / "large"), weights(tmp_path / "out")
    assert large.keys() == ours.keys()
    for name in large:
        torch.testing.assert_close(ours[name], large[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rows", ["containing", "buffer"])
def test_without_delay_gba_is_synchronous_training_to_the_bit(tmp_path: Path, rows: str) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    for method in ("sync", "gba"):
        config = gradient_settings(
            data, method, model=SMALL_DLRM, data={"slice_rows": 12}, aggregation={"global_batch": 8, "rows": rows}
        )
        Job(config, out=tmp_path / method).run()
    sync, gba = weights(tmp_path / "sync"), weights(tmp_path / "gba")
    assert all(torch.equal(sync[name], gba[name]) for name in sync)


def stepped_samples(out: Path) -> int:
    """How many samples the newest checkpoint counts as trained."""
    samples: int = json.loads((checkpoints(out)[-1] / "manifest.json").read_text())["body"]["samples"]
    return samples


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_job_is_resumed_where_it_was(tmp_path: Path, method: str) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "out"
    config = gradient_settings(
        data, method, train={"trainers": 2, "workers": 2}, data={"epochs": 2}, aggregation={"global_batch": 8}
    )
    before, said = interrupt(config, out)
    stepped = stepped_samples(out)
    assert f"stopped by SIGTERM after {stepped} samples" in said
    late = 8 if method == "hop_bw" else 0  # what its slow ones were at
    assert 0 <= before.total() - stepped < 8 + late
    result, after = train_counted(config, out, resume=out)
    assert min((before + after).values()) == 2
    assert (before + after).total() == 202 + before.total() - stepped  # what waited for its step is trained anew
    assert result.data.trained_samples == 202


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"sync": {"method": "easgd"}}, {"aggregation": {"method": "gba"}}),
        ({"sync": {"method": "ma"}}, {"aggregation": {"method": "gba"}}),
        ({"aggregation": {"method": "sync"}}, {"aggregation": {"method": "gba"}}),
        *(({"aggregation": {"method": method}}, {"sync": {"method": "easgd"}}) for method in METHODS),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_method_goes_on_under_another(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any]
) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "out"
    base = settings(data, data, train={"trainers": 2}, data={"epochs": 2})
    del base["sync"]
    before, _ = interrupt(base | there, out)
    _, after = train_counted(base | here, tmp_path / "new", resume=out)
    assert min((before + after).values()) == 2
    assert after.total() == 202 - stepped_samples(out)  # what waited for its step is trained anew


def test_another_number_of_workers_keeps_the_global_batch_or_from_python_needs_a_word_about_it(tmp_path: Path) -> None:
    data, there, here = write_rows(tmp_path / "rows.parquet", 101), tmp_path / "there", tmp_path / "here"
    more = {"data": {"epochs": 2}, "model": SMALL_DLRM, "train": {"workers": 3}}
    Job(gradient_settings(data, "sync", model=SMALL_DLRM, train={"workers": 2}), out=there).run()
    train_from_command_line(None, ["train.workers=3", "data.epochs=2"], here, there)
    assert result_of(here)["config"]["aggregation"]["global_batch"] == 4
    job = Job(gradient_settings(data, "sync", **more), out=tmp_path / "none", resume=there)
    fails(job.run, ConfigError, "was made of 4 samples, and would be of 6")
    for size in (4, 6):
        given = gradient_settings(data, "sync", aggregation={"global_batch": size}, **more)
        assert Job(given, out=tmp_path / f"of-{size}", resume=there).run().data.trained_samples == 202


def test_another_batch_size_has_to_fit_the_global_batch_of_the_checkpoint(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 21)
    there, here = tmp_path / "there", tmp_path / "here"
    Job(gradient_settings(data, "gba", model=SMALL_DLRM, train={"workers": 2}), out=there).run()

    def resumed(*overrides: str) -> str:
        return str(error_of(lambda: train_from_command_line(None, overrides, here, there)))

    assert resumed("train.batch_size=3") == (
        "train.batch_size=3: a global step was made of 4 samples so far, which are not whole batches of that size: "
        "take one that divides them, or set aggregation.global_batch to a multiple of it"
    )
    assert resumed("train.batch_size=8").startswith("train.batch_size=8: a global step was made of 4 samples so far")
    own = resumed("train.batch_size=3", "aggregation.global_batch=7")
    assert own.startswith("aggregation.global_batch=7 is not a multiple of train.batch_size=3")
    train_from_command_line(None, ["train.batch_size=3", "aggregation.global_batch=6", "data.epochs=2"], here, there)
    assert result_of(here)["data"]["trained_samples"] == 42


@pytest.mark.parametrize("model", [SMALL_DLRM, {"name": "deepfm", "deep": [8]}, {"name": "dcn", "deep": [8]}], ids=str)
@pytest.mark.parametrize(("method", "batch_size", "workers"), [("gba", 1, 1), ("gba", 8, 1), ("sync", 2, 4)])
def test_a_switch_to_batches_of_another_size_changes_nothing(
    tmp_path: Path, model: dict[str, Any], method: str, batch_size: int, workers: int
) -> None:
    data, spans = write_rows(tmp_path / "rows.parquet", 64), {"slice_rows": 16, "epochs": 2}
    at_once = {"batch_size": 8, "optimizer": "adagrad"}
    Job(settings(data, data, model=model, train=at_once, data=spans), out=tmp_path / "large").run()

    def config(method: str, batch_size: int, workers: int, epochs: int) -> dict[str, Any]:
        train = {"batch_size": batch_size, "workers": workers, "optimizer": "adagrad"}
        sections = {"train": train, "data": {**spans, "epochs": epochs}, "aggregation": {"global_batch": 8}}
        return gradient_settings(data, method, model=model, **sections)

    Job(config("sync", 4, 1, 1), out=tmp_path / "half").run()
    result = Job(config(method, batch_size, workers, 2), out=tmp_path / "rest", resume=tmp_path / "half").run()
    assert (result.aggregation.global_steps, result.aggregation.max_staleness) == (16, 0)
    large, ours = weights(tmp_path / "large"), weights(tmp_path / "rest")
    for name in large:
        torch.testing.assert_close(ours[name], large[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_that_does_not_say_how_it_divides_the_gradients_of_rows_goes_on_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where `containing` was the default, which was not written down."""

    def without_rows(stored: dict[str, Any]) -> dict[str, Any]:
        assert stored["aggregation"].pop("rows") == "buffer"
        return stored

    data, there = write_rows(tmp_path / "rows.parquet", 21), tmp_path / "there"
    config = gradient_settings(data, "gba", model=SMALL_DLRM, data={"epochs": 2})
    with monkeypatch.context() as old:
        old.setattr(job, "given", lambda config: without_rows(given(config)))
        Job(config | {"data": {**config["data"], "epochs": 1}}, out=there).run()
    train_from_command_line(None, ["data.epochs=2"], tmp_path / "here", there)
    assert result_of(tmp_path / "here")["config"]["aggregation"]["rows"] == "containing"
    for name, rows in (("python", {}), ("other", {"rows": "buffer"})):
        other = config | {"aggregation": {**config["aggregation"], **rows}}
        Job(other, out=tmp_path / name, resume=there).run()
        assert result_of(tmp_path / name)["config"]["aggregation"]["rows"] == rows.get("rows", "containing")


def test_optimizer_state_and_steps_go_on_after_a_switch(tmp_path: Path) -> None:
    """Half under one method, half under the other, with nothing stale, is the whole under one."""
    data = write_rows(tmp_path / "rows.parquet", 64)

    def config(method: str, epochs: int) -> dict[str, Any]:
        return gradient_settings(
            data,
            method,
            model=SMALL_DLRM,
            train={"optimizer": "adam"},
            data={"slice_rows": 16, "epochs": epochs},
            aggregation={"global_batch": 8},
        )

    Job(config("sync", 2), out=tmp_path / "whole").run()
    Job(config("sync", 1), out=tmp_path / "half").run()
    result = Job(config("gba", 2), out=tmp_path / "other", resume=tmp_path / "half").run()
    whole, other = weights(tmp_path / "whole"), weights(tmp_path / "other")
    assert all(torch.equal(whole[name], other[name]) for name in whole)
    assert result.aggregation.global_steps == 16


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("trainers", "workers", "prefetch", "iteration"),
    [(3, 2, 0, 1), (3, 2, 3, 5), (2, 1, 3, 2)],
    ids=["at once", "later", "with nobody else there"],
)
def test_a_trainer_that_dies_holds_nobody_up(
    tmp_path: Path, method: str, trainers: int, workers: int, prefetch: int, iteration: int
) -> None:
    """What it has begun and does not compute must not hold up the round that its own pulls ahead wait for."""
    dead: list[int] = []

    def script(rank: int, step: int) -> None:
        if step == iteration and (not dead or rank in dead):
            dead.append(rank)
            raise TrainerLost("by script")

    config = gradient_settings(
        write_rows(tmp_path / "rows.parquet", 61),
        method,
        train={"trainers": trainers, "workers": workers, "prefetch": prefetch},
        data={"epochs": 2},
        aggregation={"global_batch": 2 * trainers * workers},
    )
    result, rows = train_counted(config, tmp_path / "out", failures=script)
    assert result.data.trained_samples == 122
    assert rows == dict.fromkeys(range(61), 2)
    assert result.recovery.failures == 1


@pytest.mark.parametrize("method", ["sync", "hop_bw"])
def test_a_pull_ahead_that_fails_ends_the_job(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one waits for a round of which the batch that was not pulled is a part."""
    fetch, fetches = EmbeddingClient.fetch, itertools.count()

    def failing(client: EmbeddingClient, prepared: Prepared) -> Pulled:
        if next(fetches) == 1:
            raise DataError("a server that cannot be reached")
        return fetch(client, prepared)

    monkeypatch.setattr(EmbeddingClient, "fetch", failing)
    data = write_rows(tmp_path / "rows.parquet", 101)
    config = gradient_settings(data, method, model=SMALL_DLRM, train={"prefetch": 3}, aggregation={"global_batch": 4})
    started = time.monotonic()
    with pytest.raises(DataError, match="a server that cannot be reached"):
        Job(config, out=tmp_path / "out").run()
    assert time.monotonic() - started < 120  # a job that the test's timeout interrupts raises the same


EASGD, SERVERS = {"sync": {"method": "easgd"}}, {"cluster": {"dense_servers": 2}}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "not a multiple": ({"method": "gba", "global_batch": 3}, {}, "aggregation.global_batch=3 is not a multiple"),
    "smaller than a batch": ({"method": "gba", "global_batch": 1}, {}, "aggregation.global_batch=1 is not a multiple"),
    "nothing to tune": ({"global_batch": 4}, {}, "aggregation.global_batch has no effect without aggregation.method"),
    "another's option": ({"method": "sync", "tolerance": 3}, {}, "aggregation.tolerance is not an option"),
    "no such method": ({"method": "gbba"}, {}, "did you mean gba"),
    "too many backups": ({"method": "hop_bw", "global_batch": 4, "backups": 2}, {}, "backups"),
    "a method of replicas": ({"method": "gba"}, EASGD, "aggregation.method=gba"),
    "dense servers in one process": ({"method": "gba"}, SERVERS, "aggregation.method=gba"),
}


@pytest.mark.parametrize(("given", "others", "said"), WRONG.values(), ids=WRONG)
def test_settings_that_mean_nothing_are_refused(
    tmp_path: Path, given: dict[str, Any], others: dict[str, Any], said: str
) -> None:
    config = settings(write_rows(tmp_path / "rows.parquet", 10)) | {"aggregation": given}
    del config["sync"]
    fails(lambda: Job(config | others, out=tmp_path / "out").run(), ConfigError, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("now", "servers"),
    [
        (["cluster.runtime=inprocess"], 1),
        (["aggregation.method=null", "sync.method=ma"], 1),
        (["aggregation.method=null", "sync.method=easgd"], 2),
        (["aggregation.method=sync"], 2),
    ],
    ids=str,
)
def test_stored_dense_servers_that_have_no_effect_any_more_are_left_out(now: list[str], servers: int) -> None:
    stored = {"cluster": {"runtime": "ray", "dense_servers": 2}, "aggregation": {"method": "gba"}}
    changed = merge({}, {}, now)
    config = parse(resumed(stored, changed))
    assert choose_all(config, own_model=False) is not None
    assert config.cluster.dense_servers == servers
    given = merge(changed, {"cluster": {"dense_servers": 2}}, [])
    if servers == 1:
        with pytest.raises(ConfigError, match="dense_servers=2 has no effect"):
            resumed(stored, given)


BUSY = {"trainers": 2, "workers": 2, "emulate_step_ms": 2.0, "stragglers": "index=0,slow=20"}
HASTY = {"global_batch": 8, "steady_commits": 4, "steady_s": 0.0, "even": 0.001}
"""Goes to GBA soon, and does not come back in the few steps between the end of the slow worker and that of the last."""


def test_only_a_worker_that_is_there_can_be_slow(tmp_path: Path) -> None:
    train = {**BUSY, "stragglers": "share=0.5;index=0+4,slow=2", "emulate_step_ms": 0.01}
    config = gradient_settings(write_rows(tmp_path / "rows.parquet", 10), "sync", train=train)
    said = "there is no worker 4 that could be slow; this job has 4, counted from 0"
    fails(lambda: Job(config, out=tmp_path / "out").run(), ConfigError, said)
    config["train"]["trainers"] = 3
    Job(config, out=tmp_path / "out").run()


def test_a_job_may_wait_instead_of_computing(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 30)
    train = {"emulate_step_ms": 0.01, "emulate_compute": False, "optimizer": "adam"}
    config = gradient_settings(data, "sync", model=SMALL_DLRM, train=train, data={"epochs": 2})
    result = Job(config, out=tmp_path / "out").run()
    assert result.data.trained_samples == 60
    Job(config | {"data": {**config["data"], "epochs": 1}}, out=tmp_path / "once").run()
    once, twice = weights(tmp_path / "once"), weights(tmp_path / "out")
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_each_switch_is_told_once_and_in_order_and_a_resume_goes_on_telling(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 400), tmp_path / "out"
    config = gradient_settings(data, "auto", train=BUSY, aggregation=HASTY)
    interrupt(config, out, iteration=40)
    first = decided(out)
    assert first[0].startswith("gradients are aggregated by gba from global step ")
    assert "stragglers cost synchronous rounds" in first[0]
    console = Console(file=io.StringIO(), width=400)
    job = Job(beside_own_model(config), model=Witness(Ledger()), out=out, resume=out)
    result = job.run(console)
    switches = [switch.sentence for switch in result.aggregation.switches]
    assert decided(out) == switches
    assert switches[: len(first)] == first
    assert "from a checkpoint at which gba was at work" in switches[len(first)]
    assert "stragglers cost" in switches[len(first) + 1]
    printed = console.file.getvalue()
    assert [sentence for sentence in switches if sentence in printed] == switches[len(first) :]


def test_the_result_and_the_history_tell_what_the_method_did(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 300), tmp_path / "out"
    config = gradient_settings(
        data, "gba", train=BUSY, aggregation={"global_batch": 4, "tolerance": 0}, report={"html": True}
    )
    result, _ = train_counted(config, out)
    done = result.aggregation
    assert (done.method, done.mode, done.switches) == ("gba", "gba", ())
    assert done.received == 150
    assert done.dropped > 0
    assert sum(count for _, count in done.staleness) == done.received - done.dropped
    assert done.max_staleness == max(steps for steps, _ in done.staleness)
    assert set(done.step_seconds) == {"0.0", "0.1", "1.0", "1.1"}
    assert done.step_seconds["0.0"] > 3 * done.step_seconds["1.1"] > 0.006
    assert done.most_held_bytes is not None
    frames = read_frames(out)
    assert (frames[-1].global_steps, frames[-1].dropped) == (done.global_steps, done.dropped)
    assert {frame.aggregation_mode for frame in frames} == {"gba"}
    assert any(frame.step_seconds for frame in frames)
    assert any(frame.held_bytes for frame in frames)
    assert result.config["aggregation"]["tolerance"] == 0
    assert result.config["aggregation"]["global_batch"] == 4
    assert "sync" not in result.config
    assert 'id="aggregation"' in (out / "report.html").read_text()
