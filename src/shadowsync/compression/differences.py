"""A vector that both sides know crosses as the difference from what the receiver has, as the codec lets it pass.

`p` elements.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.channel import Channel, Stream
from shadowsync.compression.codec import Codec, Encoded, received
from shadowsync.errors import DataError


@dataclass(frozen=True)
class Message:
    """What crosses of a vector, in either direction.

    Attributes:
        frames: of the codec.
        whole: nothing is left out; where differences may cross, the one frame is the float32 vector itself.
        kept: number of elements that cross, of a difference; `refreshes` and `early` as in `Encoded`.
    """

    frames: tuple[Tensor, ...]
    whole: bool = True
    kept: int = 0
    refreshes: int = 0
    early: int = 0

    @classmethod
    def of_difference(cls, encoded: Encoded) -> "Message":
        """A difference as it was encoded."""
        return cls(encoded.frames, False, encoded.kept_count, encoded.refreshes, encoded.early)

    def count(self, channel: Channel, elements: int) -> None:
        """Counts the message, of a vector of so many elements."""
        channel.count(sum(frame.nbytes for frame in self.frames), elements * torch.float32.itemsize)
        if not self.whole and channel.codec.sparse:
            channel.count_kept(elements, self.kept, self.refreshes, self.early)


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

    def encode(self, codec: Codec, vector: Tensor) -> Message:
        """The next message; this end counts on its arrival."""
        self._begin(codec)
        if codec.everything:
            return Message((vector,))
        if self.known is None:
            self.known = vector.clone()  # who trains goes on writing to it
            return Message((self.known.clone(),))
        encoded = self._stream.encode(vector - self.known)
        self.known.add_(self._stream.codec.decode(encoded.frames, encoded.shape))
        return Message.of_difference(encoded)

    def take(self, codec: Codec, message: Message, shape: tuple[int, ...]) -> Tensor | None:
        """The receiver's end: what is known after that message; None if it needs one before that never came.

        Raises:
            DataError: the frames are none of such a message.
        """
        self._begin(codec)
        frames = message.frames
        if message.whole:
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
