"""What crosses between trainers, the desk and readers: leases, claims, batches."""

from shadowsync.data.leases import Lease
from shadowsync.rpc.service import Meta


class LeaseInfo(Meta, frozen=True):
    """A `data.leases.Lease`."""

    number: int
    trainer: int
    epoch: int
    slice: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lease: Lease) -> "LeaseInfo":
        """What crosses for a lease."""
        return cls(lease.number, lease.trainer, lease.epoch, lease.slice, lease.spans)

    def lease(self) -> Lease:
        """The lease again."""
        return Lease(self.number, self.trainer, self.epoch, self.slice, self.spans)


class LeaseAsked(Meta, frozen=True):
    """A trainer wants rows; an idle one also those that others have not begun."""

    trainer: int
    idle: bool


class OpenedAsked(Meta, frozen=True):
    """The slice of a lease has so many good rows."""

    lease: int
    rows: int


class Rows(Meta, frozen=True):
    """Rows `start … stop − 1` of a lease."""

    lease: int
    start: int
    stop: int


class DoneTold(Meta, frozen=True):
    """What was trained."""

    done: tuple[Rows, ...]


class ClaimAsked(Meta, frozen=True):
    """Rows that somebody wants to train now, and what was trained since the message before."""

    rows: Rows
    done: tuple[Rows, ...]


class DeskStatus(Meta, frozen=True):
    """How things stand; comes with every reply of the desk.

    Attributes:
        version: as `Leasing.version`.
        finished: as `Leasing.finished`.
        trained: rows, all epochs.
    """

    version: int
    finished: bool
    trained: int


class LeaseGiven(Meta, frozen=True):
    """A lease, or None."""

    status: DeskStatus
    lease: LeaseInfo | None


class ClaimGiven(Meta, frozen=True):
    """A claim; `number` is −1 where the rows are not the caller's any more."""

    status: DeskStatus
    number: int
    stop: int


class Held(Meta, frozen=True):
    """Whether the lease is still the caller's."""

    status: DeskStatus
    held: bool


class ParsedInfo(Meta, frozen=True):
    """A `data.parsing.Parsed`; its tensors follow: labels, dense, values and, where they are, offsets and weights.

    Attributes:
        rows: good rows of the slice.
        spans: of each batch.
        feature_count: `F`.
        parts: of each batch: 4 if it has offsets, and 1 if it has weights, added up.
    """

    rows: int
    spans: tuple[tuple[int, int], ...]
    feature_count: int
    parts: tuple[int, ...]
