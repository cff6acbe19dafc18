"""Connections to services behind sockets, with one thread for all of them in a process."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.rpc.connection import Answer, Connection, new_client
from shadowsync.rpc.errors import CallTimeout, PeerLost
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.loop import Loop
from shadowsync.rpc.messages import (
    META_BYTES,
    Answered,
    Answers,
    Bye,
    Call,
    Calls,
    Failed,
    Frames,
    FromServer,
    Hello,
    Malformed,
    Ping,
    Unknown,
    Welcome,
    encode,
    from_server,
    pack,
)
from shadowsync.rpc.service import Meta
from shadowsync.rpc.sockets import ClientSocket, Context, Line, LinkNews, new_context
from shadowsync.rpc.tensors import Misfit, Spec, tensors_of

_LOG = logging.getLogger(__name__)
_BYE_MS = 100
_RETRY_S = 0.5
_HELD_META_BYTES = META_BYTES // 16
"""Longest typed part that waits for another call: a header has room for many of these."""


@dataclass(frozen=True)
class CourierOptions:
    """How a process reaches services.

    Attributes:
        timeout_s: deadline of calls that name none.
        ping_every_s: silence after which the peer is asked for a sign of life.
        link_timeout_s: silence of the network after which a connection counts as broken and a new one is made.
        max_message_bytes: longest tensor that is sent.
        tick_s: how often deadlines and silence are looked at.
    """

    timeout_s: float = 120.0
    ping_every_s: float = 1.0
    link_timeout_s: float = 10.0
    max_message_bytes: int = 1 << 30
    tick_s: float = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """One call that waits for its answer, and all that it takes to send it again.

    Attributes:
        method: the name that is called.
        meta, specs, frames: as `messages.pack` made them.
        limit_s: how long it may take.
        deadline_s: when it is given up.
        future: where the answer goes.
    """

    method: str
    meta: bytes
    specs: tuple[Spec, ...]
    frames: Frames
    limit_s: float
    deadline_s: float
    future: Future[Answer]

    @property
    def since_s(self) -> float:
        """When it was made."""
        return self.deadline_s - self.limit_s


@dataclass
class OpenCalls:
    """One connection's calls that have no answer yet, by number, oldest first; the caller's lock guards it."""

    _open: dict[int, Pending] = field(default_factory=dict)
    _last: int = 0
    _sent: int = 0

    def __contains__(self, number: int) -> bool:
        return number in self._open

    @property
    def oldest(self) -> Pending | None:
        """The one that has waited longest."""
        return next(iter(self._open.values()), None)

    @property
    def low(self) -> int:
        """The lowest number that waits for an answer, or the next one."""
        return next(iter(self._open), self._last + 1)

    def add(self, pending: Pending) -> int:
        """Enters a call and returns its number."""
        self._last += 1
        self._open[self._last] = pending
        return self._last

    def drop(self, number: int) -> Pending | None:
        """Takes out a call, if it still waits."""
        return self._open.pop(number, None)

    def message(self, numbers: Sequence[int], session: int) -> Frames:
        """These calls as they are sent in that session."""
        self._sent = max(self._sent, *numbers)
        found = [(number, self._open[number]) for number in numbers]
        calls = tuple(Call(number, call.method, call.meta, call.specs) for number, call in found)
        return [encode(Calls(session, self.low, calls)), *(frame for _, call in found for frame in call.frames)]

    def numbers(self) -> list[int]:
        """All that wait, in order."""
        return list(self._open)

    def take_sent(self) -> list[Pending]:
        """Takes out all that were sent at least once."""
        return self._take(number for number in self.numbers() if number <= self._sent)

    def take_all(self) -> list[Pending]:
        """Takes out all."""
        return self._take(self.numbers())

    def take_late(self, now_s: float) -> list[Pending]:
        """Takes out those whose deadline has passed."""
        return self._take([number for number, pending in self._open.items() if pending.deadline_s <= now_s])

    def _take(self, numbers: Iterable[int]) -> list[Pending]:
        return [self._open.pop(number) for number in numbers]


class WireConnection(Connection):
    """A connection to a service that may be lost, made again and moved, while its calls run once each.

    Callbacks of the futures run in the thread that receives: they must be short and wait for no other call.
    """

    def __init__(self, courier: "Courier", address: str) -> None:
        self.client = new_client()
        self._courier = courier
        self._lock = threading.Lock()
        self._calls = OpenCalls()
        self._held: list[int] = []
        self._address: str | None = address
        self._lost = ""
        self._closed = False
        self._socket: ClientSocket | None = None
        self._ready = False
        self._session = 0
        self._incarnation = 0
        self._heard_s = self._pinged_s = self._opened_s = time.monotonic()
        self._useless: ClientSocket | None = None
        courier.loop.post(partial(self._replace, None))

    def call(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """As `Connection.call`; what it raises says nothing about whether the method has run, or still will."""
        return self._enter(method, meta, tensors, timeout_s, hold=False)

    def call_along(
        self, method: str, meta: Meta | None = None, tensors: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Future[Answer]:
        """As `Connection.call_along`: it goes with the next call, or with the next tick."""
        return self._enter(method, meta, tensors, timeout_s, hold=True)

    def _enter(
        self, method: str, meta: Meta | None, tensors: Sequence[Tensor], timeout_s: float | None, hold: bool
    ) -> Future[Answer]:
        options = self._courier.options
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # nobody can take a call back
        limit_s = options.timeout_s if timeout_s is None else timeout_s
        try:
            packed, specs, frames = pack(meta, tensors, options.max_message_bytes)
            pending = Pending(method, packed, specs, frames, limit_s, time.monotonic() + limit_s, future)
            with self._lock:
                if self._lost:
                    raise PeerLost(self._lost)
                self._held.append(self._calls.add(pending))
                if not hold or len(packed) > _HELD_META_BYTES:
                    self._send_held()
        except ShadowSyncError as error:
            future.set_exception(error)
        return future

    def _send_held(self) -> None:
        """Sends what waits to travel with another call, if the connection stands; the lock is held."""
        if self._ready and self._socket is not None:
            held, self._held = [number for number in self._held if number in self._calls], []
            if held:
                self._socket.send(self._calls.message(held, self._session))

    def silent_s(self) -> float:
        """Seconds since anything was heard from the peer, or since it was first looked for at its address.

        A message counts when it is complete: a long one over a slow link is silence until then.
        """
        return time.monotonic() - self._heard_s

    def waiting(self, longer_than_s: float) -> str | None:
        """The method of the call that has waited longest for its answer, if it has for so long."""
        with self._lock:
            oldest = self._calls.oldest
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
            given_up = [] if address else self._calls.take_all()
            socket = self._detach()
        self._courier.loop.post(partial(self._replace, socket))
        _fail(given_up, lambda _: PeerLost(self._lost))

    def close(self) -> None:
        """As `Connection.close`; tells the server, if it can be reached at once."""
        with self._lock:
            self._closed = True
            self._lost = "the connection is closed"
            given_up = self._calls.take_all()
            listening = self._ready
            socket = self._detach()
        self._courier.loop.post(partial(self._leave, socket, listening))
        self._courier.forget(self)
        _fail(given_up, lambda _: PeerLost("the connection is closed"))

    def _detach(self) -> ClientSocket | None:
        socket, self._socket, self._ready = self._socket, None, False
        return socket

    # what follows runs in the loop

    def _replace(self, old: ClientSocket | None) -> None:
        """Opens a socket to the present address, unless there is one already."""
        if old is not None:
            old.close(self._courier.loop)
        with self._lock:
            if self._address is None or self._closed or self._socket is not None:
                return
            self._useless = None
            self._opened_s = time.monotonic()
            try:
                self._socket = self._courier.open(self._address, self)
            except RunError as error:
                self._lost = str(error)
                given_up = self._calls.take_all()
            else:
                self._socket.send([encode(Hello(self.client, self._session))])
                return
        _fail(given_up, lambda _: PeerLost(self._lost))

    def _leave(self, old: ClientSocket | None, listening: bool) -> None:
        if old is not None:
            if listening:
                old.send([encode(Bye(self._session))])
            old.close(self._courier.loop, _BYE_MS if listening else 0)

    def receive(self, socket: ClientSocket) -> None:
        """Takes what has come on a socket."""
        for frames in socket.receive():
            self._heard_s = time.monotonic()
            try:
                self._take(socket, from_server(frames), frames[1:])
            except Malformed as reason:
                _LOG.warning("a message of %s was dropped: %s", self._address, reason)
            except BaseException:  # whatever it was, the messages behind it are not to suffer
                _LOG.exception("a message of %s was dropped", self._address)

    def news(self, socket: ClientSocket, news: LinkNews) -> None:
        """Takes what has become of a socket's connection."""
        if news is LinkNews.BROKEN:
            self.receive(socket)
            self._renew(socket)
        elif news is LinkNews.REFUSED:
            self._refused(socket)
        else:
            self._useless = socket  # for the tick, so that a port that speaks something else is not hammered

    def _refused(self, socket: ClientSocket) -> None:
        with self._lock:
            if socket is not self._socket:
                return
            self._lost = f"{self._address} does not accept the keys of this job"  # ZeroMQ does not try again
            given_up = self._calls.take_all()
        _fail(given_up, lambda _: PeerLost(self._lost))

    def _renew(self, socket: ClientSocket) -> None:
        with self._lock:
            if socket is not self._socket:
                self._useless = None
                return
            self._detach()
        self._replace(socket)

    def _take(self, socket: ClientSocket, message: FromServer, frames: Sequence[Any]) -> None:
        if isinstance(message, Answers):
            with self._lock:
                found = [self._calls.drop(answer.number) for answer in message.answers]
            try:
                tensors = tensors_of(frames, *(answer.tensors for answer in message.answers))
            except Misfit as error:
                damaged = RunError(f"an answer of {self._address} is damaged: {error}")
                _fail([call for call in found if call is not None], lambda _: damaged)
                return
            for call, answer, own in zip(found, message.answers, tensors, strict=True):
                if call is not None:
                    _settle(call, answer, own)
        elif isinstance(message, Welcome):
            self._begin(socket, message)
        elif isinstance(message, Unknown):
            self._ask_again(socket, message)

    def _begin(self, socket: ClientSocket, welcome: Welcome) -> None:
        """Goes on in the session that the server gave, and sends what waits."""
        forgotten: list[Pending] = []
        with self._lock:
            if socket is not self._socket:
                return
            if welcome.session != self._session and welcome.incarnation == self._incarnation:
                forgotten = self._calls.take_sent()  # they may have run, and the server no longer knows which
            self._session, self._incarnation = welcome.session, welcome.incarnation
            self._ready, self._held = True, []
            for number in self._calls.numbers():
                socket.send(self._calls.message([number], self._session))
        _fail(forgotten, lambda _: PeerLost(f"{self._address} has forgotten this connection after a long silence"))

    def _ask_again(self, socket: ClientSocket, unknown: Unknown) -> None:
        with self._lock:
            if socket is self._socket and self._ready and unknown.session == self._session:
                self._ready = False
                socket.send([encode(Hello(self.client, self._session))])

    def tick(self, now_s: float) -> None:
        """Gives up late calls and asks a silent peer for a sign of life."""
        every_s = self._courier.options.ping_every_s
        with self._lock:
            late = self._calls.take_late(now_s)
            self._send_held()
            if self._ready and self._socket is not None and now_s - max(self._heard_s, self._pinged_s) >= every_s:
                self._pinged_s = now_s
                self._socket.send([encode(Ping(self._session, self._calls.low))])
        if self._useless is not None and now_s - self._opened_s >= _RETRY_S:
            self._renew(self._useless)
        _fail(late, lambda call: CallTimeout(f"{call.method} at {self._address} gave no answer in {call.limit_s:g} s"))


