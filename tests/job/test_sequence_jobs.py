"""Jobs whose model is given sequences: exact, resumed, evaluated, exported, and refused where they make no sense."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from job_helpers import ROWS, SMALL_DLRM, beside_own_model, error_of, fails, result_of, settings, write_rows
from test_exactness import NO_FBGEMM, assert_near, in_order, job_config, table_rows
from test_inference import exported_inputs
from test_resume import SignalAt
from torch import Tensor, nn

from shadowsync import Job, Table, Trained
from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import fill
from shadowsync.embedding.table import Shard
from shadowsync.errors import ConfigError
from shadowsync.metrics.quality import evaluate_scores
from shadowsync.models.interest import Din
from shadowsync.models.model import SequenceInput
from shadowsync.models.vectors import JaggedVectors

DIN = {"name": "din", "attention": [8], "deep": [8]}
DIEN = {"name": "dien", "deep": [8], "steps": 3, "auxiliary": 0.5}
SHARED = {"tables": {"many": "c1"}}
both_models = pytest.mark.parametrize("model", [DIN, DIEN], ids=lambda model: model["name"])
both_storages = pytest.mark.parametrize("storage", ["torch", "fbgemm"])


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    return write_rows(tmp_path / "train.parquet", 300, 0), write_rows(tmp_path / "test.parquet", 120, 1)


def config_of(files: tuple[Path, Path], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A job in which `many` is a history of ids of `c1`, for a sequence model to find."""
    shared = {"data": SHARED | dict(sections.pop("data", {}))}
    return settings(*files, **{"model": {"embedding_dim": 4} | DIN} | shared | sections)


def needs(storage: str) -> None:
    if storage == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason=NO_FBGEMM)


def initial_rows(table: str) -> Tensor:
    weight = torch.empty(ROWS, 4)
    fill([(Shard(Table(table, ROWS, 4, (table,)), 0, ROWS), weight)], seed=0)
    return weight


def plain_din(config: Mapping[str, Any], spec: Din, steps_lr: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same training with plain tensors, autograd and SGD; the reader gives the order of the data."""
    torch.manual_seed(0)
    module = spec.build(2, {"c0": 4, "c1": 4}, {"many": SequenceInput(4, ("c1",))})
    weights = {name: initial_rows(name).requires_grad_() for name in ("c0", "c1")}
    optimizer = torch.optim.SGD([*module.parameters(), *weights.values()], lr=steps_lr)
    for batch in in_order({**config, "model": {"embedding_dim": 4}}):
        logits = module(batch.dense, plain_vectors(weights, batch.ids))
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
    return module, weights


def plain_vectors(weights: Mapping[str, Tensor], ids: Jagged) -> dict[str, Any]:
    one, other, many = (ids.select([feature]) for feature in range(3))
    sequence = JaggedVectors("many", weights["c1"][many.values], many.bag_offsets())
    return {"c0": weights["c0"][one.values], "c1": weights["c1"][other.values], "many": sequence}


@pytest.mark.parametrize(
    ("storage", "servers", "pooling"),
    [("torch", 1, "sum"), ("torch", 3, "mean"), ("fbgemm", 1, "mean"), ("fbgemm", 3, "sum")],
)
def test_a_job_with_din_equals_a_plain_loop(tmp_path: Path, storage: str, servers: int, pooling: str) -> None:
    needs(storage)
    config = job_config(
        tmp_path,
        data={"slice_rows": 32, "epochs": 2, **SHARED, "pooling": {"c1": pooling}},
        model=DIN,
        embedding={"storage": storage, "optimizer": "sgd", "lr": 0.1, "servers": servers, "split_rows": 11},
        train={"optimizer": "sgd", "lr": 0.1, "batch_size": 8},
    )
    module, weights = plain_din(config, Din(attention=(8,), deep=(8,)), 0.1)
    Job(config, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    assert {table.name: table.sequences for table in trained.tables} == {"c0": (), "c1": ("many",)}
    for name, parameter in module.named_parameters():
        assert_near(trained.module.get_parameter(name), parameter, name)
    for name, weight in weights.items():
        assert_near(table_rows(trained, name), weight, name)
        assert (weight - initial_rows(name)).abs().max() > 1e-3


@both_models
@both_storages
def test_any_shape_of_job_trains_every_row_and_evaluates_as_it_says(
    tmp_path: Path, data: tuple[Path, Path], model: dict[str, Any], storage: str
) -> None:
    needs(storage)
    config = config_of(
        data,
        model=model,
        embedding={"servers": 3, "storage": storage, "unique_rows": "auto"},
        train={"trainers": 2, "workers": 2, "batch_size": 16, "precision": "bf16", "prefetch": 2, "lr": 0.05},
        compression={"pull": "bf16", "push": "bf16"},
        sync={"method": "easgd"},
    )
    result = Job(config, out=tmp_path / "out").run()
    assert result.data.trained_samples == 300
    measured = Trained(tmp_path / "out").evaluate()
    assert (measured.auc, measured.logloss) == (result.test.auc, result.test.logloss)
    sent, raw = (result_of(tmp_path / "out")["wire"][key] for key in ("bytes", "raw_bytes"))
    assert 0 < sent["push"] == raw["push"] / 2


@both_models
def test_training_learns(tmp_path: Path, model: dict[str, Any]) -> None:
    """More rows than elsewhere: of 300 in many epochs a model learns some by heart, which says nothing."""
    data = write_rows(tmp_path / "many.parquet", 1200, 0), write_rows(tmp_path / "test.parquet", 600, 1)
    config = config_of(data, model=model, data={"epochs": 2}, train={"batch_size": 8, "lr": 0.05, "workers": 1})
    assert Job(config, out=tmp_path / "out").run().test.auc > 0.8


@pytest.mark.parametrize(("model", "iteration"), [(DIN, 1), (DIN, 23), (DIEN, 23)])
def test_a_resumed_job_equals_an_undisturbed_one(
    tmp_path: Path, data: tuple[Path, Path], model: dict[str, Any], iteration: int
) -> None:
    config = config_of(data, model=model, train={"batch_size": 8, "trainers": 1})
    whole = Job(config, out=tmp_path / "whole").run()
    script, out = SignalAt(iteration), tmp_path / "out"
    script.run(Job(config, out=out, failures=script))
    resumed = Job(config, out=out, resume=out).run()
    assert resumed.test == whole.test
    for table in ("c0", "c1"):
        found, expected = (table_rows(Trained(folder), table) for folder in (out, tmp_path / "whole"))
        assert torch.equal(found, expected)


def test_another_pooling_is_refused_at_a_resume(tmp_path: Path, data: tuple[Path, Path]) -> None:
    out = tmp_path / "out"
    Job(config_of(data, model=SMALL_DLRM), out=out).run()
    other = config_of(data, model=SMALL_DLRM, data={"epochs": 2, "pooling": {"many": "mean"}})
    message = "table c1 has pooling sum in the checkpoint and sum of c1, mean of many in this job"
    assert message in str(error_of(Job(other, out=out, resume=out).run))


@both_models
def test_predictions_and_the_exported_file_are_those_evaluated(
    tmp_path: Path, data: tuple[Path, Path], model: dict[str, Any]
) -> None:
    result = Job(config_of(data, model=model), out=tmp_path / "out").run()
    trained, file = Trained(tmp_path / "out"), tmp_path / "predictions.parquet"
    trained.predict(str(data[1]), file)
    predicted = pl.read_parquet(file)["logit"].to_torch()
    assert evaluate_scores(predicted, pl.read_parquet(data[1])["label"].to_torch()).auc == result.test.auc
    trained.export(tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    answer = loaded(*exported_inputs(pl.read_parquet(data[1])))["logits"].detach()
    torch.testing.assert_close(answer, predicted, rtol=1e-5, atol=1e-5)


class Attending(nn.Module):
    """A user's own module that takes a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 + 4 + 4 + 4, 1)
        nn.init.ones_(self.out.weight)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Any]) -> Tensor:
        many, target = embeddings["many"], embeddings["c1"]
        interest = many.weighted_sum((many.values * target[many.owners]).sum(1))
        return self.out(torch.cat([dense, embeddings["c0"], target, interest], dim=1)).squeeze(1)


