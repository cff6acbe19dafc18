"""What becomes of a column: every kind against numpy, types as they come, what was learnt and kept, what is wrong."""

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
import torch
from data_samples import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learnt_tables import open_again, opened

from shadowsync import registry
from shadowsync.config import parse
from shadowsync.data import columns as kinds
from shadowsync.data import fitting, tables
from shadowsync.data.batch import Batch
from shadowsync.data.columns import Fit
from shadowsync.data.fitting import Learnt, LearntState, learn
from shadowsync.data.frame import batch_of
from shadowsync.data.parquet import Parquet
from shadowsync.data.splits import Selected, open_parts
from shadowsync.data.tables import OpenTable
from shadowsync.data.values import Values, hash_strings
from shadowsync.errors import ConfigError, DataError
from shadowsync.serving import mix, to_rows

DAY = datetime.date(1970, 1, 1)


def all_rows(source: OpenTable) -> Batch:
    return Batch.join([source.read(part) for part in source.slices(1 << 20)])


def ids(source: OpenTable, feature: int = 0) -> list[int]:
    return all_rows(source).ids.select([feature]).values.tolist()


def columns(**declared: Any) -> dict[str, Any]:
    """With a column of ids, which every model needs."""
    return {"columns": {**declared, "id": {"kind": "as_is", "rows": 10_000}}}


def dense(path: Path, values: Any, **options: Any) -> torch.Tensor:
    frame = {"x": values, "id": range(len(values))}
    return all_rows(opened(path, frame, **columns(x={"kind": "dense", **options}))).dense


# --- dense columns ---------------------------------------------------------------------------------------------------

NUMBERS = np.random.default_rng(0).lognormal(3, 2, 5000) - 5


@pytest.mark.parametrize("pieces", [1 << 17, 700])
@pytest.mark.parametrize(
    "options", [{}, {"log": True}, {"clip": 0.05}, {"log": True, "clip": 0.01}, {"standardise": False, "clip": 0.1}]
)
def test_dense_columns_are_what_numpy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(tables, "PIECE", pieces)
    wanted = NUMBERS
    if clip := options.get("clip"):
        wanted = np.clip(wanted, *np.quantile(wanted, [clip, 1 - clip]))
    if options.get("log"):
        wanted = np.log1p(np.maximum(wanted, 0))
    if options.get("standardise", True):
        wanted = (wanted - wanted.mean()) / wanted.std()
    found = dense(tmp_path / "rows.parquet", NUMBERS, **options)
    np.testing.assert_allclose(found[:, 0].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_a_missing_number_counts_as_what_is_said(tmp_path: Path) -> None:
    path, values = tmp_path / "rows.parquet", [1.0, None, 3.0, 5.0]
    deviation = np.std([1, 3, 5])
    plain = [-2 / deviation, 0.0, 0.0, 2 / deviation]
    np.testing.assert_allclose(dense(path, values)[:, 0], plain, rtol=1e-6)
    shown = dense(path, values, missing="indicator")
    np.testing.assert_allclose(shown[:, 0], plain, rtol=1e-6)
    assert shown[:, 1].tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(dense(path, values, missing=-2)[:, 0], [plain[0], -5 / deviation, *plain[2:]], rtol=1e-6)
    assert dense(path, values, standardise=False)[:, 0].tolist() == [1, 0, 3, 5]
    assert dense(path, values, standardise=False, missing=7)[:, 0].tolist() == [1, 7, 3, 5]
    with pytest.raises(DataError, match=r"row 2: x is missing; mend it, or leave such rows out"):
        dense(path, values, missing="error")
    for odd in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"data\.columns\.x\.missing.* finite number"):
            dense(path, values, missing=odd)


def test_indicators_stand_behind_their_columns(tmp_path: Path) -> None:
    frame = {"a": [1.0, None], "b": [None, 2.0], "c": [3.0, 4.0], "id": [0, 1]}
    kinds = {name: {"kind": "dense", "standardise": False, "missing": "indicator"} for name in "ab"}
    source = opened(tmp_path / "rows.parquet", frame, **columns(**kinds, c={"kind": "dense", "standardise": False}))
    assert source.schema.dense == ("a", "a_missing", "b", "b_missing", "c")
    assert all_rows(source).dense.tolist() == [[1, 0, 0, 1, 3], [0, 1, 2, 0, 4]]


