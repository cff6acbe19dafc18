"""What was trained is what is evaluated, predicts and is exported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
import torch
from job_helpers import (
    FEATURES,
    ROWS,
    SMALL_DLRM,
    Ledger,
    Witness,
    error_of,
    fails,
    result_of,
    set_cells,
    settings,
    train_counted,
    write_rows,
)
from torch import Tensor, nn

from shadowsync import Job, Table, Trained
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.metrics.quality import evaluate_scores


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Rows to train on and to test."""
    folder = tmp_path_factory.mktemp("data")
    return write_rows(folder / "train.parquet", 300, 0), write_rows(folder / "test.parquet", 120, 1)


def run(files: tuple[Path, Path], out: Path, /, **sections: Mapping[str, Any]) -> Any:
    return Job(settings(*files, **{"model": SMALL_DLRM} | sections), out=out).run()


@pytest.fixture(scope="module")
def a_run(data: tuple[Path, Path]) -> Path:
    """The folder of a run, for tests that read it only."""
    run(data, data[0].parent / "out")
    return data[0].parent / "out"


@pytest.fixture(scope="module")
def skipping_run(data: tuple[Path, Path]) -> Path:
    """Of one that left out two of its test rows."""
    bad = set_cells(data[1], "label", 7, [3, 70], data[0].parent / "two-bad.parquet")
    run((data[0], bad), data[0].parent / "skipping", data={"on_bad_row": "skip"})
    return data[0].parent / "skipping"


@pytest.mark.parametrize("method", ["easgd", "bmuf"])
def test_evaluation_repeats_the_result(tmp_path: Path, data: tuple[Path, Path], method: str) -> None:
    sections = {"sync": {"method": method}, "train": {"trainers": 2, "workers": 2}, "embedding": {"servers": 3}}
    result = run(data, tmp_path / "out", **sections)
    measured = Trained(tmp_path / "out").evaluate()
    found = (measured.auc, measured.ne, measured.logloss, measured.calibration, measured.samples)
    assert found == (result.test.auc, result.test.ne, result.test.logloss, result.test.calibration, 120)


@pytest.mark.parametrize("model", [SMALL_DLRM, {"name": "deepfm"}, {"name": "dcn"}], ids=lambda model: model["name"])
def test_predictions_in_the_order_of_rows_are_those_evaluated(
    tmp_path: Path, data: tuple[Path, Path], model: dict[str, Any]
) -> None:
    result = run(data, tmp_path / "out", model=model)
    trained, file = Trained(tmp_path / "out"), tmp_path / "predictions.parquet"
    assert trained.predict(str(data[1]), file) == 120
    predicted = pl.read_parquet(file)
    logits = predicted["logit"].to_torch()
    labels = pl.read_parquet(data[1])["label"].to_torch()
    assert evaluate_scores(logits, labels).auc == result.test.auc
    assert torch.equal(predicted["probability"].to_torch(), logits.sigmoid())


def test_the_exported_model_predicts_the_same(tmp_path: Path, data: tuple[Path, Path]) -> None:
    run(data, tmp_path / "out", data={"pooling": {"many": "mean"}})
    trained, file = Trained(tmp_path / "out"), tmp_path / "predictions.parquet"
    trained.export(tmp_path / "model.pt2")
    trained.predict(str(data[1]), file)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    answer = loaded(*exported_inputs(pl.read_parquet(data[1])))
    expected = pl.read_parquet(file)
    for key, column in (("logits", "logit"), ("probabilities", "probability")):
        torch.testing.assert_close(answer[key].detach(), expected[column].to_torch(), rtol=1e-6, atol=1e-6)


def exported_inputs(rows: pl.DataFrame) -> tuple[Tensor, Tensor, Tensor]:
    """Dense columns `[B, N]`, ids `[L]` and offsets `[F · B + 1]`, made without this package."""
    dense = torch.stack([rows[name].to_torch().float() for name in ("row", "x")], dim=1)
    bags = [value if isinstance(value, list) else [value] for name in FEATURES for value in rows[name].to_list()]
    values = torch.tensor([one for bag in bags for one in bag])
    return dense, values, torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)


