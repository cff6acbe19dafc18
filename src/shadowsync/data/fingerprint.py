"""What tells data from other data without reading all of it: names, sizes, and a digest of parts of each file."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

Span = tuple[int, int]

_WHOLE = 1 << 20  # bytes of a file that is read as a whole
PART = 1 << 16  # bytes read at a place that is looked at


class Mark(msgspec.Struct, frozen=True):
    """A file of the data, wherever it lies; or all rows of a source that makes them itself.

    Attributes:
        name: of the file without its folder, or of the source.
        size: bytes, or rows.
        digest: of some of the file's bytes, or of what the rows are made from.
    """

    name: str
    size: int
    digest: str


def digest(size: int, spans: Iterable[Span], read: Callable[[int, int], bytes]) -> str:
    """Of the bytes in `spans` of a file of `size` bytes; of all bytes where the file is small."""
    found = hashlib.sha256()
    for start, stop in [(0, size)] if size <= _WHOLE else spans:
        found.update(read(start, stop))
    return found.hexdigest()[:16]


def mark_of_options(source: Any, rows: int, without: Collection[str] = ()) -> Mark:
    """Of rows that a source's options decide; those at their defaults do not count, so that there may be new ones.

    Args:
        source: the dataclass with the options.
        rows: how many.
        without: options that do not matter to the training rows.
    """
    fields = [field for field in dataclasses.fields(source) if field.name not in without]
    given = {
        field.name: getattr(source, field.name) for field in fields if getattr(source, field.name) != field.default
    }
    told = json.dumps(given, sort_keys=True, default=str)
    return Mark(f"data.name={source.name}", rows, hashlib.sha256(told.encode()).hexdigest()[:16])


def summary(marks: Sequence[Mark]) -> str:
    """One short word for all of them, by which a user may name this very data."""
    return hashlib.sha256(msgspec.json.encode(marks)).hexdigest()[:12]
