"""Rows that a program has in memory, or makes, kept as parquet files in a run's folder.

So they are read like any others: in slices, in any order, in every epoch, by other processes, and again when the run is
resumed, evaluated or reported on. It costs a pass over them and their size on disk; a row group of them is in memory at
a time, besides what the program holds.
"""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import polars as pl
import pyarrow
import pyarrow.parquet
import torch

from shadowsync.config import Config, with_data
from shadowsync.data.files import reading
from shadowsync.data.values import LONG, is_list, shown_type, value_type
from shadowsync.data.writer import ROW_GROUP, writing_table
from shadowsync.errors import ConfigError, DataError
from shadowsync.serving import without_mask

pa: Any = pyarrow  # has no types
T = TypeVar("T")

Split = Literal["train", "test"]
_KEYS: Mapping[Split, str] = {"train": "path", "test": "test_path"}
"""Of the section `data`, where rows of a split are."""
_OF_TABLES = ("label", "columns", "categorical", "dense")
_NOT_KEPT = ("Object", *LONG)
"""Types, as polars calls them, of values that nobody could read as what they were."""
_NOT_TAKEN = (
    *(pa.types.is_decimal32, pa.types.is_decimal64, pa.types.is_decimal256),
    *(pa.types.is_interval, pa.types.is_union),
    *(pa.types.is_list_view, pa.types.is_large_list_view, pa.types.is_run_end_encoded),
)
"""Arrow's types that polars does not read."""
_ALLOWED = "give numbers of up to 64 bits, text, dates, or lists of them"
_OF_DATASETS = "pyarrow._dataset"
"""Where pyarrow's datasets are. It is not imported, as it imports pandas where there is one, which takes as long."""
_TABLES = "a polars, pandas or Hugging Face table, one of pyarrow, a dict of columns"


class Given:
    """Rows that were given as the argument `name`.

    Raises:
        ConfigError: they are of no kind that is known.
    """

    def __init__(self, name: str, rows: object) -> None:
        self.name, self._rows = name, rows
        if isinstance(rows, str | bytes | Path):
            raise ConfigError(
                f"{name}={str(rows)!r} is a path and not rows: set data.path in the configuration instead"
            )
        if _is_series(rows) or (not isinstance(rows, pl.LazyFrame | Iterable) and _frames_of(rows) is None):
            raise ConfigError(
                f"{name} is {_described(rows)}: give {_TABLES}, or an iterable of such, for instance a DataLoader"
            )

    def keep(self, path: Path) -> int:
        """Writes them to `path`, in place of what may be there, when all of them are; how many.

        Raises:
            DataError: there are none, they cannot be read, or their columns change.
            SaveError: the file cannot be written.
        """
        rows = 0
        with writing_table(path) as write:
            for block in self._blocks():
                write(block)
                rows += len(block)
            if rows == 0:
                raise DataError(f"{self.name} holds no rows")
        return rows

    def check_kept(self, path: Path) -> None:
        """Raises `ConfigError` if `path` holds other rows, by the first ones and, where that is known, their number: an
        iterable may be gone through only once."""
        first, as_kept = next(self._blocks(), None), io.BytesIO()
        if first is None:
            raise DataError(f"{self.name} holds no rows")
        pa.parquet.write_table(first.to_arrow(compat_level=pl.CompatLevel.oldest()), as_kept)
        with reading(str(path)):
            kept = pl.scan_parquet(path, glob=False)
            same = kept.head(len(first)).collect().equals(pl.read_parquet(as_kept.getvalue()))
            rows = kept.select(pl.len()).collect().item()
        if not same or getattr(self._rows, "shape", (rows,))[0] != rows:
            raise ConfigError(
                f"{path} holds other rows than {self.name}: leave {self.name} out to go on with those, or give another "
                "folder as out to train on these"
            )

    def _blocks(self) -> Iterator[pl.DataFrame]:
        """All rows, a row group at a time, with the same columns."""
        schema: dict[str, pl.DataType] = {}
        held: list[pl.DataFrame] = []
        fixed = False
        for number, frame in enumerate(self.frames(), 1):
            if frame.is_empty():
                continue
            schema = self._common(schema, frame, number, fixed)
            held.append(frame)
            if sum(map(len, held)) >= ROW_GROUP:
                whole, fixed = _joined(held, schema), True
                full = len(whole) // ROW_GROUP * ROW_GROUP
                yield from whole[:full].iter_slices(ROW_GROUP)
                held = [whole[full:]]
        if held and len(rest := _joined(held, schema)):
            yield rest

    def frames(self) -> Iterator[pl.DataFrame]:
        whole = _frames_of(self._rows)
        if whole is not None:
            yield from _guarded(self.name, whole)
            return
        assert isinstance(self._rows, Iterable)
        for number, item in enumerate(_guarded(self.name, self._rows), 1):
            frames = None if _is_series(item) else _frames_of(item)
            if frames is None:
                raise DataError(f"{self.name}: its batch {number} is {_described(item)}, each must be {_TABLES}")
            yield from _guarded(f"{self.name}, batch {number}", frames)

    def _common(
        self, before: Mapping[str, pl.DataType], frame: pl.DataFrame, number: int, fixed: bool
    ) -> dict[str, pl.DataType]:
        """The columns of those before and this one; `fixed` where some are written."""
        if before and (odd := {*before} ^ {*frame.columns}):
            has = "lacks" if min(odd) in before else "has also"
            raise DataError(f"{self.name}: batch {number} {has} the column {min(odd)!r}: give all the same columns")
        common = {}
        for name in before or frame.columns:
            kind = frame.schema[name]
            holds = f"{self.name}: batch {number} holds {shown_type(kind)} in the column {name!r}"
            if str(_innermost(kind)) in _NOT_KEPT:
                raise DataError(f"{holds}: {_ALLOWED}")
            held = before.get(name, kind)
            either = _either(held, kind)
            if either is None or (fixed and either != held):
                raise DataError(f"{holds}, those before it hold {shown_type(held)}: give all the same types")
            common[name] = either
        return common