def test_bad_test_rows_that_the_run_skipped_are_skipped_again(skipping_run: Path) -> None:
    measured = Trained(skipping_run).evaluate()
    assert (measured.samples, measured.auc) == (118, result_of(skipping_run)["test"]["auc"])


def test_a_bad_row_is_never_left_out_of_predictions(
    tmp_path: Path, data: tuple[Path, Path], skipping_run: Path
) -> None:
    bad, file = set_cells(data[1], "c1", ROWS, [5], tmp_path / "bad.parquet"), tmp_path / "predictions.parquet"
    fails(
        lambda: Trained(skipping_run).predict(str(bad), file),
        DataError,
        f"{bad}, row 6: c1 has id 40, outside of 0 … 39 (data.rows); mend it, or take such rows out",
    )
    assert list(tmp_path.glob("*predictions*")) == []


def test_rows_without_labels_can_be_predicted(tmp_path: Path, data: tuple[Path, Path], a_run: Path) -> None:
    bare, trained = tmp_path / "bare.parquet", Trained(a_run)
    pl.read_parquet(data[1]).drop("label").write_parquet(bare)
    for source, file in ((bare, "bare.out.parquet"), (data[1], "out.parquet")):
        trained.predict(str(source), tmp_path / file)
    assert pl.read_parquet(tmp_path / "bare.out.parquet").equals(pl.read_parquet(tmp_path / "out.parquet"))
    fails(lambda: trained.evaluate(str(bare)), DataError)


@pytest.mark.parametrize(("column", "value"), [("label", 7), ("c1", -1), ("c1", None), ("x", float("nan"))])
def test_a_bad_row_is_said_to_be_mended_in_the_file_alone(
    tmp_path: Path, data: tuple[Path, Path], a_run: Path, column: str, value: object
) -> None:
    """The two commands take no options of the data, and what a model was trained on stays."""
    bad, trained = set_cells(data[1], column, value, [5], tmp_path / "bad.parquet"), Trained(a_run)
    asked = [lambda: trained.evaluate(bad), lambda: trained.predict(bad, tmp_path / "p.csv")]
    for ask in asked[: 1 if column == "label" else 2]:
        said = str(error_of(ask))
        assert f"{bad}, row 6: " in said
        assert said.endswith("mend it, or take such rows out of the file, as the model is trained already")
        assert "hash_size" not in said


def test_odd_rows_are_remarked_on(tmp_path: Path, data: tuple[Path, Path], skipping_run: Path) -> None:
    rows, odd, trained = pl.read_parquet(data[1]), tmp_path / "odd.parquet", Trained(skipping_run)
    rows.with_columns(pl.lit(1).alias("label"), pl.col("x") * 1e6).write_parquet(odd)
    set_cells(odd, "label", 7, range(13))
    unscaled, undefined, bad = (trained.evaluate(odd), trained.remarks)[1]
    assert "dense columns with numbers beyond ±10,000, which drown the others: x (" in unscaled
    assert unscaled.endswith("; scale them as the rows that the model was trained on")
    assert undefined == "AUC and NE of these rows are not defined, as all 107 labels are 1: give rows of both labels"
    assert bad == "13 of 120 rows (11 %) were left out by data.on_bad_row=skip"
    trained.predict(odd, tmp_path / "p.csv")
    (alone,) = trained.remarks
    assert alone.startswith("dense columns with numbers beyond ±10,000")
    trained.evaluate(data[1])
    assert trained.remarks == ()


