"""JSON lines: an object of columns in each line."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from shadowsync.data.files import Lines
from shadowsync.data.text import Text, TextFile, TextSource
from shadowsync.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Jsonl(TextSource):
    """JSON lines, plain or .gz; label, dense and categorical columns are as in parquet files.

    A row is one line, an object whose values are numbers, strings, true or false, null, or lists of them. A value that
    an object does not have is missing; a column that none of the first rows of a file has is not in the file.
    """

    name: ClassVar[str] = "jsonl"
    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
    as_missing: ClassVar[str] = "write null for a value that is missing"

    def text(self, lines: Lines) -> Text:
        return Text(lines, tuple(self._first(lines)), header=False)

    def look(self, text: Text) -> Mapping[str, pl.DataType]:
        return self._first(text.lines)

    def text_file(self, text: Text, folders: Mapping[str, pl.Series], kinds: Mapping[str, pl.DataType]) -> TextFile:
        return JsonlFile(self, text, self.names(), folders, kinds)

    def _first(self, lines: Lines) -> Mapping[str, pl.DataType]:
        """Names and looks of the columns of the first rows, as far as these can be read."""
        found: dict[str, pl.DataType] = {}
        seen: set[tuple[str, type]] = set()
        for line in lines.read(0, min(self.infer_rows, lines.count)).split(b"\n"):
            for name, value in (_object(line) or {}).items():
                kind = type(value)
                if (name, kind) not in seen or kind is list or (isinstance(value, int) and value >= 1 << 63):
                    seen.add((name, kind))
                    found[name] = _either(found.get(name, pl.Null()), _looks(value))
        if not found:
            raise DataError(f"{lines.file.path}: none of the first rows is a JSON object in one line")
        return found


class JsonlFile(TextFile):
    """A file of JSON lines of which some columns are to be read."""

    def parse(self, text: bytes, rows: int) -> pl.DataFrame | None:
        return pl.read_ndjson(text.removeprefix(BOM_UTF8), schema={name: self.types[name] for name in self.columns})

    def problem(self, line: str) -> str | None:
        return "it is not a JSON object in one line" if _object(line.encode()) is None else None

    def value(self, line: str, column: str) -> str:
        return json.dumps((_object(line.encode()) or {}).get(column), ensure_ascii=False)


def _object(line: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(line.removeprefix(BOM_UTF8))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _looks(value: object) -> pl.DataType:
    if isinstance(value, list):
        inner: pl.DataType = pl.Null()
        for one in value:
            inner = _either(inner, _looks(one))
        return pl.List(inner)
    if value is None or isinstance(value, bool):
        return pl.Null() if value is None else pl.Boolean()
    if isinstance(value, int):
        return pl.Int64() if value < 1 << 63 else pl.UInt64()
    return pl.Float64() if isinstance(value, float) else pl.String() if isinstance(value, str) else pl.Struct([])


def _either(one: pl.DataType, other: pl.DataType) -> pl.DataType:
    """What values of both types are. A list and a value, or a value and an object, are what came first."""
    if pl.Null() in (one, other):
        return other if one == pl.Null() else one
    if one.is_nested() or other.is_nested():
        both = isinstance(one, pl.List) and isinstance(other, pl.List)
        return pl.List(_either(_inner(one), _inner(other))) if both else one
    if one.is_numeric() and other.is_numeric():
        return next(kind for kind in (pl.Float64(), pl.UInt64(), pl.Int64()) if kind in (one, other))
    return one if one == other else pl.String()


def _inner(kind: pl.DataType) -> pl.DataType:
    assert isinstance(kind, pl.List)
    assert isinstance(kind.inner, pl.DataType)
    return kind.inner
