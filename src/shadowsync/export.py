"""Writes a model with its tables as one file that torch alone loads and predicts with.

    model = torch.export.load("model.pt2").module()
    answer = model(dense, values, offsets)          # a model trained with weights also takes weights
    answer["probabilities"], answer["logits"]       # float32 [B] each; of other labels see `answered`

Inputs are those of a batch: `dense` float32 `[B, N]`; `values` int64 `[L]`, the ids of all samples of feature 0, then
of feature 1 …; `offsets` int64 `[F * B + 1]`, where bag `f * B + b` begins in `values`, and `L` at the end; `weights`
float32 `[L]`. `B ≥ 1` and `L ≥ 0` are free, bags may be empty. The names in their order are in the file beside the
program: `torch.export.load(file, extra_files=(found := {"metadata.json": "", "columns.json": ""}))`. What becomes of
the columns of the data before they are dense columns and ids is in `columns.json`, and `serving.load` applies it.

`B` samples, `N` dense columns, `F` features, `L` ids, `D` width of a table.
"""

import contextlib
import copy
import importlib.metadata
import io
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shadowsync.data.batch import Jagged
from shadowsync.data.labels import ONE_CLICK, Task, answers
from shadowsync.data.source import Schema
from shadowsync.embedding.keys_in_torch import KeysInTorch
from shadowsync.embedding.table import Table
from shadowsync.errors import ConfigError, SaveError
from shadowsync.models.vectors import JaggedVectors
from shadowsync.models.wrapping import Wrapped
from shadowsync.serving import digest_of
from shadowsync.training.kernels import FastLinear, FastTower

FORMAT = 1
CHUNK_BYTES = 256 << 20
SUFFIX = ".pt2"
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {FastLinear: nn.Linear, FastTower: nn.Sequential}
"""What training's layers are without the operators that torch has on some machines only."""
_SAMPLES_TO_TRACE = 5
_SAMPLES_TO_CHECK = (1, 2, 7)


@dataclass(frozen=True)
class ExportSpec:
    """What the model is fed with: its features in the order of the ids, and its dense columns in theirs.

    Rows are kept in tensors of at most `chunk_bytes`, because torch copies a tensor to write it: more costs memory
    while the file is written, less costs time when it is used.
    `schema` is that of the rows where a wrapped module looks their ids up itself; `columns` says what becomes of the
    data's columns, as `serving.Transforms` takes it; `several` are the features of which a row has any number of ids,
    `tasks` what the logits are of; `keys` of dynamic tables what is kept beside their rows (`keys.PARTS`).
    """

    tables: Sequence[Table]
    features: Sequence[str]
    dense: Sequence[str]
    weighted: bool = False
    chunk_bytes: int = CHUNK_BYTES
    schema: Schema | None = None
    columns: Mapping[str, Any] | None = None
    several: Collection[str] | None = None
    tasks: Sequence[Task] = ONE_CLICK
    keys: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def table_of(self) -> dict[str, Table]:
        """The table that each feature looks rows up in, in the order of the features."""
        return {feature: next(table for table in self.tables if feature in table.features) for feature in self.features}

    @property
    def ids(self) -> list[tuple[int, bool]]:
        """Of each feature, how many rows its ids may name, and whether a sample may have none or several of them."""
        if self.schema is not None:
            return [(feature.rows, feature.multi_hot) for feature in self.schema.features]
        return [(table.rows, True) for table in self.table_of.values()]

    def metadata(self) -> dict[str, Any]:
        """What a program that uses the file has to know, as plain JSON values."""
        if self.schema is not None:
            own = self.schema.features
            features = [{"name": each.name, "rows": each.rows, "several": each.multi_hot} for each in own]
        else:
            features = [
                {"name": name, "table": t.name, "rows": t.rows, "dim": t.dim, "pooling": t.poolings[name]}
                for name, t in self.table_of.items()
            ]
            if self.several is not None:
                features = [{**each, "several": each["name"] in self.several} for each in features]
        return {
            "format": FORMAT,
            "shadowsync": importlib.metadata.version("shadowsync"),
            "dense": list(self.dense),
            "features": features,
            "weighted": self.weighted,
            "labels": [{"name": task.name, "loss": task.kind} for task in self.tasks],
        }


