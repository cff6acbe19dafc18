"""What crosses between an embedding server and its clients: small typed parts, and tensors beside them.

Ids and row numbers cross as int32 where they fit, offsets always; floats as the codec encodes them.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Decoded, Encoded
from shadowsync.compression.positions import pack as pack_positions
from shadowsync.compression.positions import unpack as unpack_positions
from shadowsync.data.batch import Jagged
from shadowsync.embedding.requests import as_int64
from shadowsync.embedding.server import Lookup
from shadowsync.errors import DataError
from shadowsync.rpc.service import Meta

Shapes = tuple[tuple[int, ...], ...]


class Ids(Meta, frozen=True):
    """The typed part of a `Lookup`; its tensors are values, then offsets if `jagged`, then weights if `weighted`."""

    slots: tuple[int, ...]
    samples: int
    jagged: bool
    weighted: bool

    @property
    def tensor_count(self) -> int:
        """Tensors that belong to it."""
        return 1 + self.jagged + self.weighted


class Coded(Meta, frozen=True):
    """Encoded tensors: the shape of each, and how many frames stand for it.

    Attributes:
        codec: of all of them, by name.
        mask: number of the mask that they were sent under, or that the gradients may come back under; None for none.
        refreshes: thresholds chosen for them.
        early: those of them that came early.
    """

    shapes: tuple[tuple[int, ...], ...]
    frames: tuple[int, ...]
    codec: str = ""
    mask: int | None = None
    refreshes: int = 0
    early: int = 0


class PullAsked(Meta, frozen=True):
    """Asks for pooled vectors; tensors: of `ids`.

    Attributes:
        stream: of the client's, which may have several, one for each worker.
        number: of the look-up in that stream; None if no push will follow.
        ids: what is looked up.
        codec: that the answer is to be in, by name.
    """

    stream: int
    number: int | None
    ids: Ids
    codec: str = ""


class PushAsked(Meta, frozen=True):
    """Brings the gradient of a pull; tensors: of `ids` where they come again, after them the positions of a mask that
    the gradient has, then the gradient's frames.

    Attributes:
        held: the batch under which it is held until a `CommitAsked` names it; None to apply it now.
    """

    stream: int
    number: int
    lr: float
    gradient: Coded
    ids: Ids | None
    generation: int = 0
    held: int | None = None


class ReadAsked(Meta, frozen=True):
    """Asks for rows as they are; tensors: their numbers. The fields are those of `PullAsked` and `RowLookup`."""

    stream: int
    number: int | None
    shards: tuple[int, ...]
    codec: str = ""


class StepAsked(Meta, frozen=True):
    """Brings the rows' gradients by width; tensors: the numbers where `shards` come again, after them the positions of
    a mask that the gradients have, then the frames.

    Attributes:
        held: as in `PushAsked`.
    """

    stream: int
    number: int
    lr: float
    gradients: Coded
    shards: tuple[int, ...] | None
    generation: int = 0
    held: int | None = None


class CommitAsked(Meta, frozen=True):
    """A global step, as `embedding.holding.RowStep`; `batches` and `weights` are of one length."""

    step: int
    batches: tuple[int, ...]
    weights: tuple[float, ...]
    divisor: float | None
    lr: float
    below: int
    generation: int = 0


class ForgetAsked(Meta, frozen=True):
    """All gradients that wait are forgotten; the next global step is one beyond `stepped`."""

    stepped: int
    generation: int = 0


class Pushed(Meta, frozen=True):
    """Answers a push or a step.

    Attributes:
        known: False if the look-up is not kept any more; nothing was done, and the ids have to come again.
    """

    known: bool


def pack_ids(lookup: Lookup, dtype: torch.dtype) -> tuple[Ids, tuple[Tensor, ...]]:
    """A look-up as it crosses, its ids as `dtype`."""
    ids = lookup.ids
    tensors = [ids.values.to(dtype)]
    tensors += [] if ids.offsets is None else [ids.offsets.to(torch.int32)]
    tensors += [] if ids.weights is None else [ids.weights]
    return Ids(lookup.slots, ids.samples, ids.offsets is not None, ids.weights is not None), tuple(tensors)


def unpack_ids(ids: Ids, tensors: Sequence[Tensor], number: int) -> Lookup:
    """The look-up again; what is in the tensors, the server checks.

    Raises:
        DataError: there are not as many tensors as there should be, or not of such types.
    """
    if len(tensors) != ids.tensor_count or ids.samples < 0:
        raise DataError(f"a look-up of {ids.samples} samples comes with {len(tensors)} tensors, not {ids.tensor_count}")
    values = as_int64(tensors[0])
    offsets = as_int64(tensors[1]) if ids.jagged else None
    weights = tensors[-1] if ids.weighted else None
    return Lookup(ids.slots, Jagged(values, offsets, weights, len(ids.slots), ids.samples), number)


def pack_coded(encoded: Sequence[Encoded], codec: str, mask: int | None = None) -> tuple[Coded, tuple[Tensor, ...]]:
    """Tensors that were encoded by the codec of that name as they cross."""
    frames = tuple(frame for each in encoded for frame in each.frames)
    refreshes, early = sum(each.refreshes for each in encoded), sum(each.early for each in encoded)
    shapes, counts = tuple(each.shape for each in encoded), tuple(len(each.frames) for each in encoded)
    return Coded(shapes, counts, codec, mask, refreshes, early), frames


def check_shapes(coded: Coded, shapes: Shapes, what: str) -> None:
    """Before anything is decoded: memory is taken for the shapes of a look-up, not for what its sender claims.

    Args:
        coded: the typed part.
        shapes: of the look-up's answer.
        what: comes.

    Raises:
        DataError: the tensors are claimed to have other shapes.
    """
    if coded.shapes != shapes:
        raise DataError(f"{what} of {_shown(coded.shapes)} do not fit a look-up whose answer is {_shown(shapes)}")


def _shown(shapes: Shapes) -> str:
    first = ", ".join(str(list(shape[:4])) for shape in shapes[:4]) or "nothing"
    return first if len(shapes) <= 4 else f"{first} and {len(shapes) - 4} more"


def unpack_coded(
    coded: Coded, frames: Sequence[Tensor], codec: Codec, kept: Sequence[Tensor | None] | None = None
) -> tuple[Decoded, ...]:
    """The float32 tensors again.

    Args:
        coded: their typed part.
        frames: what came.
        codec: how they were encoded.
        kept: the positions of the elements of each that came, where both sides know them.

    Raises:
        DataError: the frames are not those of such tensors, or in a codec that is not sent here.
    """
    codec = codec.level(coded.codec)
    if len(coded.shapes) != len(coded.frames) or min(coded.frames, default=0) < 0 or sum(coded.frames) != len(frames):
        raise DataError(f"{len(frames)} frames do not make {len(coded.shapes)} tensors of {sum(coded.frames)}")
    cut = [frames[a:b] for a, b in pairwise(accumulate(coded.frames, initial=0))]
    if kept is None:
        return tuple(_decode(codec, own, shape) for own, shape in zip(cut, coded.shapes, strict=True))
    if len(kept) != len(cut):
        raise DataError(f"{len(cut)} gradients came under a mask of {len(kept)} tensors")
    parts = zip(cut, coded.shapes, kept, strict=True)
    return tuple(_decode(codec, own, shape, [positions]) for own, shape, positions in parts)


def pack_masks(kept: Sequence[Tensor | None], shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """The positions of a mask as they cross, for tensors of these shapes."""
    return tuple(
        torch.empty(0, dtype=torch.uint8) if found is None else pack_positions(found.numpy(), math.prod(shape))
        for found, shape in zip(kept, shapes, strict=True)
    )


def unpack_masks(frames: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor | None, ...]:
    """The positions again.

    Raises:
        DataError: the frames are no positions in tensors of these shapes.
    """
    if len(frames) != len(shapes):
        raise DataError(f"{len(shapes)} gradients came with a mask of {len(frames)} tensors")
    found: list[Tensor | None] = []
    for frame, shape in zip(frames, shapes, strict=True):
        try:
            positions = unpack_positions(frame, math.prod(shape))
        except ValueError as error:
            raise DataError(f"the mask of a gradient {list(shape)} cannot be read: {error}") from error
        found.append(None if positions is None else torch.from_numpy(positions))
    return tuple(found)


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
