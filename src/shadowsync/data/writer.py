"""Writes rows: those of any source as a parquet file that the `parquet` source reads, and tables of other columns."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.data.batch import Batch
from shadowsync.data.source import Feature, OpenSource, Schema
from shadowsync.errors import ConfigError, SaveError

pa: Any = pyarrow  # has no types

ROW_GROUP = 65_536  # small enough that a slice of a few thousand rows decodes little it does not need


def write_parquet(source: OpenSource, path: Path) -> str:
    """Writes all rows, the file appearing only when it is whole.

    Columns: `label` (int8), the dense columns (float32, transformed as the source does), and the features (integers,
    or lists of them for multi-hot ones, with a column `<feature>_weights` where the source gives weights).

    Returns:
        The YAML lines that read the file back.

    Raises:
        SaveError: the file cannot be written.
        DataError: the source cannot be read.
    """
    weighted = False
    with replacing(path) as temporary, writing(path):
        writer = None
        for part in source.slices(ROW_GROUP):
            batch = source.read(part)
            table = pa.table(_columns(batch, source.schema))
            weighted = batch.ids.weights is not None
            writer = writer or pa.parquet.ParquetWriter(temporary, table.schema, compression="lz4")
            writer.write_table(table, row_group_size=ROW_GROUP)
        if writer is not None:
            writer.close()
    return yaml_lines(source.schema, path, weighted)


def yaml_lines(schema: Schema, path: Path, weighted: bool) -> str:
    """The `data` section of a configuration that reads a file written by `write_parquet`."""
    features = schema.features
    multi_hot = [feature for feature in features if feature.multi_hot]
    lines = [
        "data:",
        "  name: parquet",
        f"  path: {_quote(str(path))}",
        f"  dense: [{', '.join(map(_quote, schema.dense))}]",
        f"  categorical: [{', '.join(_quote(feature.name) for feature in features)}]",
        f"  rows: {_mapping({feature.name: str(feature.rows) for feature in features})}",
    ]
    tables = {feature.name: _quote(feature.table) for feature in features if feature.table is not None}
    weights = {feature.name: _quote(_weights_name(feature)) for feature in multi_hot if weighted}
    pooling = {feature.name: feature.pooling for feature in multi_hot if feature.pooling != "sum"}
    for key, named in (("tables", tables), ("weights", weights), ("pooling", pooling)):
        if named:
            lines.append(f"  {key}: {_mapping(named)}")
    return "\n".join(lines) + "\n"


@contextmanager
def writing_table(path: Path) -> Iterator[Callable[[pl.DataFrame], None]]:
    """Gives what writes frames of the same columns, as parquet or CSV by the name; the file appears when it is whole.

    Raises:
        SaveError: the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(replacing(path))
        stack.enter_context(writing(path))
        if is_csv(path):
            file = stack.enter_context(temporary.open("wb"))
            yield lambda frame: frame.write_csv(file, include_header=file.tell() == 0)
            return
        writer: Any = None

        def write(frame: pl.DataFrame) -> None:
            nonlocal writer
            table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
            writer = writer or stack.enter_context(pa.parquet.ParquetWriter(temporary, table.schema))
            writer.write_table(table)

        yield write


def is_csv(path: Path) -> bool:
    """Whether a table of this name is CSV; else it is parquet.

    Raises:
        ConfigError: its name ends neither in .csv nor in .parquet.
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".parquet"):
        has = f"the ending {path.suffix}" if path.suffix else "no ending"
        raise ConfigError(
            f"--out {path} has {has}: give a name that ends in .parquet or .csv, which says what is written"
        )
    return ending == ".csv"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place at the end, or vanishes if anything is raised."""
    handle, name = _temporary(path)
    os.close(handle)
    try:
        yield Path(name)
        with writing(path):
            Path(name).chmod(0o644)
            Path(name).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def _temporary(path: Path) -> tuple[int, str]:
    with writing(path):
        if path.exists() and not path.is_file():
            raise SaveError(f"{path}: cannot be written: it is a folder or a device, which no file may replace")
        path.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of file systems into `SaveError`s that name `path`."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{path}: cannot be written: {error.strerror or error}") from error


def _columns(batch: Batch, schema: Schema) -> dict[str, Any]:
    columns = {"label": pa.array(batch.labels.numpy().astype(np.int8))}
    columns |= {name: pa.array(batch.dense[:, k].numpy()) for k, name in enumerate(schema.dense)}
    for position, feature in enumerate(schema.features):
        ids = batch.ids.select([position])
        integers = np.int32 if feature.rows <= 1 << 31 else np.int64
        values = ids.values.numpy().astype(integers)
        if not feature.multi_hot:
            columns[feature.name] = pa.array(values)
            continue
        offsets = ids.bag_offsets().numpy().astype(np.int32)
        columns[feature.name] = pa.ListArray.from_arrays(offsets, values)
        if ids.weights is not None:
            columns[_weights_name(feature)] = pa.ListArray.from_arrays(offsets, _numpy(ids.weights))
    return columns


def _numpy(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.numpy()
    return array


def _weights_name(feature: Feature) -> str:
    return f"{feature.name}_weights"


def _mapping(named: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_quote(key)}: {value}" for key, value in named.items()) + "}"


def _quote(text: str) -> str:
    return text if text.replace("_", "").isalnum() and not text[0].isdigit() else '"' + text.replace('"', '\\"') + '"'
