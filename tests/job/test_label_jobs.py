"""Whole jobs of several labels, weights, other losses and measures by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from job_helpers import ROWS, by_gradients, fails, result_of, settings, weights, write_rows
from test_exactness import BATCH, Tower, plain_loop
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from shadowsync import Job, Table, Trained
from shadowsync.choices import resumed
from shadowsync.cli import app
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.report.files import read_frames
from shadowsync.report.reporter import final_table, quality_table
from shadowsync.report.result import read_result
from shadowsync.training.losses import objective

LABELS: dict[str, Any] = {"label": "logloss", "watched": {"loss": "mse", "weight": 0.3}, "visits": "poisson"}
MMOE = {"name": "mmoe", "experts": 3, "expert": [16], "top": [8]}


def write_answers(path: Path, rows: int, seed: int = 0) -> Path:
    """As `write_rows`, with more labels that the same columns tell, weights and a user."""
    frame = pl.read_parquet(write_rows(path, rows, seed))
    draw = np.random.default_rng(seed)
    of = frame["x"].to_numpy() + frame["c0"].to_numpy() % 2
    frame.with_columns(
        watched=pl.Series(2 * of + draw.normal(size=rows)),
        visits=pl.Series(draw.poisson(np.exp(0.5 * of))),
        w=pl.Series(draw.uniform(0, 2, rows)),
        user=pl.Series([f"user {number}" for number in draw.integers(0, 30, rows)]),
    ).write_parquet(path)
    return path


def answering(folder: Path, rows: int = 3000, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A job of three labels."""
    data = write_answers(folder / "rows.parquet", rows)
    test = write_answers(folder / "test.parquet", 1000, seed=1)
    base: dict[str, dict[str, Any]] = {
        "data": {"slice_rows": 512, "epochs": 3, "labels": LABELS},
        "model": {**MMOE, "embedding_dim": 4},
        "embedding": {"storage": "auto", "lr": 0.1},
        "train": {"batch_size": 32, "lr": 0.03},
    }
    return settings(
        data, test, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}
    )


# --- several labels --------------------------------------------------------------------------------------------------

FAMILIES_OF_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "one replica": {},
    "easgd": {"train": {"trainers": 2}, "sync": {"method": "easgd"}},
    "averages": {"train": {"trainers": 2, "workers": 2}, "sync": {"method": "ma", "schedule": "every_k", "k": 4}},
    "accumulated": {"train": {"accumulate": 3}},
    "gba": {"aggregation": {"method": "gba"}, "train": {"trainers": 2}},
    "sync steps": {"aggregation": {"method": "sync"}, "train": {"workers": 2}},
    "codecs": {
        "compression": {
            "dense": {"name": "threshold", "keep": 0.3},
            **{key: {"name": "int8"} for key in ("pull", "push")},
        },
        "sync": {"method": "easgd"},
        "train": {"trainers": 2},
    },
    "a server that is lost": {
        "embedding": {"servers": 2},
        "recovery": {"mode": "partial", "inject": "at:0.7,unit=epoch,index=1", "interval_s": 0.05, "priority": "mfu"},
    },
}


