"""Files written past the page cache, and what happens where that is not to be had."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shadowsync.checkpoint import files
from shadowsync.checkpoint.files import write_file
from shadowsync.errors import RunError

BUFFER = 8192
SIZES = (0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, 3 * BUFFER + 4096, 3 * BUFFER + 4097)


class Disk:
    """Counts what goes through `os.write`, as it went, and fails where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[tuple[int, bool]] = []
        self.fails: Callable[[int, bool], int | None] = lambda size, directly: (
            None
        )  # raises, or gives the most it takes
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, view: memoryview) -> int:
        directly = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        most = self.fails(len(view), directly)
        self.writes.append((len(view), directly))
        return self._write(descriptor, view if most is None else view[:most])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(files, "BUFFER_BYTES", BUFFER)
    return Disk(monkeypatch)


@pytest.fixture
def taking(tmp_path: Path) -> Path:
    """A file on a file system that takes direct writes; else there is nothing to test here."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files takes no direct writes")
    return tmp_path / "file"


def chunks(content: bytes, sizes: int = 1000) -> Iterator[bytes | memoryview]:
    """Of no size that fits."""
    for number, start in enumerate(range(0, len(content), sizes)):
        part = content[start : start + sizes]
        yield part if number % 2 else memoryview(part)
        yield b""


@pytest.mark.parametrize("size", SIZES)
def test_full_buffers_go_directly_and_the_rest_the_ordinary_way(taking: Path, disk: Disk, size: int) -> None:
    content = os.urandom(size)
    write_file(taking, chunks(content))
    assert taking.read_bytes() == content
    rest = [(size % BUFFER, False)] if size % BUFFER else []
    assert disk.writes == [(BUFFER, True)] * (size // BUFFER) + rest


def test_what_was_there_before_is_gone(taking: Path, disk: Disk) -> None:
    taking.write_bytes(os.urandom(9 * BUFFER))
    write_file(taking, [b"x" * (BUFFER + 5)])
    assert taking.read_bytes() == b"x" * (BUFFER + 5)


@pytest.mark.parametrize("refused", ["flag", "first write", "system"])
@pytest.mark.parametrize("size", SIZES)
def test_where_direct_writes_are_refused_all_goes_the_ordinary_way(
    tmp_path: Path, disk: Disk, size: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = fcntl.fcntl

    def refusing(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return ask(descriptor, command, argument)

    def no_direct(size: int, directly: bool) -> None:
        if directly:
            raise OSError(errno.EINVAL, "Invalid argument")

    if refused == "flag":
        monkeypatch.setattr(fcntl, "fcntl", refusing)
    elif refused == "system":
        monkeypatch.setattr(files, "_O_DIRECT", 0)
    disk.fails = no_direct
    content = os.urandom(size)
    write_file(tmp_path / "file", chunks(content))
    assert (tmp_path / "file").read_bytes() == content
    assert not any(directly for _, directly in disk.writes)


def test_a_write_that_was_cut_short_is_gone_on_with(taking: Path, disk: Disk) -> None:
    disk.fails = lambda size, directly: 4096 if len(disk.writes) == 1 else None
    content = os.urandom(3 * BUFFER + 77)
    write_file(taking, chunks(content))
    assert taking.read_bytes() == content
    assert disk.writes == [(BUFFER, True), (BUFFER, True), (BUFFER - 4096, False), (BUFFER, True), (77, False)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_full_disk_is_what_it_was(tmp_path: Path, disk: Disk, number: int, at: int) -> None:
    def full(size: int, directly: bool) -> None:
        if len(disk.writes) >= at - 1:
            raise OSError(number, os.strerror(number))

    disk.fails = full
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write_file(tmp_path / "file", [os.urandom(3 * BUFFER + 1)])
    assert caught.value.errno == number


def test_what_gives_the_bytes_may_fail(tmp_path: Path, disk: Disk) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x" * (2 * BUFFER)
        raise RunError("nobody is there")

    with pytest.raises(RunError, match="nobody is there"):
        write_file(tmp_path / "file", failing())


def test_it_is_flushed_once_all_is_written(tmp_path: Path, disk: Disk, flushed: list[Path]) -> None:
    write_file(tmp_path / "file", [b"x" * (BUFFER + 1)])
    assert flushed == [tmp_path / "file"]
