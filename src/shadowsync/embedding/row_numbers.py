"""How ids and row numbers cross: as int32 where they fit, and the numbers of distinct rows as gaps between them.

`K` rows, `N` rows that a server has in all. Gaps lose nothing, so they need no option and no codec; they take about a
byte for each row, and 50 ns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shadowsync.compression import positions
from shadowsync.errors import DataError

_IDS = (torch.int32, torch.int64)
_INT32_ROWS = 1 << 31


def id_type(rows: int) -> torch.dtype:
    """How ids in `[0, rows)` cross: int32 where they fit."""
    return torch.int32 if rows <= _INT32_ROWS else torch.int64


def raw_bytes(rows: Tensor, total: int) -> int:
    """What row numbers in `[0, total)` take as int32 or int64."""
    return len(rows) * id_type(total).itemsize


def pack_rows(rows: Tensor, total: int) -> Tensor:
    """Row numbers `[K]` (int64) as they cross: as bytes, or as int32 or int64 where that is shorter. Numbers that are
    not distinct, ascending and in `[0, total)` cross as they are, and the server refuses them."""
    if not len(rows):
        return rows.to(id_type(total))
    if int(rows[0]) < 0 or int(rows[-1]) >= total or not bool((rows[1:] > rows[:-1]).all()):
        return rows
    gaps = positions.pack(rows.numpy(), total)
    return gaps if gaps.nbytes < raw_bytes(rows, total) else rows.to(id_type(total))


def unpack_rows(tensors: Sequence[Tensor], total: int) -> Tensor:
    """The row numbers of a message that holds nothing else, int64 `[K]`; if they are in a server, it checks itself.

    Raises:
        DataError: the message does not hold one tensor of row numbers. At most a few times N numbers have been
            allocated by then.
    """
    if len(tensors) != 1:
        raise DataError(f"row numbers are one tensor, not {len(tensors)}")
    if tensors[0].dtype != torch.uint8:
        return as_int64(tensors[0])
    try:
        rows = positions.unpack(tensors[0], total)
    except ValueError as error:
        raise DataError(f"row numbers cannot be read: {error}") from error
    if rows is None:
        raise DataError("row numbers cross as no bytes at all")
    return torch.from_numpy(rows)


def as_int64(tensor: Tensor) -> Tensor:
    """Ids, offsets or row numbers in the type that operators want.

    Raises:
        DataError: they are not int32 or int64, or a single number without a dimension.
    """
    if not tensor.dim():
        raise DataError("ids cross as a row of numbers, not as a single one")
    if tensor.dtype not in _IDS:
        raise DataError(f"ids cross as int32 or int64, not as {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.to(torch.int64)
