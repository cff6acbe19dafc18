"""Tensors as one row of bytes, for what carries nothing else: a header that says what they are, then their memory."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from shadowsync.errors import DataError
from shadowsync.rpc.tensors import Misfit, Spec, bytes_of, spec_of, tensors_of

_LENGTH = 4
"""Bytes of the number that says how long the header is."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    specs: tuple[Spec, ...]
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


def bundle(frames: Sequence[Tensor]) -> Tensor:
    """The tensors as bytes (uint8, one dimension)."""
    parts = [bytes_of(frame) for frame in frames]
    header = _ENCODER.encode(_Header(tuple(map(spec_of, frames)), tuple(map(len, parts))))
    return torch.frombuffer(
        bytearray(b"".join((len(header).to_bytes(_LENGTH, "big"), header, *parts))), dtype=torch.uint8
    )


def frames_of(row: Tensor) -> tuple[Tensor, ...]:
    """The tensors that `bundle` made the bytes of; they may share its memory.

    Raises:
        DataError: it made none of these.
    """
    data = row.numpy().data
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
    try:
        header = _DECODER.decode(data[_LENGTH:end])
        edges = list(accumulate(header.sizes, initial=end))
        frames = [data[start:stop] for start, stop in pairwise(edges)]
        return tensors_of(frames, header.specs)[0]
    except (msgspec.DecodeError, Misfit) as error:
        raise DataError(f"{len(data)} bytes are no tensors: {error}") from error
