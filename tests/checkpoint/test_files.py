"""The conformance test of `Files`, and files written past the page cache, also where that is not to be had."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from checkpoint_helpers import memory_root
from fsspec.implementations.memory import MemoryFileSystem

from shadowsync.checkpoint import files as file_systems
from shadowsync.checkpoint.files import Files, LocalFiles, RemoteFiles, open_files, write_file
from shadowsync.errors import ConfigError, RunError

BUFFER = 8192
SIZES = (0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, 3 * BUFFER + 4096, 3 * BUFFER + 4097)


MEMBERS: dict[str, Callable[[Path], Files]] = {
    "local": lambda path: open_files(str(path / "a" / "b")),
    "url": lambda path: open_files(f"file://{path}/c"),
    "memory": lambda path: open_files(memory_root()),
    "generic": lambda path: RemoteFiles(str(path), fsspec.filesystem("file"), str(path / "d")),
}


@pytest.fixture(params=MEMBERS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return MEMBERS[request.param](tmp_path)


def test_local_urls_are_local(tmp_path: Path) -> None:
    assert isinstance(open_files(f"file://{tmp_path}"), LocalFiles)
    assert isinstance(open_files(memory_root()), RemoteFiles)


def test_nothing_is_made_before_something_is_written(files: Files, tmp_path: Path) -> None:
    assert files.names() == []
    assert files.names("x") == []
    assert files.size("x/y") is None
    assert list(tmp_path.iterdir()) == []
    files.remove("x", "y")


def test_a_written_file_is_read_in_ranges(files: Files) -> None:
    files.write("x/y", iter([b"01234", memoryview(b"56789")]))
    assert files.size("x/y") == 10
    assert files.read("x/y", 0, 10) == b"0123456789"
    assert files.read("x/y", 3, 7) == b"3456"
    assert files.read("x/y", 8, 20) == b"89"
    assert files.names("x") == ["y"]
    assert files.size("x") is None or isinstance(files, LocalFiles)
    with pytest.raises(FileNotFoundError):
        files.read("x/z", 0, 1)
    files.write("x/empty", iter(()))
    assert files.size("x/empty") == 0
    assert files.read("x/empty", 0, 1) == b""


def test_publishing_gives_the_folder_its_name_and_its_last_file(files: Files) -> None:
    staged = files.staging("x")
    files.write(f"{staged}/y", [b"1"])
    assert files.size("x/last") is None
    files.publish("x", "last", b"content")
    assert files.names() == ["x"]
    assert sorted(files.names("x")) == ["last", "y"]
    assert files.read("x/last", 0, 99) == b"content"
    assert files.read("x/y", 0, 99) == b"1"


def test_a_folder_gets_its_name_only_when_all_of_it_is_on_the_disk(
    tmp_path: Path, flushed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(str(tmp_path))
    staged = files.staging("x")
    files.write(f"{staged}/y", [b"1"])
    rename = Path.rename
    flushed_before_rename: list[Path] = []

    def recording(path: Path, target: Path) -> Path:
        flushed_before_rename.extend(flushed)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", recording)
    files.publish("x", "last", b"content")
    folder = tmp_path / staged
    assert flushed_before_rename == [folder / "y", folder / "last", folder]
    assert flushed[3:] == [tmp_path]


def test_removing_takes_only_the_folder(files: Files) -> None:
    for path in ("x/first", "x/y", "z/y"):
        files.write(path, [b"1"])
    files.remove("x", "first")
    files.remove("x", "first")
    assert files.names() == ["z"]


@pytest.mark.parametrize("member", ["local", "memory"])
def test_a_half_removed_folder_is_not_complete(member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MEMBERS[member](tmp_path)
    for path in ("x/a", "x/first", "x/z"):
        files.write(path, [b"1"])

    remove = MemoryFileSystem.rm

    def only_single_files(self: object, path: str, recursive: bool = True) -> None:
        if recursive:
            raise OSError(5, "Input/output error")
        remove(self, path)

    monkeypatch.setattr(shutil, "rmtree", lambda path: only_single_files(None, path))
    monkeypatch.setattr(MemoryFileSystem, "rm", only_single_files)
    with pytest.raises(OSError, match="Input/output error"):
        files.remove("x", "first")
    assert sorted(files.names("x")) == ["a", "z"]


def test_errors_of_a_remote_library_become_os_errors() -> None:
    class Broken(fsspec.AbstractFileSystem):
        def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
            raise RuntimeError("Access Denied\nrequest 17")

    files = RemoteFiles("broken://bucket", Broken(), "bucket")
    with pytest.raises(OSError, match=r"^RuntimeError: Access Denied$"):
        files.read("x", 0, 1)


def test_errors_of_what_gives_the_bytes_are_not_the_file_systems(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "BUFFER_BYTES", BUFFER)

    def failing() -> Iterator[bytes]:
        yield b"1" * (2 * BUFFER)
        raise RunError("nobody is there")

    with pytest.raises(RunError, match="nobody is there"):
        files.write("x/y", failing())
    files.write("x/y", [b"2"])
    assert files.read("x/y", 0, 9) == b"2"


@pytest.mark.parametrize("root", ["nosuch://bucket/x", "gdrive://x"])
def test_an_unknown_protocol_is_the_users_mistake(root: str) -> None:
    with pytest.raises(ConfigError, match=root):
        open_files(root)


# --- past the page cache ---------------------------------------------------------------------------------------------


class Disk:
    """Counts what goes through `os.write`, as it went, and fails where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[tuple[int, bool]] = []
        self.fails: Callable[[int, bool], int | None] = lambda size, directly: None  # raises, or says how much fits
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, view: memoryview) -> int:
        directly = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        most = self.fails(len(view), directly)
        self.writes.append((len(view), directly))
        return self._write(descriptor, view if most is None else view[:most])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(file_systems, "BUFFER_BYTES", BUFFER)
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
        monkeypatch.setattr(file_systems, "_O_DIRECT", 0)
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


def test_it_is_flushed_once_all_is_written(tmp_path: Path, disk: Disk, flushed: list[Path]) -> None:
    write_file(tmp_path / "file", [b"x" * (BUFFER + 1)])
    assert flushed == [tmp_path / "file"]
