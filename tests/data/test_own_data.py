"""Data of a user's own: damaged or changed under way, oddly named, drifting, unscaled; and how it is known again."""

import datetime
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import polars as pl
import pytest
from data_samples import criteo_row, write_criteo
from polars.exceptions import PanicException

from shadowsync.data import criteo
from shadowsync.data.batch import Batch
from shadowsync.data.criteo import Criteo
from shadowsync.data.files import File, large_columns, largest_column
from shadowsync.data.parquet import Parquet
from shadowsync.data.source import OpenSource
from shadowsync.data.synthetic import Synthetic
from shadowsync.data.tables import Columns, OpenTable
from shadowsync.errors import DataError

ROWS = 60


def frame(rows: int = ROWS, first: float = 0.0, **columns: Any) -> pl.DataFrame:
    numbers = np.arange(rows)
    return pl.DataFrame({"label": numbers % 2, "price": first + numbers * 0.5, "item": numbers % 50, **columns})


def opened(*paths: Path | str, **options: Any) -> OpenTable:
    given: dict[str, Any] = {"dense": ("price",), "categorical": ("item",), "rows": 50, **options}
    source = Parquet(path=tuple(str(path) for path in paths), **given).open("train", "error")
    assert isinstance(source, OpenTable)
    return source


def opened_text(path: Path, rows: Sequence[str]) -> OpenSource:
    source = Criteo(path=str(write_criteo(path, rows))).open("train", "error")
    assert source is not None
    return source


def read(source: OpenSource, number: int = 0, rows: int = 10) -> Batch:
    return source.read(source.slices(rows)[number])


def written(path: Path, table: pl.DataFrame, **how: Any) -> Path:
    table.write_parquet(path, **how)
    return path


# --- damaged and changed under way -----------------------------------------------------------------------------------


def test_a_panic_of_the_parser_is_an_error_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "rows.parquet", frame(40_000), row_group_size=10_000)
    monkeypatch.setattr(File, "stamp", lambda file: None)
    source = opened(path)
    read(source)
    os.truncate(path, 1000)  # polars keeps the footer that it has read, and panics where the rows should be
    with pytest.raises(DataError, match=r"rows\.parquet: row 31 and those after cannot be decoded: it is damaged"):
        read(source, 3)


def panic(*_: object, **__: object) -> None:
    raise PanicException("called `Result::unwrap()` on an `Err` value")


@pytest.mark.parametrize("called", ["collect_schema", "collect"])
def test_a_panic_at_opening_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str) -> None:
    path = written(tmp_path / "rows.parquet", frame())
    monkeypatch.setattr(pl.LazyFrame, called, panic)
    with pytest.raises(DataError, match=r"rows\.parquet: .*damaged, or was changed while it was being read"):
        opened(path)


def test_a_panic_over_text_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo.pl, "read_csv", panic)
    assert criteo.parse((criteo_row(1) + "\n").encode(), 1) is None


def test_a_file_replaced_under_way_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", frame())
    source = opened(path)
    read(source)
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=r"rows\.parquet: .*(changed while it was being read|cannot be read)"):
        read(source, 1)
    written(path, frame(first=7.0))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"rows\.parquet: was changed while it was being read \(row 11 was next\)"):
        read(source, 1)
    path.unlink()
    with pytest.raises(DataError, match=r"rows\.parquet: there is no such file"):
        read(source, 1)


def test_a_file_that_was_only_touched_is_read_on(tmp_path: Path) -> None:
    source = opened(written(tmp_path / "rows.parquet", frame()))
    lines = opened_text(tmp_path / "rows.tsv", [criteo_row(number) for number in range(20)])
    for touched in tmp_path.iterdir():
        os.utime(touched, ns=(5, 5))
    assert len(read(source, 1)) == len(read(lines)) == 10


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("literal", ["day[1].parquet", "day*.parquet", "t [1].parquet"])
def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path, literal: str) -> None:
    for other in ("day1.parquet", "day2.parquet"):  # what the pattern would match; of the last one nothing
        written(tmp_path / other, frame(first=1000.0).with_columns(pl.lit("text").alias("item")).drop("price"))
    source = opened(written(tmp_path / literal, frame(30)))
    assert source.rows == 30
    assert read(source).dense[:2, 0].tolist() == [0.0, 0.5]
    columns = Columns(source, ["item", "price"])
    assert columns.types == {"item": pl.Int64, "price": pl.Float64}
    assert columns.take(2)["price"].to_list() == [0.0, 0.5]


def test_a_folder_stands_for_its_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "older").mkdir(parents=True)
    for number in (2, 1):
        written(folder / f"part-{number}.parquet", frame(10, first=100.0 * number))
    for name in ("_SUCCESS", "_metadata.parquet", ".hidden.parquet", "notes.txt"):
        (folder / name).write_text("")
    written(folder / "older" / "part-0.parquet", frame(10))
    source = opened(folder)
    assert [Path(file.path).name for file in source.files] == ["part-1.parquet", "part-2.parquet"]
    assert read(source, 1).dense[0].tolist() == [200.0]


def test_a_folder_without_files_of_the_format_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: is a folder without files that end in \.parquet"):
        opened(tmp_path / "empty")


# --- drift -----------------------------------------------------------------------------------------------------------

ITEM_AS_TEXT = pl.col("item").cast(pl.String)
ITEM_AS_NUMBER = pl.col("item").cast(pl.Float64)


