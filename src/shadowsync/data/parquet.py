"""Any parquet table whose columns the configuration names.

`B` samples, `F` categorical features, `N` dense columns, `L` ids.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import polars as pl
import pyarrow.parquet
from pydantic import Field

from shadowsync.data.batch import Batch
from shadowsync.data.files import PANIC, File, reading, resolve
from shadowsync.data.fingerprint import PART, digest
from shadowsync.data.frame import Column, Layout, batch_of, problems
from shadowsync.data.mirror import Mirror, column_span
from shadowsync.data.rows import FileRows
from shadowsync.data.source import Feature, OpenSource, Pooling, Schema, Slice, Source
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import nearest

pq: Any = pyarrow.parquet  # has no types

Rows = Annotated[int, Field(ge=1, le=1 << 32)]


@dataclass(frozen=True)
class Parquet(Source):
    """Parquet files with a label, dense and categorical columns.

    A categorical column holds integers or strings, or lists of either (multi-hot, empty lists allowed). With
    `hash_size` its values are hashed to `[1, hash_size)` and a missing one takes row 0; without, integers are used as
    they are and must lie in `[0, rows)`. A missing dense value counts as 0.
    """

    name: ClassVar[str] = "parquet"
    not_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("weight", "sample_weight", "sample_weights", "weight_column"),
        "all rows count alike, a row has no weight of its own yet; data.weights={COLUMN: WEIGHTS} is for the ids of a "
        "list column",
    )

    path: Annotated[
        str | tuple[str, ...], Field(description="training rows: a file, a glob or a list, any URL of fsspec")
    ]
    categorical: Annotated[tuple[str, ...], Field(description="categorical columns, in the model's order")]
    test_path: Annotated[str | tuple[str, ...] | None, Field(description="test rows, likewise; None: no test")] = None
    label: Annotated[
        str | None, Field(description="the column that holds 0 or 1; null: rows without labels, for predictions only")
    ] = "label"
    dense: Annotated[tuple[str, ...], Field(description="dense columns, in the model's order")] = ()
    log_dense: Annotated[bool, Field(description="take log(1 + max(x, 0)) of the dense columns, for counts")] = False
    rows: Annotated[
        Rows | dict[str, Rows] | None,
        Field(description="integers used as they are lie in [0, rows): one number, or by column"),
    ] = None
    hash_size: Annotated[
        Rows | dict[str, Rows] | None,
        Field(description="rows that values are hashed to: one number, or by column; more collides less"),
    ] = None
    weights: Annotated[dict[str, str], Field(description="for a list column, the list column of its ids' weights")] = (
        field(default_factory=dict)
    )
    tables: Annotated[dict[str, str], Field(description="by column, the name of a table it shares with others")] = (
        field(default_factory=dict)
    )
    pooling: Annotated[
        dict[str, Pooling],
        Field(description="how a list column's rows are pooled, sum by default; none keeps them apart, as a sequence"),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("weights", "tables", "pooling"):
            self._check_names(key, getattr(self, key))
        for key in ("rows", "hash_size"):
            sizes = getattr(self, key)
            self._check_names(key, sizes if isinstance(sizes, dict) else {})
        if not self.categorical:
            raise ConfigError("data.categorical is empty: name at least one column of ids, as data.categorical=[user]")
        for key, names in (("dense", self.dense), ("categorical", self.categorical)):
            self._check_inputs(key, names)
        self._check_inputs("weights", tuple(dict.fromkeys(self.weights.values())))

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The label's column, if there is one."""
        return () if self.label is None else (self.label,)

    def _check_inputs(self, key: str, names: Sequence[str]) -> None:
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"data.{key} names {min(repeated)!r} twice: leave one out")
        if self.label in names:
            raise ConfigError(
                f"data.{key} names {self.label!r}, which is the label (data.label): leave it out, as a model cannot be "
                "given the answer"
            )

    def _check_names(self, key: str, named: Mapping[str, object]) -> None:
        for name in named:
            if name not in self.categorical:
                hint = nearest(name, self.categorical)
                raise ConfigError(f"data.{key} names {name!r}, which is not in data.categorical{hint}")

    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """Checks the files' columns and types."""
        paths = self.path if split == "train" else self.test_path
        if paths is None:
            return None
        files = resolve("data.path" if split == "train" else "data.test_path", paths, ".parquet")
        return OpenParquet(self, files, on_bad_row)

    def size(self, name: str) -> tuple[int, bool]:
        """Rows of the feature's table, and whether its values are hashed to them."""
        for hashed, sizes in ((True, self.hash_size), (False, self.rows)):
            found = sizes.get(name) if isinstance(sizes, dict) else sizes
            if found is not None:
                if hashed and found == 1:
                    raise ConfigError(
                        f"data.hash_size of {name} is 1; it must be at least 2, as row 0 is for missing values"
                    )
                return found, hashed
        raise ConfigError(
            f"column {name!r} has no size: give data.hash_size=100000, or data.rows if it holds ids from 0 to rows − 1"
        )


