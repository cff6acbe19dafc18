"""What the driver and a trainer say to each other."""

from shadowsync.rpc.errors import Fault
from shadowsync.rpc.service import Meta
from shadowsync.training.kernels import Computing

SKETCH = 4096
"""Coordinates of a replica that a status brings, so that the driver knows how far apart replicas are."""


class TrainerStatus(Meta, frozen=True):
    """How a trainer is; its one tensor are at most `SKETCH` coordinates of the replica, the same of every trainer.

    Attributes:
        syncs: synchronisations so far.
        ended: all its workers have ended, and the driver knows all that they did.
        lost: it died by script.
        fault: what went wrong, if anything did.
        wire: what crossed so far, as `metrics.wire.WireTotals.by_name`.
        waiting: batches parsed and not begun.
        codecs: by kind of traffic, the codec in use where the trainer chooses it.
        first, decisions: how it came to them, in sentences, from number `first` on.
        computing: how its workers compute.
        waiting_for: what it has waited for too long, as `waiting_for` says it; empty for nothing.
    """

    syncs: int
    ended: bool
    lost: bool
    fault: Fault | None
    wire: dict[str, dict[str, int]]
    waiting: int
    codecs: dict[str, str]
    first: int
    decisions: tuple[str, ...]
    computing: Computing | None
    waiting_for: str = ""


class StatusAsked(Meta, frozen=True):
    """Asks for a `TrainerStatus`; `heard` sentences are known already."""

    heard: int


class HoldAsked(Meta, frozen=True):
    """Stand still for pause `number`; answered as soon as that is so, or after `patience_s` at the latest."""

    number: int
    patience_s: float


class Released(Meta, frozen=True):
    """Pause `number` and all before it have ended, also for a `HoldAsked` that comes later."""

    number: int


class Held(Meta, frozen=True):
    """Whether the trainer stands still, and all that it did is where it belongs."""

    still: bool


class Moved(Meta, frozen=True):
    """A server of this kind (`embedding`, `dense` or `reader`) was replaced and is reached at another address.

    Attributes:
        kind: of the server.
        index: of the server; for `reader` 0, since a trainer knows one.
        address: the new one.
    """

    kind: str
    index: int
    address: str


class SliceAsked(Meta, frozen=True):
    """Where does a slice of the training rows come from?"""

    slice: int


class SlicePlace(Meta, frozen=True):
    """For messages: `the 8192 rows from rows.tsv, row 17 on`."""

    words: str
