"""`shadowsync data inspect`: shows columns, and writes a configuration that trains as it is."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import yaml
from command_line import CommandLine, assert_sentence

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
    assert Path("shown.yaml").read_text() == Path("written.yaml").read_text()


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