class OpenParquet(FileRows):
    """Parquet files whose columns have been checked."""

    def __init__(self, options: Parquet, files: Sequence[File], on_bad_row: Literal["error", "skip"]) -> None:
        wanted = [*options.label_columns, *options.dense, *options.categorical, *options.weights.values()]
        self._mirrors = [None if file.local else Mirror(file, wanted) for file in files]
        paths = [file.key if m is None else m.path for file, m in zip(files, self._mirrors, strict=True)]
        self._paths, self._label = paths, options.label
        opened = [_Checked(options, file, path) for file, path in zip(files, paths, strict=True)]
        self._layout = opened[0].layout()
        for other in opened[1:]:
            other.check_like(opened[0])
        self.labelled = options.label is not None
        self._frames = [pl.scan_parquet(path, glob=False).select(list(dict.fromkeys(wanted))) for path in paths]
        super().__init__(_schema(options, self._layout), files, [file.rows() for file in opened], on_bad_row)

    def read(self, part: Slice) -> Batch:
        """Decodes the pages that hold the slice; rows are looked at one by one only if something is wrong."""
        frame = self._frame(part)
        batch = batch_of(frame, self._layout)
        if batch is None:
            keep = self.reject(part, problems(frame, self._layout))
            batch = batch_of(frame.filter(pl.Series(keep)), self._layout)
            assert batch is not None, "problems() must find what batch_of() rejects"
        return batch

    def _frame(self, part: Slice) -> pl.DataFrame:
        path, mirror = self.files[part.file].path, self._mirrors[part.file]
        self.check_unchanged(part)
        if mirror is not None:
            mirror.fetch(part.start, part.rows)
        with reading(path):
            try:
                return self._frames[part.file].slice(part.start, part.rows).collect()
            except (pl.exceptions.PolarsError, PANIC) as error:
                raise DataError(
                    f"{path}: row {part.start + 1} and those after cannot be decoded: {_line(error)}"
                ) from error

    def dense_bounds(self) -> Mapping[str, float]:
        """As the footers tell; nothing where logarithms are taken, or where a file holds no bounds."""
        largest: dict[str, float] = {}
        if self._layout.log_dense:
            return largest
        for file, path in zip(self.files, self._paths, strict=True):
            with reading(file.path):
                for name, bound in _bounds(pq.read_metadata(path), self._layout.dense):
                    largest[name] = max(bound, largest.get(name, 0.0))
        return largest

    def digest(self, file: int) -> str:
        """Of the footer, which has sizes and bounds of all columns, and of the first labels, which hardly show there.

        Not of the file's other bytes, unless it is small.
        """
        size, path, mirror = self.files[file].size, self._paths[file], self._mirrors[file]
        with reading(self.files[file].path):
            metadata = pq.read_metadata(path)
            spans = [(size - 8 - metadata.serialized_size, size)]
            labels = None if self._label is None else column_span(metadata, self._label)
        if labels is not None:
            spans.append((labels[0], min(labels[1], labels[0] + PART)))
        return digest(size, spans, self.files[file].read if mirror is None else mirror.read)

    def close(self) -> None:
        """Removes what was fetched of remote files."""
        for mirror in self._mirrors:
            if mirror is not None:
                mirror.close()


