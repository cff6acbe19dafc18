"""How parameters come back to a worker of a gradient method: all of them, or what has changed.

`P` elements of the flat tensor.
"""

import threading
from dataclasses import dataclass

from torch import Tensor

from shadowsync.aggregation.stepping import Version
from shadowsync.compression.channel import Line
from shadowsync.compression.codec import Codec
from shadowsync.compression.mirror import Mirror
from shadowsync.compression.plain import Plain
from shadowsync.compression.rungs import received
from shadowsync.errors import DataError


@dataclass(frozen=True)
class Message:
    """Parameters on their way to a worker.

    Attributes:
        version: their number.
        frames: of the codec.
        serial: counts the messages to this worker, from 1 on.
        whole: all of them come, and not what has changed since the version that the worker has.
        kept, refreshes, early: as in `Encoded`.
    """

    version: int
    frames: tuple[Tensor, ...]
    serial: int
    whole: bool = True
    kept: int = 0
    refreshes: int = 0
    early: int = 0


class _Mirrored:
    """What the worker has; with another codec both ends begin anew."""

    def __init__(self, about: str) -> None:
        self._about, self._name = about, ""
        self._now: Mirror | None = None

    def under(self, codec: Codec) -> Mirror:
        """The mirror of messages in that codec."""
        if self._now is None or self._name != codec.name:
            self._now, self._name = Mirror(codec.of_differences(), self._about), codec.name
        return self._now

    def drop(self) -> None:
        """Whole parameters cross without one: what comes after them begins anew."""
        self._now = None


class ParameterSender:
    """The dense server's end towards one worker.

    Unless the codec keeps everything, parameters cross as the difference from what the worker has (`Mirror`): what a
    codec leaves out or rounds off comes when it has grown. The worker says which message it had last; where that is not
    the one sent last, because an answer was lost or made twice or the worker is new, it gets them whole. Versions would
    not do: two messages may bring the same one, and leave different things out.

    Ours differs from DCT-DP (arXiv 2010.08899), where every trainer makes the step itself from the sum of the sparse
    gradients: here the optimizer is the server's, and may move every parameter in each step (Adam does).

    Args:
        about: what messages are called in errors.
    """

    def __init__(self, about: str) -> None:
        self._mirror = _Mirrored(about)
        self._serial = 0
        self._lock = threading.Lock()

    def answer(self, codec: Codec, version: Version, having: int) -> Message:
        """The message in that codec that brings a worker to this version, who had message `having` last."""
        flat = version.flat.cpu()
        with self._lock:
            expected, self._serial = self._serial, self._serial + 1
            serial = self._serial
            if codec.everything:
                self._mirror.drop()
                return Message(version.number, Plain().encode(flat).frames, serial)
            mirror = self._mirror.under(codec)
            if having != expected:
                mirror.forget()
            encoded, whole = mirror.encode(flat)
        told = encoded.kept_count, encoded.refreshes, encoded.early
        return Message(version.number, encoded.frames, serial, whole, *told)


class ParameterReceiver:
    """The worker's end.

    Args:
        line: of the dense part.
        length: `P`.

    Attributes:
        having: the serial number of the last message; 0 before the first.
    """

    def __init__(self, line: Line, length: int) -> None:
        self.having = 0
        self._line, self._length = line, length
        self._mirror = _Mirrored("the dense parameters")

    def take(self, codec: Codec, message: Message) -> Version:
        """The parameters after a message in that codec, counted.

        Raises:
            DataError: it goes on from a message that never came, or the frames are none of such a message.
        """
        with received("the dense parameters", codec):
            flat = self._decoded(codec, message)
        if flat is None:
            raise DataError("the dense server sent what has changed to a worker that has nothing")
        if flat.shape != (self._length,):
            raise DataError(f"the dense server sent {list(flat.shape)} parameters to a model of {self._length}")
        self.having = message.serial
        self._line.count(sum(frame.nbytes for frame in message.frames), flat.nbytes)
        if codec.sparse and not message.whole:
            self._line.count_kept(self._length, message.kept, message.refreshes, message.early)
        return Version(message.version, flat)

    def _decoded(self, codec: Codec, message: Message) -> Tensor | None:
        if codec.everything:
            self._mirror.drop()
            return Plain().decode(message.frames, (self._length,))
        known = self._mirror.under(codec).take(message.frames, (self._length,), message.whole)
        return None if known is None else known.clone()  # the next message is added to it
