"""A vector that two sides know: it crosses as the difference from what the receiver has.

`p` elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shadowsync.compression.channel import Encoder
from shadowsync.compression.codec import Codec, Encoded


class Mirror:
    """What the receiver has of the sender's vector, kept alike at both ends, bit for bit.

    The first message is the vector in float32, each further one `Q(w − known)`, and both ends add that. What the codec
    leaves out stays in the difference, so that there is no residual to keep, and none to lose: a side that forgot, or
    took another's place, gets the vector again.

    Args:
        codec: any, as `Codec.of_differences` has it.
        about: what messages are called in errors.

    Attributes:
        known: `[p]`, None before the first message; not to be kept by the caller.
    """

    def __init__(self, codec: Codec, about: str) -> None:
        self.known: Tensor | None = None
        self._codec = codec
        self._encoder = Encoder(codec, about)

    def encode(self, vector: Tensor) -> tuple[Encoded, bool]:
        """The next message, and whether it is the vector itself; this end counts on its arrival."""
        if self.known is None or self._codec.everything:
            self.known = vector.clone()  # who trains goes on writing to it
            return Encoded((self.known.clone(),), tuple(vector.shape)), True
        encoded = self._encoder.encode(vector - self.known)
        self.known.add_(self._codec.decode(encoded.frames, encoded.shape))
        return encoded, False

    def take(self, frames: Sequence[Tensor], shape: tuple[int, ...], whole: bool) -> Tensor | None:
        """The receiver's end: what is known after that message; None if it needs one before that never came.

        Raises:
            ValueError: the frames are none of such a message; as `Codec.decode` otherwise.
        """
        if whole:
            if len(frames) != 1 or frames[0].shape != shape or frames[0].dtype != torch.float32:
                raise ValueError(f"{len(frames)} frames are not a vector {list(shape)}")
            self.known = frames[0].clone()
        elif self.known is not None:
            self.known.add_(self._codec.decode(frames, shape))
        return self.known

    def forget(self) -> None:
        """It is not known what arrived."""
        self.known = None

    def moved(self, by: Tensor) -> None:
        """Both ends know that the sender took so much off its vector."""
        if self.known is not None:
            self.known.sub_(by)
