"""Checks on what arrives from outside, before an operator that does not check reads memory with it.

`B` samples, `F` features of a request, `L` ids, `K` rows asked for by number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.numbering import RowNumbers
from shadowsync.embedding.table import Shard, Slot
from shadowsync.errors import DataError

KNOWN_REQUESTS = 256
"""Sequences of features whose bounds and plans are remembered: a job has a few, and made-up ones fill no memory."""


def check_shape(ids: Jagged, feature_count: int) -> None:
    """Raises `DataError` unless the tensors of `ids` fit each other and there are `feature_count` features."""
    bags = ids.feature_count * ids.samples
    wrong = (
        ids.feature_count != feature_count,
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
    """What is known of a sequence of slots.

    Attributes:
        slots: the slots.
        last: the last local row of each, int64 `[F]`.
        width: columns of their pooled vectors.
    """

    slots: tuple[Slot, ...]
    last: Tensor
    width: int

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> "Bounds":
        """The bounds of these slots."""
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
    """Raises `DataError` unless `rows` are rows of the shard: a run of them, or distinct and ascending, int64 `[K]`."""
    if isinstance(rows, range):
        wrong = rows.step != 1 or not shard.start <= rows.start <= rows.stop <= shard.stop
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
