"""The processes of the roles: launched, watched and given up."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shadowsync.cluster.context import EventLog
from shadowsync.metrics.history import RoleState
from shadowsync.rpc.connection import Connection, Connector
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime.runtime import Builder, Endpoint, LaunchRequest, RoleProcess, Runtime

_LOG = logging.getLogger(__name__)
WATCH_S = 0.1
UNREACHABLE_S = 3.5
START_S = 120.0
BUILD_S = 300.0


class NobodyLeft(PeerLost):
    """There is nobody from whom a replacement could go on: everybody has to go back to a checkpoint."""


@dataclass(eq=False)
class Member:
    """A role's present process.

    Attributes:
        incarnation: how many processes the role had before.
        connection: the driver's, to what it serves.
        noted: it died, and the session has taken note: only then may another take its endpoint.
        ready: a server's part is in place, so that others may be sent there.
        asked: it was ended because somebody wanted it to go.
    """

    request: LaunchRequest
    incarnation: int
    process: RoleProcess
    endpoint: Endpoint
    connection: Connection
    state: RoleState = "alive"
    noted: bool = False
    ready: bool = False
    asked: bool = False

    @property
    def role(self) -> str:
        return self.request.role

    @property
    def kind(self) -> str:
        return self.request.kind

    @property
    def index(self) -> int:
        return int(self.role.rpartition("-")[2])

    @property
    def living(self) -> bool:
        """It was not given up."""
        return self.state in ("alive", "unreachable")

    def build(self, builder: Builder) -> None:
        """Has a part made there and waits for it.

        Raises:
            PeerLost: the process ended meanwhile.
            ShadowSyncError: what the builder raised.
        """
        try:
            self.process.build(builder).result(BUILD_S)
        except TimeoutError as error:
            raise PeerLost(f"{self.role} did not get ready within {BUILD_S:g} s") from error


@dataclass
class Supervisor:
    """All members of a job, the newest of each role; a thread of its own looks after them.

    Args:
        runtime: starts processes.
        connector: the driver's.
        lost_after_s: silence after which a member is given up.
        events: hears of what happens to them.
        wake: called when somebody died.

    Attributes:
        members: by role.
        coming: processes that stand beside the member of their role, to take its place.
    """

    runtime: Runtime
    connector: Connector
    lost_after_s: float
    events: EventLog
    wake: Callable[[], None]
    members: dict[str, Member] = field(default_factory=dict)
    coming: dict[str, Member] = field(default_factory=dict)
    _dead: list[Member] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)
    _listening_since: float = field(default=-math.inf, repr=False)
    _looked_at: float = field(default=math.inf, repr=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        if not self.runtime.direct:
            self._thread.start()

    def launch(self, request: LaunchRequest, beside: bool = False) -> Member:
        """Starts a process for a role, waits until it is there, and lets it take the place of the one before; or stand
        `beside` it, among those that are `coming`, until it does (`take_place`).

        Raises:
            PeerLost: it did not start, or ended at once.
        """
        process = self.runtime.start(request)
        try:
            endpoint = process.endpoint(START_S)
        except BaseException:
            process.kill()
            raise
        before = self.members.get(request.role)
        incarnation = 0 if before is None else before.incarnation + 1
        member = Member(request, incarnation, process, endpoint, self.connector.connect(endpoint.address))
        with self._lock:
            if self._closed.is_set():
                process.kill()
                raise PeerLost("the job has ended")
            (self.coming if beside else self.members)[request.role] = member
        if not beside:
            self.events.add(request.role, "alive" if before is None else "restarted", endpoint.host)
        return member

    def take_place(self, member: Member) -> Member:
        """Lets a process that was launched beside another one of its role take its place; the other one, which is not a
        member any more and still runs.

        Raises:
            PeerLost: one of the two is gone.
        """
        with self._lock:
            before = self.members[member.role]
            if not (before.living and member.living and self.coming.get(member.role) is member):
                raise PeerLost(f"{member.role} died on its way to another machine")
            del self.coming[member.role]
            self.members[member.role] = member
            before.state = "left"
        return before

    def dismiss(self, member: Member) -> None:
        """Ends a process that is no member, or not yet; one that has become a member stays."""
        with self._lock:
            if self.members.get(member.role) is member:
                return
            if self.coming.get(member.role) is member:
                del self.coming[member.role]
            member.state = "left"
        member.process.kill()
        member.connection.redirect(None)

    def of_kind(self, kind: str) -> list[Member]:
        found = [member for member in list(self.members.values()) if member.kind == kind and member.living]
        return sorted(found, key=lambda member: member.index)

    def take_dead(self) -> list[Member]:
        """Those that died since the last call; their places are vacant from now on."""
        with self._lock:
            dead, self._dead = self._dead, []
            for member in dead:
                member.noted = True
        return dead

    def occupied(self) -> set[str]:
        """Roles that somebody has, or had until a death that nobody has taken note of."""
        return {role for role, member in list(self.members.items()) if member.living or not member.noted}

    @property
    def anybody_died(self) -> bool:
        """Somebody did, and nobody has taken note."""
        return bool(self._dead)

    def give_up(self, member: Member, reason: str, end: bool = True, asked: bool = False) -> None:
        """Ends a member: calls to it fail from now on; if it is not to `end`, it only counts as dead. `asked`, somebody
        wants it to go, and it is no failure."""
        with self._lock:
            if not member.living:
                return
            if self._closed.is_set():
                member.state = "dead"
                return
            if not (coming := self.coming.get(member.role) is member):
                member.state, member.asked = "left" if asked else "dead", asked
        if coming:  # whoever waits for it hears of it, and nobody else has to
            self.dismiss(member)
            return
        self.events.add(member.role, "left" if asked else "dead", reason)
        if end:  # first: what it has done is read as soon as it counts among the dead
            member.process.kill()
            member.connection.redirect(None)
        with self._lock:
            self._dead.append(member)
        self.wake()

    def places(self) -> dict[str, dict[str, str | int]]:
        """Where the members are, but for those that left, by role, as in `roles.json`; `log` is empty where a role has
        none of its own."""
        return {
            role: {
                "pid": end.pid,
                "host": end.host,
                "machine": end.machine,
                "incarnation": member.incarnation,
                "log": end.log,
            }
            for role, member in sorted(self.members.copy().items())
            for end in [member.endpoint]
            if member.state != "left"
        }

    def close(self) -> None:
        """Ends the watch; the members are the runtime's to end."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            self.look_round(time.monotonic())

    def look_round(self, now_s: float) -> None:
        """Looks after everybody who lives; the clock is the system's steady one."""
        if now_s - self._looked_at > UNREACHABLE_S:  # this process was stopped: who spoke meanwhile was not heard
            self._listening_since = now_s
        self._looked_at = now_s
        for member in [m for m in [*self.members.copy().values(), *self.coming.copy().values()] if m.living]:
            try:
                self._look_at(member, now_s)
            except BaseException as error:  # one that cannot be looked after must not end the watch over the others
                _LOG.exception("looking after %s failed", member.role)
                self.give_up(member, f"it cannot be looked after: {error}")

    def _look_at(self, member: Member, now_s: float) -> None:
        reason = member.process.ended()
        silent_s = min(member.connection.silent_s(), now_s - self._listening_since)
        if reason is None and silent_s > self.lost_after_s:
            reason = f"silent for {silent_s:.0f} s"
        if reason is not None:
            self.give_up(member, reason)
        elif (silent_s > UNREACHABLE_S) != (member.state == "unreachable") and self.members[member.role] is member:
            member.state = "unreachable" if member.state == "alive" else "alive"
            self.events.add(member.role, "unreachable" if member.state == "unreachable" else "reachable")


def first_error(errors: Sequence[BaseException | None]) -> BaseException | None:
    """The one to raise: what a part found wrong rather than that somebody is gone."""
    found = [error for error in errors if error is not None]
    return next((error for error in found if not isinstance(error, PeerLost)), found[0] if found else None)