@pytest.mark.parametrize("sections", FAMILIES_OF_METHODS.values(), ids=FAMILIES_OF_METHODS)
def test_several_labels_are_learnt_by_every_family_of_methods(
    tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    more = {**sections, "train": {"measures": ["gauc(user)", "mae"], **sections.get("train", {})}}
    config = answering(tmp_path, **more)
    if "aggregation" in config:
        config = by_gradients(config, config["aggregation"]["method"])
    result = Job(config, out=tmp_path / "out").run()
    if "recovery" in sections:
        assert result.recovery is not None
        assert result.recovery.failures == 1
    tasks = result.test.tasks
    assert list(tasks) == ["label", "watched", "visits"]
    assert result.test.auc == tasks["label"].auc > 0.75
    assert result.test.measures == tasks["label"].measures
    assert tasks["label"].measures["gauc(user)"] > 0.7
    assert tasks["watched"].ne < 0.5
    assert tasks["visits"].ne < 0.9
    assert {*tasks["watched"].measures} == {"rmse", "mae"}
    assert {*tasks["visits"].measures} == {"rmse", "mae", "poisson_deviance"}
    found = Trained(tmp_path / "out").evaluate()
    assert found.tasks["watched"].measures == pytest.approx(tasks["watched"].measures, rel=1e-5)
    assert read_result(tmp_path / "out").test == result.test


def test_a_measure_that_is_code_runs_where_its_user_names_it_not_where_a_folder_does(tmp_path: Path) -> None:
    own = "torchmetrics:MeanSquaredError"
    config = answering(tmp_path, rows=600, train={"measures": ["pr_auc", own]})
    assert own in Job(config, out=tmp_path / "out").run().test.measures
    trained = Trained(tmp_path / "out")
    assert trained.skipped == (f"{own} is code that the run's folder names, and is not run: give --measure {own}",)
    assert {*trained.evaluate().measures} == {"pr_auc", "rmse"}
    assert {*Trained(tmp_path / "out", measures=[own, "mae"]).evaluate().measures} == {own, "mae", "rmse"}
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "out"), "--measure", "mae", "--measure", "gauc(user)"])
    assert "label: gauc(user)" in done.output
    assert own not in done.output


def test_result_table_predictions_and_export_have_every_label(tmp_path: Path) -> None:
    config = answering(tmp_path, rows=600, train={"measures": ["pr_auc"]}, report={"html": True})
    result = Job(config, out=tmp_path / "out").run()
    names = [str(cell) for cell in final_table(result).columns[0].cells]
    assert {"test AUC", "label: AUC", "label: pr_auc", "watched: NE", "visits: poisson_deviance"} <= {*names}
    assert "visits: poisson_deviance" in (tmp_path / "out" / "report.html").read_text("utf-8")
    trained = Trained(tmp_path / "out")
    assert "watched: rmse" in [str(cell) for cell in quality_table(trained.evaluate()).columns[0].cells]
    unlabelled = tmp_path / "unlabelled.parquet"
    pl.read_parquet(tmp_path / "test.parquet").drop("label", "watched", "visits").write_parquet(unlabelled)
    assert trained.predict(unlabelled, tmp_path / "predicted.parquet", keep=["user"]) == 1000
    predicted = pl.read_parquet(tmp_path / "predicted.parquet")
    assert predicted.columns == [
        "user",
        "label_probability",
        "label_logit",
        "watched_prediction",
        "watched_logit",
        "visits_prediction",
        "visits_logit",
    ]
    wanted = predicted.select("label_probability", "watched_prediction", "visits_prediction").to_numpy()
    np.testing.assert_allclose(trained.predict(unlabelled), wanted, rtol=1e-6)
    np.testing.assert_allclose(trained.predict(pl.read_parquet(unlabelled)), wanted, rtol=1e-6)
    truth = pl.read_parquet(tmp_path / "test.parquet")
    error = ((predicted["watched_prediction"] - truth["watched"]) ** 2).mean() ** 0.5
    assert error == pytest.approx(result.test.tasks["watched"].measures["rmse"], rel=1e-4)
    trained.export(tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    source = trained.rows(unlabelled, labelled=False)
    batch = source.read(source.slices(100)[0])
    answer = exported(batch.dense, batch.ids.values, batch.ids.bag_offsets())
    assert answer["logits"].shape == (100, 3)
    for name in predicted.columns[1:]:
        torch.testing.assert_close(answer[name], predicted[name][:100].to_torch().float(), rtol=1e-4, atol=1e-5)


def test_a_job_of_several_labels_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    config = answering(tmp_path, rows=400)
    whole = Job(config, out=tmp_path / "whole").run()
    first = {**config, "data": {**config["data"], "epochs": 2}}
    Job(first, out=tmp_path / "out").run()
    resumed = Job(config, out=tmp_path / "out", resume=tmp_path / "out").run()
    assert resumed.data.trained_samples == whole.data.trained_samples
    assert resumed.test.tasks["visits"].ne == pytest.approx(whole.test.tasks["visits"].ne, rel=0.2)
    swapped = {"watched": "mse", "label": "logloss", "visits": "poisson"}
    others = {**config, "data": {**config["data"], "labels": swapped, "epochs": 4}}
    told = (
        "was trained on label (logloss), watched (mse), visits (poisson), this job has watched (mse), label (logloss)"
    )
    fails(Job(others, out=tmp_path / "out", resume=tmp_path / "out").run, CheckpointError, told)


class TwoLogits(nn.Module):
    """A user's own of so many logits."""

    def __init__(self, logits: int) -> None:
        super().__init__()
        self.out = nn.Linear(14, logits)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return self.out(torch.cat([dense, *(embeddings[name] for name in ("c0", "c1", "many"))], dim=1))


def test_a_module_of_ones_own_answers_every_label(tmp_path: Path) -> None:
    config = answering(tmp_path, rows=200)
    del config["model"]
    config["model"] = {"embedding_dim": 4}
    assert Job(config, model=TwoLogits(3), out=tmp_path / "out").run().test.tasks["watched"].ne is not None
    told = "returns logits of shape [32, 2] for a batch of 32 samples; return one logit per sample and label, [32, 3]"
    fails(Job(config, model=TwoLogits(2), out=tmp_path / "other").run, ConfigError, told)


def test_a_model_of_one_logit_refuses_several_labels(tmp_path: Path) -> None:
    told = "data.labels names 3 labels and model.name=dlrm gives one logit: set model.name=mmoe"
    config = answering(tmp_path, rows=10)
    fails(lambda: Job({**config, "model": {"name": "dlrm"}}), ConfigError, told)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["worker", "accumulated", "steps"])