def test_predictions_go_to_a_path_given_as_text_as_csv_or_parquet_by_its_name(
    tmp_path: Path, data: tuple[Path, Path], a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shadowsync.inference.BATCH_SIZE", 50)
    trained = Trained(str(a_run))
    assert [trained.predict(data[1], name) for name in ("p.parquet", "p.csv", "P.CSV")] == [120] * 3
    expected = pl.read_parquet("p.parquet")
    assert expected.schema == {"probability": pl.Float32, "logit": pl.Float32}
    for name in ("p.csv", "P.CSV"):
        assert pl.read_csv(name, schema=expected.schema).equals(expected)
    trained.export("model.pt2")
    assert Path("model.pt2").is_file()


@pytest.mark.parametrize("name", ["p", "p.json", "p.csv.gz"])
def test_predictions_of_another_format_are_refused(
    tmp_path: Path, data: tuple[Path, Path], a_run: Path, name: str
) -> None:
    fails(lambda: Trained(a_run).predict(data[1], tmp_path / name), ConfigError, "ends in .parquet or .csv")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("ending", "remote"), [("parquet", True), ("csv", False)])
def test_kept_columns_stand_beside_the_predictions_of_their_rows(
    tmp_path: Path, data: tuple[Path, Path], a_run: Path, monkeypatch: pytest.MonkeyPatch, ending: str, remote: bool
) -> None:
    """Batches end in the midst of slices and at the ends of two files."""
    monkeypatch.setattr("shadowsync.inference.BATCH_SIZE", 7)
    monkeypatch.setattr("shadowsync.data.reader.EVALUATION_ROWS", 21)
    rows = pl.read_parquet(data[1]).with_row_index("user_id").with_columns(pl.format("u{}", "user_id").alias("name"))
    place = f"memory://{tmp_path.name}-{ending}" if remote else str(tmp_path)
    for part, start, stop in (("a", 0, 50), ("b", 50, 120)):
        with fsspec.open(f"{place}/keys-{part}.parquet", "wb") as file:
            rows[start:stop].write_parquet(file, row_group_size=16)
    trained = Trained(a_run)
    trained.predict(data[1], tmp_path / "bare.parquet")
    kept = tmp_path / f"kept.{ending}"
    assert trained.predict(f"{place}/keys-*.parquet", kept, keep=("name", "user_id", "label", "name")) == 120
    keys, bare = rows.select("name", "user_id", "label"), pl.read_parquet(tmp_path / "bare.parquet")
    schema = pl.Schema({**keys.schema, **bare.schema})
    found = pl.read_csv(kept, schema=schema) if ending == "csv" else pl.read_parquet(kept)
    assert found.schema == schema
    assert found.select(keys.columns).equals(keys)
    torch.testing.assert_close(found["logit"].to_torch(), bare["logit"].to_torch())


@pytest.mark.parametrize(
    ("name", "out", "sentence"),
    [
        ("c3", "p.parquet", "there is no column 'c3' (--keep)"),
        ("logit", "p.parquet", "--keep logit: predictions have a column of that name"),
        ("many", "p.csv", "--keep many: the column holds List(Int64), which CSV cannot"),
    ],
)
def test_columns_that_cannot_be_kept(
    tmp_path: Path, data: tuple[Path, Path], a_run: Path, name: str, out: str, sentence: str
) -> None:
    assert sentence in str(error_of(lambda: Trained(a_run).predict(data[1], tmp_path / out, keep=(name,))))
    assert list(tmp_path.glob("*p.*")) == []


def test_a_kept_column_has_one_type_in_all_files(tmp_path: Path, data: tuple[Path, Path], a_run: Path) -> None:
    for part, kind in (("a", pl.Int64), ("b", pl.String)):
        rows = pl.read_parquet(data[1]).with_row_index("user_id").with_columns(pl.col("user_id").cast(kind))
        rows.write_parquet(tmp_path / f"keys-{part}.parquet")
    pattern = str(tmp_path / "keys-*.parquet")
    fails(
        lambda: Trained(a_run).predict(pattern, tmp_path / "p.csv", keep=("user_id",)),
        DataError,
        f"keys-b.parquet: column 'user_id' (--keep) holds String, but Int64 in {tmp_path}",
    )


