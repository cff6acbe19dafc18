"""CSV and TSV: fields between separators, with a header or without."""

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import polars as pl
from pydantic import Field

from shadowsync.data.files import Lines
from shadowsync.data.text import Text, TextFile, TextSource
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest

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

    def text(self, lines: Lines) -> Text:
        if self.header is not None:
            return Text(lines, _distinct("data.header", self.header), header=False)
        line = lines.read(0, min(1, lines.count)).decode("utf-8-sig", errors="replace").rstrip("\r\n")
        columns = tuple(self.fields(line, self.separator_of(lines)))
        return Text(lines, _distinct(f"{lines.file.path}: the header", columns), header=True)

    def look(self, text: Text) -> Mapping[str, pl.DataType]:
        for name in self.lists:
            if name not in text.columns:
                hint = nearest(name, text.columns)
                raise ConfigError(f"data.lists names {name!r}, which {text.lines.file.path} does not have{hint}")
        lists = {name: pl.List(pl.String()) for name in self.lists}
        file = CsvFile(self, text, text.columns, {}, lists)
        frame, _ = file.read(0, min(self.infer_rows, file.rows()))
        return {name: _looks(frame[name]) for name in text.columns}

    def text_file(self, text: Text, folders: Mapping[str, pl.Series], kinds: Mapping[str, pl.DataType]) -> TextFile:
        return CsvFile(self, text, self.names(), folders, kinds)

    def separator_of(self, lines: Lines) -> str:
        """Between the fields of a file."""
        return self.separator or ("\t" if lines.file.path.lower().removesuffix(".gz").endswith(".tsv") else ",")

    def fields(self, line: str, separator: str) -> list[str]:
        """Of one line."""
        if self.quote is None:
            return line.split(separator)
        try:
            return next(csv.reader([line], delimiter=separator, quotechar=self.quote), [])
        except csv.Error:
            return [line]


class CsvFile(TextFile):
    """A CSV file of which some columns are to be read."""

    source: Csv

    def __init__(
        self,
        source: Csv,
        text: Text,
        columns: Collection[str],
        folders: Mapping[str, pl.Series],
        kinds: Mapping[str, pl.DataType],
    ) -> None:
        super().__init__(source, text, columns, folders, kinds)
        self.separator = source.separator_of(text.lines)
        lists = {name: source.lists[name] for name in self.columns if name in source.lists}
        self._lists = [pl.col(name).str.split(between).cast(self.types[name]) for name, between in lists.items()]
        self._schema = {
            **{name: pl.String() if name in source.lists else kind for name, kind in self.own_types().items()},
            _END_COLUMN: pl.String(),
        }
        self._positions = [text.columns.index(name) for name in self.columns] + [len(text.columns)]

    def parse(self, text: bytes, rows: int) -> pl.DataFrame | None:
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        frame = pl.read_csv(
            text.replace(b"\n", f"{self.separator}{_END}\n".encode()),
            has_header=False,
            separator=self.separator,
            quote_char=self.source.quote,
            null_values=["", *self.source.null_words],
            schema=self._schema,
            columns=self._positions,
        )
        if len(frame) != rows or not (frame[_END_COLUMN] == _END).all(ignore_nulls=False):
            return None
        return frame.drop(_END_COLUMN).with_columns(self._lists)

    def problem(self, line: str) -> str | None:
        quote, needed = self.source.quote, len(self.text.columns)
        if quote is not None and line.count(quote) % 2:
            return (
                "a quoted field has no end in its line, and a row is one line: take line breaks out of fields, or set "
                "data.quote=null if quotes mean nothing"
            )
        if (has := len(self.source.fields(line, self.separator))) != needed:
            return f"{has} fields where {needed} are needed ({', '.join(self.text.columns[:5])}{' …' * (needed > 5)})"
        return None

    def value(self, line: str, column: str) -> str:
        return repr(self.source.fields(line, self.separator)[self.text.columns.index(column)])


def _distinct(place: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    if repeated := {name for name in columns if columns.count(name) > 1}:
        raise DataError(f"{place} names {min(repeated)!r} twice: give each column a name of its own")
    return columns


def _looks(values: pl.Series) -> pl.DataType:
    """What all given values of a column of text, or of lists of it, are."""
    if isinstance(values.dtype, pl.List):
        return pl.List(_looks(values.explode()))
    given = values.drop_nulls()
    if given.is_empty():
        return pl.Null()
    for kind in (pl.Int64(), pl.UInt64(), pl.Float64()):
        if not given.cast(kind, strict=False).has_nulls():
            return kind
    return pl.Boolean() if given.is_in(["true", "false"]).all() else pl.String()
