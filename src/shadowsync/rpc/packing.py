"""Typed parts and tensors, on their way to frames."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowsync.errors import RunError
from shadowsync.rpc.ledger import Frames
from shadowsync.rpc.messages import MAX_TENSORS, META_BYTES
from shadowsync.rpc.service import Meta, encode_meta
from shadowsync.rpc.tensors import Spec, bytes_of, frames_of, spec_of


@dataclass(frozen=True, slots=True)
class Cargo:
    """What a message carries: the typed part, what the header says of the tensors, and their own memory."""

    meta: bytes
    specs: tuple[Spec, ...]
    frames: Frames

    @classmethod
    def of(cls, meta: Meta | None, tensors: Sequence[Tensor], max_message_bytes: int) -> "Cargo":
        """The cargo, with no tensor copied that is contiguous and on the CPU.

        Raises:
            RunError: a tensor or the typed part is too long, there are too many tensors, or a type cannot cross.
        """
        if len(tensors) > MAX_TENSORS:
            raise RunError(f"a message has {len(tensors)} tensors, and at most {MAX_TENSORS} are allowed")
        memory = [bytes_of(tensor) for tensor in tensors]
        frames = [frame for tensor in memory for frame in frames_of(tensor)]
        cargo = cls(encode_meta(meta), tuple(map(spec_of, tensors)), frames)
        longest = max(map(len, memory), default=0)
        if longest > max_message_bytes:
            raise RunError(f"a tensor has {longest} bytes, and at most {max_message_bytes} are allowed on the wire")
        if len(cargo.meta) > META_BYTES:
            raise RunError(
                f"a typed part has {len(cargo.meta)} bytes, and at most {META_BYTES} are allowed on the wire"
            )
        return cargo
