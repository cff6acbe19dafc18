"""Frames and the codec that a message names, checked where they are received."""

from collections.abc import Iterator
from contextlib import contextmanager

from shadowsync.compression.codec import Codec
from shadowsync.errors import DataError


def rung(codec: Codec, name: str) -> Codec:
    """As `Codec.rung`, for names that came over the wire.

    Raises:
        DataError: messages may not be in such a codec.
    """
    try:
        return codec.rung(name)
    except ValueError as error:
        raise DataError(f"a message names what its receiver does not take: {error}") from error


@contextmanager
def received(what: str, codec: Codec) -> Iterator[None]:
    """Around the decoding of frames that came over the wire: a codec does not expect what it did not make.

    Args:
        what: the frames are of, for errors.
        codec: that they should be of.

    Raises:
        DataError: in place of whatever the codec raises.
    """
    try:
        yield
    except Exception as error:
        raise DataError(f"the frames of {what} are none of codec {codec.name}") from error
