"""The codec that a message names, checked where it is received."""

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
