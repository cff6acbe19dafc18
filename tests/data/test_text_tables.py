"""CSV and JSON lines: as parquet, whatever the file looks like; and what is wrong with a row."""

import datetime
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from data_samples import same
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync import registry
from shadowsync.data.csv import Csv
from shadowsync.data.fitting import learn
from shadowsync.data.jsonl import Jsonl
from shadowsync.data.parquet import Parquet
from shadowsync.data.source import Source
from shadowsync.data.tables import Columns, OpenTable, TableSource
from shadowsync.errors import ConfigError, DataError

OPTIONS: dict[str, Any] = {
    "dense": ["price", "count"],
    "categorical": ["item", "user", "word", "tags", "names"],
    "rows": {"item": 50, "tags": 9},
    "hash_size": {"user": 1000, "word": 1000, "names": 1000},
}
SCHEMA = {
    "label": pl.Boolean,
    "price": pl.Float64,
    "count": pl.Int64,
    "item": pl.Int64,
    "user": pl.UInt64,
    "word": pl.String,
    "tags": pl.List(pl.Int64),
    "names": pl.List(pl.String),
}
LISTS = {"tags": ";", "names": "|"}


def opened(
    member: type[TableSource], path: Path | Sequence[Path], on_bad_row: str = "error", **options: Any
) -> OpenTable:
    paths = [str(each) for each in ([path] if isinstance(path, Path) else path)]
    built: Source = registry.build(member, {"path": paths, **OPTIONS, **options}, "data")
    source: Any = built.open("train", on_bad_row)  # type: ignore[arg-type]
    assert isinstance(source, OpenTable)
    return source


def csv_of(frame: pl.DataFrame, separator: str = ",", **how: Any) -> bytes:
    """With lists joined; an empty string in quotes, a missing one as nothing."""
    joined = [pl.col(name).cast(pl.List(pl.String)).list.join(LISTS[name]) for name in LISTS]
    return frame.with_columns(joined).write_csv(separator=separator, **how).encode()


def jsonl_of(frame: pl.DataFrame) -> bytes:
    return frame.write_ndjson().encode()


WORD = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n|", exclude_categories=("Cs", "Cc")), min_size=1, max_size=6
)
ROW = st.fixed_dictionaries(
    {
        "label": st.booleans(),
        "price": st.none() | st.floats(-1e6, 1e6, width=32),
        "count": st.none() | st.integers(-(1 << 20), 1 << 20),
        "item": st.integers(0, 49),
        "user": st.none() | st.integers(0, (1 << 64) - 1),
        "word": st.none() | WORD,
        "tags": st.lists(st.integers(0, 8), min_size=1, max_size=3),
        "names": st.none() | st.lists(WORD, min_size=1, max_size=3),
    }
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=12), compressed=st.booleans(), tabs=st.booleans())
def test_the_same_rows_are_the_same_batches(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], compressed: bool, tabs: bool
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    frame = pl.DataFrame(rows, schema=SCHEMA)
    frame.write_parquet(folder / "rows.parquet")
    packed = gzip.compress if compressed else bytes
    ending = ".gz" if compressed else ""
    csv, jsonl = folder / f"rows.{'tsv' if tabs else 'csv'}{ending}", folder / f"rows.jsonl{ending}"
    csv.write_bytes(packed(csv_of(frame, "\t" if tabs else ",", quote_style="necessary")))
    jsonl.write_bytes(packed(jsonl_of(frame)))
    # words that look like numbers are numbers in a CSV, unless it is said
    types = {"word": "String", "user": "UInt64", "names": "List(String)"}
    sources = [
        opened(Parquet, folder / "rows.parquet"),
        opened(Csv, csv, lists=LISTS, types=types),
        opened(Jsonl, jsonl, types=types),
    ]
    for size in (1, 5, 100):
        for parts in zip(*(source.slices(size) for source in sources), strict=True):
            batches = [source.read(part) for source, part in zip(sources, parts, strict=True)]
            assert same(batches[0], batches[1]), csv.read_bytes()
            assert same(batches[0], batches[2]), jsonl.read_bytes()


FRAME = pl.DataFrame(
    {
        "label": [k % 2 == 0 for k in range(40)],
        "price": [None if k % 7 == 0 else k / 4 for k in range(40)],
        "count": list(range(40)),
        "item": list(range(40)),
        "user": [k + (1 << 40) for k in range(40)],
        "word": [f'w{k}, "{k}"' if k % 5 else None for k in range(40)],
        "tags": [[k % 9, 0] for k in range(40)],
        "names": [[f"n{k}", "x"] if k % 3 else None for k in range(40)],
    }
)


