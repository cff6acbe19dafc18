"""The conformance test of `Files`: what a checkpoint needs of any file system."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from checkpoint_helpers import memory_root
from fsspec.implementations.memory import MemoryFileSystem

from shadowsync.checkpoint.files import Files, LocalFiles, RemoteFiles, open_files
from shadowsync.errors import ConfigError, RunError


def generic(path: Path) -> Files:
    """A local folder through the code for remote file systems."""
    return RemoteFiles(str(path), fsspec.filesystem("file"), str(path))


MEMBERS: dict[str, Callable[[Path], Files]] = {
    "local": lambda path: open_files(str(path / "a" / "b")),
    "url": lambda path: open_files(f"file://{path}/c"),
    "memory": lambda path: open_files(memory_root()),
    "generic": lambda path: generic(path / "d"),
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


def test_a_file_can_be_empty(files: Files) -> None:
    files.write("x/y", iter(()))
    assert files.size("x/y") == 0
    assert files.read("x/y", 0, 1) == b""


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

    def cut_off(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", cut_off)
    monkeypatch.setattr(MemoryFileSystem, "rm", only_single_files(MemoryFileSystem.rm))
    with pytest.raises(OSError, match="Input/output error"):
        files.remove("x", "first")
    assert sorted(files.names("x")) == ["a", "z"]


def only_single_files(remove: Callable[..., None]) -> Callable[..., None]:
    """Removing a file works, removing a folder fails before its first file."""

    def removed(self: MemoryFileSystem, path: str, recursive: bool = False) -> None:
        if recursive:
            raise OSError(5, "Input/output error")
        remove(self, path)

    return removed


def test_reading_what_is_not_there_is_file_not_found(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.read("x/y", 0, 1)


def test_errors_of_a_remote_library_become_os_errors() -> None:
    class Broken(fsspec.AbstractFileSystem):
        def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
            raise RuntimeError("Access Denied\nrequest 17")

    files = RemoteFiles("broken://bucket", Broken(), "bucket")
    with pytest.raises(OSError, match=r"^RuntimeError: Access Denied$"):
        files.read("x", 0, 1)


def test_errors_of_what_gives_the_bytes_are_not_the_file_systems(files: Files) -> None:
    def failing() -> Iterator[bytes]:
        yield b"1"
        raise RunError("nobody is there")

    with pytest.raises(RunError, match="nobody is there"):
        files.write("x/y", failing())
    files.write("x/y", [b"2"])
    assert files.read("x/y", 0, 9) == b"2"


@pytest.mark.parametrize("root", ["nosuch://bucket/x", "gdrive://x"])
def test_an_unknown_protocol_is_the_users_mistake(root: str) -> None:
    with pytest.raises(ConfigError, match=root):
        open_files(root)
