"""JSON lines: an object of columns in each line."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import polars as pl

from shadowsync.data.files import PANIC, Lines
from shadowsync.data.text import TextFile, TextSource
from shadowsync.data.values import value_type
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

    def parsed_as(self, name: str) -> pl.DataType:
        """Where the first rows have no value of a column of lists, null is a list, too."""
        kind, weighted = super().parsed_as(name), {*self.weights, *self.weights.values()}
        listed = name in weighted or (self.learnt is not None and self.learnt.fit(name).listed)
        return pl.List(kind) if listed and self.types[name] == "Null" else kind

    def columns_of(self, lines: Lines) -> Sequence[str]:
        return tuple(self.look(lines))

    def look(self, lines: Lines) -> Mapping[str, pl.DataType]:
        """As far as the rows can be read."""
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

    def parse(self, text: bytes, file: TextFile, columns: Sequence[str]) -> pl.DataFrame | None:
        types = {name: file.own[name] for name in columns}
        decimals = {name: kind for name, kind in types.items() if kind.is_decimal()}
        schema = {**types, **dict.fromkeys(decimals, pl.String())}
        frame = pl.read_ndjson(text.removeprefix(BOM_UTF8), schema=schema)
        frame = frame.with_columns(pl.col(name).cast(kind) for name, kind in decimals.items())
        for name in (name for name in columns if file.own[name] == pl.String):
            begins = frame[name].str.starts_with
            rows = (begins("[") | begins("{")).arg_true().to_list()
            lines = text.split(b"\n") if rows else []
            if any(isinstance((_object(lines[row]) or {}).get(name), list | dict) for row in rows):
                return None  # polars takes it for the text that it is written as
        return frame

    def nothing(self, file: TextFile) -> bytes:
        return b"{}"

    def values(self, line: str, file: TextFile) -> Mapping[str, str] | str:
        if (found := _object(line.encode())) is not None:
            if (odd := next((name for name, value in found.items() if not _is_read(value)), None)) is not None:
                written = json.dumps((_object(line.encode(), _AS_WRITTEN) or {})[odd]).replace('"', "")
                return f"{odd} is {written}, which cannot be read: numbers end at 1.8e308"
            return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items()}
        numbers = " (NaN and Infinity are not JSON: write null)" if "NaN" in line or "Infinity" in line else ""
        return f"it is not a JSON object in one line{numbers}"


def _no_number(word: str) -> NoReturn:
    raise ValueError(word)


_JSON = json.JSONDecoder(parse_constant=_no_number)
_AS_WRITTEN = json.JSONDecoder(parse_float=str)


def _is_read(value: object) -> bool:
    """Whether polars takes it in a line, as whatever."""
    try:
        pl.read_ndjson(json.dumps({"value": value}).encode(), schema={"other": pl.Null()})
    except (pl.exceptions.PolarsError, PANIC):
        return False
    return True


def _object(line: bytes, decoder: json.JSONDecoder = _JSON) -> dict[str, object] | None:
    try:
        found = decoder.decode(line.removeprefix(BOM_UTF8).decode())
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
    if isinstance(one, pl.List) and isinstance(other, pl.List):
        return pl.List(_either(value_type(one), value_type(other)))
    if one.is_nested() or other.is_nested():
        return one
    if one.is_numeric() and other.is_numeric():
        return next(kind for kind in (pl.Float64(), pl.UInt64(), pl.Int64()) if kind in (one, other))
    return one if one == other else pl.String()
