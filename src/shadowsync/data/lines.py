"""Text files addressed by line, plain or compressed with gzip, without reading them whole into memory.

Opening makes one pass that counts the lines. Every 256th line's position is kept (8 bytes each); a .gz also keeps the
decompressor's state about every 32 MB, so that reading can start near any line instead of at the file's beginning.
"""

import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shadowsync.data.files import File
from shadowsync.errors import DataError

_STRIDE = 256
_CHUNK = 4 << 20
_GZIP_CHUNK = 1 << 18
_RESTART = 32 << 20
_GZIP_WBITS = 31


class Lines(ABC):
    """The lines of a text file; `read` may be called from several threads.

    Attributes:
        count: how many lines; a last one without a line break counts.
    """

    sequential: bool

    def __init__(self, file: File) -> None:
        self.file = file
        self.count, self._marks = _index(self._chunks())

    def read(self, start: int, stop: int) -> bytes:
        """Lines `start … stop − 1`, with their line breaks.

        Raises:
            DataError: the file cannot be read any more.
        """
        first, last = start // _STRIDE, -(-stop // _STRIDE)
        block = self._range(int(self._marks[first]), int(self._marks[min(last, len(self._marks) - 1)]))
        before, wanted = start - first * _STRIDE, stop - start
        if before == 0 and (stop % _STRIDE == 0 or stop == self.count):
            return block
        breaks = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        begin = breaks[before - 1] + 1 if before else 0
        end = breaks[before + wanted - 1] + 1 if before + wanted <= len(breaks) else len(block)
        return block[begin:end]

    @abstractmethod
    def _chunks(self) -> Iterator[bytes]:
        """The whole text, piece by piece."""

    @abstractmethod
    def _range(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop − 1` of the text."""


class PlainLines(Lines):
    """Lines of an uncompressed file."""

    sequential = False

    def _chunks(self) -> Iterator[bytes]:
        return self.file.chunks(_CHUNK)

    def _range(self, start: int, stop: int) -> bytes:
        return self.file.read(start, stop)


@dataclass(frozen=True)
class _Restart:
    """A point from which decompression can go on."""

    text_byte: int
    file_byte: int
    decompressor: Any


class GzipLines(Lines):
    """Lines of a .gz, of one member or several.

    Raises:
        DataError: when opened, if the file is damaged or ends too early.
    """

    sequential = True

    def __init__(self, file: File) -> None:
        self._restarts = [_Restart(0, 0, zlib.decompressobj(_GZIP_WBITS))]
        self._lock = threading.Lock()
        super().__init__(file)
        self._rewind(self._restarts[0])

    def _chunks(self) -> Iterator[bytes]:
        lines, text_byte = 0, 0
        try:
            for chunk, file_byte, decompressor in self._decompress(self._restarts[0]):
                yield chunk
                lines += chunk.count(b"\n")
                text_byte += len(chunk)
                if text_byte - self._restarts[-1].text_byte >= _RESTART:
                    self._restarts.append(_Restart(text_byte, file_byte, decompressor.copy()))
        except (zlib.error, EOFError) as error:
            what = "it was cut" if isinstance(error, EOFError) else f"it is damaged ({error})"
            raise DataError(
                f"{self.file.path}: the gzip stream ends in row {lines + 1}: {what}; fetch it anew"
            ) from error

    def _range(self, start: int, stop: int) -> bytes:
        with self._lock:
            nearest = max((r for r in self._restarts if r.text_byte <= start), key=lambda r: r.text_byte)
            if start < self._held_from or nearest.text_byte > self._held_from + len(self._held):
                self._rewind(nearest)
            return self._advance(start, stop)

    def _rewind(self, restart: _Restart) -> None:
        self._stream = self._decompress(restart)
        self._held, self._held_from = b"", restart.text_byte

    def _advance(self, start: int, stop: int) -> bytes:
        """Decompresses up to `stop` and keeps what was read beyond it."""
        pieces = [self._held]
        position = self._held_from + len(self._held)
        while position < stop:
            try:
                chunk, _, _ = next(self._stream)
            except (StopIteration, zlib.error, EOFError) as error:
                raise DataError(f"{self.file.path}: was changed while it was being read") from error
            position += len(chunk)
            pieces = [*pieces, chunk] if position > start else [chunk]
        text = b"".join(pieces)
        begin = position - len(text)
        self._held, self._held_from = text[stop - begin :], stop
        return text[start - begin : stop - begin]

    def _decompress(self, restart: _Restart) -> Iterator[tuple[bytes, int, Any]]:
        """Text, and where in the file the decompressor then stands."""
        decompressor, file_byte = restart.decompressor.copy(), restart.file_byte
        for compressed in self.file.chunks(_GZIP_CHUNK, restart.file_byte):
            file_byte += len(compressed)
            text = decompressor.decompress(compressed)
            while decompressor.eof and decompressor.unused_data.strip(b"\0"):
                member = decompressor.unused_data
                decompressor = zlib.decompressobj(_GZIP_WBITS)
                text += decompressor.decompress(member)
            yield text, file_byte, decompressor
        if not decompressor.eof:
            raise EOFError


def open_lines(file: File) -> Lines:
    """A file that begins like a .gz is read as one, whatever its name."""
    compressed = file.read(0, min(2, file.size)) == b"\x1f\x8b"
    return GzipLines(file) if compressed or file.path.endswith(".gz") else PlainLines(file)


def _index(chunks: Iterator[bytes]) -> tuple[int, NDArray[np.int64]]:
    """The number of lines, and the positions of every `_STRIDE`th line and of the end."""
    lines, size, last = 0, 0, b"\n"
    marks = [np.zeros(1, dtype=np.int64)]
    for chunk in chunks:
        breaks = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
        first = -(lines + 1) % _STRIDE
        marks.append(breaks[first::_STRIDE] + size + 1)
        lines, size, last = lines + len(breaks), size + len(chunk), chunk[-1:] or last
    lines += last != b"\n"
    starts = np.concatenate(marks)
    return lines, starts if starts[-1] == size else np.append(starts, size)
