"""Servers that change their machine while training goes on: onto those that come, off those that are to be shut down.

A server moves whole: another process of its role is started elsewhere and copies what it holds, while trainers go on
with the one that is there. What changed meanwhile is copied again, the last of it while everybody stands still for a
moment; then everybody goes on with the other process. Whatever fails before that moment, the one that is there stays.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from shadowsync.cluster.context import EventLog
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.roles import ROLES, MovableRole
from shadowsync.cluster.scheduler import Scheduler
from shadowsync.cluster.supervisor import Member
from shadowsync.embedding.moving import Copied
from shadowsync.errors import ShadowSyncError
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.runtime.runtime import HeldMemory, LaunchRequest

LOOK_S = 2.0
RETRY_S = 10.0
"""After a move that failed; its machine is left alone twice as long each time."""
PAUSES = 30
"""How often everybody is asked to stand still for a move before it counts as failed."""
PAUSE_S = 1.0
"""Between two of these."""
SAVE_S, LOOK_AGAIN_S = 120.0, 0.1


@dataclass
class Moves:
    """All moves of a session, one at a time.

    Args:
        manager: whose servers.
        events: hears of them.
        pool: in which they are made.
        still: within it nobody changes anything; raises `PeerLost` if somebody died or does not stop.
        wake: called when one is over.
    """

    manager: ClusterManager
    events: EventLog
    pool: Executor
    still: Callable[[], AbstractContextManager[None]]
    wake: Callable[[], None]
    _names: frozenset[str] = frozenset()
    _met: frozenset[str] = frozenset()
    _gone: frozenset[str] = frozenset()
    _under_way: Future[None] | None = None
    _role: str = ""
    _target: Member | None = None
    _called_off: bool = False
    _look_at: float = 0.0
    _avoided: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By machine, until when nothing is tried there, and for how long it was not."""
    _told: frozenset[str] = frozenset()
    _why_not: str = ""
    _closing: threading.Event = field(default_factory=threading.Event)

    def leave(self, names: Collection[str]) -> None:
        """Machines of these names or ids are to be shut down, and no others; seen to with the next `look`."""
        self._names = frozenset(names)

    def look(self, now: float) -> None:
        """Begins what is due; for times at which everybody is there, and training."""
        if self._under_way is not None and self._under_way.done():
            over, self._under_way = self._under_way, None
            over.result()
        if self._under_way is not None or self._closing.is_set() or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._gone &= self._names
        unknown = self.manager.leave(self._names - self._gone)
        self._gone |= unknown & self._met  # they were shut down, and a machine of that name that comes is another one
        self._met, unknown = (self._met | self._names) - unknown, unknown - self._gone
        scheduler = self.manager.scheduler([machine for machine, (until, _) in self._avoided.items() if now < until])
        cluster, with_trainers = self.manager.spec.job.config.cluster, self.manager.dense.is_with_trainers
        if (found := scheduler.next_move(cluster.min_servers)) is not None:
            source = self.manager.supervisor.members[found[0].role]
            self._begin(source.role, lambda: self._move(source, found[1]))
        elif not scheduler.leavers("embedding") and (
            guests := scheduler.to_let_go(cluster.min_trainers, with_trainers)
        ):
            self._begin("", lambda: self._let_go(guests))
        else:
            self._tell_how_it_is(scheduler, unknown)

    def abort(self, role: str | None = None) -> None:
        """The move of that role, or whichever is under way, is not to go on."""
        if role in (None, self._role):
            self._called_off = True
            if (target := self._target) is not None:
                self.manager.supervisor.dismiss(target)

    def end(self) -> None:
        """None changes anything any more when this returns; a process that was about to start may, and is ended."""
        self.abort()
        if self._target is not None:
            self._wait()

    def close(self) -> None:
        """No more of them; returns when the last one is over."""
        self._closing.set()
        self.abort()
        self._wait()

    def _wait(self) -> None:
        if self._under_way is not None:
            wait([self._under_way])

    def _begin(self, role: str, act: Callable[[], None]) -> None:
        self._role, self._called_off = role, False
        self._under_way = self.pool.submit(act)
        self._under_way.add_done_callback(lambda _: self.wake())

    # --- a server ----------------------------------------------------------------------------------------------------

    def _move(self, source: Member, launch: LaunchRequest) -> None:
        began, role, manager = time.monotonic(), ROLES[source.kind], self.manager
        assert isinstance(role, MovableRole)
        memory: HeldMemory | None = None
        target: Member | None = None
        try:
            self._target = target = manager.supervisor.launch(launch, beside=True)
            if self._called_off:
                raise PeerLost("it was called off")
            memory = manager.make_memory(target)
            copied = role.begin_move(manager, source, target, None if memory is None else memory.path)
            rest, still_s = self._change_over(role, source, target, memory)
        except BaseException as error:
            if target is not None:
                manager.supervisor.dismiss(target)
                if memory is not None:
                    memory.close()
            if not isinstance(error, ShadowSyncError):
                raise
            self._failed(source, str(launch.machine), error)
            return
        finally:
            self._target = None
        self._avoided.pop(target.endpoint.machine, None)
        told = _told(source, target, copied.plus(rest), time.monotonic() - began, still_s)
        self.events.add(source.role, "moved", told)

    def _change_over(
        self, role: MovableRole, source: Member, target: Member, memory: HeldMemory | None
    ) -> tuple[Copied, float]:
        """Everybody goes on with the target; what was copied meanwhile, and the seconds for which everybody stood
        still.

        Raises:
            PeerLost, CallTimeout: nobody does: one of the two died, or it takes too long.
        """
        manager = self.manager
        for attempt in range(PAUSES):
            self._wait_for_saves()
            began, entered = time.monotonic(), False
            try:
                with self.still():
                    entered = True
                    copied = role.end_move(manager, source, target)
                    before, let_go = manager.take_place(target, memory)
                    role.tell_of_move(manager, target)
                    manager.supervisor.dismiss(before)
                    if let_go is not None:
                        let_go.close()
                return copied, time.monotonic() - began
            except GONE:  # somebody else may have died, or an image been taken
                over = entered or self._called_off or attempt == PAUSES - 1
                if over or not (source.living and target.living) or self._closing.wait(PAUSE_S):
                    raise
        raise PeerLost("nobody stands still")

    def _wait_for_saves(self) -> None:
        """One that is being written reads from the server that is there; for a while, as another may follow soon."""
        until = time.monotonic() + SAVE_S
        while self.manager.images.is_read and not self._called_off and time.monotonic() < until:
            self._closing.wait(LOOK_AGAIN_S)

    def _failed(self, source: Member, machine: str, error: ShadowSyncError) -> None:
        now, (_, before_s) = time.monotonic(), self._avoided.get(machine, (0.0, RETRY_S / 2))
        self._avoided[machine] = now + 2 * before_s, 2 * before_s
        if not self._called_off:
            where = self.manager.name_of(machine)
            self.events.add(source.role, "decided", f"stays where it is, as its way to {where} failed: {error}")

    # --- machines ----------------------------------------------------------------------------------------------------

    def _let_go(self, guests: Sequence[LaunchRequest]) -> None:
        """Ends trainers and readers whose machine is to be shut down, while everybody stands still, so that all that
        they did is where it belongs; others take their places."""
        members = self.manager.supervisor.members
        try:
            with self.still():
                for member in [members[guest.role] for guest in guests]:
                    self.manager.supervisor.give_up(member, "its machine is to be shut down", asked=True)
        except GONE:
            self._look_at = time.monotonic() + RETRY_S

    def _tell_how_it_is(self, scheduler: Scheduler, unknown: Collection[str]) -> None:
        """Which machines are empty, and why others are not."""
        left = scheduler.leavers("embedding", "trainer", "reader", "dense")
        occupied = {str(request.machine) for request in left}
        for machine in sorted(self.manager.leaving - occupied - self._told):
            self.events.add("driver", "moved", f"{self.manager.name_of(machine)} is empty and may be shut down")
        self._told = self.manager.leaving - occupied
        why_not = "; ".join(
            [
                *([f"there is no machine {', '.join(sorted(unknown))} to be emptied"] if unknown else []),
                *([f"{_reason(left[0])}, so that its machine cannot be emptied yet"] if left else []),
            ]
        )
        if why_not and why_not != self._why_not:
            self.events.add("driver", "waiting", why_not)
        self._why_not = why_not


def _reason(left: LaunchRequest) -> str:
    if left.kind == "trainer":
        return (
            f"for {left.role} there is no room elsewhere, or no other trainer from which one could go on there "
            "(cluster.max_trainers lets more of them join)"
        )
    return f"for {left.role} there is no room elsewhere, or cluster.min_servers keeps it"


def _told(source: Member, target: Member, copied: Copied, seconds: float, still_s: float) -> str:
    """A move in words."""
    rows = f", {copied.rows:,} rows of {copied.bytes / 2**20:,.0f} MiB" if copied.rows else ""
    where = f"from {source.endpoint.host} to {target.endpoint.host}"
    return f"{where}{rows} in {seconds:.1f} s, {still_s:.2f} s of them with everybody standing still"
