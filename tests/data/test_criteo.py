"""The Criteo format: values, and one sentence for everything that can be wrong."""

import gzip
import math
from pathlib import Path

import fsspec
import pytest
import torch
from data_samples import criteo_row, same, write_criteo
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync import serving
from shadowsync.data.batch import Batch
from shadowsync.data.criteo import CATEGORICAL, Criteo, parse, problem
from shadowsync.errors import ConfigError, DataError

ROWS = [criteo_row(n) for n in range(20)]


def edited(column: int, value: str, row: int = 6) -> list[str]:
    fields = ROWS[row].split("\t")
    fields[column] = value
    return [*ROWS[:row], "\t".join(fields), *ROWS[row + 1 :]]


def read(path: object, on_bad_row: str = "error", **options: object):
    opened = Criteo(path=str(path), **options).open("train", on_bad_row)
    return opened, [opened.read(part) for part in opened.slices(8)]


def test_values_of_a_row(tmp_path):
    row = "\t".join(["1", "5", "-2", *[""] * 11, "68fd1e64", *[""] * 25])
    _, (batch,) = read(write_criteo(tmp_path / "a.tsv", [row]), hash_size=100)
    assert batch.labels.tolist() == [1.0]
    assert batch.dense[0, 0].item() == pytest.approx(math.log(6))
    assert batch.dense[0, 1:].tolist() == [0.0] * 12
    assert 1 <= batch.ids.values[0] < 100
    assert batch.ids.values[1:].tolist() == [0] * 25


def test_hashes_never_change(tmp_path):
    """A trained model depends on them: these numbers must hold in every later version."""
    row = "\t".join(["0", *[""] * 13, *(f"{k:x}" for k in range(26))])
    _, (batch,) = read(write_criteo(tmp_path / "a.tsv", [row]), hash_size=1_000_000)
    assert batch.ids.values[[0, 1, 25]].tolist() == [883310, 566562, 632946]


def test_upper_and_lower_case_are_one_category(tmp_path):
    _, (batch,) = read(write_criteo(tmp_path / "a.tsv", edited(14, "68FD1E64", 0)[:1] + edited(14, "68fd1e64", 0)[:1]))
    assert batch.ids.values[0] == batch.ids.values[1]


@pytest.mark.parametrize(
    "hash_size",
    [50, list(range(10, 36)), {name: 10 + k for k, name in enumerate(CATEGORICAL)}],
    ids=["one", "26", "named"],
)
def test_sizes_by_feature(tmp_path, hash_size):
    opened, batches = read(
        write_criteo(tmp_path / "a.tsv", ROWS), hash_size=tuple(hash_size) if isinstance(hash_size, list) else hash_size
    )
    sizes = [50] * 26 if hash_size == 50 else list(range(10, 36))
    assert [feature.rows for feature in opened.schema.features] == sizes
    ids = torch.cat([batch.ids.values.view(26, -1) for batch in batches], dim=1)
    assert (ids < torch.tensor(sizes)[:, None]).all()


@pytest.mark.parametrize("hash_size", [(2,) * 25, {"c1": 5}, {**dict.fromkeys(CATEGORICAL, 5), "c27": 5}])
def test_sizes_of_other_features_are_refused(hash_size):
    with pytest.raises(ConfigError, match="hash_size"):
        Criteo(path="x", hash_size=hash_size).open("train", "error")


@pytest.mark.parametrize("name", ["rows.tsv.gz", "rows.tsv", "memory://rows.tsv.gz"])
def test_gz_gives_what_the_plain_file_gives(tmp_path, name):
    _, plain = read(write_criteo(tmp_path / "plain.tsv", ROWS))
    path = name if "://" in name else str(tmp_path / name)
    with fsspec.open(path, "wb") as stream:
        stream.write(gzip.compress("".join(row + "\n" for row in ROWS).encode()))
    opened, compressed = read(path)
    assert opened.sequential
    assert all(same(left, right) for left, right in zip(plain, compressed, strict=True))


def test_a_last_line_without_a_line_break_and_lines_from_windows(tmp_path):
    _, plain = read(write_criteo(tmp_path / "plain.tsv", ROWS))
    for text in ("\n".join(ROWS), "".join(row + "\r\n" for row in ROWS)):
        path = tmp_path / "other.tsv"
        path.write_bytes(text.encode())
        opened, batches = read(path)
        assert opened.rows == 20
        assert all(same(left, right) for left, right in zip(plain, batches, strict=True))


