"""Tables in text files, a line for each row, whose columns are parsed as types that are found out once.

Nothing of a text says what a column holds. So the first rows of the first training file decide, for all files and, as
this is stored with a run, for all that its model is used on later. What is used as a number is one, however it looks.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import polars as pl
from pydantic import Field

from shadowsync.data.columns import Buckets, Ids
from shadowsync.data.files import PANIC, Lines, Problem, open_lines
from shadowsync.data.fitting import told_apart
from shadowsync.data.tables import Found, TableFile, TableSource
from shadowsync.errors import DataError

Type = Literal["Boolean", "Int64", "UInt64", "Float64", "String", "Null"]
ListType = Literal["List(Boolean)", "List(Int64)", "List(UInt64)", "List(Float64)", "List(String)", "List(Null)"]
"""As polars calls them; Null says that the first rows have no value."""

_VALUES = (pl.Boolean(), pl.Int64(), pl.UInt64(), pl.Float64(), pl.String(), pl.Null())
_KINDS: Mapping[str, pl.DataType] = {str(kind): kind for value in _VALUES for kind in (value, pl.List(value))}
_WORDS: Mapping[pl.DataType, str] = {
    pl.Boolean(): "true or false",
    pl.Int64(): "an integer",
    pl.Float64(): "a number",
    pl.List(pl.Int64()): "a list of integers",
    pl.List(pl.Float64()): "a list of numbers",
}


@dataclass(frozen=True)
class Text:
    """The lines of a file and the columns in it, in their order; with a header the first line is no row."""

    lines: Lines
    columns: tuple[str, ...]
    header: bool


class TextFile(TableFile):
    """A text file of which some columns are to be read."""

    def __init__(
        self,
        source: "TextSource",
        text: Text,
        columns: Collection[str],
        folders: Mapping[str, pl.Series],
        kinds: Mapping[str, pl.DataType],
    ) -> None:
        """`source` has the options of the format, `kinds` the types of columns of any file."""
        self.source, self.text, self.kinds = source, text, kinds
        self.sequential = text.lines.sequential
        super().__init__(text.lines.file, columns, folders)

    def own_types(self) -> Mapping[str, pl.DataType]:
        return {name: self.kinds.get(name, pl.String()) for name in self.text.columns}

    @abstractmethod
    def parse(self, text: bytes, rows: int) -> pl.DataFrame | None:
        """`self.columns` of whole lines, at least one; None, or an error of polars, if any cannot be parsed."""

    @abstractmethod
    def problem(self, line: str) -> str | None:
        """What is wrong with a line whatever its columns hold."""

    @abstractmethod
    def value(self, line: str, column: str) -> str:
        """As it stands in a line."""

    def rows(self) -> int:
        lines, before = self.text.lines, int(self.text.header)
        last = lines.count
        while last > before and not lines.read(last - 1, last).strip():
            last -= 1  # an empty line at the end is none
        if last <= before:
            raise DataError(f"{self.file.path}: has no rows")
        return last - before

    def read(self, start: int, rows: int) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """Parses all of it at once; only near a row that is wrong are rows looked at one by one."""
        first = start + self.text.header
        text = self.text.lines.read(first, first + rows)
        frame = self._parsed(text, rows)
        if frame is not None:
            return frame, ()
        lines = text.removesuffix(b"\n").split(b"\n")
        bad = list(self._bad_rows(lines, 0))
        good = sorted({*range(rows)}.difference(bad))
        frame = self._parsed(b"".join(lines[row] + b"\n" for row in good), len(good))
        assert frame is not None, "lines that can be parsed alone can be parsed together"
        places: list[int | None] = [None] * rows
        for place, row in enumerate(good):
            places[row] = place
        whole = frame.select(pl.all().gather(pl.Series(places, dtype=pl.UInt32))) if good else frame.clear(rows)
        return whole, [self._problem(row, lines[row]) for row in bad]

    def of(self, columns: Collection[str]) -> Self:
        return type(self)(self.source, self.text, columns, self._folders, self.kinds)

    def _parsed(self, text: bytes, rows: int) -> pl.DataFrame | None:
        if not rows:
            return pl.DataFrame(schema={name: self.types[name] for name in self.columns})
        try:
            frame = self.parse(text if text.endswith(b"\n") else text + b"\n", rows)
        except (pl.exceptions.PolarsError, PANIC):
            return None
        return frame if frame is not None and len(frame) == rows else None

    def _bad_rows(self, lines: Sequence[bytes], start: int) -> Iterator[int]:
        """Those that cannot be parsed, found by halving."""
        if self._parsed(b"\n".join(lines), len(lines)) is not None:
            return
        if len(lines) == 1:
            yield start
            return
        half = len(lines) // 2
        yield from self._bad_rows(lines[:half], start)
        yield from self._bad_rows(lines[half:], start + half)

    def _problem(self, row: int, line: bytes) -> Problem:
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            return Problem(row, "it is not UTF-8")
        if (said := self.problem(text)) is not None:
            return Problem(row, said)
        wrong = next((name for name in self.columns if self.of([name])._parsed(line, 1) is None), None)
        if wrong is None:
            return Problem(row, "it cannot be parsed")
        held, kind = f"{wrong} is {self.value(text, wrong)}", self.types[wrong]
        skip = "mend it, leave such rows out with data.on_bad_row=skip, or"
        if wrong in self.source.numbers():
            return Problem(row, f"{held}, it must be {_WORDS.get(kind, kind)}", f"{skip} {self.source.as_missing}")
        remedy = f"{skip} read the column as text with data.types={{{wrong}: String}}"
        return Problem(row, f"{held}, where the first rows of the data hold {_WORDS.get(kind, kind)}", remedy)


@dataclass(frozen=True, kw_only=True)
class TextSource(TableSource):
    """Text files of a table.

    Attributes:
        as_missing: what to do about a word that stands for a missing number.
    """

    as_missing: ClassVar[str]

    types: Annotated[
        dict[str, Type | ListType],
        Field(description="by column, as what it is parsed; left out: as it looks in the first rows of the first file"),
    ] = field(default_factory=dict)
    infer_rows: Annotated[
        int, Field(ge=1, le=1 << 20, description="first rows of a file that are looked at for that; more costs time")
    ] = 10_000

    @abstractmethod
    def text(self, lines: Lines) -> Text:
        """A file's columns; raises `DataError` if they cannot be told."""

    @abstractmethod
    def look(self, text: Text) -> Mapping[str, pl.DataType]:
        """What the columns of a file look like in its first rows."""

    @abstractmethod
    def text_file(self, text: Text, folders: Mapping[str, pl.Series], kinds: Mapping[str, pl.DataType]) -> TextFile:
        """A file of the format."""

    def opened(self, files: Sequence[Found]) -> tuple[Self, Sequence[TableFile]]:
        found = [(self.text(open_lines(file)), folders) for file, folders in files]
        looked = self.look(found[0][0])
        types: dict[str, Any] = {name: str(kind) for name, kind in looked.items() if str(kind) in _KINDS}
        known = replace(self, types={**types, **self.types})
        kinds = {**looked, **{name: known.parsed_as(name) for name in known.types}}
        return known, [known.text_file(text, folders, kinds) for text, folders in found]

    @property
    def settled(self) -> Mapping[str, object]:
        return {"types": self.types}

    def numbers(self) -> set[str]:
        """The columns that are used as numbers, or lists of them."""
        ids = (name for name, kind in self.kinds.ids.items() if isinstance(kind, Ids | Buckets))
        return {*self.kinds.dense, *ids, *self.weights.values(), *self.answers}

    def parsed_as(self, name: str) -> pl.DataType:
        """The type of a column: by its use where that says it, else by its looks."""
        looks = self.types[name]
        value = looks.removeprefix("List(").removesuffix(")")
        told = name in told_apart(self.kinds.ids)
        if isinstance(self.kinds.ids.get(name), Ids):
            used_as = "Int64"
        elif told and value in ("Int64", "UInt64"):
            used_as = value
        elif name in self.numbers():
            used_as = value if value == "Boolean" else "Float64"
        elif told:
            used_as = "String"
        else:
            used_as = "String" if value == "Null" else value
        return _KINDS[used_as if looks == value else f"List({used_as})"]
