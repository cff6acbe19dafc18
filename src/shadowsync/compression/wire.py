"""Counts what crosses between roles, or would if they stood on different machines."""

import threading
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class WireTotals:
    """What crossed so far, by kind of message (`pull`, `push`, `dense`).

    Attributes:
        bytes: as sent: with codecs applied, ids and offsets included, headers of the transport left out.
        raw_bytes: what the same messages take with every float as fp32.
        elements: floats in the messages of codecs that send a part of them.
        kept: those of them that crossed.
        refreshes: thresholds chosen for that; a parameter of the dense part counts by itself.
        early: those chosen early, because the share that crosses had left its band.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    raw_bytes: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    refreshes: dict[str, int] = field(default_factory=dict)
    early: dict[str, int] = field(default_factory=dict)

    @property
    def kept_shares(self) -> dict[str, float]:
        """By kind, the share of elements that crossed; kinds that cross whole are left out."""
        return {kind: self.kept.get(kind, 0) / count for kind, count in self.elements.items() if count > 0}

    def plus(self, other: "WireTotals") -> "WireTotals":
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        return WireTotals(*({kind: a.get(kind, 0) + b.get(kind, 0) for kind in {**a, **b}} for a, b in pairs))


class WireCounter:
    """Adds up what crosses, from any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = WireTotals()

    def add(self, kind: str, sent: int, raw: int) -> None:
        """Counts one message: `sent` bytes of it on the wire, `raw` bytes of it uncompressed."""
        self._add(kind, bytes=sent, raw_bytes=raw)

    def add_kept(self, kind: str, elements: int, kept: int, refreshes: int, early: int) -> None:
        """Counts of one message the elements, those that crossed, and the thresholds chosen for it."""
        self._add(kind, elements=elements, kept=kept, refreshes=refreshes, early=early)

    def _add(self, kind: str, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                sums = getattr(self._totals, name)
                sums[kind] = sums.get(kind, 0) + amount

    def totals(self) -> WireTotals:
        """A consistent copy of the sums."""
        with self._lock:
            return self._totals.plus(WireTotals())
