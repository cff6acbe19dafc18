"""Tensors as bytes: the safetensors layout, written in one pass from the tensors' own memory, with block checksums.

The safetensors library writes a file only as a whole and to a local path; here the header and then each tensor go out
in chunks, so that any file system takes them, no copy is made, and the checksums cost no second reading. The files
are plain safetensors files, which the library opens.
"""

import json
from collections.abc import Collection, Iterator, Sequence

import torch
from isal.isal_zlib import crc32
from torch import Tensor

Chunk = bytes | memoryview
CHUNK_BYTES = 4 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def place(tensors: Sequence[tuple[str, Tensor]], late: Collection[str] = ()) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file, and at which byte of it each tensor begins, in the order of the file.

    Tensors of wider elements come first, so that each stands at a multiple of its element's width.

    Args:
        tensors: by name.
        late: names of tensors that come behind all others; those of wider elements stand in their place if the others
            all have elements of one width.

    Raises:
        ValueError: two tensors have one name, or a dtype has no code.
    """
    if len({name for name, _ in tensors}) < len(tensors):
        raise ValueError(f"names of tensors are not unique: {', '.join(name for name, _ in tensors)}")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    widths: dict[str, int] = {}
    stop = 0
    for name, tensor in sorted(tensors, key=lambda item: (item[0] in late, -item[1].element_size())):
        if tensor.dtype not in CODES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}, which checkpoints do not hold")
        begins[name], widths[name] = stop, tensor.element_size()
        stop += tensor.nbytes
        offsets = [begins[name], stop]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    fits = (n for n in range(8) if not any((len(text) + n + begins[name]) % widths[name] for name in begins))
    text += b" " * next(fits, -len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in views of at most `CHUNK_BYTES`."""
    view = bytes_of(tensor.detach().cpu().contiguous())
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    """Writable view of the bytes of a contiguous CPU tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


class BlockSums:
    """CRC-32 of each block of `block_bytes` of a stream, the last one shorter.

    A checksum per block lets a reader check exactly what it reads, be it one row, in the same pass.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.sums: list[int] = []
        self.total_bytes = 0

    def add(self, chunk: Chunk) -> None:
        """Goes on with the next bytes of the stream."""
        view = memoryview(chunk)
        while view:
            used = self.total_bytes % self.block_bytes
            part = view[: self.block_bytes - used]
            if used == 0:
                self.sums.append(0)
            self.sums[-1] = crc32(part, self.sums[-1])
            self.total_bytes += len(part)
            view = view[len(part) :]
