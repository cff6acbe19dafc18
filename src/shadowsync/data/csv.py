"""CSV and TSV: fields between separators, with a header or without."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import polars as pl
from pydantic import Field

from shadowsync.data.files import Lines
from shadowsync.data.text import TextFile, TextSource
from shadowsync.errors import ConfigError, DataError

_END = "\x1e"
"""A field that is put behind each row: it is where it should be if the row has as many fields as there are columns."""
_END_COLUMN = "\x1e the end of the row"

Character = Annotated[str, Field(pattern=r"^[\x01-\x09\x0b\x0c\x0e-\x1d\x1f-\x7f]$")]


@dataclass(frozen=True, kw_only=True)
class Csv(TextSource):
    """CSV and TSV files, plain or .gz; label, dense and categorical columns are as in parquet files.

    A row is one line: a quoted field may hold separators and doubled quotes, but no line break. The header is not
    counted as a row.
    """

    name: ClassVar[str] = "csv"
    endings: ClassVar[tuple[str, ...]] = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
    as_missing: ClassVar[str] = "name it in data.null_words if it says that the value is missing"

    separator: Annotated[
        Character | None, Field(description="between fields; null: a tab in files that are called .tsv, else a comma")
    ] = None
    header: Annotated[
        tuple[str, ...] | None,
        Field(description="names of all columns of files without a header; null: the first line of each file has them"),
    ] = None
    quote: Annotated[
        Character | None, Field(description="around fields that hold separators; null: quotes mean nothing")
    ] = '"'
    null_words: Annotated[
        tuple[str, ...], Field(description="words that say that a value is missing, besides an empty field: [NA, null]")
    ] = ()
    lists: Annotated[
        dict[str, Character], Field(description="columns that hold lists, with what is between their values: {tags: ;}")
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in self.types.items():
            if (listed := name in self.lists) != kind.startswith("List"):
                have = f"has no list, as data.lists={{{name}: …}} says" if listed else f"needs data.lists={{{name}: ;}}"
                raise ConfigError(f"data.types.{name}={kind} {have}: what is between the values of a field")

    @property
    def lines_before(self) -> int:
        return int(self.header is None)

    def columns_of(self, lines: Lines) -> Sequence[str]:
        place, columns = "data.header", self.header
        if columns is None:
            line = lines.read(0, min(1, lines.count)).decode("utf-8-sig", errors="replace").rstrip("\r\n")
            place, columns = f"{lines.file.path}: the header", tuple(self._fields(line, self._separator(lines)))
        if repeated := {name for name in columns if columns.count(name) > 1}:
            raise DataError(f"{place} names {min(repeated)!r} twice: give each column a name of its own")
        return columns

    def look(self, lines: Lines) -> Mapping[str, pl.DataType]:
        own = {name: pl.List(pl.String()) if name in self.lists else pl.String() for name in self.columns_of(lines)}
        file = TextFile(self, lines, own, {})
        frame, _ = file.read(0, min(self.infer_rows, file.rows()), [*own])
        return {name: _looks(frame[name]) for name in own}

    def parse(self, text: bytes, file: TextFile, columns: Sequence[str]) -> pl.DataFrame | None:
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        separator, places = self._separator(file.lines), {name: place for place, name in enumerate(file.own)}
        schema = {name: pl.String() if name in self.lists else kind for name, kind in file.own.items()}
        frame = pl.read_csv(
            text.replace(b"\n", f"{separator}{_END}\n".encode()),
            has_header=False,
            separator=separator,
            quote_char=self.quote,
            null_values=["", *self.null_words],
            schema={**schema, _END_COLUMN: pl.String()},
            columns=[*(places[name] for name in columns), len(places)],
        )
        if not (frame[_END_COLUMN] == _END).all(ignore_nulls=False):
            return None
        lists = [name for name in columns if name in self.lists]
        split = [pl.col(name).str.split(self.lists[name]).cast(file.own[name]) for name in lists]
        return frame.drop(_END_COLUMN).with_columns(split)

    def nothing(self, file: TextFile) -> bytes:
        return self._separator(file.lines).encode() * (len(file.own) - 1)

    def values(self, line: str, file: TextFile) -> Mapping[str, str] | str:
        columns, values = tuple(file.own), self._fields(line, self._separator(file.lines))
        if self.quote is not None and line.count(self.quote) % 2:
            return (
                "a quoted field has no end in its line, and a row is one line: take line breaks out of fields, or set "
                "data.quote=null if quotes mean nothing"
            )
        if (has := len(values)) != (needed := len(columns)):
            return f"{has} fields where {needed} are needed ({', '.join(columns[:5])}{' …' * (needed > 5)})"
        return dict(zip(columns, map(repr, values), strict=True))

    def _separator(self, lines: Lines) -> str:
        return self.separator or ("\t" if lines.file.path.lower().removesuffix(".gz").endswith(".tsv") else ",")

    def _fields(self, line: str, separator: str) -> list[str]:
        if self.quote is None:
            return line.split(separator)
        try:
            return next(csv.reader([line], delimiter=separator, quotechar=self.quote), [])
        except csv.Error:
            return [line]


def _looks(values: pl.Series) -> pl.DataType:
    """What all given values of a column of text, or of lists of it, are; numbers would lose the zeros of `007`."""
    if isinstance(values.dtype, pl.List):
        return pl.List(_looks(values.explode()))
    given = values.drop_nulls()
    if given.is_empty():
        return pl.Null()
    for kind in () if given.str.contains(r"^[+-]?0\d").any() else (pl.Int64(), pl.UInt64(), pl.Float64()):
        if not given.cast(kind, strict=False).has_nulls():
            return kind
    return pl.Boolean() if given.is_in(["true", "false"]).all() else pl.String()
