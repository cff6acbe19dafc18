"""`shadowsync data inspect`: shows columns, and writes a configuration that trains as it is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from command_line import CommandLine, Said, assert_sentence
from omegaconf import OmegaConf

SMALL = ("model.embedding_dim=4", "model.bottom=[8]", "model.top=[8]", "embedding.storage=torch", "report.html=false")


def write_log(path: Path) -> None:
    draw = np.random.default_rng(0)
    brands = pl.Series(["red", "blue", "[bold]x[/bold]"])[draw.integers(0, 3, 200)]
    columns = {
        "clicked": np.arange(200) % 2,
        "price": draw.normal(5, 2, 200),
        "brand": brands,
        "hour": np.arange(200) % 24,
    }
    pl.DataFrame(columns).write_parquet(path)


def test_what_inspect_writes_trains_as_it_is(shadowsync: CommandLine) -> None:
    write_log(Path("log.parquet"))
    said = shadowsync("data", "inspect", "log.parquet", "--out", "columns.yaml")
    assert (said.status, said.err) == (0, "")
    assert said.out.splitlines()[-1] == "the configuration is in columns.yaml: shadowsync train columns.yaml"
    for shown in ("200 of 200 rows", "Float64", "the label", "vocabulary", "dense"):
        assert shown in said.out
    section = yaml.safe_load(Path("columns.yaml").read_text())["data"]
    assert section["label"] == "clicked"
    assert section["columns"] == {
        "price": {"kind": "dense"},
        "brand": {"kind": "vocabulary"},
        "hour": {"kind": "vocabulary"},
    }
    assert shadowsync("train", "columns.yaml", *SMALL, "--out", "out").status == 0
    assert json.loads(Path("out/result.json").read_text())["data"]["trained_samples"] == 200


def test_the_configuration_is_shown_alone_where_it_is_not_written(shadowsync: CommandLine) -> None:
    write_log(Path("log.parquet"))
    said = shadowsync("data", "inspect", "log.parquet", "data.label=clicked")
    assert said.status == 0
    assert "200 of 200 rows" in said.err
    Path("shown.yaml").write_text(said.out)
    split = ("data.test.column=price", "data.test.from=6.5")
    assert shadowsync("data", "inspect", "log.parquet", *split, "--out", "split.yaml").status == 0
    assert shadowsync("train", "split.yaml", *SMALL, "--out", "split").status == 0
    assert shadowsync("data", "inspect", "log.parquet", "--out", "written.yaml").status == 0
    shown, kept = (yaml.safe_load(Path(name).read_text()) for name in ("shown.yaml", "written.yaml"))
    assert shown == kept


def test_a_run_says_what_it_inferred_and_learnt(shadowsync: CommandLine) -> None:
    write_log(Path("log.parquet"))
    said = shadowsync("train", "data.name=parquet", "data.path=log.parquet", *SMALL, "--out", "out")
    assert said.status == 0
    assert (
        "the columns as they look, which data.columns changes: label clicked; dense price; vocabulary brand, hour"
        in said.out
    )
    assert (
        "learnt from 200 of 200 training rows: brand has 3 values, hour has 24 values, price is standardised"
        in said.out
    )


def written(said: Said, section: str = "data") -> Any:
    """A section of the configuration that is shown."""
    assert said.status == 0, said.err
    found: Any = OmegaConf.to_container(OmegaConf.create(said.out))
    return found[section]


def test_what_is_declared_stays_and_the_rest_is_as_it_looks(
    shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_log(Path("log.parquet"))
    buckets, cross = "{kind: buckets, count: 6}", "{kind: cross, of: [brand, hour], rows: 50}"
    kinds = (f"data.columns.hour={buckets}", f"data.columns.pair={cross}")
    said = shadowsync("data", "inspect", "log.parquet", *kinds)
    assert written(said)["columns"] == {
        "price": {"kind": "dense"},
        "brand": {"kind": "vocabulary"},
        "hour": {"kind": "buckets", "count": 6},
        "pair": {"kind": "cross", "of": ["brand", "hour"], "rows": 50},
    }
    assert "buckets count=6" in said.err
    assert "cross" in said.err
    Path("columns.yaml").write_text(said.out)
    assert shadowsync("train", "columns.yaml", *SMALL, "--out", "out").status == 0
    lists = ("data.categorical=[hour]", "data.rows={hour: 24}", "data.tables={hour: hours}")
    found = written(shadowsync("data", "inspect", "log.parquet", *lists))
    assert found["columns"] == {"price": {"kind": "dense"}, "brand": {"kind": "vocabulary"}}
    assert (found["categorical"], found["rows"], found["tables"]) == (["hour"], {"hour": 24}, {"hour": "hours"})
    alone = written(shadowsync("data", "inspect", "log.parquet", "data.columns.price=dense"))
    assert alone["columns"]["price"] == "dense"
    assert alone["columns"]["hour"] == {"kind": "vocabulary"}


def test_several_labels_come_with_weight_and_a_model_that_answers_them(
    shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_log(Path("log.parquet"))
    frame = pl.read_parquet("log.parquet").with_columns(bought=1 - pl.col("clicked"), w=pl.col("hour"))
    frame.write_parquet("log.parquet")
    labels = ("data.labels.clicked=logloss", "data.labels.price={loss: mse, weight: 0.1}", "data.weight=w")
    said = shadowsync("data", "inspect", "log.parquet", *labels, "train.lr=0.01")
    found = written(said)
    assert found["labels"] == {"clicked": "logloss", "price": {"loss": "mse", "weight": 0.1}}
    assert found["weight"] == "w"
    assert "label" not in found
    assert {*found["columns"]} == {"brand", "hour", "bought"}
    assert (said.err.count("the label"), said.err.count("the weight"), "left out" in said.err) == (2, 1, False)
    assert written(said, "model") == {"name": "mmoe"}
    assert written(said, "train") == {"lr": 0.01}
    Path("labels.yaml").write_text(said.out)
    small = ("model.embedding_dim=4", "model.expert=[8]", "model.top=[8]", *SMALL[3:])
    assert shadowsync("train", "labels.yaml", *small, "--out", "out").status == 0


def test_columns_and_files_of_any_name_read_back_as_they_were_inferred(shadowsync: CommandLine) -> None:
    write_log(Path("log.parquet"))
    brand, names = pl.read_parquet("log.parquet")["brand"], ("no", "1e3", "a: b", "ü", "a.b")
    rows = pl.DataFrame({"label": [0, 1] * 100, **dict.fromkeys(names, brand)})
    rows.write_parquet("it's: 1.parquet")
    found = written(shadowsync("data", "inspect", "it's: 1.parquet"))
    assert (found["name"], found["path"], found["label"]) == ("parquet", "it's: 1.parquet", "label")
    assert found["columns"] == {name: {"kind": "vocabulary"} for name in names}
    assert list(found["columns"]) == list(names)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["data.path=other.parquet"], ["data.path=other.parquet has no effect", "log.parquet is what is inspected"]),
        (["data.labels.clickd=logloss"], ["no column 'clickd' (data.labels), did you mean clicked?"]),
        (["data.weight=wait"], ["no column 'wait' (data.weight)"]),
        (["data.labels.brand=mse"], ["column 'brand' (data.labels) holds String, it must hold one number per row"]),
        (["data.columns.prize=dense"], ["no column 'prize' (data.columns.prize), did you mean price?"]),
        (["data.columns.brand=dense"], ["column 'brand' (data.columns.brand) holds String"]),
        (["data.columns.clicked=hash", "data.label=clicked"], ["data.columns names 'clicked', which is the label"]),
        (["data.columns=[price]"], ["data.columns=[price]: it holds keys"]),
        (["data.categorical=hour"], ["data.categorical=hour: input should be a list, as [hour]"]),
        (["data=3"], ["data=3: it holds keys"]),
        (["model.nam=x"], ["model.nam"]),
        (["train.best_by=nope"], ["train.best_by has no effect without rows to validate on"]),
        (["data.labels={clicked: logloss, price: mse}", "model.bottom=[8]"], ["model.bottom", "model.name=mmoe"]),
    ],
)
def test_what_inspect_cannot_do_as_it_is_told_is_one_sentence(
    shadowsync: CommandLine, given: list[str], parts: list[str]
) -> None:
    write_log(Path("log.parquet"))
    assert_sentence(shadowsync("data", "inspect", "log.parquet", *given), 2, parts)


def test_rows_without_ids_are_one_sentence(shadowsync: CommandLine) -> None:
    pl.DataFrame({"label": [0, 1], "x": [1, 1]}).write_parquet("none.parquet")
    assert_sentence(shadowsync("data", "inspect", "none.parquet"), 2, ["no column looks as if it had ids"])
    pl.DataFrame({"label": [0, 1], "x": [0.5, 1.5]}).write_parquet("dense.parquet")
    assert_sentence(shadowsync("data", "inspect", "dense.parquet"), 2, ["name at least one column of ids"])


def test_mistakes_of_inspect_are_sentences(shadowsync: CommandLine) -> None:
    write_log(Path("log.parquet"))
    assert_sentence(shadowsync("data", "inspect", "none.parquet"), 2, ["none.parquet: there is no such file"])
    wrong = shadowsync("data", "inspect", "log.parquet", "data.label=clicks")
    assert_sentence(wrong, 2, ["there is no column 'clicks'", "data.label=NAME"])
    assert_sentence(
        shadowsync("data", "inspect", "log.parquet", "data.name=criteo"), 2, ["inspect is for files of named"]
    )
    assert "inspect" in shadowsync("data", "--help").out
    assert shadowsync("data", "inspect", "--help").status == shadowsync("data", "write", "--help").status == 0
