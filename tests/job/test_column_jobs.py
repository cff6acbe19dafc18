"""Whole jobs on columns as they come: planted effects are learnt, and what was learnt of columns goes with a model."""

import datetime
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from job_helpers import SMALL_DLRM, settings

from shadowsync import Job, Trained, serving
from shadowsync.checkpoint.job_state import JobState
from shadowsync.data.values import Values
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.metrics.quality import evaluate_scores

ROWS = 6000
BRANDS = [f"brand {number}" for number in range(30)]


def write(path: Path, seed: int, rows: int = ROWS) -> Path:
    """Half of the logit is the brand's, a quarter the price's, which is far from 0, and a quarter the day's."""
    draw = np.random.default_rng(seed)
    brand, day = draw.integers(0, 30, rows), draw.integers(0, 40, rows)
    price = 1e6 + 1e4 * draw.normal(size=rows)
    logit = 2.0 * np.where(brand % 2, 1, -1) + (price - 1e6) / 1e4 + np.where(day < 20, 1.0, -1.0)
    frame = pl.DataFrame(
        {
            "click": draw.random(rows) < 1 / (1 + np.exp(-logit)),
            "brand": [BRANDS[number] if number else None for number in brand],
            "price": [None if number == 7 else value for number, value in zip(brand, price, strict=True)],
            "day": [datetime.date(2024, 1, 1) + datetime.timedelta(days=int(one)) for one in day],
            "user": draw.integers(0, 1 << 62, 300)[draw.integers(0, 300, rows)],
            "empty": pl.Series([None] * rows),
        }
    )
    frame.write_parquet(path)
    return path


def config(folder: Path, **data: Any) -> dict[str, Any]:
    train, test = (folder / f"{name}.parquet" for name in ("train", "test"))
    if not train.exists():
        write(train, 0)
        write(test, 1, 2000)
    found = settings(train, test, model={**SMALL_DLRM, "embedding_dim": 4}, train={"batch_size": 64, "lr": 0.05})
    found["data"] = {"name": "parquet", "path": str(train), "test_path": str(test), "epochs": 3, **data}
    return found


DECLARED: dict[str, Any] = {
    "price": {"kind": "dense", "missing": "indicator"},
    "brand": "vocabulary",
    "day": {"kind": "buckets", "count": 8},
    "user": {"kind": "hash", "rows": 100},
    "brand_day": {"kind": "cross", "of": ["brand", "day"], "rows": 500},
}


@pytest.mark.parametrize("columns", [DECLARED, {}], ids=["declared", "inferred"])
def test_strings_dates_and_nulls_are_learnt_from(tmp_path: Path, columns: dict[str, Any]) -> None:
    label = {"label": "click"} if columns else {}
    result = Job(config(tmp_path, columns=columns, **label), out=tmp_path / "out").run()
    assert result.test is not None
    assert result.test.auc > 0.85
    trained = Trained(tmp_path / "out")
    assert trained.evaluate().auc == pytest.approx(result.test.auc, abs=1e-6)
    rows = pl.read_parquet(tmp_path / "test.parquet")
    assert trained.evaluate(rows) == trained.evaluate(tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"^data: there is no column 'click'"):
        trained.evaluate(rows.drop("click"))
    assert trained.choices.source.learnt is not None
    stored = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["data"]
    assert (stored["label"], set(stored["columns"])) == (
        "click",
        set(columns) or {"brand", "price", "day", "user"},
    )