class _Checked:
    """A parquet file held against the options.

    Raises:
        DataError: it is not a parquet file; `layout` and `rows` find the rest.
    """

    def __init__(self, options: Parquet, file: File, path: str) -> None:
        self.options, self.file, self.path = options, file, path
        with reading(file.path):
            try:
                self.types = _schema_of(path)
            except (pl.exceptions.PolarsError, PANIC) as error:
                raise DataError(f"{file.path}: is not a parquet file, or was cut: {_line(error)}") from error

    def rows(self) -> int:
        with reading(self.file.path):
            count = int(pl.scan_parquet(self.path, glob=False).select(pl.len()).collect().item())
        if count == 0:
            raise DataError(f"{self.file.path}: has no rows")
        return count

    def layout(self) -> Layout:
        options = self.options
        for key, names in (("label", options.label_columns), ("dense", options.dense)):
            for name in names:
                self._need(_is_number(self._type(key, name)), key, name, "one number per row")
        columns = tuple(self._column(name) for name in options.categorical)
        return Layout(options.label, options.dense, columns, options.log_dense)

    def check_like(self, first: "_Checked") -> None:
        """Raises `DataError` if a column is of another type than in the first file, so that its ids would differ."""
        for here, there in zip(self.layout().columns, first.layout().columns, strict=True):
            if here != there:
                raise DataError(
                    f"{self.file.path}: column {here.name!r} holds {self.types[here.name]}, in {first.file.path} it "
                    f"holds {first.types[here.name]}: write all files with the same types"
                )

    def _column(self, name: str) -> Column:
        kind, (rows, hashed) = self._type("categorical", name), self.options.size(name)
        listed = isinstance(kind, pl.List)
        value = kind.inner if isinstance(kind, pl.List) else kind
        text = value in (pl.String, pl.Categorical, pl.Enum)
        self._need(text or value.is_integer(), "categorical", name, "integers or strings, or lists of them")
        self._need(hashed or not text, "categorical", name, "integers, unless data.hash_size is given")
        weights = self.options.weights.get(name)
        if weights is not None:
            self._need(listed, "categorical", name, "lists, as data.weights gives their ids weights")
            kind = self._type("weights", weights)
            self._need(isinstance(kind, pl.List) and _is_number(kind.inner), "weights", weights, "lists of numbers")
        return Column(name, rows, hashed, text, listed, weights)

    def _type(self, key: str, name: str) -> pl.DataType:
        if name not in self.types:
            has = ", ".join(list(self.types)[:50])
            hint = nearest(name, self.types)
            if f"/{name}=" in self.file.path:
                hint = ": it is in the name of a folder, and columns that folders are named after are not read yet"
            raise DataError(f"{self.file.path}: there is no column {name!r} (data.{key}){hint}; the file has {has}")
        return self.types[name]

    def _need(self, condition: bool, key: str, name: str, allowed: str) -> None:
        if not condition:
            held = self.types[name]
            raise DataError(f"{self.file.path}: column {name!r} (data.{key}) holds {held}, it must hold {allowed}")


class Columns:
    """Columns of parquet files as they are, read beside the rows of a source of the same files, in their order.

    Attributes:
        types: by column.

    Raises:
        DataError: a file lacks one of them, or holds it as another type than the first.
    """

    def __init__(self, files: Sequence[File], names: Sequence[str], file_rows: Sequence[int]) -> None:
        self._files, self._names, self._file_rows = files, list(names), file_rows
        self._file = self._row = 0
        self._mirrors = [None if file.local else Mirror(file, names) for file in files]
        self._paths = [file.key if m is None else m.path for file, m in zip(files, self._mirrors, strict=True)]
        found = [self._types(file.path, path) for file, path in zip(files, self._paths, strict=True)]
        self.types = found[0]
        for file, types in zip(files, found, strict=True):
            for name, kind in types.items():
                if kind != self.types[name]:
                    first = f"{self.types[name]} in {files[0].path}"
                    raise DataError(f"{file.path}: column {name!r} (--keep) holds {kind}, but {first}")

    def _types(self, shown: str, path: str) -> dict[str, pl.DataType]:
        with reading(shown):
            types = _schema_of(path)
        for name in self._names:
            if name not in types:
                has = ", ".join(list(types)[:50])
                raise DataError(
                    f"{shown}: there is no column {name!r} (--keep){nearest(name, types)}; the file has {has}"
                )
        return {name: types[name] for name in self._names}

    def take(self, rows: int) -> pl.DataFrame:
        """Of the next rows, which lie in one file."""
        if self._row == self._file_rows[self._file]:
            self._file, self._row = self._file + 1, 0
        mirror, start = self._mirrors[self._file], self._row
        if mirror is not None:
            mirror.fetch(start, rows)
        self._row += rows
        with reading(self._files[self._file].path):
            frame = pl.scan_parquet(self._paths[self._file], glob=False).select(self._names)
            return frame.slice(start, rows).collect()


def _schema_of(path: str) -> Mapping[str, pl.DataType]:
    """By column; a path that looks like a pattern is a name, as it was resolved before."""
    return pl.scan_parquet(path, glob=False).collect_schema()


def _bounds(metadata: Any, columns: Collection[str]) -> Iterator[tuple[str, float]]:
    """The largest |x| of each row group's columns, as far as it is written down."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    wanted = [n for n in range(metadata.num_columns) if groups[0].column(n).path_in_schema in columns]
    for chunk in (group.column(number) for group in groups for number in wanted):
        if chunk.is_stats_set and chunk.statistics.has_min_max:
            yield chunk.path_in_schema, max(abs(float(chunk.statistics.min)), abs(float(chunk.statistics.max)))


def _is_number(kind: object) -> bool:
    return isinstance(kind, pl.DataType) and (kind.is_numeric() or kind == pl.Boolean)


def _schema(options: Parquet, layout: Layout) -> Schema:
    return Schema(
        options.dense,
        tuple(
            Feature(
                column.name,
                column.rows,
                options.tables.get(column.name),
                column.listed,
                options.pooling.get(column.name, "sum"),
            )
            for column in layout.columns
        ),
    )


def _line(error: BaseException) -> str:
    if isinstance(error, PANIC):
        return "it is damaged, or was changed while it was being read"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
