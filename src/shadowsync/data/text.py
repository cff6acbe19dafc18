"""Tables in text files, a line for each row, whose columns are parsed as types that are found out once.

Nothing of a text says what a column holds. So the first rows of the first training file decide, for all files and, as
this is stored with a run, for all that its model is used on later. What is used as a number is one, however it looks.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import polars as pl
from pydantic import Field

from shadowsync.data.columns import Buckets, Fit, Ids
from shadowsync.data.files import PANIC, File, Lines, Problem, bad_ones, open_lines
from shadowsync.data.fitting import told_apart
from shadowsync.data.folders import Found
from shadowsync.data.tables import TableFile, TableSource, format_of
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest
from shadowsync.serving import TEXTS

Type = Literal["Boolean", "Int64", "UInt64", "Float64", "String", "Null"]
ListType = Literal["List(Boolean)", "List(Int64)", "List(UInt64)", "List(Float64)", "List(String)", "List(Null)"]
"""As polars calls them; Null says that the first rows have no value."""

_VALUES = (pl.Boolean(), pl.Int64(), pl.UInt64(), pl.Float64(), pl.String(), pl.Null())
_KINDS: Mapping[str, pl.DataType] = {str(kind): kind for value in _VALUES for kind in (value, pl.List(value))}
_DAYS, _TIMES, _DECIMALS = pl.Date(), pl.Datetime("us", "UTC"), pl.Decimal(38, 18)
_TRAINED: Mapping[str | None, pl.DataType] = {"date": _DAYS, "datetime": _TIMES, "decimals": _DECIMALS}
"""By the form of what a model was trained on, as what a column is parsed that text does not tell from others."""
_WORDS: Mapping[pl.DataType, str] = {
    pl.Boolean(): "true or false",
    pl.Int64(): "an integer",
    pl.Float64(): "a number",
    pl.String(): "text",
    _DAYS: "a date, as 2024-01-31",
    _TIMES: "a date and time, as 2024-01-31T12:00:00",
    _DECIMALS: "a number",
    pl.List(pl.Int64()): "a list of integers",
    pl.List(pl.Float64()): "a list of numbers",
}


def _text(lines: Sequence[bytes]) -> bytes:
    return b"\n".join(lines) + b"\n"


def _opened(file: File) -> Lines:
    lines = open_lines(file)
    if b"\0" in lines.read(0, min(1, lines.count)):
        named = format_of(file.path)
        other = None if named is None or issubclass(named, TextSource) else named.name
        hint = "" if other is None else f": data.name={other} reads what is called so"
        raise DataError(f"{file.path}: is not text in UTF-8, its first line has zero bytes{hint}")
    return lines


class TextFile(TableFile):
    """A text file, whose `source` knows its format."""

    def __init__(
        self, source: "TextSource", lines: Lines, own: Mapping[str, pl.DataType], folders: Mapping[str, pl.Series]
    ) -> None:
        self.source, self.lines, self.sequential = source, lines, lines.sequential
        super().__init__(lines.file, own, folders)

    def rows(self) -> int:
        lines, before = self.lines, self.source.lines_before
        last = lines.count
        while last > before and not lines.read(last - 1, last).strip():
            last -= 1  # an empty line at the end is none
        if last <= before:
            raise DataError(f"{self.file.path}: has no rows")
        return last - before

    def read(self, start: int, rows: int, columns: Sequence[str]) -> tuple[pl.DataFrame, Sequence[Problem]]:
        """Parses all of it at once; only near a row that is wrong are rows looked at one by one."""
        first = start + self.source.lines_before
        text = self.lines.read(first, first + rows)
        if (frame := self._parsed(text, rows, columns)) is not None:
            return frame, ()
        lines = text.removesuffix(b"\n").split(b"\n")
        bad = bad_ones(lines, lambda some: self._parsed(_text(some), len(some), columns) is not None)
        problems = [self._problem(row, lines[row], columns) for row in bad]
        for problem in problems:
            lines[problem.row] = self.source.nothing(self)
        frame = self._parsed(_text(lines), rows, columns)
        assert frame is not None, "lines that can be parsed alone can be parsed together"
        return frame, problems

    def _parsed(self, text: bytes, rows: int, columns: Sequence[str]) -> pl.DataFrame | None:
        try:
            frame = self.source.parse(text if text.endswith(b"\n") else text + b"\n", self, columns)
        except (pl.exceptions.PolarsError, PANIC):
            return None
        return frame if frame is not None and len(frame) == rows else None

    def _problem(self, row: int, line: bytes, columns: Sequence[str]) -> Problem:
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            return Problem(row, "it is not UTF-8")
        values = self.source.values(text, self)
        if isinstance(values, str):
            return Problem(row, values)
        wrong = next((name for name in columns if self._parsed(line, 1, [name]) is None), None)
        if wrong is None:
            return Problem(row, "it cannot be parsed")
        held, kind = f"{wrong} is {values.get(wrong, 'null')}", self.own[wrong]
        needed = _WORDS.get(kind, kind)
        skip = "mend it, leave such rows out with data.on_bad_row=skip, or"
        if wrong in self.source.numbers() or kind in (pl.Boolean(), *_TRAINED.values()):
            return Problem(row, f"{held}, it must be {needed}", f"{skip} {self.source.as_missing}")
        said = f"{held}, where the first rows of the data hold {needed}"
        if kind == pl.String:  # a list in JSON lines, which could be read as nothing else
            return Problem(row, said)
        words, other = ("lists of text", "List(String)") if kind.is_nested() else ("text", "String")
        return Problem(row, said, f"{skip} read the column as {words} with data.types={{{wrong}: {other}}}")


@dataclass(frozen=True, kw_only=True)
class TextSource(TableSource):
    """Text files of a table.

    Attributes:
        as_missing: what to do about a word that stands for a missing number.
        lines_before: the first row of a file, which are none.
    """

    as_missing: ClassVar[str]

    types: Annotated[
        dict[str, Type | ListType],
        Field(description="by column, as what it is parsed; left out: as it looks in the first rows of the first file"),
    ] = field(default_factory=dict)
    infer_rows: Annotated[
        int, Field(ge=1, le=1 << 20, description="first rows of a file that are looked at for that; more costs time")
    ] = 10_000

    @property
    def lines_before(self) -> int:
        return 0

    @abstractmethod
    def columns_of(self, lines: Lines) -> Sequence[str]:
        """A file's columns in their order; raises `DataError` if they cannot be told."""

    @abstractmethod
    def look(self, lines: Lines) -> Mapping[str, pl.DataType]:
        """What these look like in its first rows."""

    @abstractmethod
    def parse(self, text: bytes, file: TextFile, columns: Sequence[str]) -> pl.DataFrame | None:
        """Some columns of whole lines, at least one; None, or an error of polars, if any cannot be parsed."""

    @abstractmethod
    def nothing(self, file: TextFile) -> bytes:
        """A line in which every column is missing."""

    @abstractmethod
    def values(self, line: str, file: TextFile) -> Mapping[str, str] | str:
        """As they stand in a line, by column, or what is wrong with it whatever these hold."""

    def opened(self, files: Sequence[Found]) -> tuple[Self, Sequence[TableFile]]:
        found = [(_opened(file), folders) for file, folders in files]
        first = found[0][0]
        looked = self.look(first)
        for key in ("types", "lists") if self.learnt is None else ():  # a trained model's may be in no other rows
            for name in getattr(self, key, ()):
                if name not in looked:
                    hint = nearest(name, looked)
                    raise ConfigError(f"data.{key} names {name!r}, which {first.file.path} does not have{hint}")
        types: dict[str, Any] = {name: str(kind) for name, kind in looked.items() if str(kind) in _KINDS}
        known = replace(self, types={**types, **self.types})
        kinds = {**looked, **{name: known.parsed_as(name) for name in known.types}}
        own = ({name: kinds.get(name, pl.String()) for name in self.columns_of(lines)} for lines, _ in found)
        return known, [TextFile(known, lines, its, folders) for (lines, folders), its in zip(found, own, strict=True)]

    @property
    def settled(self) -> Mapping[str, object]:
        return {"types": self.types}

    def numbers(self) -> set[str]:
        """The columns that are used as numbers, or lists of them."""
        ids = (name for name, kind in self.kinds.ids.items() if isinstance(kind, Ids | Buckets))
        return {*self.kinds.dense, *ids, *self.weights.values(), *self.answers}

    def parsed_as(self, name: str) -> pl.DataType:
        """The type of a column: by its use where that says it, else by its looks; by what a trained model had learnt
        where rows of another format did not look like anything then, or like that."""
        looks = self.types[name]
        value = looks.removeprefix("List(").removesuffix(")")
        told = name in told_apart(self.kinds.ids)
        fit = Fit() if self.learnt is None else self.learnt.fit(name)
        if isinstance(self.kinds.ids.get(name), Ids) or (told and (value, fit.form) == ("Null", "integers")):
            used_as = "Int64"
        elif told and value == looks and not fit.listed and fit.form in _TRAINED:
            return _TRAINED[fit.form]
        elif told and value in ("Int64", "UInt64") and fit.form not in TEXTS:
            used_as = value
        elif told and looks == "Boolean" and fit.form == "integers":
            used_as = looks
        elif name in self.numbers():
            used_as = value if value == "Boolean" else "Float64"
        elif told:
            used_as = "String"
        else:
            used_as = "String" if value == "Null" else value
        return _KINDS[used_as if looks == value else f"List({used_as})"]
