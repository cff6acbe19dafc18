"""Parts of data: no row in two of them, none in no part, and each counted exactly."""

import datetime
import gzip
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from data_samples import CountedRows, criteo_row, write_criteo
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shadowsync.choices import choose_all
from shadowsync.config import Config, parse
from shadowsync.data import splits
from shadowsync.data.batch import Batch
from shadowsync.data.reader import Reader, ReaderOptions, batches
from shadowsync.data.source import OpenSource, Slice
from shadowsync.data.splits import PARTS, Selected, open_parts, partition
from shadowsync.errors import ConfigError, DataError, UserError


class Filed(CountedRows):
    """Numbered rows in files; the column `tens` says the tenth of each, and `time` is later for later ones."""

    def __init__(self, file_rows: Sequence[int], bad: int = 0) -> None:
        super().__init__(sum(file_rows), bad)
        self.file_rows = tuple(file_rows)

    def numbers(self, part: Slice) -> range:
        first = sum(self.file_rows[: part.file]) + part.start
        assert part.start + part.rows <= self.file_rows[part.file]
        return range(first, first + part.rows)

    def read(self, part: Slice) -> Batch:
        return super().read(Slice(part.index, 0, self.numbers(part).start, part.rows))

    def dropped(self, part: Slice) -> list[int]:
        return [place for place, number in enumerate(self.numbers(part)) if self.is_bad(number)]

    def place(self, part: Slice, row: int) -> str:
        return str([number for number in self.numbers(part) if not self.is_bad(number)][row])

    def column(self, name: str, part: Slice, key: str) -> pl.Series:
        values = {"tens": lambda number: str(number // 10), "time": lambda number: number / 2}
        return pl.Series(name, [values[name](number) for number in self.numbers(part)])


def split_of(data: Mapping[str, Any]) -> Any:
    config = parse({"data": dict(data)}).data
    given = {"test": config.test, "valid": config.valid}
    return {part: split for part, split in given.items() if split is not None}


def numbers(batch: Batch) -> list[int]:
    return batch.ids.values.tolist()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred rows are many blocks."""
    monkeypatch.setattr(splits, "_BLOCK", 16)
    monkeypatch.setattr(splits, "_READ", 24)


SHARES = st.floats(0.05, 0.6)
WAYS = st.one_of(
    st.builds(lambda share, seed: {"fraction": share, "seed": seed}, SHARES, st.integers(0, 99)),
    st.builds(lambda share: {"last": share}, SHARES),
    st.builds(lambda rows: {"last": rows}, st.integers(1, 40)),
    st.builds(lambda share: {"column": "tens", "fraction": share}, SHARES),
    st.builds(lambda start: {"column": "time", "from": start}, st.floats(1, 100)),
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    file_rows=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    ways=st.fixed_dictionaries({}, optional={"test": WAYS, "valid": WAYS}),
    size=st.integers(1, 40),
    bad=st.integers(0, 9),
)
def test_every_row_is_in_one_part_and_every_part_counts_its_own(file_rows, ways, size, bad):
    source, found = Filed(file_rows, bad), Counter[int]()
    try:
        parts = partition(source, split_of({"test": ways.get("test"), "valid": ways.get("valid")}))
    except DataError:
        assume(False)  # a part would have been empty
    assert sum(part.rows for part in parts.values()) == source.rows
    for part in parts.values():
        slices = part.slices(size)
        assert sum(one.rows for one in slices) == part.rows
        seen = []
        for one in slices:
            assert 0 < one.rows <= size
            read = numbers(part.read(one))
            assert [part.place(one, row) for row in range(len(read))] == list(map(str, read))
            seen += read
        assert seen == sorted(seen)
        found.update(seen)
    assert found == dict.fromkeys(source.good(), 1)


def rows_of(part: OpenSource) -> list[int]:
    return [number for batch in batches(part, 7) for number in numbers(batch)]


def parts_of(source: OpenSource, **given: Any) -> dict[str, list[int]]:
    return {name: rows_of(part) for name, part in partition(source, split_of(given)).items()}


def test_what_is_drawn_depends_on_the_seed_only_and_has_the_share_asked_for() -> None:
    first, again = (parts_of(Filed([700, 1300]), valid={"fraction": 0.1}) for _ in range(2))
    assert first == again
    assert 150 < len(first["valid"]) < 250
    other = parts_of(Filed([700, 1300]), valid={"fraction": 0.1, "seed": 1})
    assert len(set(first["valid"]) & set(other["valid"])) < 60
    both = parts_of(Filed([2000]), test={"fraction": 0.5}, valid={"fraction": 0.5})
    assert 420 < len(both["valid"]) < 580, "test and validation rows are drawn independently"


def test_the_last_rows_are_validated_on_and_those_after_them_tested() -> None:
    found = parts_of(Filed([30, 70]), test={"last": 10}, valid={"last": 0.2})
    assert found == {"test": [*range(90, 100)], "valid": [*range(72, 90)], "train": [*range(72)]}


def test_the_last_rows_are_of_what_the_test_leaves() -> None:
    found = parts_of(Filed([30, 70]), test={"column": "time", "from": 40}, valid={"last": 20})
    assert found == {"test": [*range(80, 100)], "valid": [*range(60, 80)], "train": [*range(60)]}
    drawn = parts_of(Filed([30, 170]), test={"fraction": 0.5}, valid={"last": 0.2})
    assert drawn["train"] + drawn["valid"] == sorted({*range(200)} - {*drawn["test"]})
    assert len(drawn["valid"]) == round(0.2 * (200 - len(drawn["test"])))


def test_rows_from_a_time_on() -> None:
    found = parts_of(Filed([100]), test={"column": "time", "from": 45}, valid={"column": "time", "from": 40})
    assert found == {"test": [*range(90, 100)], "valid": [*range(80, 90)], "train": [*range(80)]}


def test_rows_of_one_value_stay_together() -> None:
    found = parts_of(Filed([1000]), test={"column": "tens", "fraction": 0.2}, valid={"column": "tens", "fraction": 0.2})
    tens = [{number // 10 for number in part} for part in found.values()]
    assert sum(map(len, tens)) == len(set().union(*tens)) == 100
    assert all(len(part) % 10 == 0 and part for part in found.values())


def test_training_rows_are_trained_once_per_epoch_also_after_a_resume() -> None:
    def make() -> OpenSource:
        return partition(Filed([90, 1, 60], bad=7), split_of({"valid": {"fraction": 0.3}, "test": {"last": 12}}))[
            "train"
        ]

    options, seen = ReaderOptions(4, 8, 2, seed=3), Counter[int]()
    with closing(Reader(make(), options)) as reader:
        feed = reader.feed(0)
        for _ in range(9):
            leased = feed.next()
            seen.update(numbers(leased.batch))
            feed.done(leased)
        state = reader.state()
    with closing(Reader(make(), options, state)) as reader:
        feed = reader.feed(1)
        while (leased := feed.next()) is not None:
            seen.update(numbers(leased.batch))
            feed.done(leased)
        assert reader.trained + reader.skipped == 2 * make().rows
    assert seen == dict.fromkeys(rows_of(make()), 2)


def test_a_split_is_part_of_the_marks_and_changes_none_of_those_before(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "log.txt", [criteo_row(number) for number in range(50)])
    plain = open_all({"name": "criteo", "path": str(path)})["train"].marks()
    marks = [
        open_all({"name": "criteo", "path": str(path), "valid": way})["train"].marks()
        for way in ({"last": 5}, {"last": 6}, {"fraction": 0.1})
    ]
    assert all(found[:-1] == plain for found in marks)
    assert len({found[-1] for found in marks}) == 3


# --- tables ----------------------------------------------------------------------------------------------------------


def open_all(data: dict[str, Any]) -> dict[Any, OpenSource]:
    config = parse({"data": data})
    return open_parts(choose_all(config, own_model=False).source, config.data, *PARTS)


def table(tmp_path: Path, **columns: Any) -> dict[str, Any]:
    rows = 60
    day = datetime.date(2024, 1, 1)
    frame = pl.DataFrame(
        {
            "label": [row % 2 for row in range(rows)],
            "row": np.arange(rows, dtype=np.float32),
            "item": [row % 5 for row in range(rows)],
            "user": [f"u{row // 6}" for row in range(rows)],
            "day": [day + datetime.timedelta(days=row) for row in range(rows)],
            "score": [None if row % 10 == 0 else float("nan") if row % 10 == 1 else float(row) for row in range(rows)],
            "tags": [[row] for row in range(rows)],
            **columns,
        }
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    return {"name": "parquet", "path": path, "dense": ["row"], "categorical": ["item"], "rows": 5}


def dense_of(part: OpenSource) -> list[int]:
    return [int(value) for batch in batches(part, 9) for value in batch.dense[:, 0].tolist()]


@pytest.mark.parametrize(
    ("way", "rows"),
    [
        ({"column": "day", "from": "2024-02-20"}, [*range(50, 60)]),
        ({"column": "day", "from": datetime.date(2024, 2, 20)}, [*range(50, 60)]),
        ({"column": "day", "from": "2024-02-20T00:00:01"}, [*range(51, 60)]),
        ({"column": "time", "from": "2024-02-20T02:00:00+02:00"}, [*range(50, 60)]),
        ({"column": "time", "from": "2024-02-20"}, [*range(50, 60)]),
        ({"column": "user", "from": "u8"}, [*range(48, 60)]),
        ({"column": "score", "from": 48}, [48, 49, 52, 53, 54, 55, 56, 57, 58, 59]),
        ({"column": "row", "from": 55.5}, [56, 57, 58, 59]),
    ],
)
def test_columns_of_tables_need_be_no_features(tmp_path: Path, way: dict[str, Any], rows: list[int]) -> None:
    times = [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(days=row) for row in range(60)]
    data = table(tmp_path, time=pl.Series(times, dtype=pl.Datetime("ms", "UTC")))
    parts = open_all({**data, "valid": way})
    assert dense_of(parts["valid"]) == rows
    assert sorted([*rows, *dense_of(parts["train"])]) == [*range(60)]


def test_bad_rows_count_where_they_belong(tmp_path: Path) -> None:
    data = table(tmp_path, label=[2 if row in (3, 55) else row % 2 for row in range(60)])
    parts = open_all({**data, "on_bad_row": "skip", "valid": {"column": "user", "fraction": 0.4}, "test": {"last": 6}})
    assert sorted([row for part in parts.values() for row in dense_of(part)]) == sorted({*range(60)} - {3, 55})
    assert (parts["test"].rows, len(dense_of(parts["test"]))) == (6, 5)
    strict = open_all({**data, "test": {"last": 6}})["test"]
    with pytest.raises(DataError, match=r"rows\.parquet, row 56: the label \(label\) is 2"):
        dense_of(strict)


def test_files_that_hold_a_value_otherwise_are_not_drawn_by_it(tmp_path: Path) -> None:
    data = {**table(tmp_path), "path": str(tmp_path / "*.parquet"), "valid": {"column": "key", "fraction": 0.3}}
    rows = pl.read_parquet(tmp_path / "rows.parquet")
    keys = rows["item"].cast(pl.Int32).alias("key")
    rows.with_columns(keys).write_parquet(tmp_path / "rows.parquet")
    rows.with_columns(keys.cast(pl.Int64)).write_parquet(tmp_path / "wider.parquet")
    rows.with_columns(pl.lit(None).alias("key")).write_parquet(tmp_path / "without.parquet")
    assert open_all(data)["valid"].rows % 24 == 0, "all rows of a value, in both files that have any"
    rows.with_columns(keys.cast(pl.Float64)).write_parquet(tmp_path / "with gaps.parquet")
    with pytest.raises(
        DataError, match=r"gaps\.parquet: column 'key' \(data\.valid\.column\) holds Float64, and Int64 in files before"
    ):
        open_all(data)


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "jsonl"])
def test_text_is_split_as_parquet_is(tmp_path: Path, ending: str) -> None:
    data = table(tmp_path)
    frame, path = pl.read_parquet(data["path"]).drop("tags", "score"), tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        frame.write_ndjson(path)
    else:
        text = frame.write_csv().encode()
        path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    split = {"test": {"column": "user", "from": "u7"}, "valid": {"column": "item", "fraction": 0.4}, "label": "label"}
    name = "jsonl" if ending == "jsonl" else "csv"
    there, here = open_all({**data, **split}), open_all({**data, **split, "name": name, "path": str(path)})
    assert [dense_of(here[part]) for part in PARTS] == [dense_of(there[part]) for part in PARTS]


def test_a_file_of_validation_rows(tmp_path: Path) -> None:
    data = table(tmp_path)
    pl.read_parquet(data["path"]).head(7).write_parquet(tmp_path / "valid.parquet")
    parts = open_all({**data, "test": {"last": 10}, "valid": {"path": str(tmp_path / "valid.parquet")}})
    assert [dense_of(parts[part]) for part in ("valid", "test", "train")] == [
        [*range(7)],
        [*range(50, 60)],
        [*range(50)],
    ]
    assert not isinstance(parts["valid"], Selected)


SPLIT = {"test": {"last": 10}, "valid": {"column": "item", "fraction": 0.3}}


@pytest.mark.parametrize("split", [{}, SPLIT])
@pytest.mark.parametrize("most", [1, 17, 25, 26, 1000])
def test_the_first_rows_are_trained_on_and_all_others_stay_what_they_are(tmp_path, split, most) -> None:
    data = table(tmp_path)
    rows = pl.read_parquet(data["path"])
    for number, part in enumerate((rows[:20], rows[20:21], rows[21:])):
        part.write_parquet(tmp_path / f"part-{number}.parquet")
    every = {**data, **split, "path": str(tmp_path / "part-*.parquet")}
    there, here = open_all(every), open_all({**every, "max_rows": most})
    wanted = dense_of(there["train"])[:most]
    assert dense_of(here["train"]) == wanted
    assert here["train"].rows == len(wanted) == sum(one.rows for one in here["train"].slices(7))
    assert [dense_of(here[part]) for part in split] == [dense_of(there[part]) for part in split]


def test_no_bound_is_all_rows() -> None:
    data = {"name": "synthetic", "rows": 100, "valid": {"last": 20}}
    rows = {most: open_all({**data, "max_rows": most})["train"].rows for most in (None, 0, 30, 80, 90)}
    assert rows == {None: 80, 0: 80, 30: 30, 80: 80, 90: 80}
    with pytest.raises(ConfigError, match=r"data\.max_rows=-1: .*greater than or equal to 0"):
        open_all({**data, "max_rows": -1})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a map": ({"valid": {"last": 5, "fraction": 0.1}}, r"data\.valid=\{last: 5, fraction: 0\.1\}: give one of"),
    "nothing": ({"valid": {}}, r"data\.valid.*give one of path, fraction, last and from .* not none of them"),
    "two ways": ({"valid": {"last": 5, "fraction": 0.1}}, "give one of .*, not fraction and last"),
    "unknown key": ({"valid": {"fractoin": 0.1}}, r"data\.valid\.fractoin: .*did you mean fraction\?.*from"),
    "from alone": ({"valid": {"from": 5}}, "from needs column"),
    "from true": ({"valid": {"column": "user", "from": True}}, "from=True: it is a number, a date or text"),
    "column alone": ({"valid": {"column": "user"}}, "give one of"),
    "column beside last": ({"valid": {"column": "user", "last": 5}}, "column has no effect beside last"),
    "seed alone": ({"valid": {"last": 5, "seed": 1}}, "seed has no effect without fraction"),
    "half a row": ({"valid": {"last": 2.5}}, "last=2.5 is neither"),
    "all rows": ({"valid": {"fraction": 1}}, r"data\.valid\.fraction=1: .*less than 1"),
    "too many rows": ({"valid": {"last": 60}}, r"data\.valid=\{last: 60\} leave none of the 60 rows to train on"),
    "no rows": ({"valid": {"column": "day", "from": "2030-01-01"}}, r"data\.valid=\{.*\} takes none of the 60 rows"),
    "no such column": (
        {"valid": {"column": "usr", "fraction": 0.1}},
        r"'usr' \(data\.valid\.column\), did you mean user",
    ),
    "a list": ({"valid": {"column": "tags", "fraction": 0.1}}, "data.valid.column=tags: it holds List"),
    "text for a number": ({"valid": {"column": "row", "from": "five"}}, "'row' holds Float32: give a number"),
    "number for text": ({"test": {"column": "user", "from": 5}}, "'user' holds String: give text"),
    "from in a list": ({"test": {"column": "tags", "from": 5}}, "name a column of numbers, text, dates or times"),
    "no time": ({"test": {"column": "day", "from": "May"}}, "data.test.from=May: .* give a date or a time, as 2024"),
    "a zone": ({"test": {"column": "day", "from": "2024-01-02T00:00:00+01:00"}}, "without a time zone: give a time"),
    "no such file": ({"valid": {"path": "nowhere.parquet"}}, "nowhere.parquet"),
    "order": ({"shuffle": "within=0"}, r"data\.shuffle=within=0: it must be true, false or within=ROWS"),
    "other order": ({"shuffle": [1]}, r"data\.shuffle=\[1\]: it must be true, false or within=ROWS"),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD)
def test_a_wrong_value_is_one_sentence(tmp_path: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        open_all({**table(tmp_path), **given})
    assert "\n" not in str(caught.value)


def test_sources_say_what_they_cannot_do() -> None:
    for data, sentence in (
        ({"test": {"last": 5}}, "has test rows of its own"),
        ({"valid": {"path": "rows.parquet"}}, "data.name=synthetic reads no files"),
        ({"valid": {"column": "user", "fraction": 0.1}}, "data.valid.column=user: these rows have no columns by name"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            open_all({"name": "synthetic", "rows": 100, **data})


def test_an_order_within_a_window_is_written_in_two_ways() -> None:
    def shuffle(given: Any) -> Any:
        return parse({"data": {"shuffle": given}}).data

    assert shuffle("within=64").window == shuffle({"within": 64}).window == 64
    assert [shuffle(given).shuffle for given in (True, "true", False, "no")] == [True, True, False, False]
    assert Config().data.window is None


Order = Callable[[int | None], list[int]]


@pytest.fixture
def order() -> Iterator[Order]:
    def read(window: int | None) -> list[int]:
        seen: list[int] = []
        with closing(Reader(CountedRows(100), ReaderOptions(4, 8, 1, seed=5, window=window))) as reader:
            feed = reader.feed(0)
            while (leased := feed.next()) is not None:
                seen += numbers(leased.batch)
                feed.done(leased)
        return seen

    return read


@pytest.mark.parametrize("window", [1, 3, 8, 20, 32, 100, 1000])
def test_rows_stay_within_their_window(order: Order, window: int) -> None:
    seen = order(window)
    assert sorted(seen) == [*range(100)]
    assert max(abs(place - row) for place, row in enumerate(seen)) < window
    assert (seen == sorted(seen)) == (window == 1)
    assert (seen == order(None)) == (window > 100)
