"""Rows that a program gives are kept as they are, once, a bounded number at a time; and what cannot be kept."""

import datetime
import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shadowsync.data import spooling, writer
from shadowsync.data.spooling import Given
from shadowsync.errors import ConfigError, DataError, SaveError

ROWS = 100


def frame(rows: int = ROWS) -> pl.DataFrame:
    numbers = range(rows)
    return pl.DataFrame(
        {
            "label": [number % 2 for number in numbers],
            "price": [None if number % 9 == 0 else number / 2 for number in numbers],
            "word": [None if number % 7 == 0 else f"w{number}" for number in numbers],
            "tags": [list(range(number % 3)) for number in numbers],
        }
    )


def pandas_of(table: pl.DataFrame) -> Any:
    pandas = pytest.importorskip("pandas", reason="pip install pandas to test its frames")
    return pandas.DataFrame(table.to_dict(as_series=False), index=range(5, 5 + len(table)))


def hugging_face_of(table: pl.DataFrame) -> Any:
    datasets = pytest.importorskip("datasets", reason="pip install datasets to test those of Hugging Face")
    backwards = datasets.Dataset(table.reverse().to_arrow(compat_level=pl.CompatLevel.oldest()))
    return backwards.select(range(len(table) - 1, -1, -1))


def dataset_of(table: pl.DataFrame) -> Any:
    return pyarrow.dataset.dataset(table.to_arrow(compat_level=pl.CompatLevel.oldest()))


