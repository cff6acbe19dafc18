"""What servers are asked for: ids of some features or rows by number, checked before an operator that does not check
reads memory with them.

`B` samples, `F` features of a request, `L` ids, `K` rows asked for by number, `U` units of `u` columns: every table is
some whole number of units wide, so that a gradient's columns are gathered in runs of `u` floats instead of one by one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.table import RowNumbers, Shard, Slot, Subject, Table, widths
from shadowsync.errors import DataError
from shadowsync.rpc.connection import Meta

KNOWN_REQUESTS = 256
"""Sequences of features whose bounds and plans are remembered: a job has a few, and made-up ones fill no memory."""

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of an answer, and of the gradients that go back."""


class Lookup(Meta, frozen=True, tag="pooled"):
    """Asks one server for pooled rows: one tensor, float32 `[B, Σ D of the slots]`.

    Attributes:
        slots: positions among the server's slots (`slots_of` its shards), in the order wanted.
        ids: of as many features, local to the shards.
        number: the client's own for this look-up, by which a server elsewhere finds it again at the push.
    """

    slots: tuple[int, ...]
    ids: Jagged
    number: int = 0

    def subjects(self, _: RowNumbers) -> tuple[Subject, ...]:
        """Of each tensor of the answer."""
        return (self.slots,)

    def groups(self, slots: Sequence[Slot]) -> tuple[int, ...]:
        """Columns of each feature in the answer."""
        return tuple(slots[slot].shard.table.dim for slot in self.slots)


class RowLookup(Meta, frozen=True, tag="rows"):
    """Asks one server for rows as they are: for each width of its shards (ascending) float32 `[K_w, D_w]`.

    Attributes:
        shards: positions of those that are looked up.
        rows: distinct numbers (`RowNumbers` of the server's shards) of rows of theirs, ascending, int64 `[K]`.
    """

    shards: tuple[int, ...]
    rows: Tensor
    number: int = 0

    def subjects(self, numbers: RowNumbers) -> tuple[Subject, ...]:
        return tuple(width.dim for width in numbers.widths)

    def groups(self, _: Sequence[Slot]) -> tuple[int, ...]:
        """None: the columns of distinct rows are no features."""
        return ()


AnyLookup = Lookup | RowLookup


def check_shape(ids: Jagged, feature_count: int) -> None:
    """Raises `DataError` unless the tensors of `ids` fit each other and there are `feature_count` features."""
    bags = ids.feature_count * ids.samples
    wrong = (
        ids.feature_count != feature_count,
        ids.samples < 0,
        ids.values.dim() != 1 or ids.values.dtype != torch.int64,
        ids.offsets is None and len(ids.values) != bags,
        ids.offsets is not None and not _offsets_fit(ids.offsets, bags, len(ids.values)),
        ids.weights is not None and (ids.weights.shape != ids.values.shape or ids.weights.dtype != torch.float32),
    )
    if any(wrong):
        raise DataError(
            f"ids of {ids.feature_count} features for {ids.samples} samples do not fit a look-up of {feature_count} "
            f"features: {_shown('values', ids.values)}, {_shown('offsets', ids.offsets)}, "
            f"{_shown('weights', ids.weights)}"
        )


def _offsets_fit(offsets: Tensor, bags: int, id_count: int) -> bool:
    if offsets.dtype != torch.int64 or offsets.shape != (bags + 1,):
        return False
    return int(offsets[0]) == 0 and int(offsets[-1]) == id_count and not bool((offsets[1:] < offsets[:-1]).any())


def _shown(name: str, tensor: Tensor | None) -> str:
    return f"no {name}" if tensor is None else f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True)
class Bounds:
    """A sequence of slots, the last local row of each, int64 `[F]`, and the columns of their pooled vectors."""

    slots: tuple[Slot, ...]
    last: Tensor
    width: int

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> "Bounds":
        last = torch.tensor([slot.shard.rows - 1 for slot in slots], dtype=torch.int64)
        return cls(tuple(slots), last, sum(slot.shard.table.dim for slot in slots))


def bounds_of(slots: Sequence[Slot]) -> Callable[[tuple[int, ...]], Bounds]:
    """Finds the bounds of requests for some of these slots, by number; raises `DataError` for a slot there is not."""

    @lru_cache(KNOWN_REQUESTS)
    def find(asked: tuple[int, ...]) -> Bounds:
        unknown = [slot for slot in asked if not 0 <= slot < len(slots)]
        if unknown:
            raise DataError(f"slot {unknown[0]} is asked for and this server has {len(slots)} slots")
        return Bounds.of([slots[slot] for slot in asked])

    return find


def check_range(ids: Jagged, bounds: Bounds) -> None:
    """Raises `DataError` naming the first of the local `ids` that lies outside its shard."""
    if not len(ids.values):
        return
    values, last = ids.values, bounds.last
    if ids.offsets is None:
        values, last = values.view(ids.feature_count, ids.samples), last[:, None]
    else:
        last = spread(last, ids)
    # negative where either the id or its distance to the last row is: one pass finds both
    sign = values | (last - values)
    if int(sign.amin()) >= 0:
        return
    where = int((sign.flatten() < 0).nonzero()[0])
    starts = ids.bag_offsets()[:: ids.samples].contiguous()
    feature = int(torch.searchsorted(starts, where, right=True)) - 1
    slot = bounds.slots[feature]
    table = slot.shard.table
    raise DataError(
        f"feature {slot.feature}: id {int(ids.values[where]) + slot.shard.start} is not a row of table {table.name}, "
        f"which has rows 0 to {table.rows - 1}; give the table more rows"
    )


