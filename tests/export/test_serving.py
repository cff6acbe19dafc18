"""Raw rows to an exported model: bit by bit what training makes of them, and a sentence for each mistake."""

import datetime
import decimal
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from export_cases import CASES, FEATURES, export, job_logits, make_inputs, make_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learnt_tables import opened

from shadowsync import serving
from shadowsync.data.batch import Batch
from shadowsync.data.source import OpenSource
from shadowsync.data.tables import OpenTable
from shadowsync.export import export_model


def no_program(*inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    raise AssertionError("only what goes into it is asked for")


def served(source: OpenTable, **more: Any) -> serving.Model:
    """As the exported file would say it, and `more` of its metadata."""
    features = [{"name": one.name, "rows": one.rows, "several": one.multi_hot} for one in source.schema.features]
    metadata = {"dense": list(source.schema.dense), "features": features, "weighted": bool(source.source.weights)}
    described = json.loads(json.dumps(source.source.described(), allow_nan=False))
    return serving.Model(no_program, json.loads(json.dumps({**metadata, **more})), described)


def read(source: OpenSource) -> Batch:
    (part,) = source.slices(1 << 20)
    return source.read(part)


def assert_same(found: serving.Inputs, wanted: Batch) -> None:
    assert found.dense.tobytes() == wanted.dense.numpy().tobytes()
    assert found.values.tolist() == wanted.ids.values.tolist()
    assert found.offsets is not None
    assert found.offsets.tolist() == wanted.ids.bag_offsets().tolist()
    weights = None if wanted.ids.weights is None else wanted.ids.weights.tolist()
    assert (None if found.weights is None else found.weights.tolist()) == weights


# --- as training -----------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
LONG = st.integers(-(2**63), 2**63 - 1)
TIMES = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
CELLS: dict[str, tuple[pl.DataType, st.SearchStrategy[Any], list[str]]] = {
    "text": (pl.String(), TEXT, ["hash", "vocabulary"]),
    "long": (pl.Int64(), LONG, ["hash", "vocabulary", "buckets", "dense"]),
    "unsigned": (pl.UInt64(), st.integers(0, 2**64 - 1), ["hash", "vocabulary", "buckets", "dense"]),
    "small": (pl.Int8(), st.integers(-3, 3), ["hash", "vocabulary", "buckets", "dense", "as_is"]),
    "double": (pl.Float64(), st.floats(-1e37, 1e37), ["buckets", "dense"]),
    "single": (pl.Float32(), st.floats(-1e6, 1e6, width=32), ["buckets", "dense"]),
    "whole": (pl.Float64(), st.integers(-(2**53), 2**53).map(float), ["hash", "vocabulary"]),
    "flag": (pl.Boolean(), st.booleans(), ["hash", "vocabulary", "buckets", "dense"]),
    "day": (pl.Date(), st.dates(), ["hash", "vocabulary", "buckets", "dense"]),
    "moment": (pl.Datetime("us"), TIMES, ["hash", "vocabulary", "buckets", "dense"]),
    "span": (pl.Duration("us"), st.timedeltas(datetime.timedelta(-999), datetime.timedelta(999)), ["hash", "dense"]),
    "clock": (pl.Time(), st.times(), ["hash", "vocabulary", "buckets", "dense"]),
    "money": (
        pl.Decimal(20, 4),
        st.decimals(-(10**9), 10**9, places=4, allow_nan=False).map(lambda value: value + decimal.Decimal(0)),
        ["hash", "vocabulary", "buckets", "dense"],
    ),
    "texts": (pl.List(pl.String()), st.lists(TEXT | st.none(), max_size=3), ["hash", "vocabulary"]),
    "longs": (pl.List(pl.Int64()), st.lists(LONG | st.none(), max_size=3), ["hash", "vocabulary", "buckets"]),
}
OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "hash": st.fixed_dictionaries({"rows": st.sampled_from([2, 1000, 1 << 32])}),
    "vocabulary": st.fixed_dictionaries({"min_count": st.integers(1, 2), "max_size": st.integers(1, 9)}),
    "buckets": st.fixed_dictionaries({"count": st.integers(2, 5)}),
    "as_is": st.just({"rows": 4, "missing": "own"}),
    "dense": st.fixed_dictionaries(
        {
            "log": st.booleans(),
            "standardise": st.booleans(),
            "clip": st.none() | st.just(0.1),
            "missing": st.sampled_from(["mean", "indicator", -2.5]),
        }
    ),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, Any]]:
    """Rows to train on, other rows, and declarations, of a column of each type and crosses of some."""
    names = draw(st.lists(st.sampled_from(list(CELLS)), min_size=1, unique=True))
    declared: dict[str, Any] = {}
    for name in names:
        kind = draw(st.sampled_from(CELLS[name][2]))
        declared[name] = {"kind": kind, **draw(OPTIONS[kind])}
    single = [name for name in names if not name.endswith("ts") and name not in ("longs", "double", "single")]
    if len(single) > 1:
        declared["crossed"] = {"kind": "cross", "of": single[:2], "rows": 1000}
    if all(each["kind"] == "dense" for each in declared.values()):
        names, declared["text"] = [*dict.fromkeys([*names, "text"])], {"kind": "hash"}
    frames = []
    for _ in range(2):
        rows = draw(st.integers(1, 8))
        columns = {}
        for name in names:
            kind, cells, _ = CELLS[name]
            cells = st.integers(0, 3) if declared[name]["kind"] == "as_is" else cells
            columns[name] = pl.Series(draw(st.lists(cells | st.none(), min_size=rows, max_size=rows)), dtype=kind)
        frames.append(pl.DataFrame(columns))
    return frames[0], frames[1], declared


