"""Some of the features of a batch: their ids, and their columns in the client's output.

`B` samples, `F` features of a selection, `U` units of `u` columns: every table is some whole number of units wide, so
that a gradient's columns are gathered in runs of `u` floats instead of one by one.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.table import Table


class Columns:
    """Where each feature's pooled vector stands in the client's output: tables in their order, features in theirs.

    Attributes:
        span: the columns of each feature that is pooled, by name.
        width: all columns.
        unit: the greatest width that divides every table's.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.span: dict[str, slice] = {}
        self.width = 0
        for table in tables:
            for feature in (f for f in table.features if f not in table.sequences):
                self.span[feature] = slice(self.width, self.width + table.dim)
                self.width += table.dim
        self.unit = math.gcd(*(table.dim for table in tables)) or 1

    def units(self, feature: str) -> range:
        """The feature's units in the output; none if it is a sequence."""
        span = self.span.get(feature, slice(0, 0))
        return range(span.start // self.unit, span.stop // self.unit)


@dataclass(frozen=True, eq=False)
class Selection:
    """Some features whose pooled vectors come side by side, in an order of their own.

    Attributes:
        features: positions in the source's order, int64 `[F]`; None for all in order.
        mean: whether each feature is pooled by mean, bool `[F]`; None if none is.
        units: every unit of their vectors in the output, int64 `[U]`; None if they are the output.
        unit: columns of a unit.
    """

    features: Tensor | None
    mean: Tensor | None
    units: Tensor | None
    unit: int

    def ids(self, ids: Jagged) -> Jagged:
        """The features' ids, from those of all features; with weights where several are pooled by mean."""
        if self.features is not None:
            ids = _select(ids, self.features)
        if self.mean is not None and ids.offsets is not None:
            ids = mean_weighted(ids, self.mean)
        return ids

    def gradient(self, gradient: Tensor) -> Tensor:
        """The part of the output's gradient `[B, Σ D_f]` that belongs to the features, `[B, U * u]`."""
        if self.units is None:
            return gradient
        units = gradient.reshape(len(gradient), gradient.shape[1] // self.unit, self.unit)
        return units.index_select(1, self.units).flatten(1)


class Selector:
    """Makes selections among the features of a source."""

    def __init__(self, tables: Sequence[Table], features: Sequence[str]) -> None:
        self.columns = Columns(tables)
        self.means = frozenset(f for table in tables for f, pooling in table.poolings.items() if pooling == "mean")
        self._position = {feature: index for index, feature in enumerate(features)}

    def select(self, features: Sequence[str]) -> Selection:
        """These features, in this order."""
        positions = [self._position[feature] for feature in features]
        mean = torch.tensor([feature in self.means for feature in features])
        units = [unit for feature in features for unit in self.columns.units(feature)]
        return Selection(
            features=None if positions == list(range(len(self._position))) else torch.tensor(positions),
            mean=mean if bool(mean.any()) else None,
            units=None if units == list(range(self.columns.width // self.columns.unit)) else torch.tensor(units),
            unit=self.columns.unit,
        )

    def features_of(self, tables: Sequence[Table], chosen: Set[str]) -> frozenset[str]:
        """The features of the tables with these names."""
        return frozenset(feature for table in tables if table.name in chosen for feature in table.features)


def _select(ids: Jagged, features: Tensor) -> Jagged:
    if ids.offsets is not None or ids.weights is not None:
        return ids.select(features.tolist())
    values = ids.values.view(ids.feature_count, ids.samples).index_select(0, features).flatten()
    return Jagged(values, None, None, len(features), ids.samples)


def mean_weighted(ids: Jagged, mean: Tensor) -> Jagged:
    """The ids with weights that turn a sum into a mean: 1 over the number of ids in the bag.

    With explicit weights this divides the weighted sum by the number of ids, not by the sum of their weights.
    """
    lengths = ids.lengths()
    per_bag = lengths.clamp(min=1).to(torch.float32).reciprocal()
    per_bag = torch.where(mean.repeat_interleave(ids.samples), per_bag, 1.0)
    weights = per_bag.repeat_interleave(lengths, output_size=len(ids.values))
    if ids.weights is not None:
        weights = weights * ids.weights
    return Jagged(ids.values, ids.offsets, weights, ids.feature_count, ids.samples)