def whole(source: OpenTable) -> Any:
    return source.read(source.slices(1000)[0])


def text(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.fixture
def expected(tmp_path: Path) -> Any:
    FRAME.write_parquet(tmp_path / "expected.parquet")
    return whole(opened(Parquet, tmp_path / "expected.parquet"))


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (csv_of(FRAME), {}),
        (csv_of(FRAME).replace(b"\n", b"\r\n"), {}),
        (b"\xef\xbb\xbf" + csv_of(FRAME).rstrip(b"\n"), {}),
        (csv_of(FRAME) + b"\n\r\n", {}),
        (csv_of(FRAME, "\x01"), {"separator": "\x01"}),
        (csv_of(FRAME, include_header=False), {"header": FRAME.columns}),
        (csv_of(FRAME.select(reversed(FRAME.columns))), {}),
        (csv_of(FRAME, null_value="NA"), {"null_words": ["NA", "\\N"]}),
        (csv_of(FRAME, quote_style="always"), {}),
        (csv_of(FRAME.with_columns(more=pl.lit("x"))), {}),
    ],
)
def test_csv_as_it_lies(tmp_path: Path, expected: Any, content: bytes, options: dict[str, Any]) -> None:
    assert same(whole(opened(Csv, text(tmp_path, "rows.csv", content), lists=LISTS, **options)), expected)


def test_columns_may_stand_in_another_order_in_each_file(tmp_path: Path, expected: Any) -> None:
    files = [
        text(tmp_path, "a.csv", csv_of(FRAME[:25])),
        text(tmp_path, "b.csv", csv_of(FRAME[25:].select(reversed(FRAME.columns)))),
    ]
    source = opened(Csv, files, lists=LISTS)
    batches = [source.read(part) for part in source.slices(1000)]
    assert same(type(expected).join(batches), expected)


def test_a_file_may_begin_with_a_mark_and_end_in_capitals(tmp_path: Path, expected: Any) -> None:
    begun = text(tmp_path, "rows.JSONL", b"\xef\xbb\xbf" + jsonl_of(FRAME))
    assert same(whole(opened(Jsonl, begun)), expected)
    tabs = text(tmp_path, "rows.TSV", csv_of(FRAME, separator="\t"))
    assert same(whole(opened(Csv, tabs, lists=LISTS)), expected)


def test_names_of_no_column_are_a_mistake(tmp_path: Path) -> None:
    path = text(tmp_path, "rows.csv", csv_of(FRAME))
    said = r"names .tagz., .*rows\.csv does not have, did you mean tags"
    with pytest.raises(ConfigError, match=rf"data\.lists {said}"):
        opened(Csv, path, lists={**LISTS, "tagz": ";"})
    with pytest.raises(ConfigError, match=r"data\.types names 'prise', .*rows\.csv does not have, did you mean price"):
        opened(Csv, path, lists=LISTS, types={"prise": "Float64"})


def test_digits_that_begin_with_zeros_are_text(tmp_path: Path) -> None:
    path = text(tmp_path, "rows.csv", b"label,price,item,user,word,code\n0,007,07,0,0.5,007\n1,08,1,10,10,7\n")
    options = {"dense": ["price"], "categorical": ["item", "user", "word", "code"], "rows": {"item": 50}}
    options["hash_size"] = dict.fromkeys(("user", "word", "code"), 1000)
    source = opened(Csv, path, **options)
    wanted = {"price": "String", "item": "String", "user": "Int64", "word": "Float64", "code": "String"}
    assert source.settled["types"] == {"label": "Int64", **wanted}
    batch = whole(source)
    assert batch.dense.tolist() == [[7.0], [8.0]], "what is used as a number is one"
    assert batch.ids.select([0]).values.tolist() == [7, 1]
    assert len({*batch.ids.select([3]).values.tolist()}) == 2


def test_quotes_may_mean_nothing(tmp_path: Path) -> None:
    path = text(tmp_path, "rows.csv", b'label,word\n0,5" disk\n1,"x\n')
    source = opened(Csv, path, dense=[], categorical=["word"], rows=None, hash_size=10, quote=None)
    assert source.tables[0].take(0, 2, ["word"])[0]["word"].to_list() == ['5" disk', '"x']


