"""Training, validation and test rows of the same data: parts of it without overlap or gap.

A part is a source of its own, cut into slices of the rows that it has, so that whoever reads it counts exactly and
knows nothing of the others. Which rows belong to it is decided by their place, or by a column, when the data is opened,
and kept as one bit for each row. The test rows are taken first, then the validation rows of what these leave.
"""

import datetime
import hashlib
import json
import zoneinfo
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from shadowsync.config import DataConfig, SplitConfig
from shadowsync.data.batch import Batch
from shadowsync.data.files import FileOptions
from shadowsync.data.frame import type_of
from shadowsync.data.source import Mark, OpenSource, Slice, Source, settled
from shadowsync.data.tables import OpenTable, some_of
from shadowsync.data.values import hash_strings
from shadowsync.errors import ConfigError, DataError
from shadowsync.serving import Mask, mix

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")
Rule = Callable[[Slice, int, NDArray[np.int64]], Mask]
"""Which rows of a slice belong to a part; given are the number of its first row in all the data, and the number of each
among those that are left."""

_BLOCK = 1 << 16  # rows that are decided and counted together
_READ = 1 << 15  # rows that are read at once, at most


def open_parts(source: Source, data: DataConfig, *wanted: Part) -> dict[Part, OpenSource]:
    """The wanted parts that there are. Whoever closes one closes all that are of the training rows' files.

    Raises:
        ConfigError: the configuration does not fit the source.
        DataError: files cannot be read, or a part would have no rows.
    """
    given: dict[Part, SplitConfig | None] = {"test": data.test, "valid": data.valid}
    cut = {part: split for part, split in given.items() if split is not None and split.path is None}
    found: dict[Part, OpenSource] = {}
    if {"train", *cut} & set(wanted) and (opened := source.open("train", data.on_bad_row)) is not None:
        parts: dict[Part, OpenSource] = partition(opened, cut) if cut else {"train": opened}
        if data.max_rows:
            parts["train"].limit(data.max_rows)
        found |= {part: rows for part, rows in parts.items() if part in wanted}
        source = settled(source, opened)
    if "test" in wanted and (own := source.open("test", data.on_bad_row)) is not None:
        found["test"] = own
        if data.test is not None:
            own.close()
            raise ConfigError(f"data.test: data.name={data.name} has test rows of its own: leave one of them out")
    for part, split in given.items():
        if part in wanted and split is not None and split.path is not None:
            if not isinstance(source, FileOptions):
                raise ConfigError(
                    f"data.{part}.path: data.name={data.name} reads no files: give fraction or last in its place"
                )
            at = source.at(split.path).open("train", data.on_bad_row)
            assert at is not None
            found[part] = at
    return found


def whole(source: OpenSource) -> OpenSource:
    """The data that a part is of; other sources as they are."""
    return source.whole if isinstance(source, Selected) else source