@pytest.mark.parametrize("kind", [pl.Null(), pl.List(pl.Int64())], ids=str)
def test_lists_that_are_null_in_every_row_are_empty(
    tmp_path: Path, data: tuple[Path, Path], a_run: Path, kind: pl.DataType
) -> None:
    trained, rows = Trained(a_run), pl.read_parquet(data[1])
    wanted = trained.predict(rows.with_columns(pl.col("many").list.head(0)))
    null = rows.with_columns(pl.lit(None, dtype=kind).alias("many"))
    null.write_parquet(tmp_path / "null.parquet")
    null.write_ndjson(tmp_path / "null.jsonl")
    for given in (null, [rows[:50], null[50:]], tmp_path / "null.parquet", tmp_path / "null.jsonl"):
        found = trained.predict(given)
        start = 50 if isinstance(given, list) else 0
        torch.testing.assert_close(torch.from_numpy(found[start:]), torch.from_numpy(wanted[start:]))


def test_lists_may_be_null_where_the_source_has_no_columns(tmp_path: Path) -> None:
    given = settings(tmp_path / "none", model=SMALL_DLRM)
    given["data"] = {"name": "synthetic", "rows": 100, "test_rows": 0, "slice_rows": 64, "multi_hot": 2, "features": 3}
    Job(given, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    columns: dict[str, Any] = {name: [0.0, 1.0] for name in trained.schema.dense}
    names, none = [feature.name for feature in trained.schema.features], pl.Series([[], []], dtype=pl.List(pl.Int64))
    null = trained.predict(columns | {name: [None, None] for name in names})
    empty = trained.predict(columns | dict.fromkeys(names, none))
    assert null.tolist() == empty.tolist()


class OwnModel(nn.Module):
    """A user's own module, which knows nothing of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Linear(6, 8)
        self.all = nn.Linear(2 + 8 + 4 + 4, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        item = self.norm(self.item(embeddings["c0"])).relu()
        return self.all(torch.cat([dense, item, embeddings["c1"], embeddings["many"]], dim=1)).squeeze(1)


OWN_TABLES = (Table("items", ROWS, 6, ("c0",)), Table("shared", ROWS, 4, ("many", "c1"), "mean"))


def test_a_module_of_ones_own_trains_and_is_evaluated(tmp_path: Path, data: tuple[Path, Path]) -> None:
    out, model = tmp_path / "out", OwnModel()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    config = settings(*data, train={"trainers": 2, "batch_size": 10}, sync={"method": "easgd"})
    result = Job(config, model=model, tables=OWN_TABLES, out=out).run()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    trained = Trained(out, model=OwnModel())
    assert trained.evaluate().auc == result.test.auc
    assert any(not torch.equal(parameter, before[name]) for name, parameter in trained.module.named_parameters())


def test_a_module_of_ones_own_is_asked_for(tmp_path: Path, data: tuple[Path, Path]) -> None:
    out = tmp_path / "out"
    train_counted(settings(*data), out)
    fails(lambda: Trained(out), ConfigError, f"shadowsync.Trained({str(out)!r}, model=module)")
    assert isinstance(error_of(lambda: Trained(out, model=OwnModel())), CheckpointError)
    assert Trained(out, model=Witness(Ledger())).evaluate().samples == 120


def test_a_run_cannot_be_evaluated_without_rows(tmp_path: Path, data: tuple[Path, Path]) -> None:
    out = tmp_path / "out"
    result = Job(settings(data[0], model=SMALL_DLRM), out=out).run()
    assert result.test is None
    fails(lambda: Trained(out).evaluate(), DataError, "--data PATH")
    assert Trained(out).evaluate(str(data[1])).samples == 120


def test_rows_of_other_columns_are_refused(tmp_path: Path, data: tuple[Path, Path], a_run: Path) -> None:
    other = tmp_path / "other.parquet"
    pl.read_parquet(data[1]).rename({"c1": "c_1"}).write_parquet(other)
    fails(lambda: Trained(a_run).evaluate(str(other)), DataError, "'c1'", "did you mean c_1")