def test_weights_are_those_of_a_plain_loop(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as one large batch: two of half its size that make one step."""
    data = write_answers(tmp_path / "rows.parquet", 12 * BATCH)
    sgd: dict[str, dict[str, Any]] = {
        "data": {"slice_rows": 2 * BATCH, "weight": "w"},
        "embedding": {"optimizer": "sgd", "lr": 0.1},
        "train": {"batch_size": BATCH, "optimizer": "sgd", "lr": 0.1},
    }
    config = settings(data, data, **sgd)
    if by != "worker":  # rows that are not stepped, so that nothing but the dense part differs
        config["embedding"]["lr"] = 1e-30
    tables = (Table("first", ROWS, 4, ("c0",)), Table("both", ROWS, 4, ("c1", "many"), "mean"))
    large = {**config, "train": {**config["train"], "batch_size": BATCH if by == "worker" else 2 * BATCH}}

    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        given = pl.read_parquet(data)
        of = dict(zip(given["row"].to_list(), given["w"].to_list(), strict=True))
        rows = torch.tensor([of[row] for row in log.steps[-1]["dense"][:, 0].tolist()])
        return plain(logits, labels, weight=rows.float())

    plain, tower = F.binary_cross_entropy_with_logits, Tower()
    log = tower.log
    with monkeypatch.context() as patch:
        patch.setattr("test_exactness.Tower", lambda: tower)
        patch.setattr(nn.functional, "binary_cross_entropy_with_logits", weighted)
        expected, _ = plain_loop(large, torch.optim.SGD)
    if by == "accumulated":
        config["train"]["accumulate"] = 2
    if by == "steps":
        config = by_gradients({**config, "aggregation": {"global_batch": 2 * BATCH}}, "sync")
    result = Job(config, model=Tower(), tables=tables, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out", model=Tower())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(trained.module.get_parameter(name), parameter.detach(), rtol=1e-5, atol=1e-6)
    trained.predict(data, tmp_path / "predicted.parquet", keep=["label", "w"])
    rows = pl.read_parquet(tmp_path / "predicted.parquet")
    loss = plain(rows["logit"].to_torch(), rows["label"].to_torch().float(), reduction="none")
    assert result.test.logloss == pytest.approx(float((loss * rows["w"].to_torch()).sum() / rows["w"].sum()), rel=1e-5)


# --- other losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["inprocess", "processes"])
def test_numbers_are_learnt_and_shown(tmp_path: Path, runtime: str) -> None:
    config = answering(tmp_path, data={"labels": {"watched": "mse"}}, cluster={"runtime": runtime})
    config["train"]["trainers"] = 2
    config["sync"] = {"method": "easgd"}
    result = Job(config, out=tmp_path / "out").run()
    assert result.test.auc is None
    assert result.test.logloss is None
    assert result.test.loss == "mse"
    assert result.test.ne < 0.4
    assert result.test.measures["rmse"] == pytest.approx((result.test.ne * 4 * 1.25 + 0) ** 0.5, rel=0.4)
    frames = [frame for frame in read_frames(tmp_path / "out") if frame.loss is not None]
    assert frames[-1].loss > 0
    assert (frames[-1].ne_lifetime, frames[-1].auc) == (None, None)
    names = [str(cell) for cell in final_table(result).columns[0].cells]
    assert {"test NE", "rmse"} <= {*names}
    assert "test AUC" not in names
    trained = Trained(tmp_path / "out")
    trained.predict(tmp_path / "test.parquet", tmp_path / "out.csv")
    assert pl.read_csv(tmp_path / "out.csv").columns == ["prediction", "logit"]


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.sigmoid() - labels) ** 2


def test_a_loss_of_ones_own_is_learnt_by_and_asked_for_again(tmp_path: Path) -> None:
    config = answering(tmp_path, data={"labels": {"label": f"{__name__}:squared"}})
    named = Job(config, out=tmp_path / "named").run()
    assert Trained(tmp_path / "named").evaluate().auc == pytest.approx(named.test.auc, abs=1e-6)
    config["data"]["labels"] = {"label": "logloss"}
    given = Job(config, out=tmp_path / "given", loss=squared).run()
    assert given.test.auc == pytest.approx(named.test.auc, abs=1e-6)
    assert given.test.auc > 0.75
    for name, tensor in weights(tmp_path / "given").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "named")[name], msg=name)
    assert Trained(tmp_path / "given").evaluate().auc == pytest.approx(given.test.auc, abs=1e-6)
    from_file = {"data": {"path": config["data"]["path"]}}
    fails(
        Job(from_file, out=tmp_path / "x", start_from=tmp_path / "named").run,
        ConfigError,
        "names code of its own, which is not run unless you name it (data.labels)",
    )
    more = {**config, "data": {**config["data"], "epochs": 4}}
    fails(
        Job(more, out=tmp_path / "given", resume=tmp_path / "given").run,
        ConfigError,
        "was trained with a loss of your own for label: go on from Python",
    )
    again = Job(more, out=tmp_path / "given", resume=tmp_path / "given", loss=squared).run()
    assert again.data.trained_samples == 12_000


# --- validation and measures -----------------------------------------------------------------------------------------


def test_validations_are_compared_by_a_measure_of_any_label(tmp_path: Path) -> None:
    config = answering(
        tmp_path,
        data={"valid": {"column": "user", "fraction": 0.2}, "on_bad_row": "skip"},
        train={"best_by": "watched/rmse", "measures": ["gauc(user)", "ndcg@5(user)"], "patience": 3},
    )
    result = Job(config, out=tmp_path / "out").run()
    validation = result.validation
    assert validation.best_by == "watched/rmse"
    frames = [frame.valid for frame in read_frames(tmp_path / "out") if frame.valid_samples == frame.samples]
    assert validation.best == min(valid["watched/rmse"] for valid in frames)
    assert {"auc", "gauc(user)", "ndcg@5(user)", "watched/ne", "watched/ndcg@5(user)", "visits/rmse"} <= {*frames[-1]}
    assert result_of(tmp_path / "out")["test"]["measures"]["gauc(user)"] == result.test.measures["gauc(user)"]


def test_groups_leave_out_the_rows_that_are_bad(tmp_path: Path) -> None:
    """Those of the rows that are used, wherever the others lie."""
    config = answering(tmp_path, rows=300, train={"measures": ["gauc(user)"]})
    config["data"] |= {"on_bad_row": "skip", "labels": {"label": "logloss"}}
    good = pl.read_parquet(tmp_path / "test.parquet")
    bad = good.head(50).with_columns(label=pl.lit(7, dtype=pl.Int64))
    pieces = [good.slice(0, 400), bad, good.slice(400)]
    pl.concat(pieces).write_parquet(tmp_path / "mixed.parquet")
    Job(config, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    assert trained.evaluate(tmp_path / "mixed.parquet").measures == trained.evaluate(tmp_path / "test.parquet").measures


def test_a_feature_makes_groups_where_columns_have_no_names(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "data": {"name": "synthetic", "rows": 2000, "seed": 1},
        "model": {"name": "dlrm", "bottom": [8], "top": [8], "embedding_dim": 4},
        "train": {"trainers": 1, "measures": ["gauc(c0)"], "batch_size": 64},
        "report": {"html": False, "tensorboard": False},
    }
    told = fails(lambda: Job(sections, out=tmp_path / "out").run(), ConfigError, "train.measures: 'c0' is no feature")
    sections["train"]["measures"] = [f"gauc({str(told).rpartition('they have ')[2].split(', ')[0]})"]
    (measured,) = Job(sections, out=tmp_path / "again").run().test.measures.values()
    assert 0 < measured < 1


def test_a_column_that_makes_no_groups_is_said_before_training(tmp_path: Path) -> None:
    config = answering(tmp_path, rows=50, train={"measures": ["gauc(usr)"]})
    fails(
        Job(config, out=tmp_path / "out").run,
        DataError,
        "there is no column 'usr' (train.measures), did you mean user?",
    )
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_metric_is_tried_on_each_label_before_training(tmp_path: Path) -> None:
    """It is measured on the labels that it can be fed, and refused if there are none, or not that of best_by."""
    right, ranks = "torchmetrics.classification:BinaryF1Score", "torchmetrics.retrieval:RetrievalMRR"
    test = Job(answering(tmp_path, rows=60, train={"measures": [right]}), out=tmp_path / "out").run().test
    assert [task for task, of in test.tasks.items() if right in of.measures] == ["label"]
    refused = {ranks: {"train": {"measures": [ranks]}}}
    refused[right] = {"train": {"best_by": f"watched/{right}"}, "data": {"valid": {"fraction": 0.3}}}
    for number, (name, sections) in enumerate(refused.items()):
        config = answering(tmp_path, rows=60, **sections)
        fails(Job(config, out=tmp_path / str(number)).run, ConfigError, f"{name} cannot be measured")
        assert not (tmp_path / str(number) / "checkpoints").exists()


def test_numbers_are_compared_by_ne_whether_that_is_said_or_not(tmp_path: Path) -> None:
    data = {"labels": {"watched": "mse"}, "valid": {"fraction": 0.3}, "epochs": 1}
    config = answering(tmp_path, rows=60, data=data)
    Job(config, out=tmp_path / "out").run()
    said = {**config, "data": {**config["data"], "epochs": 2}, "train": {**config["train"], "best_by": "ne"}}
    result = Job(said, out=tmp_path / "out", resume=tmp_path / "out").run()
    assert result.validation.best_by == "ne"


@pytest.mark.parametrize("loss", [squared, {"clicked": squared}], ids=["function", "map"])
def test_a_loss_of_ones_own_is_that_of_a_label_that_is_found(tmp_path: Path, loss: Any) -> None:
    config = answering(tmp_path, rows=60)
    pl.read_parquet(tmp_path / "rows.parquet").rename({"label": "clicked"}).write_parquet(tmp_path / "rows.parquet")
    config |= {"data": {"path": str(tmp_path / "rows.parquet")}}
    for epochs in (1, 2):
        config["data"]["epochs"] = epochs
        resume = {"resume": tmp_path / "out"} if epochs == 2 else {}
        result = Job(config, out=tmp_path / "out", loss=loss, **resume).run()
    assert result.data.trained_samples == 120
    fails(Job(config, out=tmp_path / "x", loss={"label": squared}).run, ConfigError, "loss names 'label'")


def test_a_single_label_may_have_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that found its label goes on with rows that call it otherwise, and says what it misses to evaluate them."""
    config, out, names = answering(tmp_path, rows=60), tmp_path / "out", ("clicked", "liked")
    for name in names:
        pl.read_parquet(tmp_path / "rows.parquet").rename({"label": name}).write_parquet(tmp_path / f"{name}.parquet")
    clicked, liked = ({**config, "data": {"path": str(tmp_path / f"{name}.parquet")}} for name in names)
    Job(clicked, out=out, loss=squared).run()
    trained = Trained(out)
    assert trained.predict(tmp_path / "liked.parquet").shape == (60,)
    fails(lambda: trained.evaluate(tmp_path / "liked.parquet"), DataError, "there is no column 'clicked' (data.label)")
    ways: list[dict[str, Any]] = [{"label": "liked"}, {"labels": {"liked": "logloss"}}]
    for number, way in enumerate(ways):
        capsys.readouterr()
        again = {**liked, "data": {**liked["data"], **way}}
        Job(again, out=tmp_path / str(number), start_from=out, loss={"liked": squared}).run()
        told = capsys.readouterr().err
        assert "lacks" not in told
        assert "begins anew" not in told
    first, second = ({**liked, "data": {**liked["data"], **way, "epochs": 2 + n}} for n, way in enumerate(ways))
    said = fails(Job(first, out=out, resume=out, loss=squared).run, CheckpointError, "was trained on other data")
    first["data"]["accept"] = str(said).partition("data.accept=")[2].partition(" ")[0]
    for epochs, again in ((2, first), (3, second)):
        assert Job(again, out=out, resume=out, loss=squared).run().data.trained_samples == 60 * epochs


def test_labels_that_are_given_now_take_the_place_of_those_stored() -> None:
    for stored, given, expected in (
        ({"label": "clicked"}, {"labels": {"liked": "mse"}}, {"labels": {"liked": "mse"}}),
        ({"labels": {"clicked": "mse"}}, {"labels": {"liked": "mse"}}, {"labels": {"liked": "mse"}}),
        ({"labels": {"clicked": "logloss"}}, {"label": "liked"}, {"label": "liked"}),
        (
            {"labels": {"a": "mse", "b": {"loss": "mse"}}},
            {"labels": {"b": {"weight": 0.5}}},
            {"labels": {"a": "mse", "b": {"loss": "mse", "weight": 0.5}}},
        ),
        ({"label": "clicked"}, {"epochs": 2}, {"label": "clicked", "epochs": 2}),
    ):
        path = {"name": "parquet", "path": "rows.parquet"}
        assert resumed({"data": path | stored}, {"data": given})["data"] == path | expected


def test_the_objective_of_a_job_is_that_of_its_labels(tmp_path: Path) -> None:
    job = Job(answering(tmp_path, rows=10))
    logits, labels = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    loss = objective(job.choices.source.tasks, {})(logits, labels, None)
    assert float(loss) == pytest.approx(np.log(2) + 0.3 * 2.0 + np.mean([1.0, 0.0]), rel=1e-5)
