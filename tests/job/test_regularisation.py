"""Penalties, dropout, norms, accumulated gradients, widths by feature and first-order weights, in whole jobs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from job_helpers import ROWS, fails, result_of, settings, weights, write_rows
from test_exactness import BATCH, PlainRows, assert_near, in_order, job_config
from torch import nn

import shadowsync.job
from shadowsync import Job, Table, Trained
from shadowsync.assembly import make_module, make_tables
from shadowsync.choices import choose_all, resumed, warmup_samples
from shadowsync.config import parse
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.job import too_short, train_from_command_line
from shadowsync.models.vectors import Pooled

DLRM = {"name": "dlrm", "bottom": [16], "top": [16]}
LEARNING: dict[str, dict[str, Any]] = {
    "fm": {"model": {"name": "fm"}},
    "wide_deep": {"model": {"name": "wide_deep", "deep": [16]}},
    "youtube_dnn": {"model": {"name": "youtube_dnn", "deep": [16]}},
    "deepfm": {"model": {"name": "deepfm", "deep": [16]}},
    "widths by feature": {"model": {"name": "dcn", "deep": [16], "embedding_dim": {"c0": 8, "default": 2}}},
    "batch norm": {"model": {**DLRM, "norm": "batch"}},
    "layer norm, dropout, bf16": {
        "model": {**DLRM, "norm": "layer", "dropout": 0.1},
        "train": {"precision": "bf16"},
    },
    "batch norm by steps": {"model": {**DLRM, "norm": "batch"}, "aggregation": {"method": "gba", "global_batch": 64}},
    "penalties": {"model": DLRM, "embedding": {"l2": 1e-4}, "train": {"l2": 1e-4}},
    "accumulated": {"model": DLRM, "train": {"accumulate": 4, "workers": 2}},
}


@pytest.mark.parametrize("sections", LEARNING.values(), ids=LEARNING)
def test_it_learns_and_is_evaluated_alike_afterwards(tmp_path: Path, sections: dict[str, Any]) -> None:
    data, test = write_rows(tmp_path / "rows.parquet", 4001), write_rows(tmp_path / "test.parquet", 1500, seed=1)
    base: dict[str, dict[str, Any]] = {
        "data": {"slice_rows": 512, "epochs": 4},
        "train": {"batch_size": 32, "lr": 0.03},
        "embedding": {"storage": "auto", "lr": 0.1},
        "sync": {"method": "none"},
    }
    config = settings(data, test, **{k: base.get(k, {}) | sections.get(k, {}) for k in {**base, **sections}})
    if "aggregation" in config:
        del config["sync"]
    result = Job(config, out=tmp_path / "out").run()
    assert result.test.auc > 0.78
    assert Trained(tmp_path / "out").evaluate().auc == pytest.approx(result.test.auc, abs=1e-6)


# --- equal to a plain loop -------------------------------------------------------------------------------------------


def plain_training(config: dict[str, Any]) -> tuple[nn.Module, list[PlainRows]]:
    """The configured model in a loop of torch alone, with SGD; row 0 of a table's columns is as initialised."""
    checked = parse(config)
    choices = choose_all(checked, own_model=False)
    source = choices.source.open("train", "error")
    tables = make_tables(checked, source.schema, None, choices.model)
    module = make_module(checked, choices, source.schema, tables, None).train()
    rows = [PlainRows(table, "sgd") for table in tables]
    optimizer = torch.optim.SGD(module.parameters(), lr=checked.train.lr)
    for batch in in_order({**config, "model": {"embedding_dim": 4}}):
        pooled = {one.table.name: one.pool(batch.ids, index) for index, one in enumerate(rows)}
        flat = torch.cat(list(pooled.values()), dim=1)
        logits = module(batch.dense, Pooled(flat, {one.table.name: one.table.dim for one in rows}))
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        for one in rows:
            one.step(checked.embedding.lr, checked.embedding.l2)
    return module, rows


