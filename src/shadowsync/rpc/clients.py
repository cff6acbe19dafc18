"""The server's book of its clients: who they are, where they can be reached, since when they are silent."""

import secrets
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from shadowsync.rpc.ledger import Ledger
from shadowsync.rpc.messages import Hello, Welcome


@dataclass(frozen=True)
class Limits:
    """Bounds of what is kept for clients.

    Attributes:
        clients: most of them at a time.
        window: as in `Ledger`.
        open_calls: as in `Ledger`.
        keep_bytes: as in `Ledger`, of each client.
        forget_client_after_s: silence after which a client is forgotten.
        yield_after_s: silence after which a client is forgotten if another needs its place; one that has called
            nothing yet is at once.
        unread_bytes: of replies that wait for a client to read them; while there are more, its calls wait, and as
            many bytes of them; further ones are refused.
    """

    clients: int = 4096
    window: int = 1 << 18
    open_calls: int = 1024
    keep_bytes: int = 1 << 26
    forget_client_after_s: float = 120.0
    yield_after_s: float = 10.0
    unread_bytes: int = 1 << 26


class Sent(Protocol):
    """What was sent, as `zmq.MessageTracker`."""

    @property
    def done(self) -> bool:
        """It has left this process."""


class Unread:
    """Bytes of replies that a client has not read, and of its calls that wait for that, in this process; any thread.

    To follow a message costs more than to send a short one, so that one is followed after every so many bytes.
    """

    _EVERY_BYTES = 1 << 23

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._loose = self._waiting = self._parked = 0
        self._followed: deque[tuple[Sent, int]] = deque()

    def add(self, size: int) -> bool:
        """Counts a reply; True if it is to be followed."""
        with self._lock:
            self._loose += size
            return self._loose >= min(self._EVERY_BYTES, self._limit_bytes)

    def follow(self, sent: Sent) -> None:
        """Once this is done, all that was counted so far is read."""
        with self._lock:
            self._followed.append((sent, self._loose))
            self._waiting += self._loose
            self._loose = 0

    def park(self, size: int) -> None:
        """Counts the bytes of a call that waits until replies are read; negative ones of a call that waits no more."""
        with self._lock:
            self._parked += size

    @property
    def crowded(self) -> bool:
        """More bytes of calls wait for replies to be read than may."""
        return self._parked > self._limit_bytes

    @property
    def full(self) -> bool:
        """There is more than there may be."""
        if self._waiting <= self._limit_bytes:
            return False
        with self._lock:
            while self._followed and self._followed[0][0].done:
                self._waiting -= self._followed.popleft()[1]
            return self._waiting > self._limit_bytes


@dataclass(eq=False)
class Record:
    """One client: its session, the route of the connection that it uses now, its requests, and what it has to read."""

    client: str
    session: int
    route: bytes
    heard_at: float
    ledger: Ledger
    unread: Unread
    greeted_only: bool = True
    gone: bool = False


class Clients:
    """All clients of one server; the caller's lock guards it, and time is handed in."""

    def __init__(self, limits: Limits) -> None:
        self.incarnation = secrets.randbits(63)
        self._limits = limits
        self._by_client: dict[str, Record] = {}
        self._by_route: dict[bytes, Record] = {}

    def __len__(self) -> int:
        return len(self._by_client)

    def hello(self, route: bytes, hello: Hello, now_s: float) -> Welcome | None:
        """Binds the client to the route; None where it is not let in.

        A session that is not known is answered with a new one: the client decides what that means for it.
        """
        record = self._by_client.get(hello.client)
        if record is None:
            if len(self) >= self._limits.clients:
                return None
            record = self._new(hello.client, route, now_s)
        elif hello.session != record.session and not record.greeted_only:
            return None  # somebody else with its name: the client itself knows its session by its first call
        self._bind(record, route)
        record.heard_at = now_s
        return Welcome(record.session, self.incarnation)

    def _new(self, client: str, route: bytes, now_s: float) -> Record:
        limits = self._limits
        ledger = Ledger(limits.window, limits.open_calls, limits.keep_bytes)
        record = Record(client, secrets.randbits(62) + 1, route, now_s, ledger, Unread(limits.unread_bytes))
        self._by_client[client] = record
        return record

    def _bind(self, record: Record, route: bytes) -> None:
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        record.route = route
        self._by_route[route] = record

    def who_yields(self, hello: Hello, now_s: float) -> Record | None:
        """Who is to be forgotten so that a new client has a place; None if there is one, or nobody is idle."""
        if hello.client in self._by_client or len(self) < self._limits.clients:
            return None
        records = self._by_client.values()
        unused = next((record for record in records if record.greeted_only), None)
        silent = min(records, key=lambda record: record.heard_at) if unused is None else unused
        is_idle = silent.greeted_only or silent.heard_at < now_s - self._limits.yield_after_s
        return silent if is_idle else None

    def heard(self, route: bytes, session: int, now_s: float) -> Record | None:
        """The client that speaks on this route, if it is its own session."""
        record = self._by_route.get(route)
        if record is None or record.session != session:
            return None
        record.heard_at = now_s
        return record

    def forget(self, record: Record) -> bool:
        """Drops a client; True if none of its requests runs any more, else the last one to end finds it `gone`."""
        record.gone = True
        del self._by_client[record.client]
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        return record.ledger.running == 0

    def silent(self, now_s: float) -> list[Record]:
        """Those to be forgotten."""
        limit = now_s - self._limits.forget_client_after_s
        return [record for record in self._by_client.values() if record.heard_at < limit]

    def all(self) -> list[Record]:
        """All of them."""
        return list(self._by_client.values())
