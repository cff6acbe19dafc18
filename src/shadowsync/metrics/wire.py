"""Counts the bytes that cross between roles, or would if they stood on different machines."""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class WireTotals:
    """Bytes so far, by kind of message (`pull`, `push`, `dense`).

    Attributes:
        bytes: as sent: with codecs applied, ids and offsets included, headers of the transport left out.
        raw_bytes: what the same messages take with every float as fp32.
    """

    bytes: dict[str, int]
    raw_bytes: dict[str, int]


class WireCounter:
    """Adds up bytes from any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._raw: dict[str, int] = {}

    def add(self, kind: str, sent: int, raw: int) -> None:
        """Counts one message: `sent` bytes of it on the wire, `raw` bytes of it uncompressed."""
        with self._lock:
            self._sent[kind] = self._sent.get(kind, 0) + sent
            self._raw[kind] = self._raw.get(kind, 0) + raw

    def totals(self) -> WireTotals:
        """A consistent copy of the sums."""
        with self._lock:
            return WireTotals(dict(self._sent), dict(self._raw))