def kept_path(folder: Path, split: Split) -> Path:
    """Where a run keeps rows that were given to it."""
    return folder / "data" / f"{split}.parquet"


def with_kept_rows(config: Config, given: Mapping[Split, Given], out: Path, resume: Path | None) -> Config:
    """A configuration that reads given rows where they are kept in `out`, and where it names no others, those that the
    run to be resumed has kept.

    Raises:
        ConfigError: it names others, or there are no training rows.
    """
    options = config.data.options
    parquet = "name" not in config.data.model_fields_set or config.data.name == "parquet"
    found = {}
    for split, rows in given.items():
        if (key := _KEYS[split]) in options:
            raise ConfigError(f"both data.{key} and {rows.name} are given: leave one of them out")
        if not parquet:
            raise ConfigError(f"data.name={config.data.name} does not go with {rows.name}: leave it out")
        found[key] = str(kept_path(out, split).absolute())
    if resume is not None and parquet and "path" not in {*options, *found}:
        found = {key: path for key, path in _kept(resume).items() if key not in options} | found
    if resume is not None and "path" not in found:
        missing = kept_path(resume, "train").absolute()
        of_table = parquet and not {*_OF_TABLES}.isdisjoint(options)
        if not missing.is_file() and options.get("path", str(missing) if of_table else "") == str(missing):
            raise ConfigError(
                f"{missing} is not there, where a run keeps rows that are given as data: give them again, or data.path"
            )
    if "test_path" in found and "path" not in {*options, *found}:
        raise ConfigError("there are test rows and none to train on: give data beside test_data, or data.path")
    return with_data(config, name="parquet", **found) if found else config


