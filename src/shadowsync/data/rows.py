"""What sources of files have in common: slices that do not cross files, places for messages, bad rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shadowsync.data.files import File
from shadowsync.data.source import BadRows, OpenSource, Schema, Slice
from shadowsync.errors import DataError


@dataclass(frozen=True)
class Problem:
    """What is wrong with a row, counted from 0 within its slice."""

    row: int
    text: str


class FileRows(OpenSource):
    """An opened source whose rows lie in files."""

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

    def limit(self, rows: int) -> None:
        """Only the first `rows` rows are read."""
        before = np.cumsum([0, *self.file_rows[:-1]])
        self.file_rows = tuple(int(max(min(n, rows - b), 0)) for n, b in zip(self.file_rows, before, strict=True))
        self.rows = sum(self.file_rows)

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

    def reject(self, part: Slice, problems: Sequence[Problem]) -> NDArray[np.bool_]:
        """Raises for the first problem, or counts all of them and returns which rows of the slice to keep."""
        texts = [f"{self.files[part.file].path}, row {part.start + p.row + 1}: {p.text}" for p in problems]
        if self.on_bad_row == "error":
            raise DataError(f"{texts[0]}; mend it, or leave such rows out with data.on_bad_row=skip")
        self.bad_rows.add(texts)
        keep = np.ones(part.rows, dtype=np.bool_)
        keep[[problem.row for problem in problems]] = False
        self._dropped[part.file, part.start] = {problem.row for problem in problems}
        return keep
