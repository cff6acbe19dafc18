"""Servers that change their machine while training goes on: onto those that come, off those that are to be shut down.

A server moves whole: another process of its role is started elsewhere and copies what it holds, while trainers go on
with the one that is there. What changed meanwhile is copied again, the last of it while everybody stands still for a
moment; then everybody goes on with the other process. Whatever fails before that moment, the one that is there stays.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from shadowsync.cluster.context import EventLog
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.roles import ROLES
from shadowsync.cluster.supervisor import Member
from shadowsync.data.reader import Reader
from shadowsync.embedding.moving import Copied
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime.runtime import HeldMemory, LaunchRequest

LOOK_S = 2.0
RETRY_S = 10.0
"""After a move that failed: what it failed of is to be over, and it is not to be the only thing that happens."""
PAUSES = 5
"""How often everybody is asked to stand still for a move before it counts as failed."""
PAUSE_S = 1.0
"""Between two of these."""


@dataclass
class Moves:
    """All moves of a session, one at a time.

    Args:
        manager: whose servers.
        events: hears of them.
        pool: in which they are made.
        still: within it nobody changes anything; raises `PeerLost` if somebody died or does not stop.
        wake: called when one is over.

    Attributes:
        done: how many servers have changed their machine.
    """

    manager: ClusterManager
    events: EventLog
    pool: Executor
    still: Callable[[], AbstractContextManager[None]]
    wake: Callable[[], None]
    done: int = 0
    _under_way: Future[None] | None = None
    _role: str = ""
    _target: Member | None = None
    _called_off: bool = False
    _look_at: float = 0.0
    _told: frozenset[str] = frozenset()
    _closing: threading.Event = field(default_factory=threading.Event)

    def look(self, now: float, reader: Reader) -> None:
        """Begins what is due; for times at which everybody is there, and training."""
        if self._under_way is not None and self._under_way.done():
            over, self._under_way = self._under_way, None
            over.result()
        if self._under_way is not None or self._closing.is_set() or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        scheduler, manager = self.manager.scheduler(), self.manager
        found = scheduler.next_move(manager.spec.job.config.cluster.min_servers)
        if found is not None:
            source = manager.supervisor.members[found[0].role]
            self._begin(source.role, lambda: self._move(source, found[1], reader))
        elif (guests := scheduler.to_let_go()) and not scheduler.leavers("embedding"):
            self._begin("", lambda: self._let_go(guests))
        elif not scheduler.leavers("embedding", "dense", "trainer", "reader"):
            for machine in sorted(manager.leaving - self._told):
                self.events.add("driver", "moved", f"{manager.name_of(machine)} is empty and may be shut down")
            self._told = manager.leaving

    @property
    def under_way(self) -> list[Future[None]]:
        """That which is, if one is."""
        return [] if self._under_way is None else [self._under_way]

    def abort(self, role: str | None = None) -> None:
        """The move of that role, or whichever is under way, is not to go on."""
        if role in (None, self._role):
            self._called_off = True
            if (target := self._target) is not None:
                self.manager.supervisor.dismiss(target)

    def end(self) -> None:
        """None is under way when this returns."""
        self.abort()
        wait(self.under_way)

    def close(self) -> None:
        """No more of them; returns when the last one is over."""
        self._closing.set()
        self.end()

    def _begin(self, role: str, act: Callable[[], None]) -> None:
        self._role, self._called_off = role, False
        self._under_way = self.pool.submit(act)
        self._under_way.add_done_callback(lambda _: self.wake())

    def _move(self, source: Member, launch: LaunchRequest, reader: Reader) -> None:
        began, role, manager = time.monotonic(), ROLES[source.kind], self.manager
        memory: HeldMemory | None = None
        target: Member | None = None
        try:
            self._target = target = manager.supervisor.launch(launch, beside=True)
            if self._called_off:
                raise PeerLost("it was called off")
            memory = manager.make_memory(target)
            copied = role.begin_move(manager, source, target, reader, None if memory is None else memory.path)
            rest, still_s = self._change_over(source, target, memory)
        except BaseException as error:
            if target is not None and manager.supervisor.members[source.role] is not target:
                manager.supervisor.dismiss(target)
                if memory is not None:
                    memory.close()
            if not isinstance(error, ShadowSyncError):
                raise
            self._look_at = time.monotonic() + RETRY_S
            if not self._called_off:
                where = manager.name_of(str(launch.machine))
                self.events.add(source.role, "decided", f"stays where it is, as its way to {where} failed: {error}")
            return
        finally:
            self._target = None
        self.done += 1
        self.events.add(
            source.role, "moved", _told(source, target, copied.plus(rest), time.monotonic() - began, still_s)
        )

    def _change_over(self, source: Member, target: Member, memory: HeldMemory | None) -> tuple[Copied, float]:
        """Everybody goes on with the target; what was copied meanwhile, and the seconds for which everybody stood
        still."""
        manager, role = self.manager, ROLES[source.kind]
        for attempt in range(PAUSES):
            began = time.monotonic()
            try:
                with self.still():
                    copied = role.end_move(manager, source, target)
                    before, let_go = manager.take_place(target, memory)
                    role.tell_of_move(manager, target)
                break
            except PeerLost:
                over = not (source.living and target.living) or manager.supervisor.members[source.role] is target
                if over or attempt == PAUSES - 1 or self._closing.wait(PAUSE_S):
                    raise
        still_s = time.monotonic() - began
        manager.supervisor.dismiss(before)
        if let_go is not None:
            let_go.close()
        return copied, still_s

    def _let_go(self, guests: Sequence[LaunchRequest]) -> None:
        """Ends trainers and readers whose machine is to be shut down, while everybody stands still, so that all that
        they did is where it belongs; others take their places."""
        members = self.manager.supervisor.members
        try:
            with self.still():
                for member in [members[guest.role] for guest in guests]:
                    self.manager.supervisor.give_up(member, "its machine is to be shut down", asked=True)
        except PeerLost:
            self._look_at = time.monotonic() + RETRY_S


def _told(source: Member, target: Member, copied: Copied, seconds: float, still_s: float) -> str:
    """A move in words."""
    rows = f", {copied.rows:,} rows of {copied.bytes / 2**20:,.0f} MiB" if copied.rows else ""
    where = f"from {source.endpoint.host} to {target.endpoint.host}"
    return f"{where}{rows} in {seconds:.1f} s, {still_s:.2f} s of them with everybody standing still"
