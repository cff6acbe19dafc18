"""Files of one JSON object a line, written so that neither a kill nor a resume spoils them."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from shadowsync.errors import DataError
from shadowsync.report.files import read_bytes, save_errors, write_atomically

S = TypeVar("S", bound=msgspec.Struct)


class JsonLines(Generic[S]):
    """Appends a line at a time.

    What a resumed run goes on from is written first, in one piece, so that the file tells one story whatever came
    after the checkpoint and was lost.
    """

    def __init__(self, path: Path, earlier: Sequence[S] = ()) -> None:
        """Starts the file anew.

        Raises:
            SaveError: it cannot be written.
        """
        self._path = path
        write_atomically(path, _lines(earlier))
        with save_errors(path):
            self._file = path.open("ab")

    def append(self, line: S) -> None:
        """Writes one line; a reader sees it at once.

        Raises:
            SaveError: it cannot be written.
        """
        with save_errors(self._path):
            self._file.write(_lines([line]))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with save_errors(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lines(structs: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(struct) + b"\n" for struct in structs)


def read_lines(path: Path, kind: type[S], name: str, tell: Callable[[str], object] | None = None) -> list[S]:
    """The lines of a file, none where there is no file.

    A last line without its end was cut off by a kill and is left out.

    Args:
        path: of the file.
        kind: of a line.
        name: what a line is called in messages.
        tell: hears of lines that are none, which are left out; without it the first one is an error.

    Raises:
        DataError: a line is none of `kind`; the message names it.
    """
    if not path.exists():
        return []
    *lines, _cut_off = read_bytes(path, "").split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found += [_decode(path, number, line, kind, name)] if line.strip() else []
        except DataError as error:
            if tell is None:
                raise DataError(f"{error}; remove the line") from error
            tell(f"{error}; the line is left out")
    return found


def _decode(path: Path, number: int, line: bytes, kind: type[S], name: str) -> S:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: line {number} is not {name} of shadowsync train: {error}") from error
