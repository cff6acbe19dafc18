"""The function that makes the labels of synthetic data.

`B` samples, `N` dense columns, `F` features, `H` hidden units.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shadowsync.data.hashing import mix

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_HIDDEN = 32
_SHARED = 4  # features whose latents the network sees beside the dense columns
_GAIN = 1.6  # of the network's layers: more makes a function that is harder to learn


def latents(ids: Integers, feature: int, seed: int) -> Floats:
    """A number for each id of a feature, uniform with mean 0 and variance 1, from a hash: no table is kept."""
    words = mix(ids.astype(np.uint64) + (np.uint64(feature) << np.uint64(40)) + (np.uint64(seed) << np.uint64(48)))
    unit = (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return (unit - np.float32(0.5)) * np.float32(12**0.5)


@dataclass(frozen=True)
class Network:
    """A fixed random network of two tanh layers, `[B, I] → [B]`."""

    layers: tuple[Floats, Floats, Floats]
    bias: Floats

    @staticmethod
    def drawn(inputs: int, generator: np.random.Generator) -> "Network":
        """Weights drawn so that the units are neither dead nor linear."""
        shapes = ((inputs, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, 1))
        layers = [generator.normal(0, _GAIN / max(rows, 1) ** 0.5, (rows, columns)) for rows, columns in shapes]
        first, second, last = (layer.astype(np.float32) for layer in layers)
        return Network((first, second, last), generator.normal(0, 0.5, _HIDDEN).astype(np.float32))

    def __call__(self, inputs: Floats) -> Floats:
        first, second, last = self.layers
        hidden = np.tanh(inputs @ first + self.bias)
        output: Floats = (np.tanh(hidden @ second) @ last)[:, 0]
        return output


@dataclass(frozen=True)
class Teacher:
    """`logit = bias + scale · (√share · network + √(1 − share) · ids)`, both parts of mean 0 and variance 1.

    `network` sees the dense columns and the latents of the first few features; `ids` is a sum over all features of
    the latents with weights that fall from feature to feature.
    """

    network: Network
    weights: Floats
    network_moments: tuple[float, float]
    ids_moments: tuple[float, float]
    dense_share: float
    scale: float
    bias: float

    def logits(self, dense: Floats, hidden: Floats) -> Floats:
        """Logits `[B]` of dense columns `[B, N]` and latents `[F, B]` (pooled over a sample's ids)."""
        parts = (
            _standard(self._network(dense, hidden), self.network_moments) * np.float32(self.dense_share**0.5),
            _standard(self._ids(hidden), self.ids_moments) * np.float32((1 - self.dense_share) ** 0.5),
        )
        return np.float32(self.bias) + np.float32(self.scale) * (parts[0] + parts[1])

    def _network(self, dense: Floats, hidden: Floats) -> Floats:
        return self.network(np.concatenate([dense, hidden[:_SHARED].T], axis=1))

    def _ids(self, hidden: Floats) -> Floats:
        return self.weights @ hidden


@dataclass(frozen=True)
class TeacherOptions:
    """What a teacher is made from; see the options of `Synthetic`."""

    dense_share: float
    scale: float
    base_rate: float
    seed: int


def make_teacher(options: TeacherOptions, dense: Floats, hidden: Floats) -> Teacher:
    """A teacher whose moments and mean label are right on a sample: dense `[B, N]`, latents `[F, B]`."""
    generator = np.random.default_rng((options.seed, 1))
    features = len(hidden)
    network = Network.drawn(dense.shape[1] + min(features, _SHARED), generator)
    weights = (generator.choice((-1.0, 1.0), features) * (1 + np.arange(features)) ** -0.5).astype(np.float32)
    draft = Teacher(network, weights, (0.0, 1.0), (0.0, 1.0), options.dense_share, options.scale, 0.0)
    moments = [
        (float(part.mean()), float(part.std()) or 1.0) for part in (draft._network(dense, hidden), draft._ids(hidden))
    ]
    unbiased = Teacher(network, weights, moments[0], moments[1], options.dense_share, options.scale, 0.0)
    bias = _bias(unbiased.logits(dense, hidden), options.base_rate)
    return Teacher(network, weights, moments[0], moments[1], options.dense_share, options.scale, bias)


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


def _standard(part: Floats, moments: tuple[float, float]) -> Floats:
    standard: Floats = (part - np.float32(moments[0])) / np.float32(moments[1])
    return standard


def _bias(logits: Floats, base_rate: float) -> float:
    """The shift that makes the mean probability `base_rate`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(50):
        middle = (low + high) / 2
        too_high = float(sigmoid(logits + np.float32(middle)).mean()) > base_rate
        low, high = (low, middle) if too_high else (middle, high)
    return (low + high) / 2