MODELS: dict[str, dict[str, Any]] = {
    "dlrm, batch norm": {"name": "dlrm", "bottom": [8], "top": [8], "norm": "batch"},
    "dcn, layer norm": {"name": "dcn", "deep": [8], "norm": "layer"},
    "deepfm": {"name": "deepfm", "deep": [8]},
    "wide_deep": {"name": "wide_deep", "deep": [8, 8], "norm": "batch", "embedding_dim": {"c0": 6, "many": 3}},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("by", ["worker", "steps"])
def test_one_worker_is_a_plain_loop(tmp_path: Path, model: dict[str, Any], by: str) -> None:
    """Under a gradient method, too, where the modules run at the workers and the parameters are moved elsewhere."""
    config = job_config(
        tmp_path,
        data={"dense": ["x"]},  # numbers of rows, up to a hundred, would have a norm take differences of large sums
        model=model,
        embedding={"optimizer": "sgd", "lr": 0.1, "l2": 0.01},
        train={"optimizer": "sgd", "lr": 0.1},
    )
    if by == "steps":
        del config["sync"]
        config["aggregation"] = {"method": "sync", "global_batch": BATCH}
    Job(config, out=tmp_path / "out").run()
    module, rows = plain_training(config)
    trained = Trained(tmp_path / "out")
    ours, theirs = trained.module.state_dict(), module.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_near(ours[name], tensor, name)
    for one in rows:
        found = next(held.tensors["weight"] for held in trained.server.state() if held.table.name == one.table.name)
        assert_near(found, one.bag.weight, one.table.name)
    if "norm" in model and model["norm"] == "batch":
        assert any(name.endswith("running_mean") and tensor.any() for name, tensor in ours.items())


@pytest.mark.parametrize("method", [None, "sync", "gba"])
def test_running_statistics_and_waiting_gradients_go_on_after_a_resume(tmp_path: Path, method: str | None) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    more: dict[str, Any] = {"train": {"accumulate": 4}} if method is None else {}

    def config(epochs: int) -> dict[str, Any]:
        made = settings(data, data, model={**DLRM, "norm": "batch"}, data={"slice_rows": 12, "epochs": epochs}, **more)
        if method is not None:
            del made["sync"]
            made["aggregation"] = {"method": method, "global_batch": 4}
        return made

    Job(config(2), out=tmp_path / "whole").run()
    Job(config(1), out=tmp_path / "half").run()
    half = weights(tmp_path / "half")
    if method is None:
        assert half["replica.0.waiting.batches"].tolist()[-1] == 30 % 4
        assert half["replica.0.waiting.sum"].any()
    Job(config(2), out=tmp_path / "other", resume=tmp_path / "half").run()
    whole, other = weights(tmp_path / "whole"), weights(tmp_path / "other")
    assert whole.keys() == other.keys()
    assert any(name.endswith("running_var") for name in whole)
    for name, tensor in whole.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("there", "here"),
    [({}, {"accumulate": 4}), ({"accumulate": 4}, {}), ({"accumulate": 4, "trainers": 3}, {"accumulate": 2})],
)
def test_how_many_batches_make_a_step_may_change(
    tmp_path: Path, there: Mapping[str, Any], here: Mapping[str, Any]
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 50)
    Job(settings(data, data, model=DLRM, train=there), out=tmp_path / "there").run()
    changed = settings(data, data, model=DLRM, train=here, data={"epochs": 2})
    result = Job(changed, out=tmp_path / "here", resume=tmp_path / "there").run()
    assert result.data.trained_samples == 100


