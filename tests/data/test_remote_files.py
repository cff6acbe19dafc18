"""Files that lie elsewhere: read in parts, with patience, and with one sentence for everything that goes wrong."""

import gzip
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
from data_samples import criteo_row, same
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_files import Flaky, Web, web_server

from shadowsync import Job
from shadowsync.data import files
from shadowsync.data import parquet as parquet_module
from shadowsync.data.batch import Batch
from shadowsync.data.criteo import Criteo
from shadowsync.data.files import File, resolve
from shadowsync.data.parquet import Parquet
from shadowsync.data.source import OpenSource, Source
from shadowsync.errors import DataError, SaveError

ROWS = 3000
Shops = Callable[[], tuple[OpenSource, OpenSource]]


@pytest.fixture
def web() -> Iterator[Web]:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not installed")
    with web_server() as server:
        yield server


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    monkeypatch.setattr(files, "_PAUSES_S", (0.0, 0.0, 0.0))
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures, Flaky.asked, Flaky.store = [], [], {}
    Flaky.pseudo_dirs = [""]
    yield Flaky
    Flaky.clear_instance_cache()


def shop(folder: Path) -> bytes:
    frame = pl.DataFrame(
        {
            "label": [k % 2 for k in range(ROWS)],
            "unused": [f"{k * 7919:032x}" for k in range(ROWS)],
            "price": [k / 7 for k in range(ROWS)],
            "tags": [list(range(k % 4)) for k in range(ROWS)],
            "tags.more": list(range(ROWS)),
            "also unused": [f"{k * 104729:032x}" for k in range(ROWS)],
        }
    )
    frame.write_parquet(folder / "shop.parquet", row_group_size=400, compression="uncompressed")
    return (folder / "shop.parquet").read_bytes()


def parquet(path: str) -> Parquet:
    return Parquet(path=path, dense=("price",), categorical=("tags", "tags.more"), rows={"tags": 4, "tags.more": ROWS})


