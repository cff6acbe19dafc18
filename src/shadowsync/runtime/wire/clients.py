"""The server's book of its clients: who they are, where they can be reached, since when they are silent."""

import secrets
from dataclasses import dataclass

from shadowsync.runtime.wire.ledger import Ledger
from shadowsync.runtime.wire.messages import Hello, Welcome


@dataclass(frozen=True)
class Limits:
    """Bounds of what is kept for clients.

    Attributes:
        clients: most of them at a time.
        window: as in `Ledger`.
        open_calls: as in `Ledger`.
        keep_bytes: as in `Ledger`, of each client.
        forget_client_after_s: silence after which a client is forgotten.
    """

    clients: int = 4096
    window: int = 1 << 18
    open_calls: int = 1024
    keep_bytes: int = 1 << 26
    forget_client_after_s: float = 120.0


@dataclass(eq=False)
class Record:
    """One client: its session, the route of the connection that it uses now, and its requests."""

    client: str
    session: int
    route: bytes
    heard_at: float
    ledger: Ledger
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
        record = Record(client, secrets.randbits(62) + 1, route, now_s, ledger)
        self._by_client[client] = record
        return record

    def _bind(self, record: Record, route: bytes) -> None:
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        record.route = route
        self._by_route[route] = record

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