def check_rows(rows: Tensor, asked: Sequence[int], shards: Sequence[Shard], numbers: RowNumbers) -> None:
    """Raises `DataError` unless `rows` are distinct numbers of rows of the `asked` shards, ascending, int64 `[K]`."""
    unknown = [index for index in asked if not 0 <= index < len(shards)]
    if unknown:
        raise DataError(f"shard {unknown[0]} is asked for and this server has {len(shards)} shards")
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise DataError(f"row numbers are int64 [K], not {_shown('rows', rows)}")
    if len(rows) and not bool((rows[1:] > rows[:-1]).all()):
        raise DataError("row numbers are to be distinct and in ascending order")
    edges = torch.tensor([(numbers.starts[i], numbers.starts[i] + shards[i].rows) for i in sorted(set(asked))])
    within = torch.searchsorted(rows, edges.flatten()).view(-1, 2).diff(dim=1).sum() if len(edges) else 0
    if int(within) != len(rows):
        raise DataError(f"{len(rows) - int(within)} of {len(rows)} row numbers are not rows of the shards asked for")


def check_single(rows: Tensor | range, shard: Shard) -> None:
    """Raises `DataError` unless `rows` are rows of the shard: a run of some, or distinct and ascending, int64 `[K]`."""
    if isinstance(rows, range):
        wrong = rows.step != 1 or not shard.start <= rows.start < rows.stop <= shard.stop
    else:
        if rows.dim() != 1 or rows.dtype != torch.int64:
            raise DataError(f"row numbers are int64 [K], not {_shown('rows', rows)}")
        inside = not len(rows) or (shard.start <= int(rows[0]) and int(rows[-1]) < shard.stop)
        wrong = not inside or not bool((rows[1:] > rows[:-1]).all())
    if wrong:
        raise DataError(
            f"the rows asked for are not distinct rows of table {shard.table.name} from {shard.start} to "
            f"{shard.stop - 1}, in ascending order"
        )


def spread(per_feature: Tensor, ids: Jagged) -> Tensor:
    """A number per feature `[F]` repeated for each of the feature's ids, `[L]`."""
    if ids.offsets is None:
        return per_feature.repeat_interleave(ids.samples)
    if not ids.samples:
        return per_feature[:0]
    return per_feature.repeat_interleave(ids.offsets[:: ids.samples].diff(), output_size=len(ids.values))


@dataclass(frozen=True, eq=False)
class Selection:
    """Some features whose pooled vectors come side by side, in an order of their own.

    Attributes:
        features: positions in the source's order, int64 `[F]`; None for all in order.
        mean: whether each feature is pooled by mean, bool `[F]`; None if none is.
        units: every unit (of `unit` columns) of their vectors in the output, int64 `[U]`; None if they are the output.
    """

    features: Tensor | None
    mean: Tensor | None
    units: Tensor | None
    unit: int

    def ids(self, ids: Jagged) -> Jagged:
        """The features' ids, from those of all features."""
        if self.features is None:
            return ids
        if ids.offsets is not None or ids.weights is not None:
            return ids.select(self.features.tolist())
        values = ids.values.view(ids.feature_count, ids.samples).index_select(0, self.features).flatten()
        return Jagged(values, None, None, len(self.features), ids.samples)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The part of the output's gradient `[B, Σ D_f]` that belongs to the features, `[B, U * u]`."""
        if self.units is None:
            return gradient
        units = gradient.reshape(len(gradient), gradient.shape[1] // self.unit, self.unit)
        return units.index_select(1, self.units).flatten(1)


class Selector:
    """Makes selections among the features of a source, given what the client's output is: tables in their order, and
    the pooled features of each in theirs.

    Attributes:
        columns: of each feature that is pooled, by name.
        width: all columns.
        means: the features that are pooled by mean.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[str]) -> None:
        self.columns: dict[str, slice] = {}
        self.width = 0
        for feature, dim in widths(tables).items():
            self.columns[feature] = slice(self.width, self.width + dim)
            self.width += dim
        self.means = frozenset(f for table in tables for f, pooling in table.poolings.items() if pooling == "mean")
        self._unit = math.gcd(*(table.dim for table in tables)) or 1
        self._position = {feature: index for index, feature in enumerate(features)}

    def select(self, features: Sequence[str]) -> Selection:
        """These features, in this order."""
        positions = [self._position[feature] for feature in features]
        mean = torch.tensor([feature in self.means for feature in features])
        spans = (self.columns.get(feature, slice(0, 0)) for feature in features)  # a sequence has no columns
        units = [unit for span in spans for unit in range(span.start // self._unit, span.stop // self._unit)]
        return Selection(
            features=None if positions == list(range(len(self._position))) else torch.tensor(positions),
            mean=mean if bool(mean.any()) else None,
            units=None if units == list(range(self.width // self._unit)) else torch.tensor(units),
            unit=self._unit,
        )


def mean_factors(ids: Jagged, mean: Tensor) -> Tensor:
    """What turns the sum of each bag into a mean, float32 `[F * B]`: 1 over the number of its ids, and 1 for features
    that are not pooled so. With weights that divides by the number of ids, not by the sum of their weights."""
    per_bag = ids.lengths().clamp(min=1).to(torch.float32).reciprocal()
    return torch.where(mean.repeat_interleave(ids.samples), per_bag, 1.0)


def mean_weighted(ids: Jagged, mean: Tensor) -> Jagged:
    """The ids with weights that turn a sum into a mean."""
    weights = mean_factors(ids, mean).repeat_interleave(ids.lengths(), output_size=len(ids.values))
    if ids.weights is not None:
        weights = weights * ids.weights
    return Jagged(ids.values, ids.offsets, weights, ids.feature_count, ids.samples)