@pytest.mark.parametrize("workers", [1, 3])
def test_there_are_as_many_steps_as_batches_allow(tmp_path: Path, workers: int) -> None:
    data = write_rows(tmp_path / "rows.parquet", 90)
    train = {"accumulate": 4, "workers": workers, "optimizer": "adam"}
    Job(settings(data, data, model=DLRM, train=train), out=tmp_path / "out").run()
    found = weights(tmp_path / "out")
    assert set(found["replica.0.waiting.batches"].tolist()) == {45 % 4}
    if workers == 1:  # of several, Adam's own count may lose one
        assert set(found["replica.0.step"].tolist()) == {45 // 4}


def test_accumulating_has_no_effect_under_a_gradient_method() -> None:
    given = {"train": {"accumulate": 4}, "aggregation": {"method": "gba"}}
    fails(lambda: Job(given), ConfigError, "train.accumulate=4 has no effect with aggregation.method=gba", "leave it")
    stored = {"train": {"accumulate": 4, "lr": 0.1}}
    assert resumed(stored, {"aggregation": {"method": "gba"}})["train"] == {"lr": 0.1}
    again = resumed(stored, given)
    fails(lambda: Job(again), ConfigError, "train.accumulate=4 has no effect")


def test_a_step_of_several_batches_is_counted_as_one() -> None:
    config = parse({"train": {"batch_size": 10, "trainers": 1, "accumulate": 10}})
    assert warmup_samples(config, 100_000) == 5_000
    assert warmup_samples(config, 20_000) == 2_000
    (said,) = too_short(config, 1_900)
    assert "only 19 step(s) of each replica" in said
    assert "by 10 x 10 x 1 trainer(s)" in said
    assert "lower train.accumulate, train.batch_size" in said


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_a_job_with_dropout_can_be_repeated_bit_by_bit_and_depends_on_the_seed(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    found = {}
    for name, seed, share in (("one", 0, 0.5), ("again", 0, 0.5), ("without", 0, 0.0)):
        torch.manual_seed(len(found))  # torch's own generator is not used
        model = {**DLRM, "dropout": share}
        Job(settings(data, data, model=model, train={"seed": seed, "batch_size": 4}), out=tmp_path / name).run()
        found[name] = weights(tmp_path / name)
    assert found["one"].keys() == found["again"].keys() == found["without"].keys()
    assert all(torch.equal(found["again"][name], tensor) for name, tensor in found["one"].items())
    assert not torch.equal(found["one"]["final"], found["without"]["final"])


def test_dropout_may_be_turned_on_and_off_when_a_job_goes_on(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    Job(settings(data, data, model={**DLRM, "dropout": 0.5}), out=tmp_path / "there").run()
    train_from_command_line(None, ["model.dropout=0", "data.epochs=2"], tmp_path / "here", tmp_path / "there")
    assert result_of(tmp_path / "here")["data"]["trained_samples"] == 120


# --- widths ----------------------------------------------------------------------------------------------------------


def widths_of(tmp_path: Path, **model: Any) -> dict[str, int]:
    path = write_rows(tmp_path / "rows.parquet", 9)
    config = parse(settings(path, model={"name": "dcn", **model}, data={"tables": {"c1": "t", "many": "t"}}))
    choices = choose_all(config, own_model=False)
    tables = make_tables(config, choices.source.open("train", "error").schema, None, choices.model)
    return {table.name: table.dim for table in tables}


def test_widths_are_given_by_feature(tmp_path: Path) -> None:
    assert widths_of(tmp_path, embedding_dim={"many": 8}) == {"c0": 16, "t": 8}
    assert widths_of(tmp_path, embedding_dim={"many": 8, "c1": 8, "default": 3}) == {"c0": 3, "t": 8}
    assert widths_of(tmp_path, name="wide_deep", embedding_dim={"c0": 4, "default": 2}) == {"c0": 5, "t": 3}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mny": 8}, "model.embedding_dim: there is no feature mny, did you mean many?; there are c0, c1, many, and"),
        ({"c1": 8, "many": 4}, "model.embedding_dim: rows of table t cannot have the widths 8 of c1 and 4 of many"),
        ({"c1": 0}, "model.embedding_dim={c1: 0}: the width of c1 is 0, it must be a whole number from 1 to 4096"),
        ({"c1": True}, "the width of c1 is True"),
        (0, "model.embedding_dim=0: input should be greater than or equal to 1"),
    ],
)
def test_widths_that_cannot_be_are_named(tmp_path: Path, given: object, said: str) -> None:
    fails(lambda: widths_of(tmp_path, embedding_dim=given), ConfigError, said)


def test_widths_by_feature_are_for_tables_made_by_default(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.parquet", 9)
    tables = (Table("t", ROWS, 4, ("c0", "c1", "many")),)
    job = Job(settings(path, model={"embedding_dim": {"c0": 8}}), tables=tables, out=tmp_path / "out")
    fails(job.run, ConfigError, "has no effect beside embedding.tables")
    one = Job(settings(path, model={"name": "fm", "embedding_dim": {"c0": 8}}), out=tmp_path / "out")
    fails(one.run, ConfigError, "model.name=fm needs vectors of one width", "model.embedding_dim as one number")


# --- pooling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "pooling"),
    [
        ({}, "mean"),
        ({"data": {"pooling": {"many": "sum"}}}, "sum"),
        ({"embedding": {"pooling": {"many": "sum"}}}, "sum"),
    ],
    ids=["nobody says", "the source says", "the tables say"],
)
def test_youtube_averages_lists_unless_told(tmp_path: Path, sections: dict[str, Any], pooling: str) -> None:
    path = write_rows(tmp_path / "rows.parquet", 9)
    config = parse(settings(path, model={"name": "youtube_dnn"}, **sections))
    choices = choose_all(config, own_model=False)
    tables = make_tables(config, choices.source.open("train", "error").schema, None, choices.model)
    assert {table.name: table.pooling for table in tables} == {"c0": "sum", "c1": "sum", "many": pooling}


# --- checkpoints of deepfm from before first-order weights -----------------------------------------------------------


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose checkpoint says as little of the first order as those written before there was a choice."""

    def stored(config: Any) -> dict[str, Any]:
        kept = shadowsync.job.as_stored(config.model_dump(mode="json", exclude_unset=True), config.written)
        del kept["model"]["first_order"]
        return kept

    monkeypatch.setattr(shadowsync.job, "given", stored)
    Job(old_config(tmp_path, first_order="projection"), out=tmp_path / "old").run()
    monkeypatch.undo()
    return tmp_path / "old"


def old_config(tmp_path: Path, epochs: int = 1, **model: Any) -> dict[str, Any]:
    data = tmp_path / "rows.parquet"
    data = data if data.exists() else write_rows(data, 60)
    deepfm = {"name": "deepfm", "deep": [8], "embedding_dim": 4, **model}
    return settings(data, data, model=deepfm, data={"epochs": epochs})


def test_a_deepfm_of_before_is_read_as_it_was_trained(tmp_path: Path, old_run: Path) -> None:
    trained = Trained(old_run)
    assert trained.evaluate().auc == result_of(old_run)["test"]["auc"]
    assert {table.dim for table in trained.tables} == {4}
    trained.export(tmp_path / "model.pt2")
    pl.read_parquet(tmp_path / "rows.parquet").write_parquet(tmp_path / "more.parquet")
    assert trained.predict(tmp_path / "more.parquet", tmp_path / "out.csv") == 60


def test_a_deepfm_of_before_goes_on_as_it_was_trained(tmp_path: Path, old_run: Path) -> None:
    train_from_command_line(None, ["data.epochs=2"], tmp_path / "new", old_run)
    assert result_of(tmp_path / "new")["config"]["model"]["first_order"] == "projection"
    Job(old_config(tmp_path, 2), out=tmp_path / "own", resume=old_run).run()
    one, other = weights(tmp_path / "new"), weights(tmp_path / "own")
    assert "c0.weight" not in one or one["c0.weight"].shape[1] == 4
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    again = Job(old_config(tmp_path, 3), out=tmp_path / "again", resume=tmp_path / "own").run()
    assert again.data.trained_samples == 180
    scalar = Job(old_config(tmp_path, 2, first_order="scalar"), out=tmp_path / "scalar", resume=old_run)
    fails(scalar.run, CheckpointError, "parameter first_order.weight is [1, 14] in the checkpoint and absent")


def test_a_new_deepfm_has_scalars_of_its_own(tmp_path: Path) -> None:
    Job(old_config(tmp_path), out=tmp_path / "out").run()
    assert result_of(tmp_path / "out")["config"]["model"]["first_order"] == "scalar"
    assert {table.dim for table in Trained(tmp_path / "out").tables} == {5}


# --- statistics of several trainers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [{"method": "easgd"}, {"method": "ma"}], ids=lambda sync: sync["method"])
def test_each_trainer_keeps_its_statistics_and_the_first_ones_are_evaluated(
    tmp_path: Path, sync: dict[str, Any]
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 200)
    config = settings(data, data, model={**DLRM, "norm": "batch"}, train={"trainers": 2, "batch_size": 8}, sync=sync)
    Job(config, out=tmp_path / "out").run()
    found = weights(tmp_path / "out")
    names = [name for name in found if name.startswith("replica.0.buffer") and name.endswith("running_mean")]
    assert names
    module = Trained(tmp_path / "out").module
    for name in names:
        assert found[name].any()
        assert torch.equal(module.get_buffer(name.removeprefix("replica.0.buffer.")), found[name])
        assert not torch.equal(found[name], found[name.replace("replica.0", "replica.1")])


@pytest.mark.parametrize("method", ["sync", "gba"])
def test_steps_of_several_workers_leave_statistics_that_fit_the_rows(tmp_path: Path, method: str) -> None:
    """Those that no worker had brought back would be means of 0 and variances of 1."""
    data = write_rows(tmp_path / "rows.parquet", 3000)
    config = settings(
        data,
        data,
        model={**DLRM, "norm": "batch"},
        train={"trainers": 2, "workers": 2, "batch_size": 16, "lr": 1e-6},
        embedding={"lr": 1e-6},
        aggregation={"method": method, "global_batch": 32},
    )
    del config["sync"]
    Job(config, out=tmp_path / "out").run()
    module = Trained(tmp_path / "out").module
    rows = pl.read_parquet(data)
    sums = module.bottom[0](torch.tensor(rows.select("row", "x").to_numpy()))
    torch.testing.assert_close(module.bottom[1][0].running_mean, sums.mean(0), rtol=0.3, atol=0.3)
    torch.testing.assert_close(module.bottom[1][0].running_var, sums.var(0), rtol=0.5, atol=0.3)