class Chosen:
    """Some rows of a file, ascending: a bit for each row of it.

    Args:
        masks: of `_BLOCK` rows each, in their order; the last one may be of fewer.
    """

    def __init__(self, masks: Sequence[Mask]) -> None:
        self._bits = pl.concat([pl.Series(dtype=pl.Boolean), *map(pl.Series, masks)], rechunk=True)
        self._ends = np.cumsum([0, *(np.count_nonzero(mask) for mask in masks)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def blocks(self) -> Iterator[Mask]:
        """The masks that it was made of."""
        return (self._bits.slice(start, _BLOCK).to_numpy() for start in range(0, len(self._bits), _BLOCK))

    def span(self, start: int, stop: int) -> tuple[int, Mask]:
        """The rows `start … stop − 1` of the chosen ones, at least one: which row of the file is the first of them, and
        which of the rows from there to the last one they are."""
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        last = int(np.searchsorted(self._ends, stop, side="left"))
        bits = self._bits.slice(first * _BLOCK, (last - first) * _BLOCK).to_numpy()
        rows = np.flatnonzero(bits)[start - self._ends[first] : stop - self._ends[first]]
        mask = np.zeros(rows[-1] - rows[0] + 1, dtype=np.bool_)
        mask[rows - rows[0]] = True
        return first * _BLOCK + int(rows[0]), mask


class Selected(OpenSource):
    """Some rows of a source, in its order, numbered through in each of its files.

    Args:
        whole: the source.
        chosen: of each of its files.
        marks: by which the choice is known again.
    """

    def __init__(self, whole: OpenSource, chosen: Sequence[Chosen], marks: Sequence[Mark] = ()) -> None:
        self.whole, self.schema, self.bad_rows = whole, whole.schema, whole.bad_rows
        self.sequential, self.labelled = whole.sequential, whole.labelled
        self._chosen, self._marks = chosen, marks
        self.file_rows = tuple(map(len, chosen))
        self.rows = sum(self.file_rows)

    def read(self, part: Slice) -> Batch:
        """Reads the stretch in which the rows lie, piece by piece, and takes them out of it."""
        found = []
        for piece, wanted in self._pieces(part):
            batch, kept = self.whole.read(piece), self._kept(piece, wanted)
            found.append(batch if len(kept) == len(batch) else batch.take(torch.from_numpy(kept)))
        return Batch.join(found)

    def types(self) -> Iterable[Mapping[str, pl.DataType]]:
        """As of `fitting.TrainingRows`."""
        assert isinstance(self.whole, OpenTable)
        return self.whole.types()

    def frames(self, columns: Collection[str], most_rows: int) -> Iterator[pl.DataFrame]:
        """As of `fitting.TrainingRows`."""
        assert isinstance(self.whole, OpenTable)
        return self.whole.pieces(columns, (piece for part in some_of(self, most_rows) for piece in self._pieces(part)))

    def kept_column(self, name: str, part: Slice, key: str) -> pl.Series:
        parts = []
        for piece, wanted in self._pieces(part):
            parts.append(self.whole.kept_column(name, piece, key).gather(self._kept(piece, wanted)))
        return pl.concat(parts)

    def place(self, part: Slice, row: int) -> str:
        for piece, wanted in self._pieces(part):
            kept = self._kept(piece, wanted)
            if row < len(kept):
                return self.whole.place(piece, int(kept[row]))
            row -= len(kept)
        raise IndexError(f"the slice has no row {row} more")

    def _pieces(self, part: Slice) -> Iterator[tuple[Slice, Mask]]:
        """Slices of the whole source that hold rows of this one's, and which."""
        first, mask = self._chosen[part.file].span(part.start, part.start + part.rows)
        for begin in range(0, len(mask), _READ):
            wanted = mask[begin : begin + _READ]
            if wanted.any():
                yield Slice(part.index, part.file, first + begin, len(wanted)), wanted

    def _kept(self, piece: Slice, wanted: Mask) -> NDArray[np.int64]:
        """The places of wanted rows among those that reading the piece gives."""
        dropped = self.whole.dropped(piece)
        return np.flatnonzero(np.delete(wanted, sorted(dropped)) if dropped else wanted)

    def marks(self) -> tuple[Mark, ...]:
        """Those of all the data, and one for each split; none where the data has none."""
        known = self.whole.marks()
        return (*known, *self._marks) if known else ()

    def close(self) -> None:
        self.whole.close()


def partition(source: OpenSource, splits: Mapping[Part, SplitConfig]) -> dict[Part, OpenSource]:
    """The rows of each split, which takes what those before it leave; `train` has what is left in the end.

    Raises:
        ConfigError: a value does not fit its column.
        DataError: a column is missing, or a part would have no rows.
    """
    chosen: dict[Part, list[Chosen]] = {}
    left = [
        Chosen([np.ones(min(_BLOCK, rows - start), dtype=np.bool_) for start in range(0, rows, _BLOCK)])
        for rows in source.file_rows or (source.rows,)
    ]
    for part, split in splits.items():
        chosen[part], left = _divided(left, _rule(split, part, source, sum(map(len, left))))
    chosen["train"] = left
    counts = {part: sum(map(len, files)) for part, files in chosen.items()}
    for part, split in splits.items():
        if not counts[part]:
            raise DataError(f"data.{part}={split} takes none of the {source.rows:,} rows: give more, or another value")
    if not counts["train"]:
        given = " and ".join(f"data.{part}={split}" for part, split in splits.items())
        raise DataError(f"{given} leave none of the {source.rows:,} rows to train on: take fewer")
    told = {part: json.dumps(split.told(), sort_keys=True).encode() for part, split in splits.items()}
    marks = [Mark(f"data.{p}", counts[p], hashlib.sha256(text).hexdigest()[:16]) for p, text in told.items()]
    return {part: Selected(source, files, marks) for part, files in chosen.items()}


def _divided(left: Sequence[Chosen], rule: Rule) -> tuple[list[Chosen], list[Chosen]]:
    """What the rule takes of the rows of each file that are left, and what it leaves."""
    taken, rest = [], []
    row = number = 0
    for file, of_file in enumerate(left):
        masks = []
        for block, free in enumerate(of_file.blocks()):
            piece = Slice(0, file, block * _BLOCK, len(free))
            mask = rule(piece, row, np.cumsum(free) + (number - 1)) & free
            masks.append((mask, free & ~mask))
            row, number = row + len(free), number + int(np.count_nonzero(free))
        taken.append(Chosen([mask for mask, _ in masks]))
        rest.append(Chosen([mask for _, mask in masks]))
    return taken, rest


# --- which rows ------------------------------------------------------------------------------------------------------


def _rule(split: SplitConfig, part: Part, source: OpenSource, left: int) -> Rule:
    """Of so many rows that are `left`; raises `DataError` if files hold the column that is drawn by as other types."""
    column, start, key = split.column, split.start, f"data.{part}.column"
    if split.last is not None:
        first = left - round(split.last if split.last >= 1 else split.last * left)
        return lambda _piece, _row, numbers: numbers >= first
    if column is not None and start is not None:
        return lambda piece, _row, _numbers: _from(source.column(column, piece, key), start, f"data.{part}.from")
    assert split.fraction is not None
    kind = _hashed_as(source, column, key) if column is not None and isinstance(source, OpenTable) else pl.Null()
    # test and validation rows are drawn independently
    salt = np.frombuffer(hashlib.sha256(f"{part}/{split.seed}".encode()).digest(), "<u8", 1)
    below = np.uint64(int(split.fraction * 2**64))

    def drawn(piece: Slice, row: int, _numbers: NDArray[np.int64]) -> Mask:
        if column is None:
            hashes = mix(np.arange(row, row + piece.rows, dtype=np.uint64))
            return mix(hashes ^ salt) < below
        values = source.column(column, piece, key)  # missing ones are alike
        values = values.cast(kind) if values.dtype == pl.Null else values
        if values.dtype.is_nested() or values.dtype == pl.Binary:
            raise DataError(f"{key}={values.name}: it holds {values.dtype}: name a column with one value per row")
        if values.dtype.is_integer():
            hashes = mix(values.fill_null(0).to_numpy().astype(np.int64).view(np.uint64))
        else:
            hashes = hash_strings(values.cast(pl.String))
        return mix(hashes ^ salt) < below

    return drawn


def _hashed_as(source: OpenTable, column: str, key: str) -> pl.DataType:
    """The one type of a column by whose values rows are drawn; Null if no file has any."""
    found: pl.DataType = pl.Null()
    for table in source.tables:
        held = kind = type_of(column, table.types, table.file.path, key)
        if kind.is_integer():
            kind = pl.Int64()
        elif kind in (pl.Categorical, pl.Enum):
            kind = pl.String()
        if pl.Null() not in (found, kind) and kind != found:  # equal values would be hashed otherwise
            raise DataError(
                f"{table.file.path}: column {column!r} ({key}) holds {held}, and {found} in files before: write all "
                "files with the same types"
            )
        found = kind if found == pl.Null() else found
    return found


def _from(values: pl.Series, start: float | str, key: str) -> Mask:
    """The rows with `start` or more; not those where the value is missing."""
    kind, given, said = values.dtype, pl.lit(start), f"{key}={start}: column {values.name!r} holds {values.dtype}"
    if kind == pl.Date:
        values = values.cast(pl.Datetime("us"))
    if isinstance(values.dtype, pl.Datetime):
        given = pl.lit(_time(start, values.dtype.time_zone, said))
    elif not (kind.is_numeric() or kind == pl.String):
        raise ConfigError(f"{said}: name a column of numbers, text, dates or times")
    elif isinstance(start, str) != (kind == pl.String):
        raise ConfigError(f"{said}: give {'text' if kind == pl.String else 'a number'}")
    if kind.is_float():
        values = values.fill_nan(None)
    found = values.to_frame("value").select(pl.col("value") >= given).to_series()
    return found.fill_null(value=False).to_numpy()


def _time(start: float | str, zone: str | None, held: str) -> datetime.datetime:
    """In the time zone of the column, if that has one."""
    try:
        given = datetime.datetime.fromisoformat(start if isinstance(start, str) else "")
    except ValueError:
        raise ConfigError(f"{held}: give a date or a time, as 2024-03-01 or 2024-03-01T12:00:00") from None
    if zone is None and given.tzinfo is not None:
        raise ConfigError(f"{held} without a time zone: give a time without one")
    if zone is None:
        return given
    of_column = zoneinfo.ZoneInfo(zone)
    return given.replace(tzinfo=of_column) if given.tzinfo is None else given.astimezone(of_column)
