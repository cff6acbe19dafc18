"""A vector that both sides know crosses as the difference from what the receiver has, as the codec lets it pass.

`p` elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shadowsync.compression.channel import Stream
from shadowsync.compression.codec import Codec, Encoded, received
from shadowsync.errors import DataError


class Differences:
    """What the receiver has of the sender's vector, kept alike at both ends, bit for bit.

    The first message is the vector in float32, each further one `Q(w − known)`, and both ends add that. What the codec
    leaves out stays in the difference, so that there is no residual to keep, and none to lose: a side that forgot, or
    took another's place, gets the vector again, and so does whoever is sent another codec's messages. Where nothing is
    left out every message is the vector, and nothing is known.

    Args:
        about: what messages are called in errors.

    Attributes:
        known: `[p]`, None before the first message; not to be kept by the caller.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._codec: Codec | None = None
        self.known: Tensor | None = None

    def encode(self, codec: Codec, vector: Tensor) -> tuple[Encoded, bool]:
        """The next message, and whether it is the vector itself; this end counts on its arrival."""
        self._begin(codec)
        if codec.everything:
            return Encoded((vector,), tuple(vector.shape)), True
        if self.known is None:
            self.known = vector.clone()  # who trains goes on writing to it
            return Encoded((self.known.clone(),), tuple(vector.shape)), True
        encoded = self._stream.encode(vector - self.known)
        self.known.add_(self._stream.codec.decode(encoded.frames, encoded.shape))
        return encoded, False

    def take(self, codec: Codec, frames: Sequence[Tensor], shape: tuple[int, ...], whole: bool) -> Tensor | None:
        """The receiver's end: what is known after that message; None if it needs one before that never came.

        Raises:
            DataError: the frames are none of such a message.
        """
        self._begin(codec)
        if whole:
            if len(frames) != 1 or frames[0].shape != shape or frames[0].dtype != torch.float32:
                raise DataError(
                    f"the frames of {self._about} are none of codec {codec.name}: {len(frames)} are not a float32 "
                    f"vector {list(shape)}"
                )
            if codec.everything:
                return frames[0]
            self.known = frames[0].clone()
        elif self.known is not None:
            with received(self._about, codec):
                self.known.add_(self._stream.codec.decode(frames, shape))
        return self.known

    def forget(self) -> None:
        """It is not known what arrived."""
        self.known = None

    def moved(self, by: Tensor) -> None:
        """Both ends know that the sender took so much off its vector."""
        if self.known is not None:
            self.known.sub_(by)

    def _begin(self, codec: Codec) -> None:
        if codec is not self._codec and (self._codec is None or codec.name != self._codec.name):
            self._codec, self.known = codec, None
            self._stream = Stream(codec.of_differences(), self._about)
