"""Parquet tables: values, hashing, lists, weights, and one sentence for everything that can be wrong."""

from typing import Any

import polars as pl
import pytest
import torch

from shadowsync import registry
from shadowsync.data.parquet import Parquet
from shadowsync.errors import ConfigError, DataError

GOOD = {
    "label": [0, 1, 1],
    "price": [0.5, None, 3.0],
    "count": [3, -1, 7],
    "item": [4, 0, 2],
    "word": ["a", None, "b"],
    "tags": [[1, 2], [], None],
    "marks": [[0.5, 2.0], [], None],
}
OPTIONS: dict[str, Any] = {
    "dense": ("price", "count"),
    "categorical": ("item", "word", "tags"),
    "rows": {"item": 5, "tags": 3},
    "hash_size": {"word": 100},
    "weights": {"tags": "marks"},
}


def open_frame(folder, columns=GOOD, on_bad_row="error", **options):
    path = folder / "rows.parquet"
    pl.DataFrame(columns, strict=False).write_parquet(path)
    return Parquet(path=str(path), **{**OPTIONS, **options}).open("train", on_bad_row)


def read(folder, columns=GOOD, on_bad_row="error", **options):
    opened = open_frame(folder, columns, on_bad_row, **options)
    return opened.read(opened.slices(10)[0])


def without(column: str, row: int, value: object) -> dict[str, list[Any]]:
    """The good table with one cell changed."""
    cells = list(GOOD[column])
    cells[row] = value
    return {**GOOD, column: cells}


def test_values_of_a_table(tmp_path):
    batch = read(tmp_path)
    assert batch.labels.tolist() == [0, 1, 1]
    assert batch.dense.tolist() == [[0.5, 3.0], [0.0, -1.0], [3.0, 7.0]]
    assert batch.ids.lengths().tolist() == [1, 1, 1, 1, 1, 1, 2, 0, 0]
    assert batch.ids.values[:3].tolist() == [4, 0, 2]
    assert batch.ids.values[4] == 0
    assert batch.ids.values[6:].tolist() == [1, 2]
    assert batch.ids.weights.tolist() == [1.0] * 6 + [0.5, 2.0]


@pytest.mark.parametrize("kind", [pl.Null(), pl.List(pl.Int64())], ids=str)
def test_lists_and_their_weights_may_be_null_in_all_rows(tmp_path, kind):
    nulls = dict.fromkeys(("tags", "marks"), pl.Series([None] * 3, dtype=kind))
    assert read(tmp_path, {**GOOD, **nulls}).ids.lengths().tolist() == [1] * 6 + [0] * 3


def test_counts_are_logged_on_demand(tmp_path):
    dense = read(tmp_path, log_dense=True).dense
    assert torch.allclose(dense, torch.log1p(torch.tensor([[0.5, 3.0], [0.0, 0.0], [3.0, 7.0]])))


def test_schema_names_tables_and_pooling(tmp_path):
    opened = open_frame(tmp_path, tables={"tags": "item"}, pooling={"tags": "mean"})
    tags = opened.schema.features[2]
    assert (tags.name, tags.rows, tags.table, tags.multi_hot, tags.pooling) == ("tags", 3, "item", True, "mean")
    assert [feature.multi_hot for feature in opened.schema.features] == [False, False, True]


def test_integers_and_strings_of_any_type_are_hashed(tmp_path):
    for values in (
        [1, 2, None],
        pl.Series([2**64 - 1, 5, None], dtype=pl.UInt64),
        pl.Series([-1, 5, None], dtype=pl.Int8),
    ):
        batch = read(tmp_path, {**GOOD, "item": values}, rows={"tags": 3}, hash_size={"item": 50, "word": 9})
        assert batch.ids.values[2] == 0
        assert ((batch.ids.values[:2] >= 1) & (batch.ids.values[:2] < 50)).all()
    categorical = pl.Series(["a", None, "b"], dtype=pl.Categorical)
    assert torch.equal(read(tmp_path, {**GOOD, "word": categorical}).ids.values, read(tmp_path).ids.values)


def test_hashed_lists(tmp_path):
    columns = {**GOOD, "tags": [["x", "y"], ["x"], []], "marks": [[1, 1], [1], []]}
    batch = read(tmp_path, columns, rows={"item": 5}, hash_size={"word": 9, "tags": 1000})
    first, second, third = batch.ids.values[6:].tolist()
    assert first == third
    assert first != second


def test_labels_of_other_types(tmp_path):
    for labels in ([False, True, True], [0.0, 1.0, 1.0], pl.Series([0, 1, 1], dtype=pl.UInt8)):
        assert read(tmp_path, {**GOOD, "label": labels}).labels.tolist() == [0, 1, 1]