@settings(deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(tables())
def test_serving_is_bit_by_bit_what_training_is(
    tmp_path: Path, made: tuple[pl.DataFrame, pl.DataFrame, dict[str, Any]]
) -> None:
    first, other, declared = made
    trained = opened(tmp_path / "a.parquet", first, columns=declared)
    model = served(trained)
    for frame in (first, other):
        source = opened(tmp_path / "b.parquet", frame, trained.source.learnt, columns=declared)
        assert_same(model.prepare(frame.to_dict(as_series=False)), read(source))
        arrays = {name: frame[name].to_numpy() for name in frame.columns if not frame[name].null_count()}
        arrays = {name: array for name, array in arrays.items() if name not in ("texts", "longs", "clock", "money")}
        assert_same(model.prepare({**frame.to_dict(as_series=False), **arrays}), read(source))


def test_arrays_of_every_unit_and_width_are_taken(tmp_path: Path) -> None:
    moments = [datetime.datetime(2024, 3, 1, 12, 30, 1, 5), datetime.datetime(1960, 1, 1, 0, 0, 0, 7), None]
    frame = pl.DataFrame(
        {
            "ms": pl.Series(moments, dtype=pl.Datetime("ms")),
            "ns": (pl.Series(moments, dtype=pl.Datetime("ns")).to_physical() + 1).cast(pl.Datetime("ns")),
            "span": pl.Series([-1, 1001, None], dtype=pl.Duration("ns")),
            "zone": pl.Series(moments, dtype=pl.Datetime("us")).dt.replace_time_zone("UTC"),
            "short": pl.Series([1.5, None, -2.5], dtype=pl.Float32),
            "matrix": pl.Series([[1, 2], [3, 4], [5, 6]]),
        }
    )
    kinds = dict.fromkeys(("ms", "ns", "zone", "matrix"), "hash")
    source = opened(tmp_path / "a.parquet", frame, columns={**kinds, "short": "dense"})
    zone = datetime.timezone(datetime.timedelta(hours=3))
    rows = {
        "ms": frame["ms"].to_numpy(),
        "span": frame["span"].to_numpy(),
        "ns": [np.datetime64(value, "ns") if value is not None else None for value in frame["ns"].to_numpy()],
        "zone": [None if one is None else one.replace(tzinfo=datetime.UTC).astimezone(zone) for one in moments],
        "short": np.array([1.5, np.nan, -2.5], dtype=np.float32),
        "matrix": np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int16),
    }
    assert_same(served(source).prepare(rows), read(source))
    rows |= {"ns": frame["ns"].to_numpy(), "matrix": [np.array([1, 2]), np.array([3, 4]), np.array([5, 6])]}
    assert_same(served(source).prepare(rows), read(source))


