"""What a trained model is good for: evaluation, predictions, export.

`B` samples of a batch, `T` samples in all.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shadowsync.assembly import disk_of, make_module, planned, row_optimizer
from shadowsync.checkpoint.job_state import column_difference, job_state, match_optimizer, match_tables, restore_final
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.choices import Choices, as_trained, choose_all, named_module, server_count
from shadowsync.config import Config, load, parse
from shadowsync.data.batch import Batch
from shadowsync.data.columns import Fit
from shadowsync.data.csv import Csv
from shadowsync.data.files import FileOptions, FileRows, large_columns
from shadowsync.data.fitting import Learnt
from shadowsync.data.frame import TableOptions, batch_of
from shadowsync.data.labels import Task, answers, predicted
from shadowsync.data.parquet import Parquet
from shadowsync.data.reader import batches
from shadowsync.data.source import OpenSource, Schema, Source
from shadowsync.data.splits import PARTS, open_parts, whole
from shadowsync.data.spooling import Given, with_rows_of
from shadowsync.data.tables import Columns, OpenTable, TableSource
from shadowsync.data.writer import as_yaml, is_csv, section_of, write_parquet, writing_table
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, Shard, Table, widths
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.export import ExportSpec, export_model
from shadowsync.measuring import Measuring
from shadowsync.memory.pages import memory_bytes
from shadowsync.memory.room import Disk
from shadowsync.metrics.quality import Scored, TestMetrics
from shadowsync.metrics.units import UnitActivity
from shadowsync.models.wrapping import Wrapped, features_of
from shadowsync.places import advice, unfollowed, without
from shadowsync.preparing import prepared, trained_source
from shadowsync.registry import build, names_code, nearest
from shadowsync.report.words import left_out
from shadowsync.runs import load_trained
from shadowsync.training.replica import Replica

BATCH_SIZE = 4096
WATCHED_ROWS = 40_000
"""About how many rows, spread over all of them, are looked at for units that are dead."""
LOADED_ROWS = 1 << 20
"""Read from a checkpoint at once."""

Logits = Callable[[Batch], Tensor]
"""Gives float32 `[B]`, or `[B, T]` of several tasks."""


_TICKS: Mapping[str | None, str] = {"date": "M8[D]", "datetime": "M8[us]", "duration": "m8[us]"}
"""As what numpy has the values of a vocabulary, by their form."""


class Embeddings(NamedTuple):
    """Trained vectors: what each is of, `[R]`, and float32 `[R, D]`."""

    ids: NDArray[Any]
    vectors: NDArray[np.float32]

    def arrow(self) -> Any:
        """As a `pyarrow.Table` of the columns `id` and `vector`."""
        return pl.DataFrame({"id": self.ids, "vector": self.vectors}).to_arrow()


def predictor(replica: Replica, embeddings: EmbeddingClient) -> Logits:
    """A dense part with the embeddings it looks up, without codecs; fp32, whatever it was trained in."""

    def logits(batch: Batch) -> Tensor:
        ids, looked_up = replica.ask(batch)
        pulled = embeddings.pull(ids)
        return replica.predict(batch.dense, pulled.pooled, pulled.sequences, looked_up)

    return logits


def predictions(predict: Logits, source: OpenSource, activity: UnitActivity | None = None) -> Iterator[Scored]:
    """What the model says of the rows, batch by batch in their order.

    `activity` is of the module that predicts; it notes what its units do on about `WATCHED_ROWS` of them.
    """
    every = -(-source.rows // WATCHED_ROWS)
    for number, batch in enumerate(batches(source, BATCH_SIZE)):
        with contextlib.nullcontext() if activity is None or number % every else activity.watching(len(batch)):
            logits = predict(batch)
        yield Scored(logits, batch.labels, batch.weights)


def score(predict: Logits, source: OpenSource, activity: UnitActivity | None = None) -> Scored:
    """As `predictions`, of all rows that can be used."""
    return Scored.join(list(predictions(predict, source, activity)))


class Trained:
    """A trained model, read from the best checkpoint of a run that was validated, else from the newest.

    It computes on the processor, also what was trained on a GPU: wherever the run's folder is taken.

    Args:
        folder: of the run.
        model: the module of the user's own that the run trained, wrapped or not, if it did; or `package.module:Class`,
            where the run named it so (`model.name`): what a folder names is not run unless the user names it, too. A
            module stands for that and for the options stored beside it.
        checkpoints: where they are; None: where the folder says, which is not followed to another machine.
        newest: read the newest checkpoint, also where another one was better.
        measures: what `evaluate` measures beside AUC and NE, as `train.measures`; None: what the run did, but for
            classes of the user's own, which the user has to name.

    Attributes:
        skipped: one sentence for each newer checkpoint that cannot be loaded, and one each if some rows
            are older, and if rows are rounded.
        remarks: sentences on what is odd about the rows that were evaluated or predicted last.
        module: the dense part.
        server: holds the rows of all tables.

    Raises:
        ConfigError: the folder does not exist, or a module of the user's own is missing.
        CheckpointError: there is no checkpoint, or it is of another model.
    """

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module | str | None = None,
        checkpoints: str | None = None,
        newest: bool = False,
        measures: Sequence[str] | None = None,
    ) -> None:
        saved = load_trained(Path(folder), checkpoints, newest)
        self.remarks: tuple[str, ...] = ()
        state = job_state(saved)
        stored = with_rows_of(Path(folder), without(saved.config, "data", "cache"))
        code = unfollowed({"model": stored.get("model")}, Path(folder)).get("model.name")
        if model is None and (state.own_model or code is not None):
            how = "model=module" if code is None else f"model={code!r}) (--model {code}"
            raise ConfigError(
                f"{folder} trained a module of your own: give it with shadowsync.Trained({str(folder)!r}, {how})"
            )
        uncalled = without(saved.config, "data", "labels").get("data")  # no loss is called any more
        self._unfollowed = unfollowed({"data": uncalled}, Path(folder))
        if isinstance(model, str):
            stored["model"] = {**stored.get("model", {}), "name": model}
        elif model is not None:  # which was made with options of its own, whatever is stored
            stored["model"] = {k: width for k, width in (stored.get("model") or {}).items() if k == "embedding_dim"}
        stored, unasked = _measured_by(stored, measures)
        self.skipped = (*saved.skipped, *unasked)
        self.config: Config = parse(stored)
        if isinstance(model, str):
            model = named_module(self.config)
        chosen = trained_source(saved, choose_all(self.config, own_model=model is not None))
        self.choices: Choices = as_trained(chosen, self.config, state.layout)
        self.schema: Schema = state.schema
        # A model's columns follow the order of the tables, which the servers' files do not keep.
        self.tables = tuple(sorted(saved.tables, key=lambda table: state.tables.index(table.name)))
        shards = [Shard(table, 0, table.rows) for table in self.tables]
        optimizer, disk = row_optimizer(self.config.embedding), _disk_of_all(self.config)
        self.server = EmbeddingServer(shards, self.choices.storage, optimizer, None, disk=disk)
        _restore_rows(self.server, saved)
        self._given = planned(model, self.choices, self.schema)
        _check_tables(self._given, self.tables)
        module = make_module(self.config, self.choices, self.schema, self.tables, self._given)
        replica = Replica(module, self.choices.optimizer, widths(self.tables))
        restore_final(saved, replica)
        self.module: nn.Module = replica.module
        features = features_of(module, self.schema)
        self._predict = predictor(replica, EmbeddingClient(self.tables, features, [self.server]))

    def rows(self, data: Path | str | None, labelled: bool = True) -> OpenSource:
        """The run's test rows, or those at `data`, with its columns: in the format that the ending says, else its own.

        Where no labels are needed a parquet file need not have any.

        Raises:
            ConfigError: they would be looked for where the run's folder says, beyond this machine.
            DataError: there are none, or they do not fit the model.
        """
        split = self.config.data.test
        given = {"data.valid"} if split is not None and split.path is None else {"data.valid", "data.path"}
        if data is not None:
            given |= {"data.path", "data.test_path", "data.test"}
        again = {key: place for key, place in self._unfollowed.items() if key not in given}
        if again:
            raise ConfigError(
                f"places on other machines that the run's folder stores are not followed ({', '.join(again)}): if they "
                f"are yours give {advice({'--data': next(iter(again.values()))})}"
            )
        if data == "":
            raise ConfigError("--data is empty: give the path of the rows, a glob or a URL")
        # Predictions have one row for each row given, so none may be left out of them.
        on_bad_row = self.config.data.on_bad_row if labelled else "error"
        if data is None:
            opened = open_parts(self.choices.source, self.config.data, "test").get("test")
        else:
            opened = self._source_at(str(data), labelled).open("train", on_bad_row)
        if opened is None:
            raise DataError(f"data.name={self.config.data.name} has no test rows: give --data PATH")
        if isinstance(read := whole(opened), FileRows):
            read.for_trained = True
        place = str(data or f"the test rows of data.name={self.config.data.name}")
        if (difference := column_difference(self.schema, opened.schema)) is not None:
            raise DataError(f"{place}: the model was trained on {difference}")
        for there, here in zip(opened.schema.features, self.schema.features, strict=True):
            if here.multi_hot and not there.multi_hot and isinstance(read, OpenTable) and isinstance(read.source, Csv):
                raise DataError(
                    f"{place}: feature {here.name} has lists, and the run does not say what is between their values in "
                    "a CSV: give parquet or JSON lines"
                )
            if there.rows > here.rows:
                raise DataError(
                    f"{place}: feature {there.name} has ids up to {there.rows - 1}, the model has {here.rows} rows for "
                    "them"
                )
        return opened

    def _source_at(self, data: str, labelled: bool) -> Source:
        source: Any = self.choices.source
        if not isinstance(source, FileOptions):
            source = parquet_of(self.schema, data)
        if isinstance(source, TableSource) and not labelled:
            source = source.unlabelled()
        return cast("Source", source.at(data))

    @overload
    def predict(self, data: object, out: None = None) -> NDArray[np.float32]: ...
    @overload
    def predict(self, data: Path | str, out: Path | str, keep: Sequence[str] = ()) -> int: ...
    def predict(
        self, data: object, out: Path | str | None = None, keep: Sequence[str] = ()
    ) -> NDArray[np.float32] | int:
        """What is predicted of each row, in the rows' order, float32 `[R]`, or `[R, T]` of T labels; with `out` it is
        written, beside the logits, and how many rows is returned.

        Of clicks it is the probability, of counts and numbers their mean.

        The rows are at a path, or with no `out` in memory: a table of polars, pandas, pyarrow or Hugging Face, a dict
        of columns, or an iterable of those. They may be without labels; `out` is parquet or CSV as its name ends.
        Before the two the columns of the rows that `keep` names are written as they are.

        Raises:
            ConfigError: `out` is one of the files that hold the rows, or its name ends otherwise; a column cannot be
                kept; or what is given holds no rows.
            DataError: the rows do not fit the model, or lack a column that is to be kept.
            SaveError: the file cannot be written; nothing is left of it.
        """
        if keep and out is None:
            raise ConfigError(f"predict: keep={list(keep)} has no effect without out=…, a file to write them to")
        if isinstance(data, str | Path):
            if out is not None:
                return self._write(data, Path(out), keep)
            with contextlib.closing(self.rows(data, labelled=False)) as opened:
                return predicted(self.choices.source.tasks, score(self._predict, opened)[0]).numpy()
        if out is not None:
            raise ConfigError("predict: rows in memory are not written: leave out=… out, or give the path of the rows")
        if not (found := [self._predict(batch) for batch in self._batches(data)]):
            raise DataError("data holds no rows")
        return predicted(self.choices.source.tasks, torch.cat(found)).numpy()

    def _batches(self, rows: object) -> Iterator[Batch]:
        """Rows in memory, whose columns are those of the run's, or are called like the model's features."""
        source: Any = self.choices.source
        source = source if isinstance(source, TableOptions) else parquet_of(self.schema, "rows")
        source, first = source.unlabelled(), 1
        for frame in Given("data", rows.collect() if isinstance(rows, pl.LazyFrame) else rows).frames():
            columns = source.read_alike([(frame.schema, "data")])
            for piece in frame.iter_slices(BATCH_SIZE):
                batch, problems = batch_of(piece, source, columns)
                for problem in problems:
                    raise DataError(f"data, row {first + problem.row}: {problem.text}")
                first += len(piece)
                yield batch

    def embeddings(self, name: str) -> Embeddings:
        """The trained vectors of a categorical column, or of a table.

        An id is the value itself where the column is a vocabulary (whose rows for missing and unknown values are left
        out) or holds the ids as they are; of anything else, hashed values say, the number of the row. Dates and times
        are numpy's, in UTC, decimals text, booleans 1 and 0, times of day microseconds, and of whole numbers beyond
        int64 it is the same 64 bits (`ids.view("u8")`).

        Raises:
            ConfigError: there is no such column or table.
        """
        table = next((table for table in self.tables if name == table.name or name in table.features), None)
        if table is None:
            known = dict.fromkeys(one for table in self.tables for one in (*table.features, table.name))
            raise ConfigError(
                f"embeddings: there is no column {name}{nearest(name, known)}; there are {', '.join(known)}"
            )
        begin = 0 if self.choices.model is None else self.choices.model.extra_columns
        vectors = self._rows(table.name, 0, table.rows)[:, begin:].numpy()
        learnt = getattr(self.choices.source, "learnt", None)
        values = {} if learnt is None else learnt.values
        column = next((one for one in (name, *table.features) if one in values), None)
        if learnt is None or column is None or isinstance(self.module, Wrapped):  # which names its tables as it likes
            return Embeddings(pl.int_range(len(vectors), eager=True).to_numpy(), vectors)
        given = values[column].values
        ids = given.to_numpy()
        ticks = _TICKS.get(learnt.fit(column).form)
        return Embeddings(ids if ticks is None else ids.astype(ticks), vectors[2 : 2 + len(given)])

    def evaluate(self, data: object = None) -> TestMetrics:
        """Quality on the run's test rows, on those at a path, or on rows in memory as `predict` takes them, which are
        kept in a file meanwhile."""
        if data is None or isinstance(data, str | Path):
            return self._evaluate(self.rows(data), str(data or "the test rows"))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data.parquet"
            Given("data", data).keep(path)
            try:
                return self._evaluate(self.rows(path), "data")
            except (DataError, ConfigError) as error:
                raise type(error)(str(error).replace(str(path), "data").replace("the file has", "they have")) from error

    def _evaluate(self, opened: OpenSource, place: str) -> TestMetrics:
        if not opened.labelled:
            raise DataError(f"{place}: there are no labels to evaluate with (data.label is null)")
        with contextlib.closing(opened):
            unscaled = large_columns(whole(opened))
            measuring = Measuring(self.config, self.choices.source.tasks, opened)
            measured = measuring.of(score(self._predict, opened))
            if not measured.samples:
                raise DataError(f"{place}: none of the rows can be used")
        bad = left_out(opened.rows - measured.samples, opened.rows, "rows")
        self._remark(unscaled, measured.undefined("these rows"), bad)
        return measured

    def _write(self, data: Path | str, out: Path, keep: Sequence[str]) -> int:
        is_csv(out)
        opened = self.rows(data, labelled=False)
        count = 0
        with contextlib.ExitStack() as stack:
            stack.callback(opened.close)
            _keep_data(opened, out)
            self._remark(large_columns(whole(opened)))
            tasks = self.choices.source.tasks
            columns = _columns_to_keep(opened, keep, out, tasks)
            write = stack.enter_context(writing_table(out))
            for logits, *_ in predictions(self._predict, opened):
                table = pl.DataFrame({name: one.numpy() for name, one in answers(tasks, logits).items()})
                write(table if columns is None else columns.take(len(logits)).hstack(table))
                count += len(logits)
        return count

    def _remark(self, *sentences: str | None) -> None:
        self.remarks = tuple(sentence for sentence in sentences if sentence)

    def export(self, out: Path | str) -> None:
        """Writes one file with tables and module that torch alone loads, and that `serving.load` feeds with raw
        rows; see `export.export_model`."""
        features = [feature.name for feature in self.schema.features]
        weighted = bool(getattr(self.choices.source, "weights", None))
        looked_up = self.schema if isinstance(self.module, Wrapped) else None
        several = [feature.name for feature in self.schema.features if feature.multi_hot]
        columns = self.choices.source.described()
        spec = ExportSpec(
            self.tables,
            features,
            self.schema.dense,
            weighted,
            schema=looked_up,
            columns=columns,
            several=several,
            tasks=self.choices.source.tasks,
            keys={rows.table.name: rows.tensors for rows in self.server.state() if rows.table.ids is not None},
        )
        export_model(self.module, spec, self._rows, Path(out))

    def unwrapped(self) -> nn.Module:
        """The module that was given to `wrap`, with all that was trained in it: plain PyTorch again.

        Raises:
            ConfigError: the run trained another kind of model.
        """
        if not isinstance(self.module, Wrapped):
            raise ConfigError(
                "only a model that was given as shadowsync.wrap(model) can be unwrapped: use Trained.module"
            )
        return self.module.unwrapped(self._rows)

    def _rows(self, table: str, start: int, stop: int) -> Tensor:
        """Rows `start … stop − 1` of a table, `[rows, D]`; of one that is never looked up, as given."""
        held = next((rows for rows in self.server.state() if rows.table.name == table), None)
        if held is not None:
            return held.tensors["weight"][start:stop]
        assert isinstance(self._given, Wrapped)
        return self._given.initial[table][start:stop]


def _check_tables(model: nn.Module | None, tables: Sequence[Table]) -> None:
    """Raises `CheckpointError` if a wrapped module has tables of another form than the checkpoint."""
    own = model.tables if isinstance(model, Wrapped) else {}
    for table in tables:
        here, there = own.get(table.name), (table.rows, table.dim)
        if here is not None and here != there:
            raise CheckpointError(
                f"table {table.name} is {list(there)} in the checkpoint and {list(here)} in this model: give the model "
                "that the checkpoint was trained with"
            )


def _disk_of_all(config: Config) -> Disk | None:
    """Of one server with the rows of all, on this machine: with the memory of all, as far as it is there."""
    disk = disk_of(config, here=False)
    if disk is None:
        return None
    most = (memory_bytes() or disk.memory_bytes) // 2
    return replace(disk, memory_bytes=max(disk.memory_bytes, min(disk.memory_bytes * server_count(config), most)))


def _restore_rows(server: EmbeddingServer, saved: LoadedCheckpoint) -> None:
    """Loads all rows, a bounded number at a time, from whatever pieces the checkpoint has.

    Raises:
        CheckpointError: the checkpoint has other tables, another optimizer, or is damaged.
    """
    held = server.state()
    match_tables(saved.tables, [own.table for own in held])
    match_optimizer({t.name: saved.tensor_names(t.name) for t in saved.tables}, {o.table.name: o.tensors for o in held})
    for table in saved.tables:
        for start in range(0, table.rows, LOADED_ROWS):
            rows = saved.rows(table.name, start, min(start + LOADED_ROWS, table.rows))
            server.load([Rows(table, start, rows)], partial=True)


def _measured_by(stored: dict[str, Any], measures: Sequence[str] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A stored configuration with these measures, or else with those of its own that are no code; says which are."""
    train = parse(stored).train
    asked = train.measures if measures is None else measures
    code = [name for name in asked if measures is None and names_code(name)]
    changed = {**stored.get("train", {}), "measures": [name for name in asked if name not in code]}
    if measures is not None or names_code(train.best_by):
        changed.pop("best_by", None)
    said = f"{', '.join(code)} is code that the run's folder names, and is not run: give --measure {' '.join(code[:1])}"
    return {**stored, "train": changed}, (said,) if code else ()