BAD = {
    "39 columns where 40 are needed": [*ROWS[:6], ROWS[6].rsplit("\t", 1)[0], *ROWS[7:]],
    "41 columns where 40 are needed": [*ROWS[:6], ROWS[6] + "\tff", *ROWS[7:]],
    "1 columns where 40 are needed": [*ROWS[:6], "", *ROWS[7:]],
    "the label is '2', it must be 0 or 1": edited(0, "2"),
    "the label is '', it must be 0 or 1": edited(0, ""),
    "the label is 'yes', it must be 0 or 1": edited(0, "yes"),
    "i3 is '1.5', it must be an integer or empty": edited(3, "1.5"),
    "i1 is 'x', it must be an integer or empty": edited(1, "x"),
    "c1 is 'xyz', it must be a hexadecimal number or empty": edited(14, "xyz"),
    "c26 is '-1f', it must be a hexadecimal number or empty": edited(39, "-1f"),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_or_skipped(tmp_path, what, compressed):
    path = write_criteo(tmp_path / "bad.tsv", BAD[what])
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, row 7: {what}")
    assert "data.on_bad_row=skip" in str(caught.value)
    opened, batches = read(path, "skip")
    assert opened.bad_rows.count == 1
    assert opened.bad_rows.examples == [f"{path}, row 7: {what}" + str(caught.value).split(what)[1].split("; mend")[0]]
    left = [math.expm1(value) for batch in batches for value in batch.dense[:, 0].tolist()]
    assert left == pytest.approx([*range(6), *range(7, 20)], abs=1e-4)
    assert opened.place(opened.slices(8)[0], 6) == f"{path}, row 8"


def test_a_slice_of_bad_rows_only_is_empty(tmp_path):
    opened, (batch,) = read(write_criteo(tmp_path / "bad.tsv", ["x", "y"]), "skip")
    assert len(batch) == 0
    assert opened.bad_rows.count == 2


FIELD = st.sampled_from(["0", "1", "", "-7", "12", "ff", "7Z", "1.0", "abc", "+3", " 4", '"', "é"])


@settings(deadline=None, max_examples=150, derandomize=True)
@given(changes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39), FIELD), max_size=3))
def test_the_fast_path_rejects_exactly_what_the_slow_one_finds(changes):
    fields = [row.split("\t") for row in ROWS[:3]]
    for row, column, value in changes:
        fields[row][column] = value
    rows = ["\t".join(row) for row in fields]
    fast = parse("".join(row + "\n" for row in rows).encode(), 3)
    assert (fast is None) == any(problem(row) for row in rows)


def test_files_that_cannot_be_used(tmp_path):
    (tmp_path / "empty.tsv").touch()
    path = write_criteo(tmp_path / "rows.tsv", ROWS)
    whole = gzip.compress(path.read_bytes())
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "broken.gz").write_bytes(whole[:100] + bytes(50) + whole[150:])
    (tmp_path / "text.gz").write_bytes(path.read_bytes())
    for given_path, message in (
        (tmp_path / "none.tsv", "there is no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "empty.tsv", "the file is empty"),
        (tmp_path / "*.csv", "data.path=.*: no file matches"),
        (tmp_path / "cut.gz", r"cut.gz: the gzip stream ends in row \d+: it was cut; fetch it anew"),
        (tmp_path / "broken.gz", r"broken.gz: the gzip stream ends in row 1: it is damaged"),
        (tmp_path / "text.gz", r"text.gz: the gzip stream ends in row 1: it is damaged"),
        ("nosuch://x", "nosuch"),
    ):
        with pytest.raises(DataError, match=message):
            read(given_path)
    with pytest.raises(DataError, match="names no file"):
        Criteo(path=()).open("train", "error")


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path):
    path = write_criteo(tmp_path / "rows.tsv", ROWS)
    opened = Criteo(path=str(path)).open("train", "error")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"rows\.tsv: was changed while it was being read \(row 1 was next\)"):
        opened.read(opened.slices(100)[0])
    path.unlink()
    with pytest.raises(DataError, match="there is no such file"):
        opened.read(opened.slices(100)[0])


def test_several_files_and_globs(tmp_path: Path):
    for k in range(3):
        write_criteo(tmp_path / f"day_{k}.tsv", ROWS[k * 5 : k * 5 + 5])
    opened = Criteo(path=(str(tmp_path / "day_[01].tsv"), str(tmp_path / "day_2.tsv"))).open("train", "error")
    assert opened.rows == 15
    assert [part.rows for part in opened.slices(4)] == [4, 1] * 3
    assert opened.place(opened.slices(4)[5], 0) == f"{tmp_path}/day_2.tsv, row 5"


def test_bad_rows_far_into_a_slice_are_found(tmp_path):
    rows = [criteo_row(n) for n in range(600)]
    rows[10], rows[300], rows[301] = "x", rows[300] + "\t", rows[301][:-1] + "g"
    path = write_criteo(tmp_path / "rows.tsv", rows)
    opened = Criteo(path=str(path)).open("train", "skip")
    assert len(opened.read(opened.slices(1000)[0])) == 597
    assert [text.split(":")[0][-8:] for text in opened.bad_rows.examples] == [", row 11", " row 301", " row 302"]


def test_a_served_model_takes_the_numbers_of_a_row(tmp_path):
    opened, batches = read(write_criteo(tmp_path / "a.tsv", ROWS), hash_size=1000)
    columns = list(zip(*(row.split("\t")[1:] for row in ROWS), strict=True))
    names = [*opened.schema.dense, *CATEGORICAL]
    bases = [10] * 13 + [16] * 26
    given = {n: [int(one, b) if one else None for one in c] for n, b, c in zip(names, bases, columns, strict=True)}
    features = [{"name": feature.name, "rows": feature.rows} for feature in opened.schema.features]
    metadata = {"dense": opened.schema.dense, "features": features, "weighted": False}
    described = Criteo(path="", hash_size=1000).described()
    served = serving.Model(dict, metadata, described).prepare(given)
    batch = Batch.join(batches)
    assert served.dense.tobytes() == batch.dense.numpy().tobytes()
    assert served.values.tolist() == batch.ids.values.tolist()
