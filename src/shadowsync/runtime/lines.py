"""What crosses between two roles: tensors pass a codec and are counted, also where nothing is really sent."""

from dataclasses import dataclass

from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.metrics.wire import WireCounter


@dataclass(frozen=True)
class Line:
    """One direction of traffic of one kind (`pull`, `push` or `dense`)."""

    kind: str
    codec: Codec
    counter: WireCounter

    def send(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """The float32 tensor as the receiver sees it; `times` messages of its size are counted."""
        encoded = self.codec.encode(tensor)
        raw = tensor.numel() * tensor.element_size()
        self.counter.add(self.kind, round(encoded.byte_count * times), round(raw * times))
        return self.codec.decode(encoded.frames, encoded.shape)