def test_predictions_and_a_resumed_job_see_the_same_columns(tmp_path: Path) -> None:
    given = config(tmp_path, columns=DECLARED, label="click", epochs=1)
    Job(given, out=tmp_path / "out").run()
    first = Trained(tmp_path / "out")
    first.predict(tmp_path / "test.parquet", tmp_path / "a.parquet")
    # a vocabulary learnt of these rows would be another one, and so would mean and quantiles
    other = pl.read_parquet(tmp_path / "train.parquet").filter(pl.col("brand") == "brand 3")
    other.write_parquet(tmp_path / "train.parquet")
    first.predict(tmp_path / "train.parquet", tmp_path / "b.parquet")
    alone = pl.read_parquet(tmp_path / "b.parquet")["logit"]
    assert len(alone) == len(other)
    other.vstack(other).write_parquet(tmp_path / "twice.parquet")
    Trained(tmp_path / "out").predict(tmp_path / "twice.parquet", tmp_path / "c.parquet")
    torch.testing.assert_close(
        pl.read_parquet(tmp_path / "c.parquet")["logit"][: len(alone)].to_torch(), alone.to_torch()
    )
    write(tmp_path / "train.parquet", 0)
    Job({**given, "data": {**given["data"], "epochs": 2}}, out=tmp_path / "out", resume=tmp_path / "out").run()
    again = Trained(tmp_path / "out")
    was, now = (model.choices.source.learnt for model in (first, again))
    assert was.state() == now.state()
    assert was.values["brand"].values.to_list() == now.values["brand"].values.to_list()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"user": {"kind": "hash", "rows": 200}},
            r"data\.columns\.user: samples-\S+ was trained with \{kind: hash, rows: 100, missing: own\}, this job "
            r"declares \{kind: hash, rows: 200",
        ),
        ({"price": {"kind": "dense", "log": True}}, r"data\.columns\.price: samples-"),
        ({"brand": "hash"}, r"data\.columns\.brand: .* was trained with \{kind: vocabulary, min_count: 2"),
        ({"empty": "hash"}, r"was trained on the categorical columns brand, day, user, brand_day, this data has brand"),
    ],
)
def test_a_job_is_not_resumed_with_other_declarations(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    given = config(tmp_path, columns=DECLARED, label="click", epochs=1)
    Job(given, out=tmp_path / "out").run()
    given["data"]["columns"] = {**DECLARED, **changed}
    with pytest.raises(CheckpointError, match=said):
        Job(given, out=tmp_path / "out", resume=tmp_path / "out").run()


def test_a_job_whose_columns_were_inferred_is_resumed_without_inferring(tmp_path: Path) -> None:
    given = config(tmp_path, epochs=1)
    Job(given, out=tmp_path / "out").run()
    given["data"]["epochs"] = 2
    result = Job(given, out=tmp_path / "out", resume=tmp_path / "out").run()
    assert result.data.trained_samples == 2 * ROWS


def test_a_checkpoint_of_before_stays_without_standardising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.parquet", 0, 400)
    frame = pl.read_parquet(path).with_columns(pl.col("price").fill_null(0) / 1e6, pl.col("user") % 50)
    frame.write_parquet(path)
    given = config(tmp_path, dense=["price"], categorical=["user"], rows=50, label="click", epochs=1)
    given["data"].pop("test_path")
    with monkeypatch.context() as patch:
        patch.setattr(
            "shadowsync.recovery_controller.JobState", lambda **fields: JobState(**{**fields, "columns": None})
        )
        Job({**given, "data": {**given["data"], "standardise": False}}, out=tmp_path / "out").run()
    stored = tmp_path / "out" / "config.yaml"
    stored.write_text(stored.read_text().replace("  standardise: false\n", ""))
    opened = Trained(tmp_path / "out").rows(path)
    assert opened.read(opened.slices(400)[0]).dense.flatten().tolist() == pytest.approx(frame["price"].to_list())
    given["data"]["epochs"] = 2
    Job(given, out=tmp_path / "out", resume=tmp_path / "out").run()
    assert Trained(tmp_path / "out").choices.source.learnt is None
    given["data"]["standardise"] = True
    with pytest.raises(ConfigError, match=r"data\.standardise=true: samples-\S+ was trained by a version that did not"):
        Job(given, out=tmp_path / "out", resume=tmp_path / "out").run()


def test_an_unscaled_column_does_not_ruin_a_run(tmp_path: Path) -> None:
    plain = {"dense": ["price"], "categorical": ["brand"], "hash_size": 100, "label": "click"}
    result = Job(config(tmp_path, **plain), out=tmp_path / "out").run()
    assert result.test is not None
    assert result.test.auc > 0.8


def test_the_export_says_what_became_of_columns(tmp_path: Path) -> None:
    Job(config(tmp_path, columns=DECLARED, label="click", epochs=1), out=tmp_path / "out").run()
    Trained(tmp_path / "out").export(tmp_path / "model.pt2")
    found = {"columns.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=found)
    told = json.loads(found["columns.json"])
    assert told["ids"]["user"] == {"kind": "hash", "rows": 100, "missing": "own"}
    assert sorted(told["values"]["brand"]) == sorted(BRANDS[1:])
    assert len(told["fits"]["day"]["edges"]) == 7
    assert told["fits"]["price"]["mean"] == pytest.approx(1e6, rel=1e-3)


def test_a_served_model_scores_raw_rows_as_the_job_does(tmp_path: Path) -> None:
    result = Job(config(tmp_path, columns=DECLARED, label="click", epochs=1), out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    trained.export(tmp_path / "model.pt2")
    trained.predict(tmp_path / "test.parquet", tmp_path / "scores.parquet", keep=["click"])
    wanted = pl.read_parquet(tmp_path / "scores.parquet")
    rows = pl.read_parquet(tmp_path / "test.parquet").to_dict(as_series=False)
    scores = torch.from_numpy(serving.load(str(tmp_path / "model.pt2")).score(rows))
    torch.testing.assert_close(scores, wanted["probability"].to_torch(), rtol=1e-5, atol=1e-6)
    auc = evaluate_scores(scores.double().logit(), wanted["click"].cast(pl.Float32).to_torch()).auc
    assert result.test is not None
    assert auc == pytest.approx(result.test.auc, abs=1e-5)


def test_columns_that_hold_only_nulls_are_saved_and_any_value_is_unknown_later(tmp_path: Path) -> None:
    frame = pl.DataFrame({"click": [0.0, 1.0] * 200, "user": list(range(400))})
    frame = frame.with_columns(seen=pl.lit(None, dtype=pl.Int64), item=pl.lit(None))
    columns = {"user": {"kind": "hash", "rows": 50}, "seen": "vocabulary", "item": "dynamic"}
    given = {"data": {"columns": columns, "label": "click"}, "train": {"trainers": 1}}
    Job(given, data=frame, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    trained.export(tmp_path / "model.pt2")
    rows = frame.with_columns(seen=pl.lit(7), item=pl.lit("new"))
    wanted = torch.from_numpy(trained.predict(rows))
    scores = torch.from_numpy(serving.load(tmp_path / "model.pt2").score(rows.to_dict(as_series=False)))
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-6)


def test_columns_of_another_export_are_refused(tmp_path: Path) -> None:
    Job(config(tmp_path, columns=DECLARED, label="click", epochs=1), out=tmp_path / "out").run()
    Trained(tmp_path / "out").export(tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as own, zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        for name in own.namelist():
            content = own.read(name)
            other.writestr(name, content.replace(BRANDS[1].encode(), b"x") if "columns.json" in name else content)
    with pytest.raises(ValueError, match=r"what it says of its columns was learnt for another model"):
        serving.load(tmp_path / "other.pt2")


def test_a_vocabulary_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(config(tmp_path, columns=DECLARED, label="click", epochs=1), out=tmp_path / "out").run()
    longer = Values(pl.Series([f"brand {number}" for number in range(99)]))
    monkeypatch.setattr(Values, "of", classmethod(lambda cls, tensors: longer))
    with pytest.raises(CheckpointError, match=r"the vocabulary of brand needs 101 rows and its table has 31: it is of"):
        Trained(tmp_path / "out")