def _settle(call: Pending, answer: Answered, tensors: tuple[Tensor, ...]) -> None:
    if isinstance(answer, Failed):
        call.future.set_exception(answer.fault.error())
    else:
        call.future.set_result(Answer(answer.meta, tensors, answer.served_s))


def _fail(calls: Iterable[Pending], error: Callable[[Pending], ShadowSyncError]) -> None:
    for call in calls:
        call.future.set_exception(error(call))


class Courier:
    """The connections of one process, with one thread that receives for all of them."""

    def __init__(self, keys: JobKeys, options: CourierOptions | None = None) -> None:
        self.options = options or CourierOptions()
        self.loop = Loop("wire-client", self._tick, self.options.tick_s)
        self._line = Line(keys, self.options.max_message_bytes, self.options.link_timeout_s)
        self._context: Context = new_context()
        self._lock = threading.Lock()
        self._connections: list[WireConnection] = []
        self._closed = False
        self.loop.start()

    def connect(self, address: str) -> WireConnection:
        """A connection to the service at `tcp://host:port`; the peer need not be there yet.

        Raises:
            PeerLost: this courier is closed.
        """
        with self._lock:
            if self._closed:
                raise PeerLost("the courier is closed")
            connection = WireConnection(self, address)
            self._connections.append(connection)
            return connection

    def close(self) -> None:
        """Closes all connections and ends the thread."""
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
        """A socket for a connection, called in the loop.

        Raises:
            RunError: that is no address.
        """
        socket = ClientSocket(self._context, address, self._line, lambda: self.loop.post(receive))
        receive = partial(connection.receive, socket)
        socket.watch(self.loop, receive, partial(connection.news, socket))
        return socket

    def forget(self, connection: WireConnection) -> None:
        """A connection was closed."""
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)

    def _tick(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.tick(now_s)
