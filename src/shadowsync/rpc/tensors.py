"""Tensors as raw frames, of which nothing is copied on the way out or in; and as one row of bytes, for what carries
nothing else."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from shadowsync.errors import DataError, RunError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
"""Types that may cross; a type is named by its position, so the order is part of the protocol."""
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_ELEMENTS = 1 << 48
"""Bound of a shape's product with zeros taken as ones: beyond it the strides of an empty tensor could overflow."""
MAX_DIMS = 16
"""Most dimensions of a tensor that may cross."""
FRAME_BYTES = 8 << 20
"""Longest frame: as much memory is taken for whoever connects, before the job's keys are proved."""


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's type, as its position in `DTYPES`, and its shape."""

    dtype: int
    shape: tuple[int, ...]


class Malformed(ValueError):
    """A message that no honest peer sends: its header is none, or a frame is not the tensor that it announces."""


def spec_of(tensor: Tensor) -> Spec:
    """What the header says of a tensor; raises `RunError` for a type or so many dimensions that cannot cross."""
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.dim() > MAX_DIMS:
        raise RunError(f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot cross the wire")
    return Spec(code, tuple(tensor.shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory; of a copy if it is not contiguous or not on the CPU."""
    # every step takes about as long as the others, so each is left out where it would do nothing
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    flat = tensor.contiguous().flatten()
    # through uint8, because numpy does not know bfloat16
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def frames_of(memory: memoryview) -> Iterator[memoryview]:
    """A tensor's memory in frames, one unless it is long."""
    for start in range(0, len(memory) or 1, FRAME_BYTES):
        yield memory[start : start + FRAME_BYTES]


def tensor_of(frame: Any, spec: Spec) -> Tensor:
    """The tensor in a received frame (any writable buffer of bytes), which it keeps alive and does not copy.

    Raises:
        Malformed: type, shape and length do not fit each other; nothing was allocated.
    """
    length = _byte_count(spec)
    dtype = DTYPES[spec.dtype]
    if length != len(frame):
        raise Malformed(f"a frame of {len(frame)} bytes came for a tensor of {length}")
    if not length:
        return torch.empty(spec.shape, dtype=dtype)
    flat = torch.frombuffer(frame, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:  # possible for short frames, which lie inside a longer buffer
        flat = flat.clone()
    return flat if len(spec.shape) == 1 else flat.view(spec.shape)


def _byte_count(spec: Spec) -> int:
    if not 0 <= spec.dtype < len(DTYPES):
        raise Malformed(f"type {spec.dtype} is unknown")
    if len(spec.shape) > MAX_DIMS:
        raise Malformed(f"{len(spec.shape)} dimensions are too many")
    elements = bound = 1
    for size in spec.shape:
        elements *= size
        bound *= size or 1
        if size < 0 or bound > _ELEMENTS:
            raise Malformed(f"{spec.shape} is no shape")
    return elements * DTYPES[spec.dtype].itemsize


def tensors_of(frames: Sequence[Any], *messages: Sequence[Spec]) -> list[tuple[Tensor, ...]]:
    """The tensors of each message that the frames belong to; those that came in several frames are copied.

    Raises:
        Malformed: as `tensor_of`, or another number of frames than announced.
    """
    counts = [[max(1, -(-_byte_count(spec) // FRAME_BYTES)) for spec in specs] for specs in messages]
    if len(frames) != sum(map(sum, counts)):
        raise Malformed(f"{len(frames)} frames came for {sum(map(len, messages))} tensors")
    coming = iter(frames)
    return [
        tuple(
            tensor_of(next(coming) if n == 1 else _joined([next(coming) for _ in range(n)]), spec)
            for n, spec in zip(own, specs, strict=True)
        )
        for own, specs in zip(counts, messages, strict=True)
    ]


def _joined(frames: Sequence[Any]) -> Any:
    if not all(map(len, frames)):
        raise Malformed("an empty frame came for a part of a tensor")
    return torch.cat([torch.frombuffer(frame, dtype=torch.uint8) for frame in frames]).numpy().data


_LENGTH = 4
"""Bytes of the number that says how long the header of a bundle is."""
_BUNDLE = msgspec.msgpack.Decoder(tuple[tuple[Spec, ...], tuple[Annotated[int, msgspec.Meta(ge=0)], ...]])
"""Reads that header: what the tensors are, and how many bytes each takes."""


def bundle(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as bytes (uint8, one dimension): a header that says what they are, then their memory."""
    return torch.frombuffer(bytearray(b"".join((_bundle_header(tensors), *map(bytes_of, tensors)))), dtype=torch.uint8)


def bundle_length(tensors: Sequence[Tensor]) -> int:
    """Of their `bundle`, which is not made."""
    return len(_bundle_header(tensors)) + sum(tensor.nbytes for tensor in tensors)


def _bundle_header(tensors: Sequence[Tensor]) -> bytes:
    header = msgspec.msgpack.encode((tuple(map(spec_of, tensors)), tuple(tensor.nbytes for tensor in tensors)))
    return len(header).to_bytes(_LENGTH, "big") + header


def unbundle(row: Tensor) -> tuple[Tensor, ...]:
    """The tensors that `bundle` made the bytes of, whose memory they may share; raises `DataError` if it did not."""
    data = row.numpy().data
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
    try:
        specs, sizes = _BUNDLE.decode(data[_LENGTH:end])
        edges = list(accumulate(sizes, initial=end))
        frames = [data[start:stop] for start, stop in pairwise(edges)]
        return tensors_of(frames, specs)[0]
    except (msgspec.DecodeError, Malformed) as error:
        raise DataError(f"{len(data)} bytes are no tensors: {error}") from error
