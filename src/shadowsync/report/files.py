"""The files of a run's folder: written whole or a JSON object a line, so that neither a kill nor a resume spoils them.

`metrics.jsonl` has a line for each frame, `events.jsonl` one for whatever happened to a role.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from shadowsync.errors import DataError, save_errors
from shadowsync.metrics.history import Frame, RoleEvent

_METRICS, _EVENTS = "metrics.jsonl", "events.jsonl"
S = TypeVar("S", bound=msgspec.Struct)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is never seen half-written, not even after a power cut.

    Raises:
        SaveError: the folder is missing or read-only, or the disk is full; what stood at `path` is kept.
    """
    with save_errors(path):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_bytes(path: Path, missing: str) -> bytes:
    """The content of `path`; `DataError` if it is not there (`missing` says what to do) or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; {missing}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


class JsonLines(Generic[S]):
    """Appends a line at a time, from any thread; a reader sees it at once. Every method may raise `SaveError`.

    What a resumed run goes on from is written first, in one piece, so that the file tells one story whatever came
    after the checkpoint and was lost. `lines` are all so far, these included.
    """

    def __init__(self, path: Path, earlier: Sequence[S] = (), empty: bool = True) -> None:
        """Starts the file anew; `empty`: it is there even without a line, else it appears with the first one."""
        self.lines = list(earlier)
        self._path = path
        self._lock = threading.Lock()
        self._closed = False
        self._file: BinaryIO | None = None
        with save_errors(path):
            if empty or earlier:
                write_atomically(path, _lines(earlier))
                self._file = path.open("ab")
            else:
                path.unlink(missing_ok=True)

    def append(self, line: S) -> None:
        """Writes one line; what comes once the file is closed is left out."""
        with self._lock, save_errors(self._path):
            if self._closed:
                return
            self._file = self._file or self._path.open("ab")
            self._file.write(_lines([line]))
            self._file.flush()
            self.lines.append(line)

    def close(self) -> None:
        with self._lock, save_errors(self._path):
            self._closed = True
            if self._file is not None:
                self._file.close()


def _lines(structs: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(struct) + b"\n" for struct in structs)


def write_frames(folder: Path, earlier: Sequence[Frame] = ()) -> JsonLines[Frame]:
    """Starts `metrics.jsonl` anew."""
    return JsonLines(folder / _METRICS, earlier)


def write_events(folder: Path, earlier: Sequence[RoleEvent] = ()) -> JsonLines[RoleEvent]:
    """Starts `events.jsonl` anew, which is there where there are any."""
    return JsonLines(folder / _EVENTS, earlier, empty=False)


def read_frames(folder: Path, tell: Callable[[str], object] | None = None) -> list[Frame]:
    """The frames of the run in `folder`; none where it wrote no `metrics.jsonl`; `tell` as in `_read_lines`."""
    return _read_lines(folder / _METRICS, Frame, "a frame", tell)


def read_events(folder: Path, tell: Callable[[str], object] | None = None) -> list[RoleEvent]:
    """What happened to the roles of the run in `folder`; nothing where it wrote no `events.jsonl`."""
    return _read_lines(folder / _EVENTS, RoleEvent, "an event", tell)


def frames_until(frames: Iterable[Frame], samples: int) -> list[Frame]:
    """The frames a run resumed at `samples` goes on from; later ones tell of training that was lost."""
    return [frame for frame in frames if frame.samples <= samples]


def _read_lines(path: Path, kind: type[S], name: str, tell: Callable[[str], object] | None = None) -> list[S]:
    """The lines of a file, none where there is no file. A last line without its end was cut off and is left out.

    `tell` hears of lines that are no `kind`, by the `name` of one, and they are left out; without it the first one is a
    `DataError`.
    """
    if not path.exists():
        return []
    *lines, _cut_off = read_bytes(path, "").split(b"\n")
    found: list[S] = []
    for number, line in enumerate(lines, start=1):
        try:
            found += [msgspec.json.decode(line, type=kind)] if line.strip() else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong = f"{path}: line {number} is not {name} of shadowsync train: {error}"
            if tell is None:
                raise DataError(f"{wrong}; remove the line") from error
            tell(f"{wrong}; the line is left out")
    return found