def test_types_are_found_once_and_for_all(tmp_path: Path) -> None:
    """The first rows of the first file decide; a number that is used as one may get a fraction later."""
    first = text(tmp_path, "a.csv", b"label,price,user,word\n0,1,17,18\n1,2,,x\n")
    second = text(tmp_path, "b.csv", b"label,price,user,word\n1,2.5,18,19\n")
    options = {"dense": ["price"], "categorical": ["user", "word"], "rows": None, "hash_size": 1000}
    source = opened(Csv, [first, second], **options)
    assert source.settled == {"types": {"label": "Int64", "price": "Int64", "user": "Int64", "word": "String"}}
    assert source.read(source.slices(9)[1]).dense.tolist() == [[2.5]]
    alone = opened(Csv, second, **options, **source.settled)
    assert same(whole(alone), source.read(source.slices(9)[1]))
    assert not same(whole(opened(Csv, second, **options)), whole(alone))  # of itself, 19 looks like a number


AS_TRAINED = {
    "decimals": (pl.Series(["8.00", "9.50", None]).cast(pl.Decimal(10, 2)), "dear", "a number"),
    "booleans": (pl.Series([True, False, None]), "perhaps", "true or false"),
    "dates": (
        pl.Series([datetime.date(2024, 1, 31), datetime.date(1950, 1, 1), None]),
        "soon",
        "a date, as 2024-01-31",
    ),
    "datetimes": (
        pl.Series([datetime.datetime(2024, 1, 31, 1, 2, 3, 4), datetime.datetime(1950, 1, 1), None]),
        "1",
        "a date and",
    ),
    "moments": (
        pl.Series([datetime.datetime(2024, 1, 31), datetime.datetime(2024, 7, 1), None]).dt.replace_time_zone(
            "Asia/Tokyo"
        ),
        "1",
        "a date and time, as 2024-01-31T12:00:00",
    ),
}


@pytest.mark.parametrize("what", AS_TRAINED)
@pytest.mark.parametrize("kind", ["vocabulary", "hash"])
def test_text_is_read_as_what_a_model_was_trained_on(tmp_path: Path, what: str, kind: str) -> None:
    column, bad, said = AS_TRAINED[what]
    frame = pl.DataFrame({"label": [0, 1, 0, 1], "w": column[[0, 1, 2, 0]]})
    frame.write_parquet(tmp_path / "a.parquet")
    options: dict[str, Any] = {"columns": {"w": kind}, "dense": [], "categorical": [], "rows": None, "hash_size": None}
    trained = opened(Parquet, tmp_path / "a.parquet", **options)
    learnt = learn(trained.source.kinds, {}, trained)
    wanted = whole(opened(Parquet, tmp_path / "a.parquet", learnt=learnt, **options))
    for member, rows in ((Csv, frame.write_csv()), (Jsonl, frame.write_ndjson())):
        assert same(whole(opened(member, text(tmp_path, "rows", rows.encode()), learnt=learnt, **options)), wanted)
    for member, row in ((Csv, f"0,{bad}\n"), (Jsonl, json.dumps({"label": 0, "w": bad}))):
        lines = frame.write_csv() if member is Csv else frame.write_ndjson()
        source = opened(member, text(tmp_path, "rows", (lines + row).encode()), infer_rows=4, learnt=learnt, **options)
        with pytest.raises(DataError, match=f"row 5: w is .{bad}., it must be {said}"):
            whole(source)


LINES = csv_of(FRAME).splitlines()


