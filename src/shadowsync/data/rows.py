"""What sources of files have in common: slices that do not cross files, places for messages, bad rows, marks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.files import File, resolve
from shadowsync.data.source import PART, BadRows, Mark, OpenSource, Schema, Slice, digest
from shadowsync.errors import DataError

_LOOKED_AT = 1000  # rows
_LARGE = 1e4  # of a dense number


@dataclass(frozen=True)
class Problem:
    """What is wrong with a row, counted from 0 within its slice, and what to do about it."""

    row: int
    text: str
    remedy: str = "mend it, or leave such rows out with data.on_bad_row=skip"


@dataclass(frozen=True)
class FileOptions:
    """Where the rows of a source of files are."""

    path: Annotated[
        str | tuple[str, ...], Field(description="training rows: a file, a glob or a list, any URL of fsspec")
    ]
    test_path: Annotated[str | tuple[str, ...] | None, Field(description="test rows, likewise; None: no test")] = None

    def files(self, split: Literal["train", "test"], suffix: str | None = None) -> tuple[File, ...] | None:
        """As `resolve`; None if there are no test rows."""
        key, paths = ("data.path", self.path) if split == "train" else ("data.test_path", self.test_path)
        return None if paths is None else resolve(key, paths, suffix)


class FileRows(OpenSource):
    """An opened source whose rows lie in files.

    Attributes:
        own_mark: stands for the marks of the files, where there is one.
        for_trained: the rows are for a model that is trained, so that options of the data cannot be changed any more.
    """

    for_trained: bool = False
    own_mark: Mark | None = None

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
        self._stamps = [file.stamp() for file in self.files]

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

    def dense_bounds(self) -> Mapping[str, float]:
        """The largest |x| of dense columns, of those of which the files tell it without being read through."""
        return {}

    def digest(self, file: int) -> str:
        """Of those bytes of a file that tell it from others: the first and the last, where a format knows no better."""
        size = self.files[file].size
        return digest(size, [(0, min(PART, size)), (max(0, size - PART), size)], self.files[file].read)

    def marks(self) -> tuple[Mark, ...]:
        """One for each file; those of files elsewhere cost a request or two each, once."""
        if self.own_mark is not None:
            return (self.own_mark,)
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
            trained = "mend it, or take such rows out of the file, as the model is trained already"
            raise DataError(f"{texts[0]}; {trained if self.for_trained else problems[0].remedy}")
        self.bad_rows.add(texts)
        keep = np.ones(part.rows, dtype=np.bool_)
        keep[[problem.row for problem in problems]] = False
        self._dropped[part.file, part.start] = {problem.row for problem in problems}
        return keep


def large_columns(source: OpenSource) -> str | None:
    """A sentence on dense columns whose numbers are far too large to train on, as the first rows of a file show them.

    Raises:
        DataError: one of these rows cannot be used.
    """
    if not isinstance(source, FileRows) or not source.schema.dense or not source.rows:
        return None
    dense = source.read(Slice(0, 0, 0, min(_LOOKED_AT, source.file_rows[0]))).dense
    most = dense.abs().amax(0).tolist() if len(dense) else [0.0] * len(source.schema.dense)
    found = [f"{name} ({value:.3g})" for name, value in zip(source.schema.dense, most, strict=True) if value > _LARGE]
    if not found:
        return None
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    remedy = (
        "scale them as the rows that the model was trained on"
        if source.for_trained
        else "list ids in data.categorical with data.hash_size, take counts with data.log_dense=true, and scale the "
        "rest to about −1 … 1"
    )
    return (
        f"dense columns with numbers beyond ±{_LARGE:,.0f}, which drown the others: {', '.join(found[:3])}{more}; "
        f"{remedy}"
    )


def largest_column(source: OpenSource) -> str | None:
    """`|price| is up to 1e+30`: the dense column with the largest number, where it is large and the files tell it.

    Raises:
        DataError: a file is gone, or was damaged.
    """
    bounds = source.dense_bounds() if isinstance(source, FileRows) else {}
    name = max(bounds, key=bounds.__getitem__, default=None)
    return None if name is None or bounds[name] <= _LARGE else f"|{name}| is up to {bounds[name]:.3g}"