def test_numbers_that_are_all_alike_or_all_missing_become_0(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    for values in ([1e9 + 0.1] * 3, pl.Series([None] * 3), pl.Series([None] * 3, dtype=pl.Float64)):
        assert dense(path, values)[:, 0].tolist() == [0, 0, 0]


def test_large_numbers_keep_their_differences(tmp_path: Path) -> None:
    """float32 alone would make all of them one number."""
    found = dense(tmp_path / "rows.parquet", [1_700_000_000_001, 1_700_000_000_002, 1_700_000_000_003])
    np.testing.assert_allclose(found[:, 0], [-(1.5**0.5), 0, 1.5**0.5], rtol=1e-5)


def test_dense_columns_of_the_old_key_are_standardised_unless_that_is_off(tmp_path: Path) -> None:
    frame = {"x": [10.0, 20.0, None], "id": [0, 1, 2]}
    options: dict[str, Any] = {"dense": ("x",), "categorical": ("id",), "rows": 3}
    assert all_rows(opened(tmp_path / "a", frame, **options)).dense.tolist() == [[-1], [1], [0]]
    assert all_rows(opened(tmp_path / "a", frame, standardise=False, **options)).dense.tolist() == [[10], [20], [0]]
    logged = all_rows(opened(tmp_path / "a", frame, standardise=False, log_dense=True, **options)).dense
    assert torch.equal(logged, torch.log1p(torch.tensor([[10.0], [20.0], [0.0]])))


# --- categorical columns ---------------------------------------------------------------------------------------------


def test_a_vocabulary_has_the_most_frequent_values_first(tmp_path: Path) -> None:
    words = ["b"] * 3 + ["a"] * 3 + ["c"] * 5 + ["once", None]
    source = opened(tmp_path / "rows.parquet", {"w": words}, columns={"w": "vocabulary"})
    assert ids(source) == [4] * 3 + [3] * 3 + [2] * 5 + [1, 0]
    assert source.schema.features[0].rows == 5
    every = opened(tmp_path / "rows.parquet", {"w": words}, columns={"w": {"kind": "vocabulary", "min_count": 1}})
    assert every.schema.features[0].rows == 6
    two = opened(tmp_path / "rows.parquet", {"w": words}, columns={"w": {"kind": "vocabulary", "max_size": 2}})
    assert ids(two) == [1] * 3 + [3] * 3 + [2] * 5 + [1, 0]
    new = opened(tmp_path / "new.parquet", {"w": ["c", "never seen", "a", None, ""]}, learnt=source.source.learnt)
    assert ids(new) == [2, 1, 3, 0, 1]


def test_columns_of_one_table_have_one_vocabulary(tmp_path: Path) -> None:
    frame = {"item": ["a", "b", "b"], "seen": [["c", "a"], [], ["a", None, "c"]]}
    declared = {"item": "vocabulary", "seen": "vocabulary"}
    one = {"item": "items", "seen": "items"}
    source = opened(tmp_path / "rows.parquet", frame, columns=declared, tables=one)
    assert [feature.rows for feature in source.schema.features] == [5, 5]
    assert (ids(source, 0), ids(source, 1)) == ([2, 3, 3], [4, 2, 2, 0, 4])
    with pytest.raises(ConfigError, match="puts 'item' and 'seen' into one table, and they are declared otherwise"):
        opened(tmp_path / "rows.parquet", frame, columns={**declared, "seen": "hash"}, tables=one)
    numbers = {**frame, "seen": [[1], [], [2]]}
    with pytest.raises(DataError, match="shares the table of 'item' with a column of another type"):
        opened(tmp_path / "rows.parquet", numbers, columns=declared, tables=one)


def test_buckets_are_quantiles_of_the_training_rows(tmp_path: Path) -> None:
    declared = {"x": {"kind": "buckets", "count": 8}}
    source = opened(tmp_path / "rows.parquet", {"x": [*NUMBERS, None]}, columns=declared)
    assert np.bincount(ids(source)).tolist() == [1, *[625] * 8]
    order = np.argsort(NUMBERS)
    assert np.all(np.diff(np.array(ids(source))[order]) >= 0)
    outside = opened(tmp_path / "b", {"x": [-1e9, 1e9, float("nan")]}, learnt=source.source.learnt)
    assert ids(outside) == [1, 8, 0]
    few = opened(tmp_path / "c", {"x": [1, 1, 1, 1, 2, 3]}, columns={"x": {"kind": "buckets", "count": 4}})
    assert (ids(few), few.schema.features[0].rows) == ([1, 1, 1, 1, 2, 3], 4)


def test_a_cross_is_of_both_columns_in_their_order(tmp_path: Path) -> None:
    frame = {"a": ["x", "x", "y", "x", None], "b": [1, 2, 1, 1, 1]}
    both = {"kind": "cross", "of": ["a", "b"], "rows": 1000}
    declared = {"ab": both, "ba": {**both, "of": ["b", "a"]}, "a": {"kind": "hash", "rows": 50}}
    source = opened(tmp_path / "rows.parquet", frame, columns=declared)
    found, other = ids(source, 0), ids(source, 1)
    assert found[0] == found[3] != found[1] != found[2]
    assert found[4] == other[4] == 0
    assert found[:3] != other[:3]
    words = mix(mix(hash_strings(pl.Series(["x"]))) ^ mix(np.array([1], np.uint64)))
    assert found[0] == to_rows(words, np.uint64(1000))[0]
    assert ids(source, 2)[4] == 0


def test_missing_ids_have_one_of_their_own_or_are_an_error(tmp_path: Path) -> None:
    path, values = tmp_path / "rows.parquet", [1, None, 0]
    assert ids(opened(path, {"x": values}, columns={"x": {"kind": "as_is", "rows": 2, "missing": "own"}})) == [1, 2, 0]
    for kind in ({"kind": "hash"}, {"kind": "vocabulary"}, {"kind": "buckets"}):
        assert ids(opened(path, {"x": values}, columns={"x": kind}))[1] == 0
        strict = opened(path, {"x": values}, columns={"x": {**kind, "missing": "error"}})
        with pytest.raises(DataError, match=r"row 2: x is missing; mend it"):
            all_rows(strict)


# --- types as they come ----------------------------------------------------------------------------------------------

TIMES = [datetime.datetime(2024, 3, 1, 12), datetime.datetime(1960, 1, 1), None]
TYPED: dict[str, tuple[pl.Series, list[object]]] = {
    "strings": (pl.Series(["a", "b", None]), ["a", "b", None]),
    "categories": (pl.Series(["a", "b", None], dtype=pl.Categorical), ["a", "b", None]),
    "an enum": (pl.Series(["a", "b", None], dtype=pl.Enum(["b", "a"])), ["a", "b", None]),
    "decimals": (pl.Series(["1.50", "100.00", None]).cast(pl.Decimal(10, 2)), ["1.5", "100", None]),
    "small integers": (pl.Series([-1, 5, None], dtype=pl.Int8), [-1, 5, None]),
    "uint64": (pl.Series([2**64 - 1, 5, None], dtype=pl.UInt64), [-1, 5, None]),
    "whole floats": (pl.Series([3.0, float("nan"), None]), [3, None, None]),
    "booleans": (pl.Series([True, False, None]), [1, 0, None]),
    "dates": (pl.Series([DAY + datetime.timedelta(days=d) for d in (3, -3)] + [None]), [3, -3, None]),
    "milliseconds": (pl.Series(TIMES, dtype=pl.Datetime("ms")), [1709294400000000, -315619200000000, None]),
    "nanoseconds": (pl.Series(TIMES, dtype=pl.Datetime("ns")), [1709294400000000, -315619200000000, None]),
    "durations": (pl.Series([datetime.timedelta(days=1), None], dtype=pl.Duration("ms")), [86_400_000_000, None]),
    "times of day": (pl.Series([datetime.time(0, 0, 1), None]), [1_000_000, None]),
    "nothing": (pl.Series([None, None]), [None, None]),
}


@pytest.mark.parametrize("what", TYPED)
def test_values_of_any_type_are_told_apart(tmp_path: Path, what: str) -> None:
    values, plain = TYPED[what]
    text = any(isinstance(value, str) for value in plain)
    told = pl.Series(plain, dtype=pl.String if text else pl.Int64)
    words = hash_strings(told) if text else mix(told.fill_null(0).to_numpy().view(np.uint64).copy())
    wanted = np.where(told.is_null().to_numpy(), 0, to_rows(words, np.uint64(1000))).tolist()
    for column in (values, values.implode().append(values.implode()).rename("x")):
        frame = pl.DataFrame({"x": column})
        hashed = opened(tmp_path / "rows.parquet", frame, columns={"x": {"kind": "hash", "rows": 1000}})
        assert ids(hashed) == wanted * (2 if isinstance(frame["x"].dtype, pl.List) else 1)
        known = opened(tmp_path / "rows.parquet", frame, columns={"x": {"kind": "vocabulary", "min_count": 1}})
        assert len(known.source.learnt.values["x"]) == len({value for value in plain if value is not None})
        assert [found > 1 for found in ids(known)][: len(plain)] == [value is not None for value in plain]


def test_dates_and_times_are_numbers_too(tmp_path: Path) -> None:
    noon = pl.Series([datetime.datetime(1970, 1, 2, 12), None])
    for values in (noon.cast(pl.Datetime("ms")), noon.dt.replace_time_zone("UTC"), noon.cast(pl.Datetime("ns"))):
        assert dense(tmp_path / "rows.parquet", values, standardise=False)[:, 0].tolist() == [1.5, 0]
    days = pl.Series([DAY, DAY + datetime.timedelta(days=10)])
    assert dense(tmp_path / "rows.parquet", days)[:, 0].tolist() == [-1, 1]
    decimals = pl.Series(["1.25", "2.50"]).cast(pl.Decimal(10, 2))
    assert dense(tmp_path / "rows.parquet", decimals, standardise=False)[:, 0].tolist() == [1.25, 2.5]


def test_a_file_that_has_only_nulls_of_a_column_is_read_beside_others(tmp_path: Path) -> None:
    frames = {"a": pl.Series([None, None]), "b": pl.Series(["x", "x"]), "c": pl.Series([["x"], ["y", "x"]])}
    for name, values in frames.items():
        table = pl.DataFrame({"label": [0, 1], "w": values})
        table.write_parquet(tmp_path / f"{name}.parquet")
    source = registry.build(
        Parquet, {"path": [str(tmp_path / f"{n}.parquet") for n in "ab"], "columns": {"w": "vocabulary"}}, "data"
    )
    found = open_again(source)
    assert ids(found) == [0, 0, 2, 2]
    other = registry.build(
        Parquet, {"path": [str(tmp_path / f"{n}.parquet") for n in "abc"], "columns": {"w": "hash"}}, "data"
    )
    with pytest.raises(
        DataError, match=r"c\.parquet: column 'w' holds List\(String\), in .*b\.parquet it holds String"
    ):
        other.open("train", "error")


@pytest.mark.parametrize("kind", ["hash", "as_is"])
def test_a_file_that_has_only_nulls_of_a_list_column_has_empty_lists(tmp_path: Path, kind: str) -> None:
    for name, values in {"a": [None, None], "b": [[1, 2], None]}.items():
        pl.DataFrame({"label": [0, 1], "tags": values}).write_parquet(tmp_path / f"{name}.parquet")
    source = registry.build(Parquet, {"path": str(tmp_path), "columns": {"tags": {"kind": kind, "rows": 9}}}, "data")
    found = open_again(source)
    assert [found.read(part).ids.bag_offsets().tolist() for part in found.slices(9)] == [[0, 0, 0], [0, 2, 2]]


@pytest.mark.parametrize("declared", ["vocabulary", {"kind": "hash", "rows": 9}, {"kind": "as_is", "rows": 9}], ids=str)
def test_rows_with_only_nulls_of_a_trained_list_column_have_empty_lists(tmp_path: Path, declared: Any) -> None:
    trained = opened(tmp_path / "a.parquet", {"tags": [[1, 2], None, [1]]}, columns={"tags": declared})
    learnt = kept(trained.source.learnt)
    for nothing in (pl.Null(), pl.List(pl.Int64())):
        nulls = {"tags": pl.Series([None, None], dtype=nothing)}
        found = opened(tmp_path / "b.parquet", nulls, learnt, columns={"tags": declared})
        assert found.schema.features[0].multi_hot
        assert all_rows(found).ids.bag_offsets().tolist() == [0, 0, 0]


def test_lists_without_values_go_with_lists_of_any_type() -> None:
    built = registry.build(Parquet, {"path": "rows", "columns": {"tags": {"kind": "hash", "rows": 9}}}, "data")
    source = built.unlabelled()
    empty = pl.DataFrame({"tags": pl.Series([[], None], dtype=pl.List(pl.Null))})
    frames = [empty, pl.DataFrame({"tags": [["x"], None]}), empty]
    columns = source.read_alike([(frame.schema, "data") for frame in frames])
    found = [batch_of(frame, source, columns) for frame in frames]
    assert [batch.ids.bag_offsets().tolist() for batch, _ in found] == [[0, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert not any(problems for _, problems in found)
    with pytest.raises(DataError, match=r"holds Int64, in data it holds List\(Null\): write all files with the same"):
        source.read_alike([(frame.schema, "data") for frame in (empty, pl.DataFrame({"tags": [1]}))])


def test_a_vocabulary_of_no_values_takes_any_type_of_them(tmp_path: Path) -> None:
    for name, kind in {"a": pl.String(), "b": pl.Null()}.items():
        table = pl.DataFrame({"label": [0, 1], "w": pl.Series([None, None], dtype=kind)})
        table.write_parquet(tmp_path / f"{name}.parquet")
    source = registry.build(Parquet, {"path": str(tmp_path), "columns": {"w": "vocabulary"}}, "data")
    assert ids(open_again(source)) == [0] * 4


# --- what was learnt is kept -----------------------------------------------------------------------------------------


def kept(learnt: Learnt) -> Learnt:
    """As a checkpoint has it."""
    state = json.loads(json.dumps(msgspec.to_builtins(learnt.state()), allow_nan=False))
    tensors = {name: tensor.clone() for name, tensor in learnt.tensors().items()}
    return Learnt.of(msgspec.convert(state, LearntState), {"final": torch.zeros(2), **tensors})


WORDS = st.text(max_size=6) | st.none()
FRAMES = st.integers(1, 25).flatmap(
    lambda rows: st.fixed_dictionaries(
        {
            "w": st.lists(WORDS, min_size=rows, max_size=rows),
            "n": st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), min_size=rows, max_size=rows),
            "l": st.lists(st.lists(WORDS, max_size=3), min_size=rows, max_size=rows),
            "x": st.lists(st.floats(-1e9, 1e9) | st.none(), min_size=rows, max_size=rows),
        }
    )
)
TYPES = {"w": pl.String, "n": pl.Int64, "l": pl.List(pl.String), "x": pl.Float64}
DECLARED = st.fixed_dictionaries(
    {
        "w": st.sampled_from(["hash", "vocabulary", {"kind": "vocabulary", "min_count": 1, "max_size": 3}]),
        "n": st.sampled_from(
            ["hash", "dense", {"kind": "buckets", "count": 3}, {"kind": "vocabulary", "min_count": 1}]
        ),
        "l": st.sampled_from(["hash", "vocabulary"]),
        "x": st.sampled_from(["dense", "buckets", {"kind": "dense", "clip": 0.1, "log": True, "missing": "indicator"}]),
        "wn": st.just({"kind": "cross", "of": ["w", "n"]}),
    }
)


@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FRAMES, FRAMES, DECLARED)
def test_the_same_batch_before_and_after_a_checkpoint(
    tmp_path: Path, frame: dict[str, Any], later: dict[str, Any], declared: dict[str, Any]
) -> None:
    first, other = (pl.DataFrame(rows, schema=TYPES, strict=False) for rows in (frame, later))
    trained = opened(tmp_path / "rows.parquet", first, columns=declared)
    learnt = trained.source.learnt
    again = opened(tmp_path / "rows.parquet", first, learnt=kept(learnt), columns=declared)
    assert again.schema == trained.schema
    assert same(again.read(again.slices(99)[0]), trained.read(trained.slices(99)[0]))
    unseen, anew = (opened(tmp_path / "b", other, learnt=one, columns=declared) for one in (learnt, kept(learnt)))
    batch = unseen.read(unseen.slices(99)[0])
    assert same(batch, anew.read(anew.slices(99)[0]))
    assert torch.isfinite(batch.dense).all()
    names = [feature.name for feature in unseen.schema.features]
    for name, known in learnt.values.items():
        cells = other.filter(pl.col("l").list.len() > 0)["l"].explode() if name == "l" else other[name]
        values = set(known.values.to_list())
        found = batch.ids.select([names.index(name)]).values.tolist()
        wanted = [0 if value is None else 1 if value not in values else 2 for value in cells]
        assert [min(one, 2) for one in found] == wanted