BAD = {
    "the label (label) is 2, it must be 0 or 1": without("label", 1, 2),
    "the label (label) is missing, it must be 0 or 1": without("label", 1, None),
    "price is nan, it must be a finite number": without("price", 1, float("nan")),
    "price is inf, it must be a finite number": without("price", 1, float("inf")),
    "item has id 5, outside of 0 … 4 (data.rows)": without("item", 1, 5),
    "item has id -1, outside of 0 … 4 (data.rows)": without("item", 1, -1),
    "item has no id": without("item", 1, None),
    "tags has id 3, outside of 0 … 2 (data.rows)": {**without("tags", 1, [0, 3, 4]), "marks": [[1, 1], [1, 1, 1], []]},
    "tags has no id": {**without("tags", 1, [None]), "marks": [[1, 1], [1], []]},
    "marks and tags are of different length": without("marks", 1, [1.0]),
    "marks has a weight that is not a finite number": {**without("tags", 1, [1]), "marks": [[1, 1], [None], []]},
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_or_skipped(tmp_path, what):
    with pytest.raises(DataError) as caught:
        read(tmp_path, BAD[what])
    assert f"{tmp_path}/rows.parquet, row 2: {what}" in str(caught.value)
    opened = open_frame(tmp_path, BAD[what], "skip")
    batch = opened.read(opened.slices(10)[0])
    assert batch.labels.tolist() == [0, 1]
    assert batch.dense[:, 1].tolist() == [3, 7]
    assert opened.bad_rows.count == 1
    assert what in opened.bad_rows.examples[0]
    assert opened.place(opened.slices(10)[0], 1).endswith("row 3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "clicked"}, "there is no column 'clicked' (data.label); the file has label, price"),
        ({"dense": ("prise",)}, "there is no column 'prise' (data.dense), did you mean price?"),
        ({"dense": ("tags",)}, "column 'tags' (data.dense) holds List(Int64), it must hold one number per row"),
        (
            {"label": "word", "categorical": ("item", "tags")},
            "column 'word' (data.label) holds String, it must hold one number per row",
        ),
        (
            {"categorical": ("price",), "rows": 9},
            "column 'price' (data.categorical) holds Float64, it must hold integers",
        ),
        ({"categorical": ("word",), "rows": 9}, "holds String, it must hold integers, unless data.hash_size is given"),
        ({"weights": {"tags": "price"}}, "column 'price' (data.weights) holds Float64, it must hold lists of numbers"),
        ({"weights": {"item": "marks"}}, "column 'item' (data.categorical) holds Int64, it must hold lists, as"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, options, message):
    if "categorical" in options:
        options = {**options, "hash_size": None, "weights": {}}
    with pytest.raises(DataError) as caught:
        open_frame(tmp_path, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": {"item": 5}}, "column 'tags' has no size: give data.hash_size=100000, or data.rows"),
        (
            {"hash_size": {"wort": 5}},
            "data.hash_size names 'wort', which is not in data.categorical, did you mean word?",
        ),
        ({"tables": {"x": "item"}}, "data.tables names 'x'"),
        ({"categorical": ("item", "item")}, "data.categorical names 'item' twice"),
        ({"hash_size": 1}, "data.hash_size"),
        ({"dense": ("price", "price")}, "data.dense names 'price' twice: leave one out"),
        ({"dense": ("price", "label")}, "data.dense names 'label', which is the label (data.label): leave it out"),
        ({"categorical": ("label", "item", "word", "tags")}, "data.categorical names 'label', which is the label"),
        ({"label": "marks"}, "data.weights names 'marks', which is the label"),
        ({"categorical": (), "rows": None, "hash_size": None, "weights": {}}, "data.categorical is empty: name at"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    path = tmp_path / "rows.parquet"
    pl.DataFrame(GOOD).write_parquet(path)
    given = {**OPTIONS, "path": str(path), **options}
    if options.get("categorical") == ("item", "item"):
        given |= {"rows": {"item": 5}, "hash_size": None, "weights": {}}
    with pytest.raises(ConfigError) as caught:
        registry.build(Parquet, given, "data").open("train", "error")
    assert message in str(caught.value)


def test_files_that_cannot_be_used(tmp_path):
    good = tmp_path / "good.parquet"
    pl.DataFrame(GOOD).write_parquet(good)
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-100])
    (tmp_path / "text.parquet").write_text("label,price\n")
    pl.DataFrame(GOOD).clear().write_parquet(tmp_path / "none.parquet")
    for name, message in (
        ("cut.parquet", "cut.parquet: is not a parquet file, or was cut"),
        ("text.parquet", "text.parquet: is not a parquet file, or was cut"),
        ("none.parquet", "none.parquet: has no rows"),
        ("missing.parquet", "there is no such file"),
    ):
        with pytest.raises(DataError, match=message):
            Parquet(path=str(tmp_path / name), **OPTIONS).open("train", "error")


def test_pages_damaged_inside_are_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    pl.DataFrame({**GOOD, "word": ["x" * 50] * 3}).write_parquet(path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    opened = Parquet(path=str(path), **OPTIONS).open("train", "error")
    with pytest.raises(DataError, match=r"rows\.parquet: row 1 and those after cannot be decoded"):
        opened.read(opened.slices(10)[0])


def test_only_lists_are_pooled(tmp_path):
    with pytest.raises(DataError, match=r"column 'item' \(data\.pooling\) holds Int64, it must hold lists, as it says"):
        open_frame(tmp_path, pooling={"item": "mean"})
    shared = {"rows": {"item": 5, "tags": 5}, "tables": {"tags": "item"}}
    assert open_frame(tmp_path, pooling={"item": "mean", "tags": "mean"}, **shared).rows == 3, "a table they share"
