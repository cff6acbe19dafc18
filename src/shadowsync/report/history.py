"""`metrics.jsonl`: one frame a line, flushed as it comes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from shadowsync.errors import DataError
from shadowsync.metrics.frame import Frame
from shadowsync.report.files import read_bytes, save_errors, write_atomically

FILE_NAME = "metrics.jsonl"


class History:
    """Writes a run's frames.

    A resumed run is given the `earlier` frames it goes on from (see `frames_until`): they are written first, in one
    piece, so that the file tells one story whatever was trained after the checkpoint and lost.
    """

    def __init__(self, folder: Path, earlier: Sequence[Frame] = ()) -> None:
        """Starts `folder/metrics.jsonl` anew.

        Raises:
            SaveError: it cannot be written.
        """
        self._path = folder / FILE_NAME
        write_atomically(self._path, _lines(earlier))
        with save_errors(self._path):
            self._file = self._path.open("ab")

    def append(self, frame: Frame) -> None:
        """Writes one line; a reader sees it at once.

        Raises:
            SaveError: it cannot be written.
        """
        with save_errors(self._path):
            self._file.write(_lines([frame]))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with save_errors(self._path):
            self._file.close()

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lines(frames: Iterable[Frame]) -> bytes:
    return b"".join(msgspec.json.encode(frame) + b"\n" for frame in frames)


def read_frames(folder: Path) -> list[Frame]:
    """The frames of the run in `folder`; none where it wrote no `metrics.jsonl`.

    A last line without its end was cut off by a kill and is left out.

    Raises:
        DataError: a line is not a frame; the message names it.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return []
    *lines, _cut_off = read_bytes(path, "").split(b"\n")
    return [_decode(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _decode(path: Path, number: int, line: bytes) -> Frame:
    try:
        return msgspec.json.decode(line, type=Frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: line {number} is not a frame of shadowsync train: {error}") from error


def frames_until(frames: Iterable[Frame], samples: int) -> list[Frame]:
    """The frames a run resumed at `samples` goes on from; later ones tell of training that was lost."""
    return [frame for frame in frames if frame.samples <= samples]