def test_vocabularies_of_a_checkpoint_are_checked() -> None:
    texts = Values(pl.Series(["ab", "", "ü"])).tensors()
    assert Values.of(texts).values.to_list() == ["ab", "", "ü"]
    for broken in (
        {},
        {"text": texts["text"]},
        {**texts, "ends": texts["ends"] + 9},
        {**texts, "ends": -texts["ends"]},
    ):
        with pytest.raises(ValueError, match=r"it has|before they begin"):
            Values.of(broken)


def test_few_rows_of_many_tell_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE", 100)
    monkeypatch.setattr(fitting, "ENOUGH_ROWS", 1000)
    monkeypatch.setattr(fitting, "SAMPLE", 500)
    frame = {"x": NUMBERS, "w": ["a"] * 5000}
    some = opened(tmp_path / "rows.parquet", frame, columns={"x": {"kind": "dense", "log": True}, "w": "hash"})
    learnt = some.source.learnt
    assert (learnt.rows, learnt.sentence(5000)) == (1000, "learnt from 1,000 of 5,000 training rows: x is standardised")
    assert abs(all_rows(some).dense.mean()) < 0.1
    every = opened(tmp_path / "rows.parquet", frame, columns={"x": {"kind": "dense", "clip": 0.1}, "w": "vocabulary"})
    assert every.source.learnt.rows == 5000
    said = "learnt from 5,000 of 5,000 training rows, quantiles from 500 of them: w has 1 values, x is standardised"
    assert every.source.learnt.sentence(5000) == said


