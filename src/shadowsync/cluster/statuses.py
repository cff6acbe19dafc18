"""What the driver knows of its trainers: asked about once a second, added up over those that are no more."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from shadowsync.cluster.supervisor import Member
from shadowsync.cluster.trainer import TrainerPart, TrainerStatus
from shadowsync.compression.wire import WireTotals
from shadowsync.embedding.keys import Counts
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.storage import StorageCounts
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.errors import GONE, Fault
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import later
from shadowsync.training.kernels import Computing

NOTHING_YET = TrainerStatus(0, False, False, None, WireTotals(), 0, {}, 0, (), None)


@dataclass
class _Seen:
    """What a trainer said last."""

    asked_at: float = 0.0
    asked: Pending[TrainerStatus] | None = None
    status: TrainerStatus = NOTHING_YET
    heard: int = 0
    untold: list[str] = field(default_factory=list)

    def hear(self, answered: Pending[TrainerStatus]) -> TrainerStatus:
        """Takes note of a status, which was asked for sentences that were not heard; why it has none is a fault.

        Raises:
            PeerLost, CallTimeout: the trainer is gone.
        """
        try:
            self.status = answered.result()
        except GONE:
            raise
        except ShadowSyncError as error:
            return replace(self.status, fault=Fault.of(error))
        self.untold += self.status.decisions
        self.heard = self.status.first + len(self.status.decisions)
        return self.status


@dataclass
class Statuses:
    """The trainers at work, with what each said last; any thread may ask.

    Args:
        wake: called when an answer has come.
    """

    wake: Callable[[], None]
    _seen: dict[Member, _Seen] = field(default_factory=dict)
    _syncs: int = 0
    _wire: WireTotals = field(default_factory=WireTotals)

    def add(self, member: Member) -> None:
        """Its part is in place."""
        self._seen[member] = _Seen()

    def forget(self, member: Member) -> None:
        """It is no more; its counts stay."""
        seen = self._seen.pop(member, None)
        if seen is not None:
            self._syncs += seen.status.syncs
            self._wire = self._wire.plus(seen.status.wire)

    def begin(self) -> None:
        """A new generation: nobody is at work, and nothing is counted yet."""
        self._seen.clear()
        self._syncs, self._wire = 0, WireTotals()

    def at_work(self) -> list[Member]:
        return sorted([member for member in list(self._seen) if member.living], key=lambda member: member.index)

    def of(self, member: Member) -> TrainerStatus:
        seen = self._seen.get(member)
        return NOTHING_YET if seen is None else seen.status

    def ask(self, every_s: float) -> list[tuple[Member, TrainerStatus]]:
        """Asks whoever was not asked for so long; the answers that have come since the last call."""
        now, heard = time.monotonic(), []

        def hear(member: Member, seen: _Seen) -> None:
            if seen.asked is not None and seen.asked.done():
                answered, seen.asked = seen.asked, None
                with contextlib.suppress(*GONE):  # the supervisor finds out why
                    heard.append((member, seen.hear(answered)))

        for member, seen in list(self._seen.items()):
            hear(member, seen)
            if seen.asked is None and member.living and now - seen.asked_at >= every_s:
                seen.asked_at, seen.asked = now, later(member.connection, TrainerPart.status, seen.heard)
                if seen.asked.done():  # who is in this process has answered
                    hear(member, seen)
                else:
                    seen.asked.then(lambda _: self.wake())
        return heard

    def syncs(self) -> int:
        return self._syncs + sum(seen.status.syncs for seen in list(self._seen.values()))

    def wire(self) -> WireTotals:
        """What crossed in this generation."""
        total = self._wire
        for seen in list(self._seen.values()):
            total = total.plus(seen.status.wire)
        return total

    def untold(self, member: Member) -> Sequence[str]:
        """What it has decided and nobody was told yet."""
        seen = self._seen.get(member)
        if seen is None:
            return ()
        decisions, seen.untold = seen.untold, []
        return decisions

    def codecs(self) -> dict[str, tuple[str, ...]]:
        """By kind of traffic, the codecs that trainers have chosen, each once."""
        chosen = [seen.status.codecs for seen in list(self._seen.values())]
        kinds = {kind: None for codecs in chosen for kind in codecs}
        return {kind: tuple(dict.fromkeys(codecs[kind] for codecs in chosen if kind in codecs)) for kind in kinds}

    def computing(self) -> list[Computing]:
        """How workers compute, each way once."""
        told = [seen.status.computing for seen in list(self._seen.values())]
        return list(dict.fromkeys(computing for computing in told if computing is not None))

    def sketches(self) -> list[Tensor]:
        """The same coordinates of each replica."""
        return [sketch for seen in list(self._seen.values()) if (sketch := seen.status.sketch) is not None]

    def waiting(self) -> dict[str, int]:
        return {member.role: seen.status.waiting for member, seen in list(self._seen.items())}


C = TypeVar("C", Counts, StorageCounts)


@dataclass
class ServerCounts(Generic[C]):
    """What each embedding server said last when it was asked to count something, if it has that."""

    method: Callable[[EmbeddingService], C | None]
    _asked: dict[str, Pending[C | None]] = field(default_factory=dict)
    _heard: dict[str, C] = field(default_factory=dict)

    def ask(self, members: Sequence[Member], wait_s: float = 0.0) -> dict[str, int]:
        """All together; asks those that have answered again, and waits so long for all of them. Empty if nobody has
        it."""
        for member in members:
            if member.role not in self._asked:
                self._asked[member.role] = later(member.connection, self.method)
        until = time.monotonic() + wait_s
        for role, pending in list(self._asked.items()):
            with contextlib.suppress(ShadowSyncError):
                if pending.done() or wait_s:
                    del self._asked[role]
                    counts = pending.result(max(0.0, until - time.monotonic()))
                    self._heard |= {} if counts is None else {role: counts}
        heard = iter(self._heard.values())
        total = next(heard, None)
        for counts in heard:
            total = total and total.plus(counts)
        return {} if total is None else asdict(total)
