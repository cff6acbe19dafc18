"""What sources of files have in common: slices that do not cross files, places for messages, bad rows."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shadowsync.data.batch import Batch
from shadowsync.data.files import File
from shadowsync.data.fingerprint import Mark
from shadowsync.data.source import BadRows, OpenSource, Schema, Slice
from shadowsync.errors import DataError


@dataclass(frozen=True)
class Problem:
    """What is wrong with a row, counted from 0 within its slice, and what to do about it."""

    row: int
    text: str
    remedy: str = "mend it, or leave such rows out with data.on_bad_row=skip"


_REMEDY_WHEN_TRAINED = "mend it, or take such rows out of the file, as the model is trained already"


class FileRows(OpenSource):
    """An opened source whose rows lie in files.

    Attributes:
        for_trained: the rows are for a model that is trained, so that options of the data cannot be changed any more.
    """

    for_trained: bool = False

    def __init__(
        self, schema: Schema, files: Sequence[File], file_rows: Sequence[int], on_bad_row: Literal["error", "skip"]
    ) -> None:
        self.schema = schema
        self.files = tuple(files)
        self.file_rows = tuple(file_rows)
        self.rows = sum(file_rows)
        self.bad_rows = BadRows()
        self.on_bad_row = on_bad_row
        self._dropped: dict[tuple[int, int], set[int]] = {}
        self._marks = [self._mark(number) if file.local else None for number, file in enumerate(self.files)]
        self._own_mark: Mark | None = None
        self._stamps = [file.stamp() for file in self.files]

    def limit(self, rows: int) -> None:
        """Only the first `rows` rows are read."""
        before = np.cumsum([0, *self.file_rows[:-1]])
        self.file_rows = tuple(int(max(min(n, rows - b), 0)) for n, b in zip(self.file_rows, before, strict=True))
        self.rows = sum(self.file_rows)

    def first(self, rows: int) -> Batch:
        """Good rows of the first `rows` rows of the first file.

        Raises:
            DataError: as `read`.
        """
        return self.read(Slice(0, 0, 0, min(rows, self.file_rows[0])))

    def slices(self, rows_per_slice: int) -> Sequence[Slice]:
        """Slices of `rows_per_slice` rows, the last one of each file shorter."""
        cuts = [
            (file, start, min(rows_per_slice, rows - start))
            for file, rows in enumerate(self.file_rows)
            for start in range(0, rows, rows_per_slice)
        ]
        return [Slice(index, *cut) for index, cut in enumerate(cuts)]

    def place(self, part: Slice, row: int) -> str:
        """`path, row N`, counted from 1 in the file; rows that were skipped count."""
        dropped = self._dropped.get((part.file, part.start), set())
        kept = [position for position in range(part.rows) if position not in dropped]
        return f"{self.files[part.file].path}, row {part.start + kept[row] + 1}"

    def dense_bounds(self) -> Mapping[str, float]:
        """The largest |x| of dense columns, of those of which the files tell it without being read through."""
        return {}

    @abstractmethod
    def digest(self, file: int) -> str:
        """Of those bytes of a file that tell it from others."""

    def known_as(self, mark: Mark) -> None:
        """Replaces the marks of the files."""
        self._own_mark = mark

    def marks(self) -> tuple[Mark, ...]:
        """One for each file; those of files elsewhere cost a request or two each, once."""
        if self._own_mark is not None:
            return (self._own_mark,)
        self._marks = [mark or self._mark(number) for number, mark in enumerate(self._marks)]
        return tuple(mark for mark in self._marks if mark is not None)

    def _mark(self, number: int) -> Mark:
        file = self.files[number]
        return Mark(file.name, file.size, self.digest(number))

    def check_unchanged(self, part: Slice) -> None:
        """Raises `DataError` if the slice's file is not the one that was opened; a new time alone says nothing."""
        file, stamp = self.files[part.file], self.files[part.file].stamp()
        if stamp == self._stamps[part.file]:
            return
        if stamp is None or stamp[0] != file.size or self._mark(part.file) != self._marks[part.file]:
            raise DataError(
                f"{file.path}: was changed while it was being read (row {part.start + 1} was next): leave the files of "
                "a job as they are until it has ended"
            )
        self._stamps[part.file] = stamp

    def reject(self, part: Slice, problems: Sequence[Problem]) -> NDArray[np.bool_]:
        """Raises for the first problem, or counts all of them and returns which rows of the slice to keep."""
        texts = [f"{self.files[part.file].path}, row {part.start + p.row + 1}: {p.text}" for p in problems]
        if self.on_bad_row == "error":
            raise DataError(f"{texts[0]}; {_REMEDY_WHEN_TRAINED if self.for_trained else problems[0].remedy}")
        self.bad_rows.add(texts)
        keep = np.ones(part.rows, dtype=np.bool_)
        keep[[problem.row for problem in problems]] = False
        self._dropped[part.file, part.start] = {problem.row for problem in problems}
        return keep
