"""The embedding vectors a model is called with, and their gradients.

`B` samples, `F` features, `D_f` width of feature f's vector, `D` where all widths are equal; of a feature with
`pooling=none` a sequence of vectors for each sample: `L` vectors of all samples, `T` length of padded sequences.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.errors import ConfigError

NO_SEQUENCES: Mapping[str, Any] = MappingProxyType({})


class Call(NamedTuple):
    """A look-up as a module asks for it.

    Attributes:
        ids: int64 of any shape, a row for each; `[L]` where they are pooled.
        offsets: where each bag of ids begins, and the last one ends, int64 `[bags + 1]`; None if nothing is pooled.
        weights: one per id, float32 `[L]`, or None for ones.
    """

    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class LookedUp:
    """What a module that looks ids up itself is called with: the ids of a batch, and what it looked up of them."""

    ids: Jagged
    calls: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class JaggedVectors:
    """The vectors of one feature's ids, sample after sample and within a sample in the order of the ids.

    It is no tensor, and whoever uses it as one is told so by a `ConfigError`.

    Attributes:
        feature: the feature's name.
        values: `[L, D]`, each times its id's weight where the ids have weights.
        offsets: sample b has `values[offsets[b]:offsets[b + 1]]`, which may be empty, int64 `[B + 1]`.
    """

    feature: str
    values: Tensor
    offsets: Tensor

    @property
    def samples(self) -> int:
        return self.offsets.shape[0] - 1

    def lengths(self) -> Tensor:
        """Vectors of each sample, int64 `[B]`."""
        return self.offsets.diff()

    @cached_property
    def owners(self) -> Tensor:
        """The sample of each vector, int64 `[L]`."""
        positions = torch.arange(self.values.shape[0], device=self.values.device)
        return torch.searchsorted(self.offsets[1:].contiguous(), positions, right=True)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """The sum of each sample's vectors, each times its weight `[L]`, `[B, D]`; zeros for an empty sequence."""
        vectors = self.values if weights is None else weights[:, None] * self.values
        return vectors.new_zeros(self.samples, vectors.shape[1]).index_add(0, self.owners, vectors)

    def padded(self, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """All sequences with zeros behind them, `[B, T, D]`, and where they are not padded, bool `[B, T]`.

        `steps` is `T`; of a longer sequence the last `T` vectors are kept. None: as long as the longest.
        """
        lengths = self.lengths()
        steps = steps if steps is not None else int(lengths.max()) if len(lengths) else 0
        first = self.offsets[:-1] + (lengths - steps).clamp(min=0)
        position = torch.arange(self.values.shape[0], device=self.values.device) - first[self.owners]
        # what is too old goes to one more step behind the others, which is cut off
        slot = torch.where(position < 0, steps, position) + (steps + 1) * self.owners
        empty = self.values.new_zeros(self.samples * (steps + 1), self.values.shape[1])
        whole = empty.index_copy(0, slot, self.values).view(self.samples, steps + 1, self.values.shape[1])
        return whole[:, :steps], torch.arange(steps, device=lengths.device) < lengths[:, None]

    def to(self, device: torch.device) -> "JaggedVectors":
        return JaggedVectors(self.feature, self.values.to(device), self.offsets.to(device))

    def leaf(self) -> "JaggedVectors":
        """The same, with values that have no history and take a gradient."""
        return JaggedVectors(self.feature, self.values.detach().requires_grad_(), self.offsets)

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(Tensor, name):
            raise self._misused()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __getitem__(self, _: object) -> NoReturn:
        raise self._misused()

    def __iter__(self) -> NoReturn:
        raise self._misused()

    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __getitem__

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise next(found for found in _leaves((args, kwargs or {})) if isinstance(found, cls))._misused()

    def _misused(self) -> ConfigError:
        return ConfigError(
            f"feature {self.feature} has pooling=none, so that the model is given a sequence of vectors per sample and "
            "uses it as one vector: use its values and offsets, padded() or weighted_sum(), or set "
            f"embedding.pooling={{{self.feature}: mean}}"
        )


def _leaves(tree: Any) -> Iterator[Any]:
    """What nested lists, tuples and dicts hold."""
    if isinstance(tree, list | tuple | dict):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(child)
    else:
        yield tree


class Pooled(Mapping[str, Any]):
    """Feature → `[B, D_f]`: views of one tensor, made when the first of them is asked for; or its sequences.

    A model that wants all vectors side by side takes `flat`, which saves a copy in the forward and one in the
    backward pass, and at small batches the time to make the views; any other sees an ordinary read-only mapping.

    Attributes:
        flat: `[B, Σ D_f]`, the pooled features in the order of the keys.
        dims: the pooled features with their widths, in that order.
        sequences: the other features, whose keys come last.
        looked_up: for a module that looks ids up itself, which of them these vectors are; None for any other.
    """

    def __init__(
        self,
        flat: Tensor,
        dims: Mapping[str, int],
        sequences: Mapping[str, JaggedVectors] = NO_SEQUENCES,
        looked_up: LookedUp | None = None,
    ) -> None:
        self.flat = flat
        self.dims = dims
        self.sequences = sequences
        self.looked_up = looked_up
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, feature: str) -> Tensor | JaggedVectors:
        if feature in self.sequences:
            return self.sequences[feature]
        if not self._views:
            self._views = dict(
                zip(self.dims, torch.split_with_sizes(self.flat, list(self.dims.values()), dim=1), strict=True)
            )
        return self._views[feature]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.dims, self.sequences)

    def __len__(self) -> int:
        return len(self.dims) + len(self.sequences)


def concatenate(embeddings: Mapping[str, Tensor], features: Sequence[str]) -> Tensor:
    """The vectors of `features` side by side, `[B, Σ D_f]`; no copy is made of a `Pooled` in the same order."""
    if isinstance(embeddings, Pooled) and list(embeddings.dims) == list(features):
        return embeddings.flat
    return torch.cat([embeddings[feature] for feature in features], dim=1)


def sequence_of(embeddings: Mapping[str, Any], feature: str) -> JaggedVectors:
    """The sequences of a feature among what a model is called with; raises `ConfigError` if the feature is pooled."""
    found = embeddings[feature]
    if not isinstance(found, JaggedVectors):
        raise ConfigError(f"feature {feature} is pooled to one vector: set embedding.pooling={{{feature}: none}}")
    return found


@dataclass(frozen=True)
class VectorGradients:
    """Gradients of the mean loss with respect to everything that a model was given of its features.

    Attributes:
        pooled: by the pooled vectors, float32 `[B, Σ D_f]`.
        sequences: by the values of each sequence, by its feature, float32 `[L_f, D_f]`.
    """

    pooled: Tensor
    sequences: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, pooled: Tensor, sequences: Mapping[str, JaggedVectors]) -> "VectorGradients":
        """Of a loss that depends on none of these vectors."""
        return cls(
            torch.zeros_like(pooled), {name: torch.zeros_like(found.values) for name, found in sequences.items()}
        )