def batches_of(table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    for part in table.iter_slices(7):
        yield part.to_dict(as_series=False)


TABLES: dict[str, Callable[[pl.DataFrame], Any]] = {
    "polars": lambda table: table,
    "lazy": lambda table: table.lazy(),
    "pandas": pandas_of,
    "arrow table": lambda table: table.to_arrow(),
    "arrow batch": lambda table: pa.RecordBatch.from_pydict(table.to_dict(as_series=False), table.to_arrow().schema),
    "arrow reader": lambda table: pa.RecordBatchReader.from_batches(
        (read := table.to_arrow()).schema, read.to_batches(max_chunksize=13)
    ),
    "arrow dataset": dataset_of,
    "hugging face": hugging_face_of,
    "columns": lambda table: table.to_dict(as_series=False),
    "generator of columns": batches_of,
    "list of frames": lambda table: list(table.iter_slices(7)),
    "generator of batches": lambda table: iter(table.to_arrow().to_batches(max_chunksize=7)),
}


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spooling, writer):
        monkeypatch.setattr(module, "ROW_GROUP", 32)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_kept_as_they_are(tmp_path: Path, kind: str) -> None:
    path, table = tmp_path / "data" / "train.parquet", TABLES[kind](frame())
    assert Given("data", table).keep(path) == ROWS
    kept = pl.read_parquet(path)
    assert kept.equals(frame().cast(kept.schema))  # type: ignore[arg-type]
    assert kept.columns == frame().columns
    metadata = pa.parquet.read_metadata(path)
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [32, 32, 32, 4]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind != "arrow reader"])
def test_the_same_rows_are_known_again_and_others_are_not(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "train.parquet"
    Given("data", TABLES[kind](frame())).keep(path)
    Given("data", TABLES[kind](frame())).check_kept(path)
    for other in (frame().with_columns(pl.col("label") + 1), frame().rename({"word": "words"})):
        with pytest.raises(ConfigError, match=r"train\.parquet holds other rows than data: leave data out to go on"):
            Given("data", TABLES[kind](other)).check_kept(path)
    with pytest.raises(DataError, match="data holds no rows"):
        Given("data", TABLES[kind](frame().clear())).check_kept(path)
    assert Given("data", TABLES[kind](frame(ROWS - 1))).keep(path) == ROWS - 1, "in place of those"


@pytest.mark.parametrize("kind", ["polars", "pandas", "arrow table", "hugging face"])
def test_more_rows_are_other_rows_where_their_number_is_known(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "train.parquet"
    Given("data", TABLES[kind](frame())).keep(path)
    with pytest.raises(ConfigError, match="holds other rows"):
        Given("data", TABLES[kind](frame(ROWS + 1))).check_kept(path)


def test_no_more_than_a_row_group_is_held(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    ahead: list[int] = []

    def batches() -> Iterator[pl.DataFrame]:
        for number, part in enumerate(frame(400).iter_slices(10)):
            written = next(tmp_path.glob(".train*")).stat().st_size
            ahead.append(written)
            assert number < 10 or written > 0, "nothing was written after three row groups"
            yield part

    assert Given("data", batches()).keep(path) == 400
    assert ahead == sorted(ahead)
    assert len(set(ahead)) > 5


def test_a_loader_of_tensors(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, 9, (ROWS, 3), generator=draw), torch.arange(ROWS) % 2 == 0
    rows = TensorDataset(ids, labels)

    def named(items: list[Any]) -> dict[str, Any]:
        return {
            "ids": torch.stack([one for one, _ in items]),
            "label": torch.stack([label for _, label in items]),
            "price": np.arange(len(items), dtype=np.float32),
            "history": [one[: one[0] % 3] for one, _ in items],
            "name": [f"n{int(one[0])}" for one, _ in items],
        }

    loader: Any = DataLoader(rows, batch_size=8, collate_fn=named)
    assert Given("data", loader).keep(tmp_path / "a.parquet") == ROWS
    kept = pl.read_parquet(tmp_path / "a.parquet")
    assert kept.schema["ids"] == pl.List(pl.Int64)
    assert kept["ids"].to_list() == ids.tolist()
    assert kept["label"].to_list() == labels.tolist()
    assert kept["history"].to_list() == [one[: one[0] % 3] for one in ids.tolist()]
    assert kept["price"].to_list()[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_tensors_of_any_width(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0], requires_grad=True)
    batch = {"a": values.bfloat16(), "b": values.half(), "c": [values.bfloat16()] * 2, "d": values[:, None].bfloat16()}
    Given("data", batch).keep(tmp_path / "a.parquet")
    kept = pl.read_parquet(tmp_path / "a.parquet").to_dict(as_series=False)
    assert kept == {"a": [1.5, -2], "b": [1.5, -2], "c": [[1.5, -2]] * 2, "d": [[1.5], [-2]]}


def odd_pandas(what: str) -> Any:
    table = pandas_of(frame())
    if what == "levels":
        return table.set_index(["label", "word"])
    if what == "named":
        return table.set_index("word")
    if what in ("mixed", "column"):
        table["word"] = table["word"].astype(object)
        table.loc[table.index[3], "word"] = 7
        return table if what == "mixed" else {"word": table["word"]}
    return table["label"] if what == "series" else table.rename(columns={"word": 3})


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("number", DataError, r"data: .*its column 3 has no text as its name: rename it \(frame\.columns\)"),
        ("levels", DataError, r"data: .*its index of several levels would be lost: .*frame\.reset_index\(\)"),
        ("named", DataError, r"data: .*its index 'word' would be lost: make a column of it by frame\.reset_index\(\)"),
        (
            "mixed",
            DataError,
            r"data: .*the column 'word' holds values of several types, or of none that is known: give",
        ),
        ("column", DataError, r"data: .*the column 'word' holds values of several types"),
        ("series", ConfigError, r"data is a pandas.*Series: give a polars, pandas"),
    ],
)
def test_what_of_pandas_is_no_table(tmp_path: Path, what: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Given("data", odd_pandas(what)).keep(tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


LATER = datetime.datetime(2024, 1, 1)
PLAIN: dict[str, tuple[Any, list[Any]]] = {
    "numbers": ([3, 2.5, None], [3.0, 2.5, None]),
    "numbers of numpy": ([np.int64(3), np.float32(2.5)], [3.0, 2.5]),
    "lists": ([[1], [2.5], None, []], [[1.0], [2.5], None, []]),
    "objects": (np.array([3, 2.5, None], dtype=object), [3.0, 2.5, None]),
    "words": (np.array(["a", None], dtype=object), ["a", None]),
    "seconds": (np.array(["2024-01-01", "NaT"], dtype="M8[s]"), [LATER, None]),
    "hours": (np.array([24], dtype="m8[h]"), [datetime.timedelta(1)]),
    "days": (np.array(["2024-01-01"], dtype="M8[D]"), [LATER.date()]),
    "masked": (np.ma.masked_array([7, 8], [True, False]), [None, 8]),
    "masked days": (
        np.ma.masked_array(np.array(["2023-01-01", "2024-01-01"], "M8[D]"), [True, False]),
        [None, LATER.date()],
    ),
    "masked lists": (np.ma.masked_array([[1, 2]], [[False, True]]), [[1, None]]),
}


@pytest.mark.parametrize("what", PLAIN)
def test_values_of_python_and_numpy_are_what_they_say(tmp_path: Path, what: str) -> None:
    given, wanted = PLAIN[what]
    Given("data", {"a": given}).keep(tmp_path / "a.parquet")
    assert pl.read_parquet(tmp_path / "a.parquet")["a"].to_list() == wanted


def test_a_column_without_values_takes_the_type_of_those_that_come(tmp_path: Path) -> None:
    batches = [{"a": [None, None], "b": [[], None]}, {"b": [["x"], []], "a": [1, None]}, {"a": [None], "b": [None]}]
    Given("data", batches).keep(tmp_path / "a.parquet")
    kept = pl.read_parquet(tmp_path / "a.parquet")
    assert kept.to_dict(as_series=False) == {"a": [None, None, 1, None, None], "b": [[], None, ["x"], [], None]}


def fails_after(rows: int, error: Exception) -> Iterator[dict[str, Any]]:
    for number in range(rows):
        yield {"a": [number]}
    raise error


BAD: dict[str, tuple[Any, str]] = {
    "no batch": ([], "data holds no rows"),
    "no row": (frame().clear(), "data holds no rows"),
    "no lazy row": (frame().clear().lazy(), "data holds no rows"),
    "another column": ([{"a": [1]}, {"a": [1], "b": [2]}], "data: batch 2 has also the column 'b': give all the same"),
    "a column less": ([{"a": [1], "b": [2]}, {"a": [1]}], "data: batch 2 lacks the column 'b'"),
    "another type": (
        [{"a": [1]}, {"a": ["x"]}],
        "data: batch 2 holds String in the column 'a', those before it hold I",
    ),
    "a late type": (
        [{"a": [None] * 40}, {"a": ["x"]}],
        "data: batch 2 holds String in the column 'a', those before it hold Null",
    ),
    "lengths": ([{"a": [1], "b": [1, 2]}], "data, batch 1: .*the column 'a' has 1 values, 'b' 2"),
    "a row": ([{"a": 1}], "data, batch 1: .*the column 'a' is a int: give a list, an array or a tensor"),
    "text": ([{"a": "xyz"}], "data, batch 1: .*the column 'a' is a str"),
    "a cube": ([{"a": torch.zeros(2, 2, 2)}], "data, batch 1: .*the column 'a' is of 3 dimensions"),
    "mixed": ([{"a": [1, "x"]}], "data, batch 1: .*the column 'a' holds values of several types, or of none"),
    "mixed text": ({"a": ["x", 1]}, "data: .*the column 'a' holds values of several types"),
    "mixed objects": ({"a": np.array([1, "x"], dtype=object)}, "data: .*the column 'a' holds values of several types"),
    "lists and values": ({"a": [[1.5], 2]}, "data: .*the column 'a' holds values of several types"),
    "signed and unsigned": ({"a": [-1, 2**63]}, "data: .*the column 'a' holds values of several types"),
    "very large numbers": ({"a": [2**200]}, "data: .*the column 'a' holds values of several types, or of none that"),
    "complex numbers": ({"a": np.zeros(3, complex)}, "data: batch 1 holds Object in the column 'a': give numbers"),
    "numbers of more bits": ({"a": [2**70, 1]}, "data: batch 1 holds Int128 in the column 'a': give numbers"),
    "lists of numbers of more bits": ({"a": [[2**70], [1]]}, r"data: batch 1 holds List\(Int128\) in the column 'a'"),
    "unsigned numbers of more bits": (
        pl.DataFrame({"a": pl.Series([1], dtype=pl.UInt128)}),
        "data: batch 1 holds UInt128 in the column 'a': give numbers of up to 64 bits",
    ),
    **{
        f"arrow's {kind}": (
            pa.table({"a": pa.nulls(2, kind)}),
            f"data: .*the column 'a' holds {re.escape(str(kind))}: give numbers of up to 64 bits",
        )
        for kind in (
            *(pa.decimal256(60, 2), pa.month_day_nano_interval(), pa.list_(pa.decimal256(60, 2))),
            *(pa.list_view(pa.int64()), pa.run_end_encoded(pa.int32(), pa.int64()), pa.decimal32(5, 1)),
            *(pa.list_(pa.decimal256(60, 2), 2), pa.struct([("b", pa.month_day_nano_interval())])),
        )
    },
    "a column as a batch": ([pl.Series("a", [1])], r"data: its batch 1 is a polars.*Series, each must be a polars"),
    "pairs": ([([1], [0])], "data: its batch 1 is a tuple, each must be a polars, pandas"),
    "its own error": (fails_after(3, KeyError("user")), "data: cannot be read: 'user'"),
    "its own file": (fails_after(50, FileNotFoundError("x.bin")), r"data: x\.bin"),
}


@pytest.mark.parametrize("what", BAD)
def test_rows_that_cannot_be_kept_leave_nothing(tmp_path: Path, what: str) -> None:
    rows, said = BAD[what]
    with pytest.raises(DataError, match=said):
        Given("data", rows).keep(tmp_path / "train.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (7, "data is a int: give a polars, pandas"),
        (object(), "data is a object"),
        (pl.Series([1]), "data is a polars.*Series: give a polars, pandas"),
        ("rows.parquet", "data='rows.parquet' is a path and not rows: set data.path"),
        (Path("rows.csv"), "is a path and not rows"),
        (
            TensorDataset(torch.zeros(3)),
            "data is a torch.utils.data.dataset.TensorDataset: .*for instance a DataLoader",
        ),
    ],
)
def test_what_is_no_table(rows: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Given("data", rows)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.pa.parquet.ParquetWriter, "write_table", full)
    with pytest.raises(SaveError, match=r"train\.parquet: cannot be written: No space left on device"):
        Given("data", frame()).keep(tmp_path / "train.parquet")
    assert list(tmp_path.iterdir()) == []
