"""Files of named columns in whatever format, and what a source of such files does.

A format is a `TableFile`, which gives rows of a file as data frames, and a `TableSource`, which opens it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import polars as pl
from pydantic import Field

from shadowsync.data.batch import Batch
from shadowsync.data.files import File, FileOptions, FileRows, Problem, resolve
from shadowsync.data.folders import Wanted, folder_columns, wanted_files
from shadowsync.data.frame import TableOptions, batch_of, type_of
from shadowsync.data.source import OpenSource, Slice, Source
from shadowsync.errors import DataError
from shadowsync.serving import Mask

PIECE = 1 << 17
"""Rows of a piece of the data that is looked at before training."""

Found = tuple[File, Mapping[str, pl.Series]]
"""A file, and one value of each column that is in the names of its folders."""


class TableFile(ABC):
    """A file of named columns, of which `columns` are read; from several threads at once, in any order.

    Attributes:
        types: of all its columns, and of those that the folders above it are named after.
        sequential: as of an `OpenSource`.
    """

    sequential: bool = False

    def __init__(self, file: File, columns: Collection[str], folders: Mapping[str, pl.Series]) -> None:
        """`folders` holds one value for each column that is in the name of a folder."""
        self.file, self._folders = file, folders
        own = self.own_types()
        self.types: Mapping[str, pl.DataType] = {**{name: values.dtype for name, values in folders.items()}, **own}
        # what is in neither is for whoever asks for it to refuse
        self.columns = [name for name in dict.fromkeys(columns) if name in own]
        self._constants = [folders[name] for name in dict.fromkeys(columns) if name in folders and name not in own]

    @abstractmethod
    def own_types(self) -> Mapping[str, pl.DataType]:
        """Of the columns in the file; raises `DataError` if it is not of its format."""

    @abstractmethod
    def rows(self) -> int:
        """How many there are, bad ones included; raises `DataError` if there are none."""

    @abstractmethod
    def read(self, start: int, rows: int) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """`self.columns` of those rows; what is wrong with each row that cannot be parsed, which is null in all."""

    def take(self, start: int, rows: int) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """As `read`, with the columns that are in the names of folders."""
        frame, problems = self.read(start, rows)
        for values in self._constants:
            frame = frame.with_columns(values.new_from_index(0, rows))
        return frame, problems

    def of(self, columns: Collection[str]) -> Self:
        """The same file, of which other columns are read."""
        return type(self)(self.file, columns, self._folders)

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
    """Files of named columns of one format.

    Attributes:
        endings: of the names of such files: those that a folder stands for, and by which `data.name` may be left out.
    """

    endings: ClassVar[tuple[str, ...]]

    partitions: Annotated[
        dict[str, Wanted],
        Field(
            description="of files in folders such as day=2024-01-01: only those with that value, one of a list, or "
            "{from: …, to: …}, both ends included"
        ),
    ] = field(default_factory=dict)
    test_partitions: Annotated[
        dict[str, Wanted],
        Field(description="likewise of the test rows, which are in data.path if there is no data.test_path"),
    ] = field(default_factory=dict)

    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """Checks the files' columns and types."""
        if split == "train":
            key, paths, wanted = "data.path", self.path, self.partitions
        elif self.test_path is not None:
            key, paths, wanted = "data.test_path", self.test_path, self.test_partitions
        elif self.test_partitions:
            key, paths, wanted = "data.path", self.path, self.test_partitions
        else:
            return None
        files = resolve(key, paths, self.endings)
        kept = {*wanted_files("data.partitions" if split == "train" else "data.test_partitions", files, wanted)}
        # of all files, so that it does not depend on the choice what a folder's name is taken for
        source, tables = self.opened([found for found in in_folders(files) if found[0] in kept])
        return OpenTable(source, tables, on_bad_row)

    @property
    def settled(self) -> Mapping[str, object]:
        """As of an `OpenSource`, once it is opened."""
        return {}

    def at(self, path: str | tuple[str, ...]) -> Self:
        """As for any files; all of them."""
        return replace(super().at(path), partitions={}, test_partitions={})

    @abstractmethod
    def opened(self, files: Sequence[Found]) -> tuple[Self, Sequence[TableFile]]:
        """The opened files, and the source with those options that were left open and that the files decided."""