class _Chunk(NamedTuple):
    """Rows `start … stop − 1` of the tables of one width, numbered through; `name` is its parameter's."""

    name: str
    start: int
    stop: int


class PooledTables(nn.Module):
    """All tables, looked up together: `(B, values, offsets, weights) → {feature: [B, D]}`, or `JaggedVectors`.

    Tables of one width are numbered through as one, and cut into chunks of bounded size. A sum over several chunks
    adds partial sums, so it may differ from the job's own by rounding.
    """

    def __init__(self, spec: ExportSpec, rows: Callable[[str, int, int], Tensor]) -> None:
        super().__init__()
        self.features = tuple(spec.features)
        tables = list(spec.table_of.values())
        self.dims = tuple(dict.fromkeys(table.dim for table in tables))
        self.feature_dims = tuple(table.dim for table in tables)
        poolings = [table.poolings[name] for name, table in spec.table_of.items()]
        self.any_mean = "mean" in poolings
        self.sequences = frozenset(name for name, how in zip(spec.features, poolings, strict=True) if how == "none")
        keyed = {name: spec.keys[name] for name in dict.fromkeys(t.name for t in tables) if name in spec.keys}
        self.keys = KeysInTorch(tables, keyed) if keyed else None
        self.chunks: dict[int, list[_Chunk]] = {}
        first_rows: dict[str, int] = {}
        for dim in self.dims:
            first_rows |= self._add_tables(spec, dim, rows)
        self.first_row: Tensor
        self.row_count: Tensor
        self.width: Tensor
        self.mean: Tensor
        self.register_buffer("first_row", torch.tensor([first_rows[table.name] for table in tables]).long())
        self.register_buffer("row_count", torch.tensor([table.rows for table in tables]).long())
        self.register_buffer("width", torch.tensor(self.feature_dims).long())
        self.register_buffer("mean", torch.tensor([how == "mean" for how in poolings]).bool())

    def _add_tables(self, spec: ExportSpec, dim: int, rows: Callable[[str, int, int], Tensor]) -> dict[str, int]:
        """Copies the tables of one width into parameters; returns each one's first row in the common numbering."""
        tables = [table for table in spec.tables if table.dim == dim and set(table.features) & set(spec.features)]
        starts = [0, *accumulate(table.rows for table in tables)]
        step = max(1, spec.chunk_bytes // (4 * dim))
        self.chunks[dim] = []
        for number, start in enumerate(range(0, starts[-1], step)):
            chunk = _Chunk(f"rows_{dim}_{number}", start, min(start + step, starts[-1]))
            weight = torch.empty(chunk.stop - chunk.start, dim)
            for table, begin in zip(tables, starts[:-1], strict=True):
                first, last = max(begin, chunk.start), min(begin + table.rows, chunk.stop)
                if first < last:
                    weight[first - chunk.start : last - chunk.start] = rows(table.name, first - begin, last - begin)
            self.register_parameter(chunk.name, nn.Parameter(weight, requires_grad=False))
            self.chunks[dim].append(chunk)
        return {table.name: start for table, start in zip(tables, starts[:-1], strict=True)}

    def forward(
        self, samples: int, values: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> dict[str, Tensor | JaggedVectors]:
        """Vectors of all features, float32 `[B, D]` each, and the sequences of those that are not pooled."""
        if not self.features:
            return {}
        # narrowed to a size in samples: of a slice torch would note that one sample of one feature is impossible
        ends, begins = (offsets.narrow(0, first, len(self.features) * samples) for first in (1, 0))
        bag = torch.searchsorted(ends.contiguous(), torch.arange(values.shape[0]), right=True)
        # offsets that end early leave values without a bag; the check below refuses them, this keeps it reachable
        feature = torch.div(bag, samples, rounding_mode="floor").clamp(max=len(self.features) - 1)
        fits = (offsets[0] == 0) & (offsets[-1] == values.shape[0]) & (ends >= begins).all()
        torch._assert_async(fits, "offsets must begin with 0, never fall, and end with the number of values")
        if self.keys is not None:
            values, keep = self.keys(values, feature)
            if self.keys.dropping:
                index = keep.nonzero().squeeze(1)
                offsets = F.pad(keep.long().cumsum(0), (1, 0))[offsets]
                values, bag, feature = values[index], bag[index], feature[index]
                weights = None if weights is None else weights[index]
        # ids of other tables' rows would go unnoticed otherwise
        inside = ((values >= 0) & (values < self.row_count[feature])).all()
        torch._assert_async(inside, "an id is not a row of its feature's table")
        if self.any_mean:
            weights = self._mean_weights(bag, feature, offsets, weights)
        numbered = values + self.first_row[feature]
        pooled = {dim: self._pool(dim, feature, (numbered, offsets, weights)) for dim in self.dims}
        bags = {dim: vectors.view(len(self.features), samples, dim) for dim, vectors in pooled.items()}
        found: dict[str, Tensor | JaggedVectors] = {}
        for index, (name, dim) in enumerate(zip(self.features, self.feature_dims, strict=True)):
            if name in self.sequences:
                mine = (feature == index).nonzero().squeeze(1)
                vectors = self._rows(dim, numbered[mine])
                vectors = vectors if weights is None else vectors * weights[mine, None]
                start = offsets.narrow(0, index * samples, samples + 1)
                found[name] = JaggedVectors(name, vectors, start - start[0])
            else:
                found[name] = bags[dim][index]
        return found

    def _mean_weights(self, bag: Tensor, feature: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Weights that turn a sum into a mean: 1 over the number of ids, whatever their weights, as in training."""
        per_bag = offsets.diff().clamp(min=1).to(torch.float32).reciprocal()
        scale = torch.where(self.mean[feature], per_bag[bag.clamp(max=per_bag.shape[0] - 1)], 1.0)
        return scale if weights is None else scale * weights

    def _rows(self, dim: int, numbered: Tensor) -> Tensor:
        """Rows of width `D` by their number, `[L, D]`."""
        parts = []
        for chunk in self.chunks[dim]:
            inside = (numbered >= chunk.start) & (numbered < chunk.stop)
            local = (numbered - chunk.start).clamp(0, chunk.stop - chunk.start - 1)
            parts.append(F.embedding(local, self.get_parameter(chunk.name)) * inside[:, None])
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _pool(self, dim: int, feature: Tensor, ids: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        """Sums over the rows of width `D`, `[F * B, D]`; bags of other features stay zero."""
        numbered, offsets, weights = ids
        chunks = self.chunks[dim]
        if len(self.dims) == 1 and len(chunks) == 1:
            return _sums(self.get_parameter(chunks[0].name), numbered, offsets, weights)
        parts = []
        for chunk in chunks:
            keep = (self.width[feature] == dim) & (numbered >= chunk.start) & (numbered < chunk.stop)
            index = keep.nonzero().squeeze(1)
            kept_before = F.pad(keep.long().cumsum(0), (1, 0))
            here = None if weights is None else weights[index]
            parts.append(
                _sums(self.get_parameter(chunk.name), numbered[index] - chunk.start, kept_before[offsets], here)
            )
        return torch.stack(parts).sum(0)


def _sums(rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    # the operator itself: torch.nn.functional's wrapper compares sizes that are not known while tracing
    pooled: Tensor = torch.ops.aten.embedding_bag.padding_idx(rows, ids, offsets, False, 0, False, weights, True, None)[
        0
    ]
    return pooled


class Predictor(nn.Module):
    """Tables and dense part as one module, in the form that is written."""

    def __init__(self, tables: PooledTables, module: nn.Module, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.tables = tables
        self.module = module
        self.tasks = tuple(tasks)

    def forward(
        self, dense: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `answered`."""
        embeddings = self.tables(dense.shape[0], values, offsets, weights)
        return answered(self.tasks, self.module(dense, embeddings))


class WholePredictor(nn.Module):
    """A module that looks ids up itself, with its own tables in it again; called and answering as `Predictor`."""

    def __init__(self, wrapped: Wrapped, spec: ExportSpec, rows: Callable[[str, int, int], Tensor]) -> None:
        super().__init__()
        self.module = wrapped.unwrapped(rows)
        self._logits = wrapped.logits
        self.tasks = tuple(spec.tasks)
        self.singles = [position for position, (_, several) in enumerate(spec.ids) if not several]
        self.features = len(spec.features)

    def forward(
        self, dense: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        samples = dense.shape[0]
        if self.singles:
            lengths = offsets.diff().view(self.features, samples)[self.singles]
            torch._assert_async((lengths == 1).all(), "a feature with one id per sample has another number of them")
        ids = Jagged(values, offsets, weights, self.features, samples)
        return answered(self.tasks, self._logits(self.module, dense, ids))


def answered(tasks: Sequence[Task], logits: Tensor) -> dict[str, Tensor]:
    """Float32 `probabilities` and `logits`, `[B]` each; of other labels than one click `predictions` and `logits`,
    `[B]` or `[B, T]`, and what `labels.answers` has of each."""
    logits = logits.to(torch.float32)
    if len(tasks) == 1 and tasks[0].clicks:
        return {"probabilities": torch.sigmoid(logits), "logits": logits}
    found = answers(tasks, logits)
    predictions = [each for name, each in found.items() if not name.endswith("logit")]
    return {
        **found,
        "predictions": torch.stack(predictions, dim=1) if logits.dim() > 1 else predictions[0],
        "logits": logits,
    }


def export_model(module: nn.Module, spec: ExportSpec, rows: Callable[[str, int, int], Tensor], out: Path | str) -> None:
    """Writes `module` with its tables to `out`; a file that is there is replaced when the new one is complete.

    The module, `forward(dense [B, N], {feature: [B, D]}) → logits [B]`, is copied, not changed, and exported for the
    CPU, in float32 and evaluation mode. `rows` gives of (table, start, stop) those rows' weights, float32
    `[stop − start, D]`. Memory: the tables once, and once more `spec.chunk_bytes`.

    Raises:
        ConfigError: torch cannot export the module, or the exported one does not compute the same.
        SaveError: the file cannot be written.
    """
    path = Path(out)
    if path.suffix != SUFFIX:
        raise ConfigError(
            f"{path}: torch reads exported models from files that end in {SUFFIX}: write to {path}{SUFFIX}"
        )
    if path.exists() and not path.is_file():
        raise SaveError(f"{path} could not be written: it is a folder or a device, which no file may replace")
    with torch.no_grad():
        whole = WholePredictor(module, spec, rows) if isinstance(module, Wrapped) else None
        plain = (whole or copy.deepcopy(module)).to("cpu", torch.float32).requires_grad_(False)
        for (
            parameter
        ) in plain.parameters():  # may share memory with nothing: a trained module's are views of one tensor
            parameter.data = parameter.detach().clone()
        for child in plain.modules():
            if type(child) in _PLAIN:
                child.__class__ = _PLAIN[type(child)]
        predictor = (whole or Predictor(PooledTables(spec, rows), plain, spec.tasks)).eval()
        program = _trace(predictor, spec)
        _check_same(predictor, program, spec)
    _write(program, spec, path)


def _example(spec: ExportSpec, samples: int) -> tuple[Tensor, ...]:
    """Inputs with empty bags, single ids and several ids, the first and the last row of each table among them."""
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.arange(len(spec.features) * samples).remainder(3)
    several = torch.tensor([several for _, several in spec.ids]).repeat_interleave(samples)
    lengths = torch.where(several, lengths, 1) if len(lengths) else lengths
    counts = lengths.view(-1, samples).sum(1).tolist() if len(lengths) else []
    ids = [torch.zeros(0, dtype=torch.int64)]
    for (rows, _), count in zip(spec.ids, counts, strict=True):
        drawn = torch.randint(rows, (count,), generator=generator)
        drawn[:1], drawn[1:2] = rows - 1, 0
        ids.append(drawn)
    values, offsets = torch.cat(ids), F.pad(lengths.cumsum(0), (1, 0))
    dense = torch.randn(samples, len(spec.dense), generator=generator)
    weights = torch.rand(len(values), generator=generator)
    return (dense, values, offsets, weights) if spec.weighted else (dense, values, offsets)


def _trace(predictor: nn.Module, spec: ExportSpec) -> torch.export.ExportedProgram:
    batch, ids = torch.export.Dim("batch", min=1), torch.export.Dim("ids", min=0)
    shapes: tuple[Any, ...] = ({0: batch}, None, None, None)
    if spec.features:
        shapes = ({0: batch}, {0: ids}, {0: len(spec.features) * batch + 1}, {0: ids})
    inputs = _example(spec, _SAMPLES_TO_TRACE)
    try:
        return torch.export.export(predictor, inputs, dynamic_shapes=shapes[: len(inputs)])
    except Exception as error:  # whatever the user's module or torch's tracer raises
        raise ConfigError(
            f"torch.export cannot trace the model ({_reason(error)}): its forward must take any batch size and may not "
            "branch on the values of tensors"
        ) from error


def _check_same(predictor: nn.Module, program: torch.export.ExportedProgram, spec: ExportSpec) -> None:
    """A module may look at its inputs' shapes in ways that tracing freezes: better found now than when it is used."""
    exported = program.module()
    for samples in _SAMPLES_TO_CHECK:
        inputs = _example(spec, samples)
        wanted = predictor(*inputs)["logits"]
        try:
            shape = (samples,) if len(spec.tasks) == 1 else (samples, len(spec.tasks))
            same = wanted.shape == shape and torch.allclose(exported(*inputs)["logits"], wanted, 1e-5, 1e-6)
        except Exception as error:  # as above
            raise ConfigError(
                f"the exported model fails for a batch of {samples} ({_reason(error)}): its forward must take any "
                "batch size"
            ) from error
        if not same:
            raise ConfigError(
                f"the exported model does not compute what the model does for a batch of {samples}: its forward must "
                "return logits [B], of T labels [B, T], depend on nothing but its inputs, and take any batch size"
            )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(":.") if lines else type(error).__name__


def _write(program: torch.export.ExportedProgram, spec: ExportSpec, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            sink = _Sink(file)
            columns = json.dumps(spec.columns)
            metadata = json.dumps({**spec.metadata(), "columns": digest_of(columns)})
            extra = {"metadata.json": metadata, "columns.json": columns}
            try:
                torch.export.save(program, cast("IO[bytes]", sink), extra_files=extra)
            except Exception as error:  # an operator that torch traces but cannot write down
                raise ConfigError(f"torch.export cannot write the model down ({_reason(error)})") from error
            if sink.error is not None:
                raise sink.error
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise SaveError(
            f"{path} could not be written ({error.strerror or error}): make room, or write it somewhere else"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # where the part could not even be made, that is the error to raise
            part.unlink()


class _Sink(io.RawIOBase):
    """A file whose `write` never fails: torch's writer ends the whole process when a disk is full.

    After the first `error` nothing is written any more.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._file = file
        self._position = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._position += count
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return count

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset  # torch goes back to the start when it is done; there is nothing to do

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
