"""Processes that take a role's place while the others go on: each gets its part and what it has to know."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.cluster.crew import Crew
from shadowsync.cluster.dense_side import DenseSide
from shadowsync.cluster.images import Images
from shadowsync.cluster.staff import Member
from shadowsync.data.reader import Reader
from shadowsync.rpc.errors import GONE
from shadowsync.runtime.runtime import Order
from shadowsync.session import Newest, ServerLoss

LOOK_S = 0.05


@dataclass
class _Outage:
    """Embedding servers that died at once.

    Attributes:
        at: when.
        samples: trained then.
        servers: which.
        missing: those that are not there again.
        loaded, loaded_samples: the oldest checkpoint that one of them took its rows from.
        restart_s, load_s: of the slowest of them.
    """

    at: float
    samples: int
    servers: tuple[int, ...]
    missing: set[int]
    loaded: str | None = None
    loaded_samples: int | None = None
    restart_s: float = 0.0
    load_s: float = 0.0

    def loss(self) -> ServerLoss:
        """As it is reported."""
        loaded_samples = self.loaded_samples or 0
        return ServerLoss(self.servers, self.samples, None, self.loaded, loaded_samples, self.restart_s, self.load_s)


@dataclass
class Newcomers:
    """Puts newcomers to work; any thread, several at a time.

    Attributes:
        dense: the dense part.
        newest: opens the checkpoint from which an embedding server takes its rows.
        crew, images: of the session.
        losses: embedding servers that died and are there again.
    """

    dense: DenseSide
    newest: Newest
    crew: Crew
    images: Images
    losses: deque[ServerLoss] = field(default_factory=deque)
    _outages: list[_Outage] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def died(self, members: Sequence[Member], samples: int) -> None:
        """Embedding servers died at once after so many samples; one that was not there again yet counts from before."""
        with self._lock:
            known = {index for outage in self._outages for index in outage.missing}
            if indices := tuple(member.index for member in members if member.index not in known):
                self._outages.append(_Outage(time.monotonic(), samples, indices, set(indices)))

    def forget_deaths(self) -> None:
        """Everybody has gone back to a checkpoint."""
        with self._lock:
            self._outages.clear()

    def _is_back(self, index: int, saved: LoadedCheckpoint | None, began: float) -> None:
        """An embedding server has its rows again; when all of its outage have, that is over."""
        name, samples = (None, 0) if saved is None else (saved.name, saved.samples)
        with self._lock:
            outage = next((outage for outage in self._outages if index in outage.missing), None)
            if outage is None:
                return
            outage.missing.discard(index)
            if outage.loaded_samples is None or samples < outage.loaded_samples:
                outage.loaded, outage.loaded_samples = name, samples
            outage.restart_s = max(outage.restart_s, began - outage.at)
            outage.load_s = max(outage.load_s, time.monotonic() - began)
            if not outage.missing:
                self._outages.remove(outage)
                self.losses.append(outage.loss())

    def install(self, order: Order, reader: Reader, stopping: Callable[[], bool]) -> Member:
        """Starts a process for a role and puts it to work, while the others go on.

        Raises:
            NobodyLeft: see there.
            PeerLost: it died again. For servers that are not there a trainer waits, unless `stopping`.
        """
        member = self.crew.staff.hire(order)
        install: dict[str, Callable[[Member, Reader], None]] = {
            "trainer": lambda member, _: self._install_trainer(member, stopping),
            "embedding": self._install_embedding,
            "dense": self._install_dense,
            "reader": self._install_reader,
        }
        try:
            install[member.kind](member, reader)
        except BaseException as error:
            self.crew.staff.give_up(member, f"it could not be put to work: {error}")
            raise
        return member

    def _install_reader(self, member: Member, reader: Reader) -> None:
        self.crew.build_server(member, reader)
        member.ready = True
        self.crew.tell_of_readers()

    def _install_embedding(self, member: Member, reader: Reader) -> None:
        """Its rows are as they were, if they outlived the one before; else those of the newest checkpoint, without one
        the initial ones. Nobody else goes back.

        Nobody knows it yet, so rows of a checkpoint that turns out to be damaged are simply overwritten.
        """
        outlived = member.role in self.crew.memory
        self.crew.build_server(member, reader, filled=False, inherits=outlived)
        if outlived:
            self._puts_on_duty(member)
            return
        began, shards = time.monotonic(), self.crew.blueprint.shards[member.index]
        with self.newest(shards, lambda saved: self.images.load_server(saved, member)) as saved:
            if saved is None:
                self.crew.build_server(member, reader)
            self._is_back(member.index, saved, began)  # before anybody saves: what it loaded decides what a save holds
        self._puts_on_duty(member)

    def _install_dense(self, member: Member, reader: Reader) -> None:
        self.crew.build_server(member, reader)
        if member.role not in self.crew.memory:
            self.dense.fill_server(member)
        self._puts_on_duty(member)

    def _puts_on_duty(self, server: Member) -> None:
        server.ready = True
        self.crew.tell_of_server(server)

    def _install_trainer(self, member: Member, stopping: Callable[[], bool]) -> None:
        if not self._build_trainer(member, stopping):
            return
        with self.images.turn:
            self.dense.fill_trainer(member)
            self.crew.doors.expect(member.index)
            self.crew.statuses.add(member)
            self.crew.tell_newcomer(member)
            self.crew.ask_to_start(member)
            if stopping():
                self.crew.ask_to_stop()

    def _build_trainer(self, member: Member, stopping: Callable[[], bool]) -> bool:
        """Waits for servers that are not there yet; False if nobody is to train meanwhile."""
        while not stopping():
            try:
                self.crew.build_trainer(member)
            except GONE:
                if not member.living or self.crew.everybody_serves():
                    raise
                time.sleep(LOOK_S)
            else:
                return True
        return False
