"""Endless click data of Criteo's shape whose best reachable AUC is known.

`B` samples, `N` dense columns, `F` features, `L` ids.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.fingerprint import Mark, mark_of_options
from shadowsync.data.source import BadRows, Feature, OpenSource, Schema, Slice, Source
from shadowsync.data.teacher import Floats, Integers, Teacher, TeacherOptions, auc, latents, make_teacher, sigmoid
from shadowsync.errors import ConfigError

_BLOCK = 4096  # rows made at once from one seed; slices may cut them anywhere
_CALIBRATION_BLOCKS = 16
_JUDGED_ROWS = 1 << 20

TableRows = Annotated[int, Field(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class Synthetic(Source):
    """Rows made from (seed, position), so that any slice of any of them can be made at any time, on any machine.

    Dense columns are standard normal. The id of rank r (from 0) has probability about (r + 1)^−zipf, rounded down from
    a bounded Pareto distribution; ranks are scattered over the rows of the table. A planted teacher (see `teacher`)
    gives each row a probability, from which its label is drawn.
    """

    name: ClassVar[str] = "synthetic"

    rows: Annotated[int, Field(ge=1, le=10**10, description="training rows per epoch; more trains longer")] = 1_000_000
    test_rows: Annotated[
        int, Field(ge=0, le=10**9, description="test rows; more makes the test AUC more exact; 0: no test")
    ] = 100_000
    dense: Annotated[int, Field(ge=0, le=4096, description="dense columns")] = 13
    features: Annotated[int, Field(ge=1, le=1024, description="categorical features")] = 26
    table_rows: Annotated[
        TableRows | tuple[TableRows, ...],
        Field(description="rows of each feature's table: one number, or one per feature"),
    ] = 100_000
    zipf: Annotated[
        float, Field(ge=0, le=4, description="skew of the ids; 0 is uniform, more makes fewer ids frequent")
    ] = 1.2
    multi_hot: Annotated[
        float,
        Field(
            ge=1, le=1000, description="mean ids per sample and feature; 1: exactly one, more: Poisson, none possible"
        ),
    ] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 31, description="of rows, labels and teacher")] = 0
    base_rate: Annotated[float, Field(gt=0, lt=1, description="mean label")] = 0.25
    dense_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="share of the logit's variance that only the dense part can learn; the rest is a sum over ids",
        ),
    ] = 0.3
    scale: Annotated[
        float,
        Field(
            gt=0, le=100, description="standard deviation of the logit; more makes labels surer and the best AUC higher"
        ),
    ] = 2.0
    repeat_blocks: Annotated[
        int,
        Field(
            ge=0,
            description="repeat this many blocks of 4,096 rows from memory, to time other parts; 0: all rows differ",
        ),
    ] = 0

    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """No row is ever bad."""
        if split == "test" and self.test_rows == 0:
            return None
        return OpenSynthetic(self, split)

    def sizes(self) -> tuple[int, ...]:
        """Rows of each feature's table, `F` of them."""
        if isinstance(self.table_rows, int):
            return (self.table_rows,) * self.features
        if len(self.table_rows) != self.features:
            raise ConfigError(
                f"data.table_rows holds {len(self.table_rows)} numbers; give one, or {self.features} (data.features)"
            )
        return self.table_rows


