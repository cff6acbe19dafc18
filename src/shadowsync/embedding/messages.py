"""How look-ups, answers and gradients cross between a worker and an embedding server.

Ids, row numbers and offsets cross as int32 where they fit, row numbers as gaps where that is shorter; floats as the
codec encodes them. `N` rows of a server, `K` of them asked for.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from shadowsync.compression import positions
from shadowsync.compression.codec import Codec, Decoded, Encoded
from shadowsync.embedding.requests import AnyLookup, Lookup, RowLookup, Shapes
from shadowsync.errors import DataError
from shadowsync.rpc.connection import Meta

_INT32_ROWS = 1 << 31


def id_type(rows: int) -> torch.dtype:
    """How ids in `[0, rows)` cross: int32 where they fit."""
    return torch.int32 if rows <= _INT32_ROWS else torch.int64


def as_int64(tensor: Tensor) -> Tensor:
    """Ids, offsets or row numbers in the type that operators want; raises `DataError` unless they are a row of integers
    that may cross."""
    if not tensor.dim():
        raise DataError("ids cross as a row of numbers, not as a single one")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise DataError(f"ids cross as int32 or int64, not as {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.to(torch.int64)


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


def unpack_rows(packed: Tensor, total: int) -> Tensor:
    """The row numbers, int64 `[K]`; the server checks whether they are its own. Raises `DataError` if they are none,
    when at most a few times N numbers have been allocated."""
    if packed.dtype != torch.uint8:
        return as_int64(packed)
    try:
        rows = positions.unpack(packed, total)
    except ValueError as error:
        raise DataError(f"row numbers cannot be read: {error}") from error
    if rows is None:
        raise DataError("row numbers cross as no bytes at all")
    return torch.from_numpy(rows)


def pack_lookup(lookup: AnyLookup, ids: torch.dtype, total: int) -> AnyLookup:
    """A look-up as it crosses, its ids as that type; `total` rows are in the server."""
    if isinstance(lookup, RowLookup):
        return msgspec.structs.replace(lookup, rows=pack_rows(lookup.rows, total))
    offsets = None if lookup.ids.offsets is None else lookup.ids.offsets.to(torch.int32)
    narrow = replace(lookup.ids, values=lookup.ids.values.to(ids), offsets=offsets)
    return Lookup(lookup.slots, narrow, lookup.number)


def unpack_lookup(lookup: AnyLookup, total: int) -> AnyLookup:
    """The look-up again; raises `DataError` for tensors of other types, and what is in them, the server checks."""
    if isinstance(lookup, RowLookup):
        return msgspec.structs.replace(lookup, rows=unpack_rows(lookup.rows, total))
    offsets = None if lookup.ids.offsets is None else as_int64(lookup.ids.offsets)
    wide = replace(lookup.ids, values=as_int64(lookup.ids.values), offsets=offsets)
    return Lookup(lookup.slots, wide, lookup.number)


def tensors_of(lookup: AnyLookup) -> tuple[Tensor, ...]:
    """What a look-up refers to, or what crosses of it."""
    if isinstance(lookup, RowLookup):
        return (lookup.rows,)
    return tuple(t for t in (lookup.ids.values, lookup.ids.offsets, lookup.ids.weights) if t is not None)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all together."""
    return sum(tensor.nbytes for tensor in tensors)


class Coded(Meta, frozen=True):
    """Encoded tensors, each a shape and some frames, in the codec of that name; `refreshes` and `early` as in
    `Encoded`.

    `mask` is the number of the mask that they were sent under, or that the gradients may come back under.
    """

    shapes: Shapes
    frames: tuple[tuple[Tensor, ...], ...]
    codec: str = ""
    mask: int | None = None
    refreshes: int = 0
    early: int = 0

    @property
    def byte_count(self) -> int:
        return sum(frame.nbytes for frames in self.frames for frame in frames)


class Sent(Meta, frozen=True):
    """The gradients of the look-up of that number in that stream of the client's, which may have one for each worker.

    Attributes:
        lookup: packed, where it comes again.
        masks: then, of each gradient that is under a mask, the positions.
    """

    number: int
    gradients: Coded
    stream: int
    generation: int
    lookup: Lookup | RowLookup | None = None
    masks: tuple[Tensor, ...] = ()


def pack_coded(encoded: Sequence[Encoded], codec: str, mask: int | None = None) -> Coded:
    """As they cross."""
    refreshes, early = sum(each.refreshes for each in encoded), sum(each.early for each in encoded)
    shapes, frames = tuple(each.shape for each in encoded), tuple(each.frames for each in encoded)
    return Coded(shapes, frames, codec, mask, refreshes, early)


def unpack_coded(
    coded: Coded, codec: Codec, shapes: Shapes, what: str, kept: Sequence[Tensor | None] | None = None
) -> tuple[Decoded, ...]:
    """The float32 tensors again, called `what` in errors.

    Args:
        shapes: that they must have: memory is taken for the shapes of a look-up, not for what its sender claims.
        kept: the positions of the elements of each that came, where both sides know them.

    Raises:
        DataError: they are of other shapes, the frames are not those of such tensors, or in a codec that is not sent
            here.
    """
    if coded.shapes != shapes or len(coded.frames) != len(shapes):
        raise DataError(f"{what} of {_shown(coded.shapes)} do not fit a look-up whose answer is {_shown(shapes)}")
    level = codec.level(coded.codec)
    if kept is None:
        return tuple(_decode(level, *pair) for pair in zip(coded.frames, shapes, strict=True))
    if len(kept) != len(shapes):
        raise DataError(f"{len(shapes)} gradients came under a mask of {len(kept)} tensors")
    return tuple(
        _decode(level, frames, shape, [mask]) for frames, shape, mask in zip(coded.frames, shapes, kept, strict=True)
    )


def _shown(shapes: Shapes) -> str:
    first = ", ".join(str(list(shape[:4])) for shape in shapes[:4]) or "nothing"
    return first if len(shapes) <= 4 else f"{first} and {len(shapes) - 4} more"


def _decode(
    codec: Codec, frames: Sequence[Tensor], shape: tuple[int, ...], under: Sequence[Tensor | None] = ()
) -> Decoded:
    try:
        if under:
            decoded = Decoded(codec.decode_under(frames, shape, under[0]), under[0])
        else:
            decoded = codec.decode_kept(frames, shape)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"frames are not a tensor {list(shape)} in the codec {codec.name}: {error}") from error
    tensor = decoded.tensor
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise DataError(f"frames hold {tensor.dtype} {list(tensor.shape)}, not float32 {list(shape)}")
    return decoded


def pack_masks(kept: Sequence[Tensor | None], shapes: Shapes) -> tuple[Tensor, ...]:
    """The positions of a mask as they cross, for tensors of these shapes."""
    return tuple(
        torch.empty(0, dtype=torch.uint8) if found is None else positions.pack(found.numpy(), math.prod(shape))
        for found, shape in zip(kept, shapes, strict=True)
    )


def unpack_masks(frames: Sequence[Tensor], shapes: Shapes) -> tuple[Tensor | None, ...]:
    """The positions again; raises `DataError` for frames that are none in tensors of these shapes."""
    if len(frames) != len(shapes):
        raise DataError(f"{len(shapes)} gradients came with a mask of {len(frames)} tensors")
    found: list[Tensor | None] = []
    for frame, shape in zip(frames, shapes, strict=True):
        try:
            mask = positions.unpack(frame, math.prod(shape))
        except ValueError as error:
            raise DataError(f"the mask of a gradient {list(shape)} cannot be read: {error}") from error
        found.append(None if mask is None else torch.from_numpy(mask))
    return tuple(found)
