"""What is inferred of columns that nobody declares, and the configuration that says so."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_columns import TYPED

from shadowsync import registry
from shadowsync.data import looking, tables
from shadowsync.data.looking import Looks, look
from shadowsync.data.parquet import Parquet
from shadowsync.data.tables import OpenTable
from shadowsync.errors import DataError

ROWS = 3000
DRAW = np.random.default_rng(0)
DAYS = [datetime.date(2024, 1, 1) + datetime.timedelta(days=int(day)) for day in DRAW.integers(0, 30, ROWS)]
FRAME: dict[str, Any] = {
    "Clicked": DRAW.integers(0, 2, ROWS),
    "price": DRAW.normal(size=ROWS),
    "hour": DRAW.integers(0, 24, ROWS),
    "user": DRAW.integers(0, 1 << 62, 700)[DRAW.integers(0, 700, ROWS)],
    "brand": pl.Series(["x", "y", None])[DRAW.integers(0, 3, ROWS)],
    "mobile": DRAW.integers(0, 2, ROWS).astype(bool),
    "day": DAYS,
    "cost": pl.Series(DRAW.integers(0, 999, ROWS)).cast(pl.Decimal(10, 2)),
    "tags": [["a", "b"][: row % 3] for row in range(ROWS)],
    "request": [f"r{row}" for row in range(ROWS)],
    "constant": [7] * ROWS,
    "nothing": pl.Series([None] * ROWS),
    "blob": [b"x"] * ROWS,
    "on": [{"a": 1}] * ROWS,
}


def looks_of(folder: Path, frame: Any, label: str | None = "label", **own: Any) -> Looks:
    pl.DataFrame(frame).write_parquet(folder / "rows.parquet")
    source = registry.build(Parquet, {"path": str(folder / "rows.parquet")}, "data").open("train", "error")
    assert isinstance(source, OpenTable)
    return look(source, label, **own)


def test_every_type_becomes_something_or_is_left_out_for_a_reason(tmp_path: Path) -> None:
    looks = looks_of(tmp_path, FRAME)
    declared = looks.declared
    assert looks.label == "Clicked"
    assert {name: becomes["kind"] for name, becomes in declared.items()} == {
        "price": "dense",
        "hour": "vocabulary",
        "user": "hash",
        "brand": "vocabulary",
        "mobile": "vocabulary",
        "day": "buckets",
        "cost": "dense",
        "tags": "vocabulary",
    }
    assert 1400 <= declared["user"]["rows"] <= 2000
    why = {one.name: one.why for one in looks.columns if one.becomes is None}
    assert why == {
        "Clicked": "label",
        "request": "it holds another value in nearly every row",
        "constant": "it holds one value only",
        "nothing": "it is empty",
        "blob": "it holds Binary",
        "on": "it holds Struct({'a': Int64})",
    }
    facts = {one.name: one for one in looks.columns}
    assert (facts["hour"].distinct, facts["hour"].low, facts["hour"].high) == (24, 0, 23)
    assert facts["brand"].nulls == pl.Series(FRAME["brand"]).null_count()
    assert "label Clicked; dense price, cost; vocabulary hour, brand, mobile, tags; hash user" in looks.sentence
    assert "request (it holds another value in nearly every row)" in looks.sentence


def test_null_lists_are_counted_and_are_no_values(tmp_path: Path) -> None:
    (tags,) = looks_of(tmp_path, {"label": [0, 1] * 50, "tags": [["a", "b"], None, [], ["a"]] * 25}).columns[1:]
    assert (tags.nulls, tags.distinct, tags.becomes) == (25, 2, {"kind": "vocabulary"})


def test_some_rows_of_many_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE", 100)
    monkeypatch.setattr(looking, "LOOKED_AT", 500)
    looks = looks_of(tmp_path, {"label": [0, 1] * 1500, "row": range(3000)})
    assert (looks.rows, looks.looked_at) == (3000, 500)
    assert looks.columns[1].high == 2499  # of the last piece that is looked at


@pytest.mark.parametrize("what", TYPED)
def test_columns_of_any_type_can_be_looked_at(tmp_path: Path, what: str) -> None:
    values, _ = TYPED[what]
    frame = pl.DataFrame({"label": [k % 2 for k in range(len(values))], "x": values, "l": [values] * len(values)})
    single, listed = looks_of(tmp_path, frame).columns[1:]
    distinct = values.drop_nulls().drop_nans() if values.dtype.is_float() else values.drop_nulls()
    assert single.distinct == listed.distinct == len(distinct)
    assert (single.becomes is None) == (len(distinct) < 2)


def test_files_that_hold_other_columns_are_not_inferred_from(tmp_path: Path) -> None:
    for name, frame in (("a", {"label": [0, 1], "x": [1, 2]}), ("b", {"label": [0, 1], "y": [1, 2]})):
        pl.DataFrame(frame).write_parquet(tmp_path / f"{name}.parquet")
    source = registry.build(Parquet, {"path": str(tmp_path / "*.parquet")}, "data").open("train", "error")
    assert isinstance(source, OpenTable)
    with pytest.raises(DataError, match=r"cannot be inferred, as the files hold others or of other types: .*; declare"):
        look(source, "label")


def test_a_label_is_asked_for_where_none_is_found(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"there is no column 'label': say which one holds 0 or 1 with data\.label=NAME;"
    ):
        looks_of(tmp_path, {"a": [1], "b": [2]})
    with pytest.raises(DataError, match=r"there is no column 'clicked': say which one .* there are click, b"):
        looks_of(tmp_path, {"click": [1], "b": [2]}, "clicked")
    with pytest.raises(DataError, match=r"no column 'bougt' \(data\.labels\), did you mean bought\?; there are bought"):
        looks_of(tmp_path, {"bought": [1], "b": [2]}, answers={"bougt": "data.labels"})
