"""What write_parquet writes reads back equal, and nothing is left behind when it fails."""

import errno

import pytest
import torch
from data_samples import CountedRows, same
from omegaconf import OmegaConf

from shadowsync import registry
from shadowsync.config import merge
from shadowsync.data import writer
from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.parquet import Parquet
from shadowsync.data.source import Feature, Schema
from shadowsync.data.synthetic import Synthetic
from shadowsync.data.writer import as_yaml, section_of
from shadowsync.errors import DataError, SaveError


def read(lines):
    return OmegaConf.to_container(OmegaConf.create(lines))["data"]


def read_back(written):
    section = read(as_yaml({"data": written}))
    assert section.pop("name") == "parquet"
    return registry.build(Parquet, section, "data").open("train", "error")


@pytest.mark.parametrize("multi_hot", [1.0, 2.5])
def test_any_source_reads_back_equal(tmp_path, multi_hot, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP", 3000)
    opened = Synthetic(rows=7000, features=3, table_rows=50, multi_hot=multi_hot).open("train", "error")
    back = read_back(writer.write_parquet(opened, tmp_path / "sub folder" / "rows: all.parquet"))
    assert back.schema == opened.schema
    assert back.rows == 7000
    for part in back.slices(2000):
        assert same(back.read(part), opened.read(part))


class Weighted(CountedRows):
    """Features with awkward names that share a table, with weights."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        features = (Feature("item: id", rows, "items"), Feature("it's seen", rows, "items", True, "mean"))
        self.schema = Schema(("a number",), features)

    def read(self, part):
        batch = super().read(part)
        count = len(batch)
        lengths = torch.cat([torch.ones(count, dtype=torch.int64), torch.arange(count) % 3])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.cat([batch.ids.values, torch.arange(int(lengths[count:].sum()))])
        weights = torch.cat(
            [torch.ones(count), torch.rand(len(values) - count, generator=torch.Generator().manual_seed(0))]
        )
        return Batch(batch.labels, batch.dense, Jagged(values, offsets, weights, 2, count))


def test_weights_tables_and_names_read_back_equal(tmp_path):
    opened = Weighted(30)
    back = read_back(writer.write_parquet(opened, tmp_path / "rows.parquet"))
    assert back.schema == opened.schema
    part = opened.slices(30)[0]
    assert same(back.read(part), opened.read(part))
    assert torch.equal(back.read(part).ids.weights, opened.read(part).ids.weights)


class Broken(CountedRows):
    def read(self, part):
        if part.index == 1:
            raise DataError("rows, row 5: bad")
        return super().read(part)


def test_a_source_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP", 4)
    path = tmp_path / "rows.parquet"
    path.write_text("before")
    with pytest.raises(DataError, match="rows, row 5: bad"):
        writer.write_parquet(Broken(10), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.pa.parquet.ParquetWriter, "write_table", full)
    with pytest.raises(SaveError, match=r"rows\.parquet: cannot be written: No space left on device"):
        writer.write_parquet(CountedRows(10), tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="cannot be written"):
        writer.write_parquet(CountedRows(10), tmp_path / "file" / "rows.parquet")


def test_the_lines_name_columns_that_yaml_would_take_for_something_else():
    schema = Schema(("on", "1e3"), (Feature("no", 5, multi_hot=True), Feature('a "b": c', 7, "no")))
    section = read(as_yaml({"data": section_of(schema, "/rows: 1/ü.parquet", weighted=True)}))
    assert section["path"] == "/rows: 1/ü.parquet"
    assert (section["dense"], section["rows"]) == (["on", "1e3"], {"no": 5, 'a "b": c': 7})
    assert (section["tables"], section["weights"]) == ({'a "b": c': "no"}, {"no": "no_weights"})


def test_text_stays_text_and_numbers_numbers():
    for text in ("", "1e3", "007", "0x1F", "1:30", ".5", "null", "~", 'it\'s "1": #2', "a\x7f🙂"):
        shared = {text: "own", "clip": 1e-05, "missing": None, "log": False}
        given = {"path": text, "columns": {text: shared, "b": shared}}
        assert read(as_yaml({"data": given})) == given


def test_what_looks_like_a_reference_is_none():
    for text in ("a${b}.parquet", "\\${b}", "\\\\${b}", "${", "$b"):
        given = {"path": text, "dense": [text], "columns": {"a": text}}
        found = merge({}, OmegaConf.to_container(OmegaConf.create(as_yaml({"data": given}))), [])
        assert found["data"] == given