def test_a_vocabulary_is_counted_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE", 100)
    monkeypatch.setattr(kinds, "_MERGED", 150)
    frame = {"n": np.arange(3000) % 700}
    source = opened(tmp_path / "rows.parquet", frame, columns={"n": "vocabulary"})
    assert sorted(set(ids(source))) == list(range(2, 702))
    assert source.source.learnt.values["n"].values[:2].to_list() == [0, 1]
    monkeypatch.setattr(kinds, "MOST_VALUES", 500)
    with pytest.raises(
        DataError, match=r"column 'n' has more than 500 different values.*data\.columns\.n=\{kind: hash"
    ):
        opened(tmp_path / "rows.parquet", frame, columns={"n": "vocabulary"})


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": {"w": "hashed"}}, "data.columns.w.kind=hashed is not known, did you mean hash?"),
        (
            {"columns": {"w": {"rows": 9}}},
            "data.columns.w does not say what becomes of the column: write data.columns.w=d",
        ),
        (
            {"columns": {"w": {"kind": "hash", "row": 9}}},
            "data.columns.w.row is not an option of kind=hash, did you mean rows?",
        ),
        (
            {"columns": {"w": {"kind": "hash", "rows": 1}}},
            "data.columns.w.rows=1: input should be greater than or equal to 2",
        ),
        ({"columns": {"w": {"kind": "as_is"}}}, "data.columns.w.rows is required"),
        (
            {"columns": {"w": {"kind": "hash", "missing": "drop"}}},
            "data.columns.w.missing=drop: input should be 'own' or 'error'",
        ),
        (
            {"columns": {"w": "dense"}},
            "data.categorical is empty: name at least one column of ids, as data.categorical=[user]",
        ),
        ({"columns": {"label": "hash"}}, "data.columns names 'label', which is the label (data.label): leave it out"),
        (
            {"columns": {"c": {"kind": "cross", "of": ["label", "w"]}}},
            "data.columns.c.of names 'label', which is the label",
        ),
        (
            {"columns": {"w": "hash"}, "dense": ["w"]},
            "data.dense names 'w', which is hash in data.columns: leave one out",
        ),
        ({"columns": {"w": "hash"}, "hash_size": {"w": 5}}, "data.hash_size names 'w'"),
        (
            {"columns": {"x": {"kind": "dense", "missing": "indicator"}, "x_missing": "hash"}},
            "data.columns.x.missing=indicator makes a column x_missing, which there is already: rename that one",
        ),
    ],
)
def test_declarations_that_do_not_fit(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "rows.parquet", {"w": ["a"], "x": [1.0]}, **options)
    assert said in str(caught.value)