def _columns_to_keep(source: OpenSource, keep: Sequence[str], out: Path, tasks: Sequence[Task]) -> Columns | None:
    """What reads them beside the rows; refuses those that cannot be written."""
    if not keep:
        return None
    if not isinstance(source, OpenTable):
        raise ConfigError(f"--keep {keep[0]}: only rows of a table have named columns to keep; leave it out")
    for name in keep:
        if name in answers(tasks, torch.empty(0, len(tasks))):
            raise ConfigError(f"--keep {name}: predictions have a column of that name; rename it in the rows")
    columns = Columns(source, list(dict.fromkeys(keep)))
    for name, kind in columns.types.items():
        if is_csv(out) and (kind.is_nested() or kind == pl.Binary):
            raise ConfigError(f"--keep {name}: the column holds {kind}, which CSV cannot; give an --out in .parquet")
    return columns


def _keep_data(source: OpenSource, path: Path) -> None:
    """Raises `ConfigError` if the file to be written is one that the source reads."""
    files = source.files if isinstance(source, FileRows) else ()
    if path.resolve() in {Path(file.key).resolve() for file in files}:
        raise ConfigError(f"--out {path} would replace the rows that are read: give another file")


def parquet_of(schema: Schema, path: str) -> Parquet:
    """The parquet source that reads what `write_parquet` writes for a source of this schema."""
    source = build(Parquet, section_of(schema, path, weighted=False), "data")
    lists = {feature.name: Fit(listed=True) for feature in schema.features if feature.multi_hot}
    return source.with_learnt(Learnt(source.kinds, lists, {}, 0))


def export_data(name: str, overrides: Sequence[str], out: Path) -> str:
    """`shadowsync data`: writes a source's training rows, and its other rows beside them; says how to read them."""
    config = load(None, [f"data.name={name}", *overrides])
    config, choices = prepared(config, choose_all(config, own_model=False), None, lambda _: None)
    tasks = choices.source.tasks
    parts = open_parts(choices.source, config.data, *PARTS)
    if "train" not in parts:
        raise DataError(f"data.name={name} has no training rows")
    places = {part: out if part == "train" else out.with_name(f"{out.stem}.{part}{out.suffix}") for part in parts}
    for place in places.values():
        for source in parts.values():
            _keep_data(whole(source), place)
    section = write_parquet(parts["train"], out, tasks)
    if "test" in parts:
        write_parquet(parts["test"], places["test"], tasks)
        section["test_path"] = str(places["test"])
    if "valid" in parts:
        write_parquet(parts["valid"], places["valid"], tasks)
        section["valid"] = {"path": str(places["valid"])}
    return as_yaml({"data": section})
