"""Folders that are named after columns: what they are read as, and which of them are."""

from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest

from shadowsync import registry
from shadowsync.data.csv import Csv
from shadowsync.data.jsonl import Jsonl
from shadowsync.data.parquet import Parquet
from shadowsync.data.tables import OpenTable, TableSource
from shadowsync.errors import ConfigError, DataError

DAYS = ("2024-01-01", "2024-01-02", "2024-01-10")
WRITE = {
    Parquet: pl.DataFrame.write_parquet,
    Csv: pl.DataFrame.write_csv,
    Jsonl: pl.DataFrame.write_ndjson,
}


def write_days(root: Path, member: type[TableSource] = Parquet) -> Path:
    """Two rows for each hour of each day, which are in the names of folders only; the item is the hour."""
    for number, day in enumerate(DAYS):
        for hour in (7, 12):
            folder = root / f"day={day}" / f"hour={hour:02}"
            folder.mkdir(parents=True)
            frame = pl.DataFrame({"label": [0, 1], "price": [float(number), number + 0.5], "item": [hour, hour]})
            WRITE[member](frame, folder / f"part{member.endings[0]}")
    (root / "older").mkdir()
    (root / "older" / f"part{member.endings[0]}").write_text("not looked into")
    (root / "_SUCCESS").write_text("")
    return root


def opened(path: Path | str, member: type[TableSource] = Parquet, split: str = "train", **options: Any) -> OpenTable:
    given = {"path": str(path), "dense": ["price", "hour"], "categorical": ["item"], "rows": 50, **options}
    source: Any = registry.build(member, given, "data").open(split, "error")  # type: ignore[arg-type]
    assert isinstance(source, OpenTable)
    return source


def whole(source: OpenTable) -> list[list[float]]:
    return [row for part in source.slices(100) for row in source.read(part).dense.tolist()]


@pytest.mark.parametrize("member", WRITE)
def test_folders_are_columns(tmp_path: Path, member: type[TableSource]) -> None:
    source = opened(write_days(tmp_path / "rows", member), member)
    assert (source.tables[0].types["day"], source.tables[0].types["hour"]) == (pl.Date(), pl.Int64())
    assert source.rows == 12
    assert whole(source)[:6] == [[0, 7], [0.5, 7], [0, 12], [0.5, 12], [1, 7], [1.5, 7]]


def test_a_pattern_shows_the_folders_that_it_matches(tmp_path: Path) -> None:
    root = write_days(tmp_path / "rows")
    assert len(whole(opened(f"{root}/day=2024-01-0*/*/*"))) == 8
    with pytest.raises(DataError, match=r"no column 'hour' \(data.dense\): it is in the name of a folder, so give as"):
        opened(root / "day=2024-01-01" / "hour=07" / "part.parquet")


def test_folders_elsewhere(tmp_path: Path) -> None:
    root = write_days(tmp_path / "rows")
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/hive", recursive=True)
    assert whole(opened("memory://hive")) == whole(opened(root))
    memory.rm("/hive", recursive=True)


def test_what_folders_are_called_decides_the_type(tmp_path: Path) -> None:
    for name in ("kind=a%2Fb", "kind=__HIVE_DEFAULT_PARTITION__", "kind=3"):
        (tmp_path / name).mkdir()
        pl.DataFrame({"label": [0], "price": [0.0]}).write_parquet(tmp_path / name / "a.parquet")
    source = opened(tmp_path, dense=["price"], categorical=["kind"], rows=None, hash_size=1000)
    assert source.tables[0].types["kind"] == pl.String()
    taken = [table.take(0, 1, ["kind"])[0]["kind"].to_list() for table in source.tables]
    assert taken == [["3"], [None], ["a/b"]]
    assert source.read(source.slices(9)[1]).ids.values.tolist() == [0]
    only = opened(tmp_path, dense=["price"], categorical=["kind"], rows=None, hash_size=1000, partitions={"kind": 3})
    assert only.tables[0].types["kind"] == pl.String(), "of all folders, not of those that are left"
    assert only.read(only.slices(9)[0]).ids.values.tolist() == source.read(source.slices(9)[0]).ids.values.tolist()


def test_a_column_of_the_file_goes_before_one_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "item=9").mkdir()
    pl.DataFrame({"label": [0], "price": [0.0], "hour": [1], "item": [2]}).write_parquet(tmp_path / "item=9/a.parquet")
    source = opened(tmp_path)
    assert source.read(source.slices(9)[0]).ids.values.tolist() == [2]


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        ({"day": "2024-01-02"}, 4),
        ({"day": ["2024-01-01", "2024-01-10"]}, 8),
        ({"day": {"from": "2024-01-02"}}, 8),
        ({"day": {"from": "2024-01-02", "to": "2024-01-09"}}, 4),
        ({"hour": 7}, 6),
        ({"hour": "07", "day": {"to": "2024-01-02"}}, 4),
    ],
)
def test_partitions_choose_the_files(tmp_path: Path, wanted: dict[str, Any], rows: int) -> None:
    root = write_days(tmp_path / "rows")
    assert opened(root, partitions=wanted).rows == rows
    assert opened(root, test_partitions=wanted).rows == 12 - rows, "tested, so not trained on"
    assert opened(root, test_path="elsewhere", test_partitions=wanted).rows == 12
    assert opened(root, split="test", test_partitions=wanted).rows == rows
    assert opened("nowhere", split="test", test_path=str(root), test_partitions=wanted).rows == rows
    assert registry.build(Parquet, {"path": "x", "categorical": ["a"]}, "data").open("test", "error") is None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"day": "2025-01-01"}, r"partitions leaves none of the 6 files, which have day from 2024-01-01 to 2024-01-10"),
        (
            {"dai": 1},
            r"partitions names 'dai', which is in the name of no folder; of such folders there are: day=…, hour",
        ),
        ({"hour": "noon"}, r"data.partitions.hour=noon: the folders hold Int64, such as 7"),
        ({"day": {"from": "yesterday"}}, r"data.partitions.day=yesterday: the folders hold Date, such as 2024-01-01"),
        (
            {"day": {"since": "2024-01-01"}},
            r"data\.partitions\.day={since: 2024-01-01}: it must be a value, a list of values, or {from: …, to: …}",
        ),
        ({"day": []}, r"data\.partitions\.day=\[\]: it must be a value, a list of values, or {from: …, to: …}"),
    ],
)
def test_partitions_that_choose_nothing(tmp_path: Path, wanted: dict[str, Any], said: str) -> None:
    root = write_days(tmp_path / "rows")
    with pytest.raises((DataError, ConfigError), match=said):
        opened(root, partitions=wanted)


def test_no_file_is_trained_on_and_tested(tmp_path: Path) -> None:
    root = write_days(tmp_path / "rows")
    apart = {"partitions": {"day": {"to": "2024-01-02"}}, "test_partitions": {"day": "2024-01-10"}}
    assert (opened(root, **apart).rows, opened(root, split="test", **apart).rows) == (8, 4)
    with pytest.raises(DataError, match=r"day=2024-01-02/.*: data\.partitions and data\.test_partitions both name it"):
        opened(root, partitions={"day": {"to": "2024-01-02"}}, test_partitions={"day": {"from": "2024-01-02"}})
    with pytest.raises(DataError, match=r"data\.test_partitions takes all 6 files: leave some to train on"):
        opened(root, test_partitions={"day": {"from": "2024-01-01"}})