def test_arrays_of_several_types_keep_their_numbers(tmp_path: Path) -> None:
    large = 2**60 + 1
    frame = pl.DataFrame({"seen": [[large], [], [large + 2, 5]]})
    source = opened(tmp_path / "a.parquet", frame, columns={"seen": "hash"})
    for last in (np.array([large + 2, 5]), np.array([large + 2, 5], dtype=np.uint64)):
        assert_same(served(source).prepare({"seen": [np.array([large]), np.array([]), last]}), read(source))


def test_what_pandas_calls_na_is_missing(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="pip install pandas to test its missing value")
    frame = pl.DataFrame({"price": [1.5, None], "user": [None, 3], "tags": [None, ["x", None]]})
    source = opened(tmp_path / "a.parquet", frame, columns={"price": "dense", "user": "hash", "tags": "hash"})
    price, user = pd.array([1.5, None], dtype="Float64"), pd.Series([None, 3], dtype="Int64")
    rows = {"price": price, "user": user, "tags": pd.Series([pd.NA, ["x", pd.NA]])}
    assert_same(served(source).prepare(rows), read(source))
    assert_same(served(source).prepare({**rows, "user": [pd.NA, 3]}), read(source))


def test_what_an_array_masks_is_missing(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"price": [1.5, None], "user": [None, 3], "tags": [[None, 2], [3, 4]], "day": [None, datetime.date(2024, 3, 1)]}
    )
    kinds = {"price": "dense", "user": "hash", "tags": "hash", "day": "hash"}
    source = opened(tmp_path / "a.parquet", frame, columns=kinds)
    rows = {
        "price": np.ma.masked_array([1.5, 9.0], [False, True]),
        "user": np.ma.masked_array([9, 3], [True, False]),
        "tags": np.ma.masked_array([[9, 2], [3, 4]], [[True, False], [False, False]]),
        "day": np.ma.masked_array(np.array(["2023-01-01", "2024-03-01"], dtype="M8[D]"), [True, False]),
    }
    assert_same(served(source).prepare(rows), read(source))


@pytest.mark.parametrize(("labels", "shape"), [([], (0,)), (["click"], (0,)), (["click", "watched"], (0, 2))])
def test_no_rows_have_a_column_for_each_of_several_labels(tmp_path: Path, labels: list[str], shape: object) -> None:
    source = opened(tmp_path / "a.parquet", {"user": ["a", "b"]}, columns={"user": "hash"})
    assert served(source, labels=[{"name": name} for name in labels]).score({"user": []}).shape == shape


def test_lists_with_weights_and_sizes_of_their_own(tmp_path: Path) -> None:
    frame = pl.DataFrame({"seen": [["a", "b"], [], ["c"]], "marks": [[0.5, 2.0], [], [1.0]], "user": [3, 2, 1]})
    options = {"categorical": ["seen", "user"], "hash_size": {"seen": 50}, "rows": {"user": 4}}
    source = opened(tmp_path / "a.parquet", frame, weights={"seen": "marks"}, **options)
    model = served(source)
    assert model.columns == ("seen", "user", "marks")
    assert_same(model.prepare(frame.to_dict(as_series=False)), read(source))
    with pytest.raises(ValueError, match=r"row 1: marks and seen are of different length"):
        model.prepare({"seen": [["a"]], "marks": [[]], "user": [0]})
    with pytest.raises(ValueError, match=r"row 1: marks has a weight that is not a finite number"):
        model.prepare({"seen": [["a"]], "marks": [[None]], "user": [0]})


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_of_before_takes_numbers_and_ids(tmp_path: Path) -> None:
    """It says nothing of its columns, nor which of them have several ids."""
    case = CASES["own module"]
    module = export(case, tmp_path / "model.pt2")
    dense, values, offsets = make_inputs(case, 5)
    lists = [part.tolist() for part in values.tensor_split(offsets[1:-1])]
    rows: dict[str, Any] = {name: lists[5 * place : 5 * place + 5] for place, name in enumerate(FEATURES)}
    rows |= {name: dense[:, place].numpy() for place, name in enumerate(case.spec.dense)}
    wanted = job_logits(case, module, (dense, values, offsets)).sigmoid()
    model = serving.load(tmp_path / "model.pt2")
    torch.testing.assert_close(torch.from_numpy(model.score(rows)), wanted, rtol=1e-6, atol=1e-6)
    assert model.score({name: [] for name in model.columns}).tolist() == []
    with pytest.raises(ValueError, match=r"row 1: number 0 is missing"):
        model.score({**rows, "number 0": [None] * 5})