ENUM = pl.Enum(["a", "b"])


@pytest.mark.parametrize(
    ("frame", "declared", "said"),
    [
        (
            {"w": [{"a": 1}]},
            "hash",
            "column 'w' (data.columns.w) holds Struct({'a': Int64}), it must hold text, whole numb",
        ),
        ({"w": [b"a"]}, "hash", "holds Binary, it must hold text, whole numbers, booleans or dates, or lists of them"),
        ({"w": ["a"]}, "dense", "column 'w' (data.columns.w) holds String, it must hold one number per row"),
        ({"w": [[1.0]]}, "dense", "holds List(Float64), it must hold one number per row"),
        ({"w": pl.Series(["a"], dtype=ENUM)}, "dense", "holds Enum of 2 values, it must hold one number per row"),
        (
            {"w": pl.Series([["a"]], dtype=pl.List(ENUM))},
            "buckets",
            "holds List(Enum of 2 values), it must hold numbers",
        ),
        ({"w": ["a"]}, "buckets", "holds String, it must hold numbers or dates, or lists of them"),
        ({"w": [["a"]]}, {"kind": "cross", "of": ["w", "id"]}, "must hold one value per row, to be crossed"),
        ({"w": ["a"]}, {"kind": "cross", "of": ["w", "no"]}, "there is no column 'no' (data.columns.w)"),
        ({"w": [1.5]}, "hash", "row 1: w is 1.5, which is no whole number: declare the column dense or as buckets"),
    ],
)
def test_columns_that_do_not_fit_their_kind(tmp_path: Path, frame: dict[str, Any], declared: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        all_rows(opened(tmp_path / "rows.parquet", {**frame, "id": [1]}, **columns(w=declared)))
    assert said in str(caught.value)


def test_other_types_than_the_model_was_trained_on_are_refused(tmp_path: Path) -> None:
    for declared in ({"w": "vocabulary"}, {"w": "hash"}, {"w2": {"kind": "cross", "of": ["w", "w"]}}):
        trained = opened(tmp_path / "rows.parquet", {"w": ["1", "2"]}, columns=declared)
        with pytest.raises(DataError, match=r"column 'w' holds Int64, and the model was trained on strings: cast it"):
            opened(tmp_path / "b.parquet", {"w": [1, 2]}, learnt=trained.source.learnt, columns=declared)
        opened(tmp_path / "b.parquet", {"w": pl.Series([None, None])}, learnt=trained.source.learnt, columns=declared)


def test_decimals_are_no_text(tmp_path: Path) -> None:
    values = {pl.Decimal(10, 2): "decimals", pl.String(): "strings"}
    for kind, form in values.items():
        column, other = (pl.Series(["8.00", "9.50"]).cast(one) for one in (kind, *(values.keys() - {kind})))
        learnt = opened(tmp_path / "a.parquet", {"w": column}, columns={"w": "hash"}).source.learnt
        with pytest.raises(DataError, match=f"column 'w' holds .*, and the model was trained on {form}: cast it"):
            opened(tmp_path / "b.parquet", {"w": other}, learnt=learnt, columns={"w": "hash"})
        before = Learnt(learnt.kinds, {"w": Fit(form="text")}, {}, 0)  # as both were called
        opened(tmp_path / "b.parquet", {"w": column}, learnt=before, columns={"w": "hash"})


def test_rows_that_are_kept_from_training_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE", 70)
    frame = {"label": [0, 1] * 200, "x": [1.0, 3.0] * 150 + [1e6] * 100, "w": ["a"] * 300 + ["late"] * 100}
    pl.DataFrame(frame).write_parquet(tmp_path / "rows.parquet")
    options = {"path": str(tmp_path / "rows.parquet"), "columns": {"x": "dense", "w": "vocabulary"}}
    data = parse({"data": {"name": "parquet", **options, "valid": {"last": 100}}}).data
    source = registry.build(Parquet, options, "data")
    train = open_parts(source, data, "train")["train"]
    assert isinstance(train, Selected)
    learnt = learn(source.kinds, source.tables, train)
    assert (learnt.rows, learnt.fit("x").mean, learnt.fit("x").scale) == (300, 2, 1)
    assert learnt.values["w"].values.to_list() == ["a"]
