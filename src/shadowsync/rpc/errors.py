"""Errors of the wire, and how any of shadowsync's errors crosses it: by name, never as an object."""

from collections.abc import Iterator

import msgspec

from shadowsync.errors import RunError, ShadowSyncError


class PeerLost(RunError):
    """The other end was given up, has forgotten this client, or the connection was closed."""


class CallTimeout(RunError):
    """No answer came within the deadline of the call."""


GONE = (PeerLost, CallTimeout)
"""How the death of a peer shows in a call."""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses the wire: its sentence, and the names of its class and of that one's bases, nearest first,
    up to `ShadowSyncError`."""

    kinds: tuple[str, ...]
    message: str

    @classmethod
    def of(cls, error: ShadowSyncError) -> "Fault":
        kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, ShadowSyncError)]
        return cls(tuple(kinds), str(error))

    def error(self) -> ShadowSyncError:
        """The error again: of the same class, or where this process does not know it of its nearest known base."""
        known = {kind.__name__: kind for kind in _descendants(ShadowSyncError)}
        kind = next((known[name] for name in self.kinds if name in known), ShadowSyncError)
        # past __init__: a class may build its message from arguments that did not cross
        error = kind.__new__(kind, self.message)
        error.args = (self.message,)
        return error


def _descendants(kind: type[ShadowSyncError]) -> Iterator[type[ShadowSyncError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _descendants(child)