@pytest.mark.parametrize(
    ("second", "options", "said"),
    [
        (frame().drop("price"), {}, r"b\.parquet: there is no column 'price' \(data\.dense\)"),
        (frame().drop("item"), {}, r"b\.parquet: there is no column 'item' \(data\.categorical\)"),
        (frame().with_columns(ITEM_AS_TEXT), {}, r"b\.parquet: column 'item' .* holds String, it must hold integers"),
        (
            frame().with_columns(ITEM_AS_TEXT),
            {"rows": None, "hash_size": 50},
            r"b\.parquet: column 'item' holds String, in .*a\.parquet it holds Int64: write all files with the same",
        ),
        (frame().with_columns(ITEM_AS_NUMBER), {}, r"b\.parquet: column 'item' .* holds Float64, it must hold integ"),
        (
            frame().with_columns(pl.concat_list("item")),
            {},
            r"b\.parquet: column 'item' holds List\(Int64\), in .*a\.parquet it holds Int64",
        ),
        (frame().with_columns(pl.col("price").cast(pl.String)), {}, r"b\.parquet: column 'price' .* holds String"),
    ],
)
def test_drift_names_file_and_column(tmp_path: Path, second: pl.DataFrame, options: dict[str, Any], said: str) -> None:
    first = written(tmp_path / "a.parquet", frame())
    with pytest.raises(DataError, match=said):
        opened(first, written(tmp_path / "b.parquet", second), **options)


def test_drift_that_means_the_same_is_read(tmp_path: Path) -> None:
    first = written(tmp_path / "a.parquet", frame().with_columns(pl.col("price").cast(pl.Int64)))
    second = frame().with_columns(pl.col("item").cast(pl.Int32), pl.lit(1).alias("more"))
    source = opened(first, written(tmp_path / "b.parquet", second))
    assert read(source, ROWS // 10).dense[1].tolist() == [0.5]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3e38, -3e38, 1e300, float("inf"), float("nan")])
def test_a_number_beyond_float32_is_a_bad_row(tmp_path: Path, value: float) -> None:
    prices = pl.Series("price", [1.0, value, value])
    source = opened(written(tmp_path / "rows.parquet", frame(3).with_columns(prices)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=r"row 2: price is .*, it must be a finite number of at most 1e\+38; mend"):
            read(source)


def test_numbers_too_large_to_train_on_are_told_of(tmp_path: Path) -> None:
    ids = np.arange(ROWS) + (1 << 60)
    path = written(tmp_path / "rows.parquet", frame(user=ids, **{f"d{k}": ids for k in range(3)}))
    said = large_columns(opened(path, dense=("price", "user", "d0", "d1", "d2")))
    assert said is not None
    assert "user (1.15e+18), d0 (1.15e+18), d1 (1.15e+18) and 1 more; list ids in data.categorical" in said
    assert "price" not in said
    for good in (opened(path), opened(path, dense=("user",), log_dense=True), opened(path, dense=())):
        assert large_columns(good) is None


def test_the_largest_number_is_known_without_reading_the_rows(tmp_path: Path) -> None:
    numbers = np.zeros(ROWS)
    numbers[40] = -1e30
    first = written(tmp_path / "a.parquet", frame(age=-3.0))
    second = written(tmp_path / "b.parquet", frame(age=numbers), row_group_size=16)
    columns: dict[str, Any] = {"dense": ("price", "age"), "standardise": False}
    assert largest_column(opened(first, second, **columns)) == "|age| is up to 1e+30"
    logged, none = opened(second, **columns, log_dense=True), opened(second, dense=())
    for good in (opened(first, **columns), logged, none, opened(second, dense=("price", "age"))):
        assert largest_column(good) is None
    days = written(tmp_path / "d.parquet", frame(age=datetime.date(2024, 1, 1)))
    assert largest_column(opened(days, **columns)) is None
    unknown = written(tmp_path / "c.parquet", frame(age=numbers), statistics=False)
    assert largest_column(opened(unknown, **columns)) is None


# --- knowing data again ----------------------------------------------------------------------------------------------


def marks_of(labels: Sequence[int], path: Path, **options: Any) -> Any:
    numbers = np.arange(len(labels))
    table = pl.DataFrame({"price": numbers * 0.5, "item": numbers % 50, "label": labels})
    return opened(written(path, table, compression="uncompressed"), **options).marks()


@pytest.mark.parametrize("rows", [100, 300_000])
def test_flipped_labels_are_other_data_although_the_footer_is_the_same(tmp_path: Path, rows: int) -> None:
    labels = np.random.default_rng(0).integers(0, 2, rows)
    paths = [tmp_path / name / "rows.parquet" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
    before, after = marks_of(labels, paths[0])[0], marks_of(1 - labels, paths[1])[0]
    assert (before.name, before.size) == (after.name, after.size)
    assert before.digest != after.digest
    assert paths[0].stat().st_size == before.size
    paths[1].write_bytes(paths[0].read_bytes())
    assert opened(paths[1]).marks() == (before,)  # the same bytes at another place
    with fsspec.open("memory://far/rows.parquet", "wb") as stream:
        stream.write(paths[0].read_bytes())
    assert opened("memory://far/rows.parquet").marks() == (before,)


def test_text_is_known_by_its_ends(tmp_path: Path) -> None:
    rows = [criteo_row(number) for number in range(6000)]
    before = opened_text(tmp_path / "log.tsv", rows).marks()
    assert before[0].size > 1 << 20
    for row in (0, 5999):
        changed = [*rows[:row], str(1 - int(rows[row][0])) + rows[row][1:], *rows[row + 1 :]]
        after = opened_text(tmp_path / "log.tsv", changed).marks()
        assert after[0].size == before[0].size
        assert after != before


def test_rows_that_are_made_are_known_by_their_options() -> None:
    def marks(**options: Any) -> Any:
        source = Synthetic(rows=100, table_rows=50, dense=2, features=2, **options).open("train", "error")
        assert source is not None
        return source.marks()

    assert marks(test_rows=7) == marks() == marks(seed=0)
    assert marks(seed=1) != marks()