class OpenTable(FileRows):
    """Files whose columns have been checked.

    Attributes:
        source: with what opening has found out.
    """

    def __init__(self, source: TableSource, tables: Sequence[TableFile], on_bad_row: Literal["error", "skip"]) -> None:
        self.source, self.tables = source, tables
        self._columns = source.read_alike([(table.types, table.file.path) for table in tables])
        self._beside: dict[tuple[str, int], TableFile] = {}
        self.labelled, self.settled = bool(source.answers), source.settled
        self.sequential = any(table.sequential for table in tables)
        files, rows = [table.file for table in tables], [table.rows() for table in tables]
        super().__init__(source.schema(self._columns), files, rows, on_bad_row)

    def read(self, part: Slice) -> Batch:
        """Decodes the slice; rows are looked at one by one only if something is wrong."""
        self.check_unchanged(part)
        frame, unread = self.tables[part.file].take(part.start, part.rows)
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
        beside = self._beside.get((name, part.file))
        if beside is None:
            beside = self._beside[name, part.file] = table.of([name])
        frame, _ = beside.take(part.start, part.rows)
        return frame[name]

    def types(self) -> Sequence[Mapping[str, pl.DataType]]:
        """Of all columns, of each file."""
        return [table.types for table in self.tables]

    def frames(self, columns: Collection[str], most_rows: int) -> Iterator[pl.DataFrame]:
        """As of `fitting.TrainingRows`."""
        parts = some_of(self, most_rows)
        return self.pieces(columns, ((part, np.ones(part.rows, dtype=np.bool_)) for part in parts))

    def pieces(self, columns: Collection[str], wanted: Iterable[tuple[Slice, Mask]]) -> Iterator[pl.DataFrame]:
        """Those columns as they lie, of the rows that are wanted of each slice and can be parsed."""
        # what is fetched of a file elsewhere is what is going to be read anyway
        known = [not table.file.local and {*columns} <= {*table.columns} for table in self.tables]
        tables = [table if its else table.of(columns) for table, its in zip(self.tables, known, strict=True)]
        for part, mask in wanted:
            frame, unread = tables[part.file].take(part.start, part.rows)
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
        self._file_rows, self._file, self._row = source.file_rows, 0, 0
        self._tables = [table.of(names) for table in source.tables]
        first = self._tables[0]
        self.types = {name: type_of(name, first.types, first.file.path, "--keep") for name in names}
        for table in self._tables:
            for name in names:
                if (kind := type_of(name, table.types, table.file.path, "--keep")) != self.types[name]:
                    there = f"{self.types[name]} in {first.file.path}"
                    raise DataError(f"{table.file.path}: column {name!r} (--keep) holds {kind}, but {there}")

    def take(self, rows: int) -> pl.DataFrame:
        """Of the next rows, which lie in one file."""
        if self._row == self._file_rows[self._file]:
            self._file, self._row = self._file + 1, 0
        start, self._row = self._row, self._row + rows
        table = self._tables[self._file]
        frame, problems = table.take(start, rows)
        for problem in problems:
            raise DataError(f"{table.file.path}, row {start + problem.row + 1}: {problem.text} (--keep)")
        return frame.select(list(self.types))


def in_folders(files: Sequence[File]) -> list[Found]:
    """Each file with the values of the columns that its folders are named after, one of each."""
    columns = folder_columns(files)
    return [
        (file, {name: columns[name].slice(number, 1) for name, _ in file.partitions})
        for number, file in enumerate(files)
    ]
