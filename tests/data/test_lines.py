"""Text addressed by line, plain and compressed, with marks and restarts closer together than in real use."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data import files


def open_text(folder, text: bytes, compressed: bool, members: int = 1):
    path = folder / "text"
    if compressed:
        size = -(-len(text) // members)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        path.write_bytes(b"".join(gzip.compress(piece) for piece in pieces))
    else:
        path.write_bytes(text)
    return files.open_lines(files.resolve("data.path", str(path))[0])


@pytest.fixture(autouse=True)
def close_marks(monkeypatch):
    for name, size in (("_STRIDE", 4), ("_CHUNK", 50), ("_GZIP_CHUNK", 30), ("_RESTART", 100)):
        monkeypatch.setattr(files, name, size)


@pytest.mark.parametrize("last", [b"\n", b""])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 200])
def test_any_run_of_lines_can_be_read(tmp_path, count, compressed, last):
    generator = np.random.default_rng(count)
    rows = [generator.integers(97, 123, generator.integers(1, 30)).astype(np.uint8).tobytes() for _ in range(count)]
    text = b"\n".join(rows) + last
    opened = open_text(tmp_path, text, compressed, members=3)
    assert opened.count == count
    whole = text.splitlines(keepends=True)
    for start in sorted({0, 1, 3, 4, count // 2, count - 1}, reverse=True):
        for stop in {start + 1, start + 4, count}:
            if start < stop <= count:
                assert opened.read(start, stop) == b"".join(whole[start:stop])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(spans=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 40)), max_size=12), members=st.integers(1, 5))
def test_compressed_text_can_be_read_in_any_order(tmp_path_factory, spans, members):
    text = b"".join(b"%d %x\n" % (k, k * 7919 % 65537) for k in range(300))
    opened = open_text(tmp_path_factory.mktemp("lines"), text, True, members)
    whole = text.splitlines(keepends=True)
    for start, rows in spans:
        assert opened.read(start, min(start + rows, 300)) == b"".join(whole[start : start + rows])


def test_reading_near_the_end_does_not_decompress_from_the_beginning(tmp_path):
    text = b"".join(b"%d %x\n" % (k, k * 7919 % 65537) for k in range(3000))
    opened = open_text(tmp_path, text, True)
    assert len(opened._restarts) > 5
    opened.read(2990, 3000)
    opened._rewind(opened._restarts[0])
    opened.read(2990, 3000)
    assert len(text) - opened._held_from < 500


def test_zeros_after_the_last_member_are_padding(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(gzip.compress(b"a\nb\n") + bytes(100))
    assert files.open_lines(files.resolve("data.path", str(path))[0]).read(0, 2) == b"a\nb\n"


@pytest.mark.parametrize("rows", [3, 4, 9])
def test_runs_that_begin_behind_a_header_are_decompressed_once(tmp_path, monkeypatch, rows):
    text = b"".join(b"%d %x\n" % (k, k * 7919 % 65537) for k in range(600))
    opened = open_text(tmp_path, text, True)
    opened.read(1, 1 + rows)
    monkeypatch.setattr(opened, "_rewind", lambda restart: pytest.fail("went back"))
    for start in range(1 + rows, 600, rows):
        assert opened.read(start, min(start + rows, 600)) == b"".join(text.splitlines(True)[start : start + rows])