SCRIPT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("shadowsync", "polars", "pyarrow", "pydantic", "msgspec", "safetensors"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
import serving

assert "torch" not in sys.modules
print(json.dumps(serving.load(sys.argv[2]).score(json.loads(sys.stdin.read())).tolist()))
"""


def test_the_file_beside_a_server_needs_numpy_and_torch(tmp_path: Path) -> None:
    case = CASES["dcn, mixed widths, weights"]
    (tmp_path / "server").mkdir()
    shutil.copy(serving.__file__, tmp_path / "server")
    described = {
        "dense": {
            f"number {place}": {"kind": "dense", "log": False, "standardise": True, "clip": None, "missing": "mean"}
            for place in range(case.dense)
        },
        "ids": {
            "seen": {"kind": "hash", "rows": 30, "missing": "own"},
            "user": {"kind": "vocabulary", "min_count": 1, "max_size": 9, "missing": "own"},
            "bought": {"kind": "hash", "rows": 30, "missing": "own"},
        },
        "fits": {"number 0": {"mean": 2.0, "scale": 4.0}, "user": {"form": "text"}},
        "values": {"user": ["ann", "bö"]},
        "weights": {"seen": "seen weights"},
    }
    rows: dict[str, Any] = {"number 0": [1, None, 3], "number 1": [0.5, 1, 2], "number 2": [True, False, None]}
    rows |= {"user": ["bö", None, ""], "seen": [["x", None], [], ["y"]], "bought": [["x"], None, []]}
    rows["seen weights"] = [[0.5, 1.0], [], [2.0]]
    held = make_rows(case.tables)
    spec = replace(case.spec, columns=described, several=["seen", "bought"])
    export_model(case.build(), spec, lambda name, start, stop: held[name][start:stop], tmp_path / "model.pt2")
    command = [sys.executable, "-I", "-c", SCRIPT, str(tmp_path / "server"), str(tmp_path / "model.pt2")]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == serving.load(tmp_path / "model.pt2").score(rows).tolist()
    assert len({*json.loads(done.stdout)}) == 3


def test_what_is_no_exported_model_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.pt2").write_text("no model")
    for name in ("none.pt2", "text.pt2"):
        with pytest.raises(ValueError, match=rf"{name} is no file that shadowsync export wrote"):
            serving.load(tmp_path / name)


# --- mistakes --------------------------------------------------------------------------------------------------------

ROWS: Mapping[str, Any] = {
    "price": [1.5, None],
    "user": ["a", "b"],
    "item": [0, 4],
    "tags": [["x"], []],
    "day": [datetime.date(2024, 1, 1)] * 2,
    "number": [7, 2**63 - 1],
}
DECLARED: Mapping[str, Any] = {
    "price": {"kind": "dense", "missing": "indicator"},
    "user": {"kind": "vocabulary", "min_count": 1},
    "item": {"kind": "as_is", "rows": 5},
    "tags": "hash",
    "day": {"kind": "buckets", "missing": "error"},
    "number": "hash",
    "both": {"kind": "cross", "of": ["user", "number"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> serving.Model:
    frame = pl.DataFrame(dict(ROWS))
    return served(opened(tmp_path_factory.mktemp("serving") / "a.parquet", frame, columns=dict(DECLARED)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"item": None}, "there is no column 'item': the model takes price, user, item, tags, day, number"),
        ({"item": [1]}, "column 'item' has 1 rows, and column 'price' has 2"),
        ({"item": "ab"}, "column 'item' is str, it must be a list or an array with a value for each row"),
        ({"item": 7}, "column 'item' is int, it must be a list or an array with a value for each row"),
        ({"item": np.array(7)}, "column 'item' is ndarray, it must be a list or an array"),
        ({"item": [0, 9]}, "row 2: item has id 9, outside of 0 … 4"),
        ({"item": [0, None]}, "row 2: item has no id"),
        ({"item": [0, 1.5]}, "row 2: item is 1.5, which is no whole number"),
        ({"item": ["0", "1"]}, "column 'item' holds strings, and the model was trained on integers: cast it"),
        ({"user": [1, 2]}, "column 'user' holds integers, and the model was trained on strings: cast it"),
        ({"user": [decimal.Decimal("8.00")] * 2}, "column 'user' holds decimals, and the model was trained on strings"),
        ({"user": ["a", decimal.Decimal("8.00")]}, "column 'user' holds Decimal and str, it must hold text, numbers"),
        ({"user": ["\ud800", "a"]}, r"column 'user' holds '\ud800', which UTF-8 has no bytes for"),
        ({"user": [b"a", b"b"]}, "column 'user' holds bytes, it must hold text, numbers"),
        ({"user": np.array([b"a", b"b"])}, "column 'user' holds bytes_, it must hold text, numbers"),
        ({"user": [["a"], ["b"]]}, "column 'user' holds lists, and the model takes one value for each row"),
        ({"tags": ["a", "b"]}, "column 'tags' holds single values, and the model takes a list for each row"),
        ({"tags": [["a"], "b"]}, "column 'tags' holds lists and single values: give a list for each row"),
        ({"tags": [["a"], [1]]}, "column 'tags' holds int and str, it must hold text"),
        ({"day": [None, ROWS["day"][0]]}, "row 1: day is missing"),
        ({"day": ["2024-01-01", "2024-01-02"]}, "column 'day' holds text, it must hold numbers"),
        ({"number": [2**64, 0]}, "column 'number' holds integers of more than 64 bits: give them as text"),
        ({"number": [-1, 2**63]}, "column 'number' holds integers of more than 64 bits"),
        ({"number": [0.5, 1]}, "row 1: number is 0.5, which is no whole number"),
        ({"price": [1e39, 1]}, "row 1: price is 1e+39, it must be a finite number of at most 1e+38"),
        ({"price": [1, float("inf")]}, "row 2: price is inf, it must be a finite number"),
        ({"price": ["1", "2"]}, "column 'price' holds text, it must hold numbers"),
    ],
)
def test_rows_that_do_not_fit_are_a_sentence(model: serving.Model, changed: dict[str, Any], said: str) -> None:
    model.prepare(ROWS)
    rows = {**ROWS, **changed}
    rows = {name: cells for name, cells in rows.items() if cells is not None}
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        model.prepare(rows)


def test_columns_of_another_run_are_refused(tmp_path: Path) -> None:
    source = opened(tmp_path / "a.parquet", pl.DataFrame(dict(ROWS)), columns=dict(DECLARED))
    features = [{"name": one.name, "rows": one.rows} for one in source.schema.features]
    metadata = {"dense": list(source.schema.dense), "features": features, "weighted": False}
    described = json.loads(json.dumps(source.source.described()))
    larger = {**described, "values": {"user": ["a", "b", "c"]}}
    with pytest.raises(ValueError, match=r"column 'user' has ids up to 4 and its table 4 rows: .* of another model"):
        serving.Model(no_program, metadata, larger)
    fewer = {**described, "ids": {name: kind for name, kind in described["ids"].items() if name != "item"}}
    with pytest.raises(ValueError, match=r"names other columns than metadata\.json: they are of different models"):
        serving.Model(no_program, metadata, fewer)
    with pytest.raises(ValueError, match=r"does not say which columns hold the weights of ids: export the model again"):
        serving.Model(no_program, {**metadata, "weighted": True}, {**described, "weights": {}})
