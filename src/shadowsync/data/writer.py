"""Writes rows: those of any source as a parquet file that the `parquet` source reads, and tables of other columns; and
the configuration that reads them."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow
import pyarrow.parquet
import yaml

from shadowsync.data.batch import Batch
from shadowsync.data.labels import ONE_CLICK, Task, column
from shadowsync.data.source import OpenSource, Schema
from shadowsync.errors import ConfigError, SaveError, save_errors

pa: Any = pyarrow  # has no types

ROW_GROUP = 65_536  # small enough that a slice of a few thousand rows decodes little it does not need
_WEIGHT = "row_weight"


def write_parquet(source: OpenSource, path: Path, tasks: Sequence[Task] = ONE_CLICK) -> dict[str, Any]:
    """Writes all rows, the file appearing only when it is whole.

    Columns: `label` (int8), or other labels by their names (float32), and `row_weight`; the dense columns (float32,
    transformed as the source does), and the features (integers, or lists of them for multi-hot ones, with a column
    `<feature>_weights` where the source gives weights).

    Gives the section `data` that reads it back; raises `SaveError` if it cannot be written, and what reading raises.
    """
    weighted = row_weights = False
    with writing_table(path, "lz4") as write:
        for part in source.slices(ROW_GROUP):
            batch = source.read(part)
            row_weights = batch.weights is not None
            weighted = batch.ids.weights is not None
            write(pl.DataFrame(pa.table({**_answers(batch, tasks), **_columns(batch, source.schema)})))
    return {"name": "parquet", **section_of(source.schema, str(path), weighted, tasks, row_weights)}


def as_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as a file of it has it, whatever its columns and files are called."""
    text: str = yaml.dump(  # type: ignore[no-untyped-call]
        _literal(dict(config)), Dumper=_Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=120
    )
    return text


def _literal(value: Any) -> Any:
    """Without what OmegaConf takes for references to other keys."""
    if isinstance(value, Mapping):
        return {key: _literal(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_literal(one) for one in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _text(dumper: Any, text: str) -> Any:
    """OmegaConf takes more words for numbers than YAML does: `1e3`."""
    style = '"' if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


class _Dumper(yaml.SafeDumper):
    """Writes what comes twice twice, without references."""

    yaml_representers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]
        **yaml.SafeDumper.yaml_representers,
        str: _text,
    }

    def ignore_aliases(self, data: object) -> bool:
        return True


def section_of(
    schema: Schema, path: str, weighted: bool, tasks: Sequence[Task] = ONE_CLICK, row_weights: bool = False
) -> dict[str, Any]:
    """The options of the `parquet` source that reads such a file."""
    features = schema.features
    multi_hot = [feature for feature in features if feature.multi_hot]
    section: dict[str, Any] = {
        "path": path,
        "labels": {} if _is_plain(tasks) else {task.name: task.told() for task in tasks},
        "weight": _WEIGHT if row_weights else "",
        "dense": schema.dense,
        "standardise": False,  # they are written as they are to be read
        "categorical": [feature.name for feature in features],
        "rows": {feature.name: feature.rows for feature in features},
        "tables": {feature.name: feature.table for feature in features if feature.table is not None},
        "weights": {feature.name: f"{feature.name}_weights" for feature in multi_hot if weighted},
        "pooling": {feature.name: feature.pooling for feature in multi_hot if feature.pooling != "sum"},
    }
    return {key: value for key, value in section.items() if value or value is False}


@contextmanager
def writing_table(path: Path, compression: str | None = None) -> Iterator[Callable[[pl.DataFrame], None]]:
    """Gives what writes frames of the same columns, parquet with that compression, else parquet or CSV by the name; the
    file appears when it is whole."""
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(replacing(path))
        stack.enter_context(save_errors(path))
        if compression is None and is_csv(path):
            file = stack.enter_context(temporary.open("wb"))
            yield lambda frame: frame.write_csv(file, include_header=file.tell() == 0)
            return
        writer: Any = None

        def write(frame: pl.DataFrame) -> None:
            nonlocal writer
            table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
            if writer is None:
                made = pa.parquet.ParquetWriter(temporary, table.schema, compression=compression or "snappy")
                writer = stack.enter_context(made)
            writer.write_table(table)

        yield write


def is_csv(path: Path) -> bool:
    """Whether a table of this name is CSV, else parquet; raises `ConfigError` if its name ends in neither."""
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
    with save_errors(path):
        if path.exists() and not path.is_file():
            raise SaveError(f"{path}: cannot be written: it is a folder or a device, which no file may replace")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        with save_errors(path):
            Path(name).chmod(0o644)
            Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _is_plain(tasks: Sequence[Task]) -> bool:
    return len(tasks) == 1 and not tasks[0].told()


def _answers(batch: Batch, tasks: Sequence[Task]) -> dict[str, Any]:
    if _is_plain(tasks):
        found = {"label": pa.array(batch.labels.numpy().astype(np.int8))}
    else:
        found = {task.name: pa.array(column(batch.labels, k).numpy()) for k, task in enumerate(tasks)}
    return found if batch.weights is None else {**found, _WEIGHT: pa.array(batch.weights.numpy())}


def _columns(batch: Batch, schema: Schema) -> dict[str, Any]:
    columns = {name: pa.array(batch.dense[:, k].numpy()) for k, name in enumerate(schema.dense)}
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
            weights: Any = ids.weights.numpy()
            columns[f"{feature.name}_weights"] = pa.ListArray.from_arrays(offsets, weights)
    return columns
