"""Labels and weights of rows: as they are read, batched, written again, and what is wrong with them."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from test_columns import all_rows, opened

from shadowsync import registry
from shadowsync.data.batch import Batch
from shadowsync.data.labels import Task
from shadowsync.data.looking import look
from shadowsync.data.parquet import Parquet
from shadowsync.data.reader import Parser, ReaderOptions
from shadowsync.data.writer import write_parquet
from shadowsync.errors import ConfigError, DataError

ROWS = 10
FRAME = {
    "user": np.arange(ROWS) % 4,
    "bought": np.arange(ROWS) % 3 == 0,
    "watched": np.linspace(-2, 7, ROWS),
    "visits": np.arange(ROWS) % 5,
    "w": np.linspace(0, 3, ROWS),
}
LABELS = {"bought": "logloss", "watched": {"loss": "mse", "weight": 0.1}, "visits": "poisson"}
OPTIONS: dict[str, Any] = {"categorical": ["user"], "rows": 4, "labels": LABELS, "weight": "w"}


def test_labels_come_in_the_order_in_which_they_are_declared_with_their_rows_weights(tmp_path: Path) -> None:
    source = opened(tmp_path / "rows.parquet", FRAME, **OPTIONS)
    batch = all_rows(source)
    expected = np.stack([FRAME["bought"], FRAME["watched"], FRAME["visits"]], axis=1).astype(np.float32)
    assert torch.equal(batch.labels, torch.from_numpy(expected))
    assert torch.equal(batch.weights, torch.from_numpy(FRAME["w"].astype(np.float32)))
    assert source.source.tasks == (
        Task("bought"),
        Task("watched", "mse", weight=0.1),
        Task("visits", "poisson"),
    )
    for part in (
        batch.narrow(2, 5),
        batch.take(torch.tensor([2, 3, 4])),
        Batch.join([batch.narrow(2, 3), batch.narrow(3, 5)]),
    ):
        assert torch.equal(part.labels, batch.labels[2:5])
        assert torch.equal(part.weights, batch.weights[2:5])


def test_weights_stay_with_their_rows_when_these_are_shuffled_and_cut(tmp_path: Path) -> None:
    source = opened(tmp_path / "rows.parquet", {**FRAME, "watched": FRAME["w"]}, **OPTIONS)
    parser = Parser(source, ReaderOptions(3, slice_rows=4, seed=1))
    for number, part in enumerate(parser.slices):
        batch = source.read(part)
        assert torch.equal(batch.labels[:, 1], batch.weights), number


def test_one_label_of_another_kind_is_a_column(tmp_path: Path) -> None:
    batch = all_rows(
        opened(tmp_path / "rows.parquet", FRAME, categorical=["user"], rows=4, labels={"visits": "poisson"})
    )
    assert batch.labels.tolist() == FRAME["visits"].tolist()
    assert batch.weights is None


def test_what_is_written_is_read_again_as_the_same(tmp_path: Path) -> None:
    source = opened(tmp_path / "rows.parquet", FRAME, **OPTIONS)
    section = write_parquet(source, tmp_path / "out.parquet", source.source.tasks)
    assert section["weight"] == "row_weight"
    again = registry.build(
        Parquet,
        {
            "path": str(tmp_path / "out.parquet"),
            "categorical": ["user"],
            "rows": 4,
            "labels": {task.name: task.told() for task in source.source.tasks},
            "weight": "row_weight",
        },
        "data",
    )
    assert again.tasks == source.source.tasks
    read, before = all_rows(again.open("train", "error")), all_rows(source)
    assert torch.equal(read.labels, before.labels)
    assert torch.equal(read.weights, before.weights)


def test_where_columns_are_inferred_labels_and_weights_are_none_of_them(tmp_path: Path) -> None:
    frame = {**FRAME, "label": np.arange(ROWS) % 2}
    source = opened(tmp_path / "rows.parquet", frame, **OPTIONS)
    looks = look(source, "label", {"bought": "data.labels", "watched": "data.labels", "w": "data.weight"})
    assert looks.label is None
    assert {"bought", "watched", "w"}.isdisjoint(looks.declared)
    assert "label bought, watched;" in looks.sentence
    assert look(source, "label", {"label": "data.label", "w": "data.weight"}).label == "label"


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("bought", 2.0, "the label (bought) is 2.0, it must be 0 or 1"),
        ("watched", None, "the label (watched) is missing, it must be a finite number"),
        ("watched", float("inf"), "the label (watched) is inf, it must be a finite number"),
        ("visits", -1.0, "the label (visits) is -1.0, it must be a number from 0 on"),
        ("w", -0.5, "the weight (w) is -0.5, it must be a number from 0 on"),
        ("w", None, "the weight (w) is missing, it must be a number from 0 on"),
    ],
)
def test_a_row_with_a_wrong_answer_is_bad(tmp_path: Path, column: str, value: float | None, told: str) -> None:
    numbers = pl.DataFrame({name: values.astype(float) for name, values in FRAME.items()})
    third = pl.when(pl.int_range(pl.len()) == 2).then(pl.lit(value)).otherwise(column).alias(column)
    bad = opened(tmp_path / "rows.parquet", numbers.with_columns(third, pl.col("user").cast(pl.Int64)), **OPTIONS)
    with pytest.raises(DataError) as caught:
        all_rows(bad)
    assert f"rows.parquet, row 3: {told}" in str(caught.value)
    skipping = bad.source.open("train", "skip")
    batch = all_rows(skipping)
    assert (len(batch), len(batch.weights), skipping.bad_rows.count) == (ROWS - 1, ROWS - 1, 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"labels": {"bought": "log_loss"}}, "data.labels.bought.loss=log_loss is not known, did you mean logloss?"),
        ({"labels": {"bought": {"los": "mse"}}}, "data.labels.bought.los: there is no such option, did you mean loss?"),
        ({"labels": {"bought": {"weight": 0}}}, "data.labels.bought.weight=0"),
        ({"labels": {"bought": {"like": "mse"}}}, "data.labels.bought.like has no effect beside loss=logloss"),
        ({"label": "bought"}, "data.label has no effect beside data.labels"),
        ({"weight": "bought"}, "data.weight=bought is a label"),
        ({"dense": ["w"]}, "data.dense names 'w', which is the weight (data.weight)"),
        ({"dense": ["watched"]}, "data.dense names 'watched', which is the label (data.labels)"),
        ({"sample_weight": "w"}, "data.sample_weight is not an option of data.name=parquet: it is called data.weight"),
    ],
)
def test_declarations_that_mean_nothing_are_one_sentence(options: dict[str, Any], told: str) -> None:
    given = {"path": "rows.parquet", **OPTIONS, **options}
    with pytest.raises(ConfigError) as caught:
        registry.build(Parquet, registry.split_options("data", given, {"data.name=parquet": Parquet})[0], "data")
    assert told in str(caught.value)


def test_a_label_that_is_not_there_or_holds_text_is_one_sentence(tmp_path: Path) -> None:
    for frame, told in (
        (
            {name: values for name, values in FRAME.items() if name != "visits"},
            "there is no column 'visits' (data.labels)",
        ),
        ({**FRAME, "w": ["a"] * ROWS}, "column 'w' (data.weight) holds String, it must hold one number per row"),
    ):
        with pytest.raises(DataError) as caught:
            opened(tmp_path / "rows.parquet", frame, **OPTIONS)
        assert told in str(caught.value)