def with_rows_of(folder: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration stored in a run's folder; rows that it has kept are where the folder is now."""
    data = stored.get("data")
    if not isinstance(data, Mapping):
        return dict(stored)
    kept = _kept(folder).items()
    here = {k: path for k, path in kept if Path(str(data.get(k))).parts[-2:] == Path(path).parts[-2:]}
    return {**stored, "data": {**data, **here}}


def _kept(folder: Path) -> dict[str, str]:
    """The rows that a run has kept, by their keys."""
    paths = {key: kept_path(folder, split).absolute() for split, key in _KEYS.items()}
    return {key: str(path) for key, path in paths.items() if path.is_file()}


def _frames_of(table: Any) -> Iterator[pl.DataFrame] | None:
    """The rows of a table, a bounded number at a time; None for what is none. Nothing is read yet."""
    package = type(table).__module__.partition(".")[0]
    if isinstance(table, pl.LazyFrame):
        return iter(table.collect_batches(chunk_size=ROW_GROUP, lazy=True))
    if isinstance(table, pl.DataFrame):
        return table.iter_slices(ROW_GROUP)
    if package == "pandas" and hasattr(table, "iloc"):
        return _of_pandas(table)
    if package == "datasets" and hasattr(table, "iter"):
        return _of_arrow(table.with_format("arrow").iter(batch_size=ROW_GROUP))
    if any(kind.__module__ == _OF_DATASETS for kind in type(table).__mro__):
        return _of_arrow(table.to_batches(batch_size=ROW_GROUP))
    if isinstance(table, pa.RecordBatch):
        return _of_arrow([table])
    if hasattr(table, "__arrow_c_stream__"):
        return _of_stream(table)
    return _of_columns(table) if isinstance(table, Mapping) else None


def _of_pandas(table: Any) -> Iterator[pl.DataFrame]:
    if odd := [name for name in table.columns if not isinstance(name, str)]:
        raise ValueError(f"its column {odd[0]!r} has no text as its name: rename it (frame.columns)")
    if table.index.nlevels > 1:
        raise ValueError("its index of several levels would be lost: make columns of them by frame.reset_index()")
    if (index := table.index.name) is not None:
        raise ValueError(
            f"its index {index!r} would be lost: make a column of it by frame.reset_index(), or leave it out by "
            "frame.reset_index(drop=True)"
        )
    columns = (table.iloc[:, number : number + 1] for number in range(table.shape[1]))  # which copies none
    fields = [_of_one_type(one.columns[0], pa.Schema.from_pandas, one, preserve_index=False)[0] for one in columns]
    schema = pa.schema(fields)
    for start in range(0, len(table), ROW_GROUP):
        piece = table.iloc[start : start + ROW_GROUP]
        yield from _of_arrow([pa.RecordBatch.from_pandas(piece, schema=schema, preserve_index=False)])


def _of_stream(table: Any) -> Iterator[pl.DataFrame]:
    yield from _of_arrow(pa.RecordBatchReader.from_stream(table))


def _of_arrow(tables: Iterable[Any]) -> Iterator[pl.DataFrame]:
    for table in tables:
        for column in table.schema:
            if any(unknown(part) for part in _parts(column.type) for unknown in _NOT_TAKEN):
                raise ValueError(f"the column {column.name!r} holds {column.type}: {_ALLOWED}")
        yield from pl.DataFrame(table).iter_slices(ROW_GROUP)


def _of_columns(columns: Mapping[Any, object]) -> Iterator[pl.DataFrame]:
    series = [_series(str(name), values) for name, values in columns.items()]
    lengths = {len(values): values.name for values in series}
    if len(lengths) > 1:
        (few, one), (many, other) = sorted(lengths.items())[:2]
        raise ValueError(f"the column {one!r} has {few} values, {other!r} {many}: a batch has one for each of its rows")
    yield pl.DataFrame(series)


def _series(name: str, values: Any) -> pl.Series:
    """A column; rows of a matrix are lists."""
    if isinstance(values, torch.Tensor):
        values = (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()
    values = without_mask(values)
    if isinstance(values, np.ndarray):
        if values.ndim not in (1, 2):
            raise ValueError(f"the column {name!r} is of {values.ndim} dimensions: one value or one list for each row")
        if values.dtype.kind in "mM" and np.datetime_data(values.dtype)[0] in ("h", "m", "s"):
            values = values.astype(f"{values.dtype.kind}8[us]")
        if values.dtype != object:
            column = pl.Series(name, values)
            return column if values.ndim == 1 else column.arr.to_list()
        values = values.tolist()
    if isinstance(values, list | tuple):
        values = [value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value for value in values]
        return _of_one_type(name, pl.Series, name, values, _with_fractions(values))
    if not (_is_series(values) or hasattr(values, "__arrow_c_array__") or hasattr(values, "__arrow_c_stream__")):
        raise ValueError(
            f"the column {name!r} is {_described(values)}: give a list, an array or a tensor, a value for each row"
        )
    return _of_one_type(name, pl.Series, name, values)


def _with_fractions(values: Sequence[Any]) -> pl.DataType | None:
    """The type of whole numbers and fractions beside each other, in lists or not: polars takes that of the first."""
    lists = [value for value in values if isinstance(value, list | tuple)]
    kinds = {*map(type, itertools.chain.from_iterable(lists) if lists else values)} - {type(None)}
    floats = any(issubclass(kind, float | np.floating) for kind in kinds)
    if not floats or not all(issubclass(kind, int | float | np.number) for kind in kinds):
        return None
    return pl.List(pl.Float64()) if lists else pl.Float64()


def _of_one_type(name: str, make: Callable[..., T], *args: Any, **options: Any) -> T:
    """What `make` makes of a column."""
    try:
        return make(*args, **options)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise ValueError(
            f"the column {name!r} holds values of several types, or of none that is known: give text, numbers of up to "
            "64 bits, dates, or lists of them"
        ) from error


def _parts(kind: Any) -> Iterator[Any]:
    """An Arrow type and all that it is made of."""
    yield kind
    if pa.types.is_dictionary(kind):
        yield from _parts(kind.value_type)
    for number in range(kind.num_fields):
        yield from _parts(kind.field(number).type)


def _innermost(kind: pl.DataType) -> pl.DataType:
    return _innermost(value_type(kind)) if is_list(kind) else kind


def _is_series(values: object) -> bool:
    """One column, of polars or pandas."""
    return type(values).__name__ == "Series"


def _joined(frames: Sequence[pl.DataFrame], schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    return pl.concat([frame.select(pl.col(name).cast(kind) for name, kind in schema.items()) for frame in frames])


def _either(one: pl.DataType, other: pl.DataType) -> pl.DataType | None:
    """What columns of both types hold: the same, or one of them has no value yet; else None."""
    if other in (one, pl.Null):
        return one
    if one == pl.Null:
        return other
    if isinstance(one, pl.List) and isinstance(other, pl.List) and isinstance(one.inner, pl.DataType):
        inner = _either(one.inner, other.inner) if isinstance(other.inner, pl.DataType) else None
        return None if inner is None else pl.List(inner)
    return None


def _guarded(name: str, pieces: Iterable[Any]) -> Iterator[Any]:
    """The pieces; what goes wrong where they are made is told with `name`."""
    with reading(name):
        try:
            yield from pieces
        except OSError as error:
            raise DataError(f"{name}: {error}") from error


def _described(found: object) -> str:
    kind = type(found)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
