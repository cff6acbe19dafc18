"""Files of named columns in whatever format, and what a source of such files does.

A format is a `TableFile`, which gives rows of a file as data frames, and a `TableSource`, which opens it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import polars as pl
from pydantic import Field

from shadowsync.config import source_called_like
from shadowsync.data.batch import Batch
from shadowsync.data.files import File, FileOptions, FileRows, Problem
from shadowsync.data.folders import Found, Wanted, chosen_files
from shadowsync.data.frame import TableOptions, batch_of, type_of
from shadowsync.data.source import OpenSource, Slice, Source
from shadowsync.data.values import shown_type
from shadowsync.errors import DataError
from shadowsync.registry import members
from shadowsync.serving import Mask

PIECE = 1 << 17
"""Rows of a piece of the data that is looked at before training."""


class TableFile(ABC):
    """A file of named columns; read from several threads at once, in any order.

    Attributes:
        own: its columns with their types.
        types: of these, and of those that the folders above it are named after.
        sequential: as of an `OpenSource`.
    """

    sequential: bool = False

    def __init__(self, file: File, own: Mapping[str, pl.DataType], folders: Mapping[str, pl.Series]) -> None:
        """`folders` holds one value for each column that is in the name of a folder."""
        self.file, self.own = file, own
        self._folders = {name: value for name, value in folders.items() if name not in own}
        self.types: Mapping[str, pl.DataType] = {name: value.dtype for name, value in self._folders.items()} | {**own}

    @abstractmethod
    def rows(self) -> int:
        """How many there are, bad ones included; raises `DataError` if there are none."""

    @abstractmethod
    def read(self, start: int, rows: int, columns: Sequence[str]) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """Some `own` columns of those rows; what is wrong with rows that cannot be parsed, which are null."""

    def take(self, start: int, rows: int, columns: Collection[str]) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """As `read`, also of columns in the names of folders; what is in neither is for whoever asks to refuse."""
        own = [name for name in columns if name in self.own]
        constants = [self._folders[name].new_from_index(0, rows) for name in columns if name in self._folders]
        if not own:
            return pl.DataFrame(constants), ()
        frame, problems = self.read(start, rows, own)
        return frame.with_columns(constants), problems

    def largest(self, columns: Collection[str]) -> Mapping[str, float]:
        """The largest |x| of those columns of which the file tells it without being read through."""
        return {}

    def digest(self, column: str | None) -> str | None:
        """By which the file is known again, if the format knows better than its ends; `column` may be looked into."""
        return None

    def close(self) -> None:  # noqa: B027 (nothing to do is the common case)
        """Lets go of the file."""


@dataclass(frozen=True, kw_only=True)
class TableSource(TableOptions, FileOptions, Source):
    """Files of named columns of one format."""

    partitions: Annotated[
        dict[str, Wanted],
        Field(
            description="of files in folders such as day=2024-01-01: only those with that value, one of a list, or "
            "{from: …, to: …}, both ends included"
        ),
    ] = field(default_factory=dict)
    test_partitions: Annotated[
        dict[str, Wanted],
        Field(
            description="likewise of the test rows; if there is no data.test_path they are in data.path and are not "
            "trained on"
        ),
    ] = field(default_factory=dict)

    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """Checks the files' columns and types."""
        train = split == "train"
        named, wanted = ("partitions", self.partitions) if train else ("test_partitions", self.test_partitions)
        files = self.files("train" if wanted and self.test_path is None else split)
        if files is None:
            return None
        chosen = chosen_files(f"data.{named}", files, wanted)
        if train and self.test_partitions and self.test_path is None:
            chosen = self._untested(files, chosen)
        source, tables = self.opened(chosen)
        return OpenTable(source if train else replace(source, time=None), tables, on_bad_row)

    def _untested(self, files: Sequence[File], chosen: Sequence[Found]) -> list[Found]:
        """The chosen ones without those that hold test rows; raises `DataError` if `partitions` names such, too."""
        tested = {file for file, _ in chosen_files("data.test_partitions", files, self.test_partitions)}
        both = [file.path for file, _ in chosen if file in tested]
        if self.partitions and both:
            raise DataError(f"{both[0]}: data.partitions and data.test_partitions both name it: leave it out of one")
        if len(both) == len(chosen):
            raise DataError(f"data.test_partitions takes all {len(files)} files: leave some to train on")
        return [found for found in chosen if found[0] not in tested]

    @property
    def settled(self) -> Mapping[str, object]:
        """As of an `OpenSource`, once it is opened."""
        return {}

    def at(self, path: str | tuple[str, ...]) -> Source:
        """The same columns in other files, in all of them, of the format that their names end in, else of this one.
        Nothing is trained there, so it does not matter when rows were."""
        kind = format_of(path if isinstance(path, str) else path[0]) or type(self)
        options = {option.name: getattr(self, option.name) for option in fields(kind) if hasattr(self, option.name)}
        elsewhere: dict[str, Any] = {
            "path": path,
            "test_path": None,
            "partitions": {},
            "test_partitions": {},
            "time": None,
        }
        return kind(**{**options, **elsewhere})

    @abstractmethod
    def opened(self, files: Sequence[Found]) -> tuple[Self, Sequence[TableFile]]:
        """The opened files, and the source with those options that were left open and that the files decided."""