def with_row(line: bytes, row: int = 30) -> bytes:
    return b"\n".join([*LINES[: row + 1], line, *LINES[row + 2 :]])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"true,1.5,3", r"3 fields where 8 are needed \(label, price, count, item, user …\); mend it"),
        (LINES[5] + b",more", r"9 fields where 8 are needed"),
        (b"", r"0 fields where 8 are needed"),
        (b'true,1,1,1,1,"open,1,a', r"a quoted field has no end in its line, and a row is one line: take line breaks"),
        (b"true,dear,1,1,1,a,1,a", r"price is 'dear', it must be a number; mend it, .*data\.null_words"),
        (b"true,1,1,1.5,1,a,1,a", r"item is '1\.5', it must be an integer"),
        (
            b"true,1,1,1,me,a,1,a",
            r"user is 'me', where the first rows .* hold an integer; .*data\.types=\{user: String\}",
        ),
        (b"true,1,1,1,1,a,1;b,a", r"tags is '1;b', it must be a list of integers"),
        (b"true,1,1,1,1,\xff,1,a", r"it is not UTF-8"),
        (b"perhaps,1,1,1,1,a,1,a", r"label is 'perhaps', it must be true or false"),
        (b"true,1,1,77,1,a,1,a", r"item has id 77, outside of 0 … 49 \(data\.rows\)"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, line: bytes, said: str, compressed: bool) -> None:
    content = with_row(line)
    path = text(tmp_path, "rows.csv", gzip.compress(content) if compressed else content)
    options = {"lists": LISTS, "infer_rows": 20}
    source = opened(Csv, path, **options)
    with pytest.raises(DataError, match=rf"rows\.csv, row 31: {said}"):
        source.read(source.slices(1000)[0])
    skipping = opened(Csv, path, "skip", **options)
    batch = whole(skipping)
    assert batch.dense[:, 1].tolist() == [count for count in range(40) if count != 30]
    assert skipping.bad_rows.count == 1
    assert skipping.place(skipping.slices(1000)[0], 30).endswith("row 32")


def test_bad_rows_of_one_column_are_none_that_another_hides(tmp_path: Path) -> None:
    path = text(tmp_path, "rows.csv", b'label\n"1\n"0\n')  # as missing, they are empty lines
    with pytest.raises(DataError, match="price"):
        opened(Csv, path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.parquet", b"PAR1\x15\0\n\n", r"zero bytes: data\.name=parquet reads what is called so"),
        ("rows.csv", "label,price\n1,0.5\n".encode("utf-16"), r"zero bytes$"),
        ("rows.csv", b"PK\x03\x04\x14\0\n", r"zero bytes$"),
    ],
)
def test_what_is_no_text_is_said_to_be_none(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: is not text in UTF-8, its first line has {said}"):
        opened(Csv, text(tmp_path, name, content))


def test_many_bad_rows_are_all_found(tmp_path: Path) -> None:
    lines = [LINES[0], *(b"x" if k % 3 == 0 else LINES[1 + k % 40] for k in range(300))]
    source = opened(Csv, text(tmp_path, "rows.csv", b"\n".join(lines)), "skip", lists=LISTS)
    assert sum(len(source.read(part)) for part in source.slices(64)) == 200
    assert source.bad_rows.count == 100
    assert source.bad_rows.examples[1].split(":")[0].endswith("row 4")
    nothing = opened(
        Csv, text(tmp_path, "bad.csv", b"\n".join([LINES[0], b"x", b"y"])), "skip", lists=LISTS, types=SAID
    )
    assert len(whole(nothing)) == 0


SAID = {name: str(kind) if isinstance(kind, pl.List) else str(kind()) for name, kind in SCHEMA.items()}
OBJECTS = jsonl_of(FRAME).splitlines()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "it is not a JSON object in one line"),
        (b"[1, 2]", "it is not a JSON object in one line"),
        (b"", "it is not a JSON object in one line"),
        (b'{"tags": ' + b"[" * 100_000, "it is not a JSON object in one line"),
        (b'{"label": true, "price": "dear", "item": 1}', r'price is "dear", it must be a number; .*write null for'),
        (b'{"label": true, "price": 1, "item": [1]}', r"item is \[1\], it must be an integer"),
        (
            b'{"label": true, "price": 1, "item": 1, "user": "me"}',
            r'user is "me", where the first rows .* hold an integer',
        ),
        (
            b'{"label": true, "price": 1, "item": 1, "tags": [1, "b"]}',
            r'tags is \[1, "b"\], it must be a list of integers',
        ),
        (
            b'{"label": true, "price": 1, "item": 1, "word": ["me", "you"]}',
            r'word is \["me", "you"\], where the first rows .* hold text; mend it, or leave such rows out',
        ),
        (b'{"label": true, "item": 1, "price": 1e400}', "price is 1e400, which cannot be read: numbers end at 1.8e308"),
        (b'{"label": true, "item": 1, "more": [-1e400]}', r"more is \[-1e400\], which cannot be read"),
        (b'{"label": true, "price": NaN, "item": 1}', r"it is not a JSON object in one line \(NaN and Infinity are"),
        (b'{"price": 1, "item": 1}', r"the label \(label\) is missing, it must be 0 or 1"),
    ],
)
def test_a_bad_object_is_named_or_skipped(tmp_path: Path, line: bytes, said: str) -> None:
    path = text(tmp_path, "rows.jsonl", b"\n".join([*OBJECTS[:30], line, *OBJECTS[31:], b""]))
    source = opened(Jsonl, path, infer_rows=20)
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 31: {said}"):
        source.read(source.slices(1000)[0])
    skipping = opened(Jsonl, path, "skip", infer_rows=20)
    assert whole(skipping).dense[:, 1].tolist() == [count for count in range(40) if count != 30]


