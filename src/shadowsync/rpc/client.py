"""Connections to services behind sockets, with one thread for all of them in a process."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import zmq

from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.rpc.connection import EMPTY, Connection, JobKeys, Payload, new_client
from shadowsync.rpc.errors import CallTimeout, PeerLost
from shadowsync.rpc.messages import (
    FROM_SERVER,
    META_BYTES,
    Answers,
    Bye,
    Call,
    Calls,
    Frames,
    FromServer,
    Hello,
    Unknown,
    Welcome,
    encode,
    header_of,
    pack,
)
from shadowsync.rpc.pending import Pending, Promise, failed
from shadowsync.rpc.sockets import ClientSocket, Context, LinkNews, Loop
from shadowsync.rpc.tensors import Malformed, Spec, tensors_of

_LOG = logging.getLogger(__name__)
_BYE_MS = 100
_RETRY_S = 0.5
_HELD_META_BYTES = META_BYTES // 16
"""Longest typed part that waits for another call: a header has room for many of these."""


class OpenCall(Promise[Payload]):
    """A call that waits for its answer, and all that it takes to send it again; `limit_s` is how long it may take."""

    def __init__(self, method: str, meta: bytes, specs: tuple[Spec, ...], frames: Frames, limit_s: float) -> None:
        super().__init__()
        self.method, self.meta, self.specs, self.frames, self.limit_s = method, meta, specs, frames, limit_s
        self.since_s = time.monotonic()

    def let_go(self) -> None:
        """It will not be sent again."""
        self.frames = []


class WireConnection(Connection):
    """A connection to a service that may be lost, made again and moved, while its calls run once each.

    What a call raises says nothing about whether the method has run, or still will. Callbacks of the answers run in
    the thread that receives: they must be short and wait for no other call.
    """

    def __init__(self, owner: "WireClient", address: str) -> None:
        self.client = new_client()
        self._owner = owner
        self._lock = threading.Lock()
        self._calls: dict[int, OpenCall] = {}  # that have no answer yet, by number, oldest first
        self._held: list[int] = []  # of those that wait to travel with another one
        self._last = self._sent = 0  # highest number so far, and highest that was sent
        self._address: str | None = address
        self._lost = ""
        self._closed = False
        self._socket: ClientSocket | None = None
        self._ready = False
        self._session = self._incarnation = 0
        self._heard_s = self._pinged_s = self._opened_s = time.monotonic()
        self._useless: ClientSocket | None = None
        owner.loop.post(partial(self._replace, None))

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        return self._enter(method, payload, timeout_s, hold=False)

    def call_along(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        return self._enter(method, payload, timeout_s, hold=True)

    def _enter(self, method: str, payload: Payload, timeout_s: float | None, hold: bool) -> Pending[Payload]:
        try:
            specs, frames = pack(payload)
            limit_s = self._owner.timeout_s if timeout_s is None else timeout_s
            call = OpenCall(method, payload.meta, specs, frames, limit_s)
            with self._lock:
                if self._lost:
                    raise PeerLost(self._lost)
                self._last += 1
                self._calls[self._last] = call
                self._held.append(self._last)
                if not hold or len(payload.meta) > _HELD_META_BYTES:
                    self._send_held()
        except ShadowSyncError as error:
            return failed(error)
        return call

    def silent_s(self) -> float:
        """Seconds since anything was heard from the peer, or since it was first looked for at its address.

        A message counts when it is complete: a long one over a slow link is silence until then.
        """
        return time.monotonic() - self._heard_s

    def waiting(self, longer_than_s: float) -> str | None:
        with self._lock:
            oldest = next(iter(self._calls.values()), None)
        return None if oldest is None or time.monotonic() - oldest.since_s < longer_than_s else oldest.method

    def redirect(self, address: str | None) -> None:
        """The peer was replaced: what is under way is sent to the new address. None: it is given up for now.

        A server that knows this connection's session (it is the same one) runs nothing twice.
        """
        with self._lock:
            if self._closed:
                return
            self._address = address
            self._lost = "" if address else "the peer is given up until it is replaced"
            self._heard_s = time.monotonic()
            given_up = [] if address else self._take(self._calls)
            socket = self._detach()
        self._owner.loop.post(partial(self._replace, socket))
        _fail(given_up, lambda _: PeerLost(self._lost))

    def close(self) -> None:
        """As `Connection.close`; tells the server, if it can be reached at once."""
        with self._lock:
            self._closed = True
            self._lost = "the connection is closed"
            given_up = self._take(self._calls)
            listening = self._ready
            socket = self._detach()
        self._owner.loop.post(partial(self._leave, socket, listening))
        self._owner.forget(self)
        _fail(given_up, lambda _: PeerLost(self._lost))

    # what follows needs the lock

    def _take(self, numbers: Iterable[int]) -> list[OpenCall]:
        return [self._calls.pop(number) for number in list(numbers)]

    def _detach(self) -> ClientSocket | None:
        socket, self._socket, self._ready = self._socket, None, False
        return socket

    def _message(self, numbers: Sequence[int]) -> Frames:
        """These calls as they are sent; none is a sign of life."""
        self._sent = max(self._sent, *numbers, 0)
        found = [(number, self._calls[number]) for number in numbers]
        calls = tuple(Call(number, call.method, call.meta, call.specs) for number, call in found)
        low = next(iter(self._calls), self._last + 1)
        return [encode(Calls(self._session, low, calls)), *(frame for _, call in found for frame in call.frames)]

    def _send_held(self) -> None:
        """Sends what waits to travel with another call, if the connection stands."""
        if self._ready and self._socket is not None:
            held, self._held = [number for number in self._held if number in self._calls], []
            if held:
                self._socket.send(self._message(held))

    # what follows runs in the loop

    def _replace(self, old: ClientSocket | None) -> None:
        """Opens a socket to the present address, unless there is one already."""
        if old is not None:
            old.close(self._owner.loop)
        with self._lock:
            if self._address is None or self._closed or self._socket is not None:
                return
            self._useless = None
            self._opened_s = time.monotonic()
            try:
                self._socket = self._owner.open(self._address, self)
            except RunError as error:
                self._lost = str(error)
                given_up = self._take(self._calls)
            else:
                self._socket.send([encode(Hello(self.client))])
                return
        _fail(given_up, lambda _: PeerLost(self._lost))

    def _leave(self, old: ClientSocket | None, listening: bool) -> None:
        if old is not None:
            if listening:
                old.send([encode(Bye(self._session))])
            old.close(self._owner.loop, _BYE_MS if listening else 0)

    def receive(self, socket: ClientSocket) -> None:
        for frames in socket.receive():
            self._heard_s = time.monotonic()
            try:
                self._hear(socket, header_of(frames, FROM_SERVER), frames[1:])
            except Malformed as reason:
                _LOG.warning("a message of %s was dropped: %s", self._address, reason)
            except BaseException:  # whatever it was, the messages behind it are not to suffer
                _LOG.exception("a message of %s was dropped", self._address)

    def news(self, socket: ClientSocket, news: LinkNews) -> None:
        if news is LinkNews.BROKEN:
            self.receive(socket)
            self._renew(socket)
        elif news is LinkNews.USELESS:
            self._useless = socket  # for the tick, so that a port that speaks something else is not hammered
        else:
            with self._lock:
                if socket is not self._socket:
                    return
                self._lost = f"{self._address} does not accept the keys of this job"  # ZeroMQ does not try again
                given_up = self._take(self._calls)
            _fail(given_up, lambda _: PeerLost(self._lost))

    def _renew(self, socket: ClientSocket) -> None:
        with self._lock:
            if socket is not self._socket:
                self._useless = None
                return
            self._detach()
        self._replace(socket)

    def _hear(self, socket: ClientSocket, message: FromServer, frames: Sequence[Any]) -> None:
        if isinstance(message, Answers):
            self._settle(message, frames)
        elif isinstance(message, Welcome):
            self._begin(socket, message)
        elif isinstance(message, Unknown):
            with self._lock:
                if socket is self._socket and self._ready and message.session == self._session:
                    self._ready = False
                    socket.send([encode(Hello(self.client))])

    def _settle(self, message: Answers, frames: Sequence[Any]) -> None:
        with self._lock:
            found = [self._calls.pop(answer.number, None) for answer in message.answers]
        try:
            tensors = tensors_of(frames, *(answer.tensors for answer in message.answers))
        except Malformed as error:
            damaged = RunError(f"an answer of {self._address} is damaged: {error}")
            _fail([call for call in found if call is not None], lambda _: damaged)
            return
        for call, answer, own in zip(found, message.answers, tensors, strict=True):
            if call is not None:
                call.let_go()
                if answer.fault is None:
                    call.keep(Payload(answer.meta, own, served_s=answer.served_s))
                else:
                    call.fail(answer.fault.error())

    def _begin(self, socket: ClientSocket, welcome: Welcome) -> None:
        """Goes on in the session that the server gave, and sends what waits."""
        forgotten: list[OpenCall] = []
        with self._lock:
            if socket is not self._socket:
                return
            if welcome.session != self._session and welcome.incarnation == self._incarnation:
                # they may have run, and the server no longer knows which
                forgotten = self._take(number for number in self._calls if number <= self._sent)
            self._session, self._incarnation = welcome.session, welcome.incarnation
            self._ready, self._held = True, []
            for number in self._calls:
                socket.send(self._message([number]))
        _fail(forgotten, lambda _: PeerLost(f"{self._address} has forgotten this connection after a long silence"))

    def tick(self, now_s: float) -> None:
        """Gives up late calls and asks a silent peer for a sign of life."""
        every_s = self._owner.ping_every_s
        with self._lock:
            late = self._take(number for number, call in self._calls.items() if call.since_s + call.limit_s <= now_s)
            self._send_held()
            if self._ready and self._socket is not None and now_s - max(self._heard_s, self._pinged_s) >= every_s:
                self._pinged_s = now_s
                self._socket.send(self._message([]))
        if self._useless is not None and now_s - self._opened_s >= _RETRY_S:
            self._renew(self._useless)
        _fail(late, lambda call: CallTimeout(f"{call.method} at {self._address} gave no answer in {call.limit_s:g} s"))


def _fail(calls: Iterable[OpenCall], error: Callable[[OpenCall], ShadowSyncError]) -> None:
    for call in calls:
        call.let_go()
        call.fail(error(call))


class WireClient:
    """The connections of one process, with one thread that receives for all of them.

    Args:
        timeout_s: deadline of calls that name none.
        ping_every_s: silence after which the peer is asked for a sign of life.
        tick_s: how often deadlines and silence are looked at.
    """

    def __init__(
        self, keys: JobKeys, timeout_s: float = 120.0, ping_every_s: float = 1.0, tick_s: float = 0.05
    ) -> None:
        self.timeout_s, self.ping_every_s = timeout_s, ping_every_s
        self.loop = Loop("wire-client", self._tick, tick_s)
        self._keys = keys
        self._context: Context = zmq.Context()
        self._lock = threading.Lock()
        self._connections: list[WireConnection] = []
        self._closed = False
        self.loop.start()

    def connect(self, address: str) -> WireConnection:
        """A connection to the service there; the peer need not be there yet. Raises `PeerLost` once this is closed."""
        with self._lock:
            if self._closed:
                raise PeerLost("the client is closed")
            connection = WireConnection(self, address)
            self._connections.append(connection)
            return connection

    def close(self) -> None:
        with self._lock:
            self._closed, already = True, self._closed
            connections = list(self._connections)
        if already:
            return
        for connection in connections:
            connection.close()
        self.loop.close()
        self._context.term()

    def open(self, address: str, connection: WireConnection) -> ClientSocket:
        """A socket for a connection, called in the loop; raises `RunError` where that is no address."""
        socket = ClientSocket(self._context, address, self._keys, lambda: self.loop.post(receive))
        receive = partial(connection.receive, socket)
        socket.watch(self.loop, receive, partial(connection.news, socket))
        return socket

    def forget(self, connection: WireConnection) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._connections.remove(connection)

    def _tick(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.tick(now_s)