def format_of(path: str) -> "type[TableSource] | None":
    """The source that reads files whose names end so, if there is one."""
    formats = members("shadowsync.data", TableSource)
    name = source_called_like(path, formats)
    return None if name is None else formats[name]


class OpenTable(FileRows):
    """Files whose columns have been checked.

    Attributes:
        source: with what opening has found out.
    """

    def __init__(self, source: TableSource, tables: Sequence[TableFile], on_bad_row: Literal["error", "skip"]) -> None:
        self.source, self.tables, self._names = source, tables, source.names()
        self._columns = source.read_alike([(table.types, table.file.path) for table in tables])
        self.labelled, self.settled = bool(source.answers), source.settled
        self.sequential = any(table.sequential for table in tables)
        files, rows = [table.file for table in tables], [table.rows() for table in tables]
        super().__init__(source.schema(self._columns), files, rows, on_bad_row)

    def read(self, part: Slice) -> Batch:
        """Decodes the slice; rows are looked at one by one only if something is wrong."""
        self.check_unchanged(part)
        frame, unread = self.tables[part.file].take(part.start, part.rows, self._names)
        batch, problems = batch_of(frame, self.source, self._columns)
        if problems or unread:
            first = {problem.row: problem for problem in (*problems, *unread)}
            keep = self.reject(part, [first[row] for row in sorted(first)])
            batch, problems = batch_of(frame.filter(pl.Series(keep)), self.source, self._columns)
            assert not problems
        return batch

    def column(self, name: str, part: Slice, key: str) -> pl.Series:
        table = self.tables[part.file]
        type_of(name, table.types, table.file.path, key)
        return table.take(part.start, part.rows, [name])[0][name]

    def types(self) -> Sequence[Mapping[str, pl.DataType]]:
        """Of all columns, of each file."""
        return [table.types for table in self.tables]

    def frames(self, columns: Collection[str], most_rows: int) -> Iterator[pl.DataFrame]:
        """As of `fitting.TrainingRows`."""
        parts = some_of(self, most_rows)
        return self.pieces(columns, ((part, np.ones(part.rows, dtype=np.bool_)) for part in parts))

    def pieces(self, columns: Collection[str], wanted: Iterable[tuple[Slice, Mask]]) -> Iterator[pl.DataFrame]:
        """Those columns as they lie, of the rows that are wanted of each slice and can be parsed."""
        for part, mask in wanted:
            frame, unread = self.tables[part.file].take(part.start, part.rows, columns)
            mask[[problem.row for problem in unread]] = False
            yield frame if mask.all() else frame.filter(pl.Series(mask))

    def dense_bounds(self) -> Mapping[str, float]:
        """As the files tell; nothing of columns that do not stay as they are, or where a file holds no bounds."""
        largest: dict[str, float] = {}
        for table in self.tables:
            for name, value in table.largest(self.source.plain_dense).items():
                largest[name] = max(value, largest.get(name, 0.0))
        return largest

    def digest(self, file: int) -> str:
        return self.tables[file].digest(next(iter(self.source.answers), None)) or super().digest(file)

    def close(self) -> None:
        for table in self.tables:
            table.close()


def some_of(source: OpenSource, most_rows: int) -> Sequence[Slice]:
    """Slices of about so many rows, spread evenly over all of them."""
    return source.slices(PIECE)[:: max(1, -(-source.rows // most_rows))]


class Columns:
    """Columns of a table's files as they are, read beside its rows, in their order.

    Raises `DataError` if a file lacks one of them, or holds it as another type than the first.
    """

    def __init__(self, source: OpenTable, names: Sequence[str]) -> None:
        self._source, self._file, self._row = source, 0, 0
        first = source.tables[0]
        self.types = {name: type_of(name, first.types, first.file.path, "--keep") for name in names}
        for table in source.tables:
            for name in names:
                if (kind := type_of(name, table.types, table.file.path, "--keep")) != self.types[name]:
                    there = f"{shown_type(self.types[name])} in {first.file.path}"
                    raise DataError(
                        f"{table.file.path}: column {name!r} (--keep) holds {shown_type(kind)}, but {there}"
                    )

    def take(self, rows: int) -> pl.DataFrame:
        """Of the next rows, which lie in one file."""
        if self._row == self._source.file_rows[self._file]:
            self._file, self._row = self._file + 1, 0
        start, self._row = self._row, self._row + rows
        table = self._source.tables[self._file]
        frame, problems = table.take(start, rows, self.types)
        for problem in problems:
            raise DataError(f"{table.file.path}, row {start + problem.row + 1}: {problem.text} (--keep)")
        return frame.select(list(self.types))