def text(first: int = 0) -> bytes:
    return "".join(criteo_row(n) + "\n" for n in range(first, first + ROWS // 3)).encode()


def opened(source: Source) -> OpenSource:
    found = source.open("train", "error")
    assert found is not None
    return found


def whole(source: OpenSource, rows: int = 300) -> Batch:
    return Batch.join([source.read(part) for part in source.slices(rows)])


# --- parquet by parts ------------------------------------------------------------------------------------------------


@pytest.fixture
def shops(tmp_path: Path, web: Web) -> Iterator[Shops]:
    """Opens the shop over HTTP, and the same shop here."""
    web.files["shop.parquet"] = shop(tmp_path)
    with ExitStack() as stack:
        yield lambda: (
            stack.enter_context(closing(opened(parquet(f"{web.url}/shop.parquet")))),
            opened(parquet(str(tmp_path / "shop.parquet"))),
        )


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_TAIL", 2000), ("_GAP", 500), ("_BLOCK", 3000)):
        monkeypatch.setattr(parquet_module, name, size)


def test_a_slice_fetches_only_its_row_groups_and_columns(web: Web, shops: Shops, small_requests: None) -> None:
    remote, local = shops()
    part = remote.slices(300)[5]  # rows 1500 … 1799: the fourth group and the fifth
    before = web.sent
    assert same(remote.read(part), local.read(part))
    first = web.sent - before
    assert 0 < first < 0.3 * len(web.files["shop.parquet"])
    assert same(remote.read(remote.slices(100)[17]), local.read(local.slices(100)[17]))
    assert web.sent - before == first, "a row group that is there is not fetched again"
    assert same(whole(remote), whole(local))
    total = web.sent
    assert total < 0.8 * len(web.files["shop.parquet"]), "columns that nobody wants stay where they are"
    assert same(whole(remote, 1000), whole(local, 1000))
    assert web.sent == total, "a second pass fetches nothing"


def test_small_files_come_with_their_footer(web: Web, shops: Shops) -> None:
    remote, local = shops()
    assert same(whole(remote), whole(local))
    assert web.got == [(0, len(web.files["shop.parquet"]))]


def test_a_footer_longer_than_the_first_guess(shops: Shops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "_TAIL", 30)
    remote, local = shops()
    assert same(whole(remote), whole(local))


def test_many_threads_fetch_each_row_group_once(web: Web, shops: Shops, small_requests: None) -> None:
    remote, local = shops()
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(remote.read, remote.slices(50)))
    assert same(Batch.join(read), whole(local))
    assert len(web.got) == len(set(web.got))


@pytest.mark.parametrize("nameless", [True, False], ids=["", "where open files have no path"])
def test_the_copy_has_no_name_and_is_gone_when_closed(
    tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    content, temporary, exists = shop(tmp_path), tmp_path / "temporary", Path.exists
    if not nameless:
        monkeypatch.setattr(Path, "exists", lambda path: "/proc/self/fd" not in str(path) and exists(path))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    temporary.mkdir()
    fsspec.filesystem("flaky").pipe_file("/shop.parquet", content)
    remote = opened(parquet("flaky://shop.parquet"))
    assert same(whole(remote), whole(opened(parquet(str(tmp_path / "shop.parquet")))))
    assert len(list(temporary.iterdir())) == (not Path("/proc/self/fd").exists())
    remote.close()
    assert list(temporary.iterdir()) == []
    with pytest.raises(DataError):
        remote.read(remote.slices(10)[0])


def test_no_room_for_the_copy(tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("flaky").pipe_file("/shop.parquet", shop(tmp_path))

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SaveError, match=r"has no room for what is read of flaky://shop\.parquet: No space left"):
        parquet("flaky://shop.parquet").open("train", "error")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(SaveError, match="a temporary file cannot be made there"):
        parquet("flaky://shop.parquet").open("train", "error")


@pytest.mark.parametrize("content", [b"label,price\n", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"\x00\x00\x00\x00PAR1"])
def test_what_is_no_parquet_file(flaky: type[Flaky], content: bytes) -> None:
    fsspec.filesystem("flaky").pipe_file("/x.parquet", content)
    with pytest.raises(DataError, match=r"flaky://x\.parquet: is not a parquet file, or was cut"):
        parquet("flaky://x.parquet").open("train", "error")


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9_000_000), st.integers(1, 900_000)), min_size=1, max_size=8))
def test_joined_spans_cover_all_and_leave_wide_holes(cuts: list[tuple[int, int]]) -> None:
    spans = [(begin, begin + length) for begin, length in cuts]
    joined = parquet_module._joined(spans)
    assert all(any(begin <= a and b <= end for begin, end in joined) for a, b in spans)
    assert all(right[0] - left[1] > parquet_module._GAP for left, right in pairwise(joined))
    assert {begin for begin, _ in joined} <= {begin for begin, _ in spans}
    assert {end for _, end in joined} <= {end for _, end in spans}


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_text_over_http_is_what_it_is_here(
    tmp_path: Path, web: Web, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BLOCK", 70_000)
    content = gzip.compress(text()) if compressed else text()
    (tmp_path / "rows").write_bytes(content)
    web.files["rows"] = content
    remote = opened(Criteo(path=f"{web.url}/rows", hash_size=100))
    counting = web.sent
    assert len(content) <= counting <= len(content) + 2, "opening reads the file once, to count its rows"
    part = remote.slices(100)[3]
    local = opened(Criteo(path=str(tmp_path / "rows"), hash_size=100))
    assert same(remote.read(part), local.read(part))
    if not compressed:
        assert web.sent - counting < 0.6 * len(content), "a slice is a range of bytes"
    assert same(whole(remote), whole(local))


def test_a_server_that_gives_no_parts_is_said_so(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not installed")
    with web_server(ranges=False) as web:
        web.files["rows"] = text()
        with pytest.raises(DataError, match="rows: the server does not give parts of a file; copy it"):
            Criteo(path=f"{web.url}/rows").open("train", "error")


def test_what_is_not_there_over_http(web: Web) -> None:
    with pytest.raises(DataError, match=r"none\.parquet: there is no such file"):
        parquet(f"{web.url}/none.parquet").open("train", "error")


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl.gz"])
def test_a_job_reads_its_rows_from_a_web_server(tmp_path: Path, web: Web, ending: str) -> None:
    rows = pl.DataFrame({"label": [k % 2 for k in range(500)], "item": [k % 2 + 2 * (k % 5) for k in range(500)]})
    rows = rows.with_columns(price=pl.Series(range(500)) % 7)
    made = {"csv": rows.write_csv().encode(), "jsonl.gz": gzip.compress(rows.write_ndjson().encode())}
    rows.write_parquet(tmp_path / "rows.parquet")
    web.files[f"rows.{ending}"] = made.get(ending) or (tmp_path / "rows.parquet").read_bytes()
    data = {
        "path": f"{web.url}/rows.{ending}",
        "categorical": ["item"],
        "rows": 12,
        "test": {"last": 100},
        "dense": ["price"],
    }
    job = Job({"data": {**data, "epochs": 5}, "train": {"trainers": 1, "batch_size": 20}}, out=tmp_path / "out")
    result = job.run()
    assert (result.data.train_samples, result.data.test_samples, result.data.trained_samples) == (400, 100, 2000)
    assert result.test.auc > 0.9


def test_a_glob_names_files_by_their_urls(flaky: type[Flaky]) -> None:
    filesystem = fsspec.filesystem("flaky")
    filesystem.pipe_file("/logs/day_1", text())
    filesystem.pipe_file("/logs/day_0", text(5000))
    source = opened(Criteo(path="flaky://logs/day_*", hash_size=100))
    first, last = source.slices(ROWS)[0], source.slices(ROWS)[1]
    assert source.place(first, 0) == "flaky:///logs/day_0, row 1"
    assert source.place(last, 0) == "flaky:///logs/day_1, row 1"


@settings(deadline=None, derandomize=True, max_examples=30)
@given(size=st.integers(1, 100), block=st.integers(1, 40), chunk=st.integers(1, 50), start=st.integers(0, 99))
def test_remote_chunks_are_the_file(size: int, block: int, chunk: int, start: int) -> None:
    content = bytes(range(size))
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/chunks", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK", block)
        pieces = list(File("chunks", "/chunks", size, filesystem).chunks(chunk, min(start, size)))
    assert b"".join(pieces) == content[start:]
    assert all(0 < len(piece) <= chunk for piece in pieces)


# --- patience and sentences ------------------------------------------------------------------------------------------


class Odd(Exception):
    """What a file system of somebody else's raises."""


def a_file(content: bytes = b"0123456789") -> File:
    fsspec.filesystem("flaky").pipe_file("/x", content)
    (found,) = resolve("data.path", "flaky://x")
    return found


def test_what_may_pass_is_tried_again(flaky: type[Flaky]) -> None:
    flaky.failures = [Odd("reset"), TimeoutError(), ConnectionResetError(104, "Connection reset by peer")]
    assert a_file().read(2, 5) == b"234"
    assert flaky.asked == [(2, 5)] * 4


@pytest.mark.parametrize(
    ("failures", "attempts", "message"),
    [
        ([Odd("no credentials\nand more")] * 4, 4, "flaky://x: cannot be read: no credentials"),
        ([TimeoutError()] * 4, 4, "flaky://x: cannot be read: TimeoutError"),
        ([PermissionError(13, "Access Denied")], 1, "flaky://x: cannot be read: Access Denied"),
        ([FileNotFoundError()], 1, "flaky://x: there is no such file"),
    ],
)
def test_what_lasts_is_one_sentence(flaky: type[Flaky], failures: list[Exception], attempts: int, message: str) -> None:
    flaky.failures = list(failures)
    with pytest.raises(DataError) as caught:
        a_file().read(0, 5)
    assert str(caught.value) == message
    assert len(flaky.asked) == attempts


def test_patience_is_longer_than_a_short_outage() -> None:
    assert 20 <= sum(files._PAUSES_S) <= 60


def test_a_file_cut_while_it_is_read(flaky: type[Flaky]) -> None:
    file = a_file()
    fsspec.filesystem("flaky").pipe_file("/x", b"0123")
    with pytest.raises(DataError, match="flaky://x: ends at byte 4, it was cut while it was being read"):
        file.read(2, 8)


@pytest.mark.parametrize(
    ("url", "module", "line"),
    [
        ("s3://bucket/rows.gz", "s3fs", "pip install s3fs"),
        ("gs://bucket/rows.gz", "gcsfs", "pip install gcsfs"),
        ("smb://host/rows.gz", "smbclient", "pip install smbprotocol"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, module: str, line: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError) as caught:
        resolve("data.path", url)
    assert str(caught.value) == f"data.path={url}: needs a package that is not installed: {line}"


def test_a_protocol_that_nobody_knows() -> None:
    with pytest.raises(DataError, match=r"data\.path=foo://x: Protocol not known: foo"):
        resolve("data.path", "foo://x")


def test_a_server_that_does_not_say_how_long_a_file_is(flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch) -> None:
    a_file()
    monkeypatch.setattr(flaky, "info", lambda self, path, **_: {"type": "file", "size": None})
    with pytest.raises(DataError, match="flaky://x: the server does not say how long it is"):
        resolve("data.path", "flaky://x")


def test_urls_of_local_files_are_local(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123")
    (file,) = resolve("data.path", f"file://{tmp_path}/x")
    assert file.local
    assert file.read(1, 3) == b"12"
    assert not File("x", "/x", 4, fsspec.filesystem("memory")).local