def test_objects_may_lack_values_and_have_others(tmp_path: Path) -> None:
    lines = [
        {"label": 1, "price": 3, "item": 4, "other": {"a": [1]}},
        {"item": 5, "label": 0},
        {"label": 1.0, "item": 6, "price": 2.5, "tags": [1, 2], "names": ["a"]},
    ]
    path = text(tmp_path, "rows.jsonl", "\n".join(map(json.dumps, lines)).encode())
    batch = whole(opened(Jsonl, path, dense=["price"], categorical=["item", "tags"], hash_size=None))
    assert batch.dense.tolist() == [[3], [0], [2.5]]
    assert batch.ids.values.tolist() == [4, 5, 6, 1, 2]


@pytest.mark.parametrize(
    ("member", "second", "said"),
    [
        (Csv, csv_of(FRAME.drop("word")), r"b: there is no column 'word' \(data\.categorical\); the file has label"),
        (
            Jsonl,
            jsonl_of(FRAME.drop("word")),
            r"b: there is no column 'word' \(data\.categorical\); the file has label",
        ),
        (Csv, LINES[0], "b: has no rows"),
        (Csv, b"label,price,price\n1,2,3\n", "b: the header names 'price' twice"),
        (Jsonl, b"1\n2\n", "b: none of the first rows is a JSON object in one line"),
        (Csv, b"", "b: the file is empty"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, member: type[TableSource], second: bytes, said: str) -> None:
    first = csv_of(FRAME) if member is Csv else jsonl_of(FRAME)
    options = {"lists": LISTS} if member is Csv else {}
    with pytest.raises(DataError, match=said):
        opened(member, [text(tmp_path, "a", first), text(tmp_path, "b", second)], **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"separator": "ab"}, r"data\.separator=ab"),
        ({"separator": "\n"}, r"data\.separator"),
        ({"types": {"user": "Int32"}}, r"data\.types\.user"),
        ({"types": {"user": "List(Int64)"}}, r"data\.types\.user=List\(Int64\) needs data\.lists=\{user: ;\}"),
        ({"types": {"tags": "Int64"}, "lists": LISTS}, r"data\.types\.tags=Int64 has no list, as data\.lists"),
        ({"infer_rows": 0}, r"data\.infer_rows=0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.build(Csv, {"path": "x", **OPTIONS, **options}, "data")


def test_columns_are_kept_as_they_are(tmp_path: Path) -> None:
    path = text(tmp_path, "rows.csv", csv_of(FRAME.with_columns(note=pl.col("count") * 1.5)))
    columns = Columns(opened(Csv, path, lists=LISTS), ["note", "word"])
    assert columns.types == {"note": pl.Float64, "word": pl.String}
    assert columns.take(3).rows() == [(0.0, None), (1.5, 'w1, "1"'), (3.0, 'w2, "2"')]
    bad = text(tmp_path, "bad.csv", b"label,item,note\n" + b"0,1,2\n" * 3 + b"0,1,x\n")
    options = {"dense": [], "categorical": ["item"], "rows": 9, "hash_size": None, "infer_rows": 2}
    with pytest.raises(DataError, match=r"bad\.csv, row 4: note is 'x', where the first rows"):
        Columns(opened(Csv, bad, **options), ["note"]).take(4)


def test_text_that_looks_like_json_is_text(tmp_path: Path) -> None:
    words = ["[x", "{}", '["a"]', None]
    rows = "\n".join(json.dumps({"label": 1, "word": word}) for word in words)
    path = text(tmp_path, "rows.jsonl", rows.encode())
    source = opened(Jsonl, path, dense=[], categorical=["word"], rows=None, hash_size=9)
    assert source.tables[0].take(0, 4, ["word"])[0]["word"].to_list() == words