class OpenSynthetic(OpenSource):
    """Rows of one split; both splits have the same teacher."""

    def __init__(self, options: Synthetic, split: Literal["train", "test"]) -> None:
        sizes = options.sizes()
        dense = tuple(f"i{k + 1}" for k in range(options.dense))
        multi_hot = options.multi_hot > 1
        self.schema = Schema(dense, tuple(Feature(f"c{k + 1}", n, None, multi_hot) for k, n in enumerate(sizes)))
        self.rows = options.rows if split == "train" else options.test_rows
        self.bad_rows = BadRows()
        self._options, self._sizes, self._stream = options, sizes, int(split == "test")
        self._zipf = [_Zipf.of(size, options.zipf) for size in sizes]
        self._teacher = self._calibrated()
        self._made = functools.lru_cache(maxsize=options.repeat_blocks or 2)(self._make)

    @functools.cached_property
    def best_auc(self) -> float | None:  # type: ignore[override]
        """The AUC of the true probabilities on these rows (the first million of them)."""
        made = [self._made(block) for block in range(-(-min(self.rows, _JUDGED_ROWS) // _BLOCK))]
        labels = np.concatenate([block.batch.labels.numpy() for block in made])[: self.rows]
        return auc(labels, np.concatenate([block.probabilities for block in made])[: self.rows])

    def slices(self, rows_per_slice: int) -> Sequence[Slice]:
        """Slices of `rows_per_slice` rows, the last one shorter."""
        return _Slices(self.rows, rows_per_slice)

    def marks(self) -> tuple[Mark, ...]:
        """Its options."""
        return (mark_of_options(self._options, self.rows, without=("test_rows",)),)

    def read(self, part: Slice) -> Batch:
        """Makes the blocks that the slice lies in."""
        return Batch.join([made.batch.narrow(first, last) for made, first, last in self._pieces(part)])

    def place(self, part: Slice, row: int) -> str:
        """`synthetic rows, row N`, from 1."""
        return f"synthetic data, row {part.start + row + 1}"

    def _pieces(self, part: Slice) -> Iterator[tuple["_Block", int, int]]:
        stop = part.start + part.rows
        for block in range(part.start // _BLOCK, -(-stop // _BLOCK)):
            first = block * _BLOCK
            kept = block % self._options.repeat_blocks if self._options.repeat_blocks else block
            yield self._made(kept), max(part.start - first, 0), min(stop - first, _BLOCK)

    def _calibrated(self) -> Teacher:
        options = self._options
        inputs = [self._inputs(np.random.default_rng((options.seed, 0, k))) for k in range(_CALIBRATION_BLOCKS)]
        dense = np.concatenate([block.dense for block in inputs])
        hidden = np.concatenate([block.hidden for block in inputs], axis=1)
        wanted = TeacherOptions(options.dense_share, options.scale, options.base_rate, options.seed)
        return make_teacher(wanted, dense, hidden)

    def _make(self, block: int) -> "_Block":
        generator = np.random.default_rng((self._options.seed, 2 + self._stream, block))
        inputs = self._inputs(generator)
        probabilities = sigmoid(self._teacher.logits(inputs.dense, inputs.hidden))
        labels = generator.random(_BLOCK, dtype=np.float32) < probabilities
        batch = Batch(torch.from_numpy(labels.astype(np.float32)), torch.from_numpy(inputs.dense), inputs.ids)
        return _Block(batch, probabilities)

    def _inputs(self, generator: np.random.Generator) -> "_Inputs":
        dense = generator.standard_normal((_BLOCK, self._options.dense), dtype=np.float32)
        if self._options.multi_hot > 1:
            ids, hidden = self._bags(generator)
        else:
            ids, hidden = self._singles(generator)
        return _Inputs(dense, ids, hidden)

    def _singles(self, generator: np.random.Generator) -> tuple[Jagged, Floats]:
        values = np.empty((len(self._sizes), _BLOCK), dtype=np.int64)
        hidden = np.empty((len(self._sizes), _BLOCK), dtype=np.float32)
        for feature, zipf in enumerate(self._zipf):
            values[feature] = zipf.rows_at(generator.random(_BLOCK))
            hidden[feature] = latents(values[feature], feature, self._options.seed)
        return Jagged(torch.from_numpy(values.ravel()), None, None, len(self._sizes), _BLOCK), hidden

    def _bags(self, generator: np.random.Generator) -> tuple[Jagged, Floats]:
        lengths = generator.poisson(self._options.multi_hot, (len(self._sizes), _BLOCK))
        values, hidden = [], np.empty(lengths.shape, dtype=np.float32)
        for feature, zipf in enumerate(self._zipf):
            values.append(zipf.rows_at(generator.random(lengths[feature].sum())))
            running = np.append(0.0, np.cumsum(latents(values[-1], feature, self._options.seed), dtype=np.float64))
            ends = np.cumsum(lengths[feature])
            hidden[feature] = (running[ends] - running[ends - lengths[feature]]) * self._options.multi_hot**-0.5
        offsets = np.append(0, np.cumsum(lengths))
        ids = np.concatenate(values)
        return Jagged(torch.from_numpy(ids), torch.from_numpy(offsets), None, len(self._sizes), _BLOCK), hidden


@dataclass(frozen=True)
class _Slices(Sequence[Slice]):
    """Slices of `size` of the rows, each made as it is asked for: there may be millions."""

    rows: int
    size: int

    def __len__(self) -> int:
        return (self.rows + self.size - 1) // self.size

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slice]: ...
    def __getitem__(self, index: int | slice) -> Slice | Sequence[Slice]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[number] for number in found]
        start = found * self.size
        return Slice(found, 0, start, min(self.size, self.rows - start))


@dataclass(frozen=True)
class _Inputs:
    """What the teacher sees: dense `[B, N]`, ids, and their latents `[F, B]`, pooled over a sample's ids."""

    dense: Floats
    ids: Jagged
    hidden: Floats


@dataclass(frozen=True)
class _Block:
    batch: Batch
    probabilities: Floats


@dataclass(frozen=True)
class _Zipf:
    """Ids of one feature by the inverse of their distribution function.

    Attributes:
        step: prime to `rows`; rank r lies in row `r · step mod rows`, so that frequent rows are not neighbours.
    """

    rows: int
    exponent: float
    step: int

    @staticmethod
    def of(rows: int, exponent: float) -> "_Zipf":
        step = int(rows * 0.6180339887) | 1
        while math.gcd(step, rows) > 1:
            step += 2
        return _Zipf(rows, exponent, step)

    def rows_at(self, uniform: NDArray[np.float64]) -> Integers:
        """Rows for uniform numbers in [0, 1)."""
        slope = 1 - self.exponent
        if abs(slope) < 1e-9:
            ends = np.exp(uniform * math.log(self.rows + 1))
        else:
            ends = np.exp(np.log1p(uniform * ((self.rows + 1) ** slope - 1)) / slope)
        rank = np.minimum(ends.astype(np.int64) - 1, self.rows - 1)
        scattered: Integers = rank * self.step % self.rows
        return scattered