TABLES = (Table("c0", ROWS, 4, ("c0",)), Table("c1", ROWS, 4, ("c1", "many"), ("sum", "none")))


def test_a_module_of_ones_own_may_use_sequences(tmp_path: Path, data: tuple[Path, Path]) -> None:
    config = beside_own_model(settings(*data, data={"epochs": 6}, train={"batch_size": 8, "lr": 0.05}))
    result = Job(config, model=Attending(), tables=TABLES, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out", model=Attending())
    assert trained.evaluate().auc == result.test.auc > 0.7
    trained.export(tmp_path / "model.pt2")


def test_a_job_may_wait_instead_of_computing(tmp_path: Path, data: tuple[Path, Path]) -> None:
    still = {"emulate_step_ms": 0.01, "emulate_compute": False, "batch_size": 32}
    assert Job(config_of(data, train=still), out=tmp_path / "out").run().data.trained_samples == 300


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": SMALL_DLRM, "embedding": {"pooling": {"many": "none"}}},
            "model.name=dlrm takes one vector per feature, but feature many has pooling=none: set embedding.pooling=",
        ),
        (
            {"embedding": {"pooling": {"many": "no"}}},
            "embedding.pooling.many=no: input should be 'sum', 'mean' or 'none'",
        ),
        ({"embedding": {"pooling": {"many": "mean"}}}, "model.name=din attends over a behaviour sequence, and no"),
        ({"data": {"pooling": {"many": "no"}}}, "data.pooling.many=no: input should be 'sum', 'mean' or 'none'"),
        ({"model": {**DIN, "targets": {"mani": "c1"}}}, "model.targets: there is no feature mani, did you mean many?"),
        ({"model": {**DIN, "targets": {"many": "c9"}}}, "model.targets: many is attended with c9, which is no pooled"),
        (
            {
                "embedding": {
                    "tables": [
                        {"name": "t", "rows": ROWS, "dim": 4, "features": ["c0", "c1", "many"], "pooling": {"x": "sum"}}
                    ]
                }
            },
            "embedding.tables: pooling of t: there is no feature x; there are c0, c1, many",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, data: tuple[Path, Path], sections: dict[str, Any], message: str
) -> None:
    error = fails(lambda: Job(config_of(data, **sections), out=tmp_path / "out").run(), ConfigError)
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    "sections",
    [
        {"embedding": {"pooling": {"many": "none"}}},
        {"data": {"pooling": {"many": "none"}}},
        {"data": {"tables": {}}, "model": {**DIN, "targets": {"many": "c0"}}},
        {
            "embedding": {
                "tables": [
                    {"name": "t", "rows": ROWS, "dim": 4, "features": ["c1", "many"], "pooling": {"many": "none"}},
                    {"name": "u", "rows": ROWS, "dim": 4, "features": ["c0"]},
                ]
            }
        },
    ],
)
def test_every_way_to_say_that_a_feature_is_a_sequence(
    tmp_path: Path, data: tuple[Path, Path], sections: dict[str, Any]
) -> None:
    Job(config_of(data, train={"batch_size": 32}, **sections), out=tmp_path / "out").run()
    tables = Trained(tmp_path / "out").tables
    assert {feature for table in tables for feature in table.sequences} == {"many"}
