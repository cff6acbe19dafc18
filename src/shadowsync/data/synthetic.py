"""Endless click data of Criteo's shape whose best reachable AUC is known.

`B` samples, `N` dense columns, `F` features.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.source import BadRows, Feature, Mark, OpenSource, Schema, Slice, Source, mark_of_options
from shadowsync.errors import ConfigError
from shadowsync.serving import mix

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_BLOCK = 4096  # rows made at once from one seed; slices may cut them anywhere
_CALIBRATION_BLOCKS = 16
_JUDGED_ROWS = 1 << 20
_HIDDEN = 32  # units of the teacher's layers
_SHARED = 4  # features whose latents the teacher's network sees beside the dense columns
_GAIN = 1.6  # of the network's layers: more makes a function that is harder to learn

TableRows = Annotated[int, Field(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class Synthetic(Source):
    """Rows made from (seed, position), so that any slice of any of them can be made at any time, on any machine.

    Dense columns are standard normal. The id of rank r (from 0) has probability about (r + 1)^−zipf, rounded down from
    a bounded Pareto distribution; ranks are scattered over the rows of the table. A planted `Teacher`
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
        return None if split == "test" and self.test_rows == 0 else OpenSynthetic(self, split)

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
        self._zipf = [_Zipf(size, options.zipf) for size in sizes]
        sample = [self._inputs(np.random.default_rng((options.seed, 0, k))) for k in range(_CALIBRATION_BLOCKS)]
        self._teacher = Teacher(
            np.concatenate([dense for dense, _, _ in sample]),
            np.concatenate([hidden for _, _, hidden in sample], axis=1),
            options,
        )
        self._made = functools.lru_cache(maxsize=options.repeat_blocks or 2)(self._make)

    @functools.cached_property
    def best_auc(self) -> float | None:  # type: ignore[override]
        """The AUC of the true probabilities on these rows (the first million of them)."""
        made = [self._made(block) for block in range(-(-min(self.rows, _JUDGED_ROWS) // _BLOCK))]
        labels = np.concatenate([batch.labels.numpy() for batch, _ in made])[: self.rows]
        return auc(labels, np.concatenate([probabilities for _, probabilities in made])[: self.rows])

    def marks(self) -> tuple[Mark, ...]:
        return (mark_of_options(self._options, self.rows, without=("test_rows",)),)

    def read(self, part: Slice) -> Batch:
        pieces, stop = [], part.start + part.rows
        for block in range(part.start // _BLOCK, -(-stop // _BLOCK)):
            first = block * _BLOCK
            batch, _ = self._made(block % self._options.repeat_blocks if self._options.repeat_blocks else block)
            pieces.append(batch.narrow(max(part.start - first, 0), min(stop - first, _BLOCK)))
        return Batch.join(pieces)

    def place(self, part: Slice, row: int) -> str:
        return f"synthetic data, row {part.start + row + 1}"

    def _make(self, block: int) -> tuple[Batch, Floats]:
        """The rows of a block, and the probabilities from which their labels are drawn."""
        generator = np.random.default_rng((self._options.seed, 2 + self._stream, block))
        dense, ids, hidden = self._inputs(generator)
        probabilities = sigmoid(self._teacher.logits(dense, hidden))
        labels = generator.random(_BLOCK, dtype=np.float32) < probabilities
        return Batch(torch.from_numpy(labels.astype(np.float32)), torch.from_numpy(dense), ids), probabilities

    def _inputs(self, generator: np.random.Generator) -> tuple[Floats, Jagged, Floats]:
        """What the teacher sees: dense `[B, N]`, ids, and their latents `[F, B]`, pooled over a sample's ids."""
        dense = generator.standard_normal((_BLOCK, self._options.dense), dtype=np.float32)
        ids, hidden = self._bags(generator) if self._options.multi_hot > 1 else self._singles(generator)
        return dense, ids, hidden

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


class _Zipf:
    """Ids of one feature by the inverse of their distribution function."""

    def __init__(self, rows: int, exponent: float) -> None:
        self.rows, self.exponent = rows, exponent
        # prime to `rows`; rank r lies in row `r · step mod rows`, so that frequent rows are not neighbours
        self.step = int(rows * 0.6180339887) | 1
        while math.gcd(self.step, rows) > 1:
            self.step += 2

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


class Teacher:
    """`logit = bias + scale · (√share · network + √(1 − share) · ids)`, both parts of mean 0 and variance 1.

    `network`, of two tanh layers, sees the dense columns and the latents of the first few features; `ids` is a sum over
    all features of the latents with weights that fall from feature to feature. Moments and mean label are right on the
    sample that is given, as to `logits`.
    """

    def __init__(self, dense: Floats, hidden: Floats, options: Synthetic) -> None:
        generator, features = np.random.default_rng((options.seed, 1)), len(hidden)
        inputs = dense.shape[1] + min(features, _SHARED)
        shapes = ((inputs, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, 1))
        layers = [generator.normal(0, _GAIN / max(rows, 1) ** 0.5, (rows, columns)) for rows, columns in shapes]
        self._layers = [layer.astype(np.float32) for layer in layers]  # units are neither dead nor linear
        self._unit_bias = generator.normal(0, 0.5, _HIDDEN).astype(np.float32)
        signs = generator.choice((-1.0, 1.0), features)
        self._weights = (signs * (1 + np.arange(features)) ** -0.5).astype(np.float32)
        self._moments = [(float(part.mean()), float(part.std()) or 1.0) for part in self._parts(dense, hidden)]
        self._shares = np.float32(options.dense_share**0.5), np.float32((1 - options.dense_share) ** 0.5)
        self._scale, self._bias = options.scale, 0.0
        unbiased = self.logits(dense, hidden)
        low, high = -50.0, 50.0
        for _ in range(50):  # bisection of the shift that makes the mean probability `base_rate`
            middle = (low + high) / 2
            too_high = float(sigmoid(unbiased + np.float32(middle)).mean()) > options.base_rate
            low, high = (low, middle) if too_high else (middle, high)
        self._bias = (low + high) / 2

    def logits(self, dense: Floats, hidden: Floats) -> Floats:
        """Logits `[B]` of dense columns `[B, N]` and latents `[F, B]` (pooled over a sample's ids)."""
        network, ids = (
            (part - np.float32(mean)) / np.float32(deviation) * share
            for part, (mean, deviation), share in zip(
                self._parts(dense, hidden), self._moments, self._shares, strict=True
            )
        )
        return np.float32(self._bias) + np.float32(self._scale) * (network + ids)

    def _parts(self, dense: Floats, hidden: Floats) -> tuple[Floats, Floats]:
        first, second, last = self._layers
        units = np.tanh(np.concatenate([dense, hidden[:_SHARED].T], axis=1) @ first + self._unit_bias)
        return (np.tanh(units @ second) @ last)[:, 0], self._weights @ hidden


def latents(ids: Integers, feature: int, seed: int) -> Floats:
    """A number for each id of a feature, uniform with mean 0 and variance 1, from a hash: no table is kept."""
    words = mix(ids.astype(np.uint64) + (np.uint64(feature) << np.uint64(40)) + (np.uint64(seed) << np.uint64(48)))
    unit = (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return (unit - np.float32(0.5)) * np.float32(12**0.5)


def sigmoid(logits: Floats) -> Floats:
    """Probabilities of logits."""
    probabilities: Floats = np.reciprocal(np.float32(1) + np.exp(-logits))
    return probabilities


def auc(labels: Floats, scores: Floats) -> float | None:
    """Area under the ROC curve, ties counted half; None unless both labels occur."""
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return None
    _, rank, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    return float((middle[rank][labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))
