"""ZeroMQ sockets as the wire uses them (CURVE, quick notice of a dead link, senders in any thread), and the thread that
waits for all of a process's."""

import contextlib
import hmac
import logging
import math
import secrets
import selectors
import socket as system_sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shadowsync.errors import RunError
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.tensors import FRAME_BYTES

_LOG = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 6
"""Frames of a question of ZAP up to the mechanism; its credentials follow."""

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_BATCH = 64
_SEAL = 64
"""Bytes that CURVE adds to a frame, and more."""
_LINK_TIMEOUT_S = 10.0
"""Silence of the network after which a connection counts as broken, and its client makes a new one."""
_REOPEN_S = 1.0
"""Pause of a server that has no file descriptor for another connection: ZeroMQ would try without one."""
# plain numbers: arithmetic with zmq's enumerations takes as long as the rest of a call
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
_COPIED = 1 << 19
"""Bytes below which a frame is copied into ZeroMQ's memory: quicker than to learn when it needs the tensor no more."""
_RECEIVED = 64
"""Messages of one client that wait inside ZeroMQ; beyond them its network connection is held up."""


Action = Callable[[], None]


class Loop:
    """Runs actions in one thread: when a file is readable, when somebody posts one, and at a steady tick."""

    def __init__(self, name: str, tick: Action, tick_s: float) -> None:
        self._tick, self._tick_s = tick, tick_s
        self._posted: deque[Action] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waking = system_sockets.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        self._wakes = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.watch(self._woken.fileno(), self._wake)
        self._thread.start()

    def watch(self, file: int, action: Action) -> None:
        """Runs the action in the loop whenever the file is readable; called in the loop, or before it starts."""
        self._selector.register(file, selectors.EVENT_READ, action)

    def unwatch(self, file: int) -> None:
        """Ends `watch`; called in the loop, before the file is closed."""
        self._selector.unregister(file)

    def post(self, action: Action) -> None:
        """Runs the action in the loop soon; from any thread."""
        self._posted.append(action)
        if not self._wakes:  # two may wake it at once, which does no harm
            self._wakes = True
            with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyhow; closed: it has ended
                self._waking.send(b"\0")

    def close(self) -> None:
        """Ends the thread, if it was started, after what was posted before."""
        if self._thread.is_alive():
            self.post(self._stop)
            self._thread.join()
        self._selector.close()
        self._woken.close()
        self._waking.close()

    def _stop(self) -> None:
        self._stopping = True

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self._wakes = False  # after it was read, before the actions are taken: no post is missed in between

    def _run(self) -> None:
        ticks_at = time.monotonic() + self._tick_s
        while not self._stopping:
            for key, _ in self._selector.select(max(0.0, ticks_at - time.monotonic())):
                _guarded(key.data)
            while self._posted:
                _guarded(self._posted.popleft())
            if time.monotonic() >= ticks_at:
                _guarded(self._tick)
                ticks_at = time.monotonic() + self._tick_s


def _guarded(action: Action) -> None:
    try:
        action()
    except BaseException:  # one bad message or socket must not end the wire
        _LOG.exception("an action of the wire failed")


def _readable(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _watch(loop: Loop, file: int, action: Action) -> None:
    loop.watch(file, action)
    loop.post(action)  # a socket's file says nothing before the socket was found empty once


class SharedSocket:
    """A socket on which any thread sends and one receives, and that hears what happens to its connections.

    The file behind a ZeroMQ socket only says that something changed, and a sender may be the one who hears it: then
    it passes the word on, through `wake`.

    A dead link is noticed by TCP itself, not by ZMTP's heart-beats: those wait behind the message that is under way,
    so that a long one on a slow link would look like a dead peer.

    Args:
        events: that are to be heard of, `zmq.EVENT_…`.
        wake: has the thread that receives look again.
    """

    def __init__(self, socket: Socket, events: int, wake: Action) -> None:
        socket.linger = 0
        socket.maxmsgsize = FRAME_BYTES + _SEAL
        socket.copy_threshold = _COPIED
        socket.sndhwm = 0  # nothing is ever dropped: whoever asks waits for answers, and asks no more meanwhile
        socket.handshake_ivl = 5_000  # less would turn honest peers away where many of them start on few cores
        socket.setsockopt(zmq.TCP_MAXRT, int(_LINK_TIMEOUT_S * 1000))
        probe_s = max(1, int(_LINK_TIMEOUT_S / 4))
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = probe_s
        socket.tcp_keepalive_intvl = probe_s
        socket.tcp_keepalive_cnt = 3
        self._socket = socket
        self._monitor = socket.get_monitor_socket(events)
        self._wake = wake
        self._lock = threading.Lock()
        self._closed = False

    def send(self, frames: Sequence[Any]) -> None:
        """Sends one message; once closed, or where the connection is lost for good, it is dropped as by a network."""
        with self._lock:
            if self._closed:
                return
            with contextlib.suppress(zmq.Again):  # only before the first frame
                for frame in frames[:-1]:
                    self._socket.send(frame, _MORE, copy=False)
                self._socket.send(frames[-1], _NOBLOCK, copy=False)
            waiting = _readable(self._socket)
        if waiting:
            self._wake()

    def receive(self) -> list[list[zmq.Frame]]:
        """Messages that are there; if that were many there may be more, and `wake` was called."""
        messages: list[list[zmq.Frame]] = []
        with self._lock:
            while not self._closed and _readable(self._socket):
                if len(messages) == _BATCH:
                    self._wake()
                    break
                frames = [self._socket.recv(_NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_NOBLOCK, copy=False))
                messages.append(frames)
        return messages

    def watch_events(self, loop: Loop, hear: Callable[[int], None]) -> None:

        def look() -> None:
            for _ in range(_BATCH):
                if self._closed or not _readable(self._monitor):
                    return
                hear(int(recv_monitor_message(self._monitor)["event"]))
            loop.post(look)

        _watch(loop, int(self._monitor.fd), look)

    def shut(self, linger_ms: int = 0) -> None:
        """Closes it; what was sent and has not left goes on leaving for so long."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger_ms)


class Gatekeeper:
    """Lets connections with the job's client key into a context's sockets, and no others (ZeroMQ's protocol ZAP).

    Over a network they prove that they have it (CURVE); over a Unix socket, which nobody can listen to, they say it
    (PLAIN).
    """

    def __init__(self, context: Context, keys: JobKeys) -> None:
        self._credentials = {
            b"CURVE": z85.decode(keys.client_public),
            b"PLAIN": keys.client_public.encode() + keys.client_secret.encode(),
        }
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP)

    def watch(self, loop: Loop) -> None:
        _watch(loop, int(self._socket.fd), self._answer)

    def _answer(self) -> None:
        while _readable(self._socket):
            request = self._socket.recv_multipart()
            mechanism = request[_ZAP_FRAMES - 1] if len(request) > _ZAP_FRAMES else b""
            key = self._credentials.get(mechanism)
            known = key is not None and hmac.compare_digest(b"".join(request[_ZAP_FRAMES:]), key)
            verdict = (b"200", b"", b"job") if known else (b"400", b"not a key of this job", b"")
            self._socket.send_multipart([*request[:2], *verdict, b""])

    def close(self) -> None:
        self._socket.close(0)


class ServerSocket(SharedSocket):
    """A ROUTER with the job's server key in a context of its own, into which only those with the client key get."""

    def __init__(self, keys: JobKeys, wake: Action) -> None:
        self._context: Context = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, keys)
        self._keys = keys
        socket = self._context.socket(zmq.ROUTER)
        socket.rcvhwm = _RECEIVED
        super().__init__(socket, zmq.EVENT_ACCEPT_FAILED, wake)
        self._endpoint = ""
        self._reopens_s = math.inf

    def bind(self, host: str, port: int) -> str:
        """Opens the address (see `WireServer`) and returns it with the port that it got.

        Raises:
            RunError: it cannot be had, and everything is closed.
        """
        place = f"[{host}]" if ":" in host else host
        socket = self._socket
        try:
            if is_folder(host):
                socket.plain_server = True
                socket.bind(f"ipc://{host}/{secrets.token_hex(8)}")
            else:
                socket.ipv6 = ":" in place
                socket.curve_server = True
                socket.curve_publickey = self._keys.server_public.encode()
                socket.curve_secretkey = self._keys.server_secret.encode()
                socket.bind(f"tcp://{place}:{port or '*'}")
            endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self.close()
            raise RunError(f"nothing can be served at {place}:{port}: {error}") from error
        assert isinstance(endpoint, bytes)
        self._endpoint = endpoint.rstrip(b"\0").decode()
        return self._endpoint if is_folder(host) else f"tcp://{place}:{self._endpoint.rpartition(':')[2]}"

    def watch(self, loop: Loop, receive: Action) -> None:
        """Lets a loop that has not started wait for it, and run `receive` when there may be messages."""
        self._gatekeeper.watch(loop)
        self.watch_events(loop, self._pause)
        _watch(loop, int(self._socket.fd), receive)

    def _pause(self, _: int) -> None:
        """There was no file descriptor for another connection."""
        with self._lock:
            if self._reopens_s == math.inf and not self._closed:
                self._reopens_s = time.monotonic() + _REOPEN_S
                self._socket.unbind(self._endpoint)

    def tick(self, now_s: float) -> None:
        """Lets newcomers in again after a pause; called in the loop."""
        if now_s >= self._reopens_s:
            self._reopens_s = math.inf
            try:
                with self._lock:
                    if not self._closed:
                        self._socket.bind(self._endpoint)
            except zmq.ZMQError:  # there is still no descriptor for that
                self._reopens_s = now_s + _REOPEN_S

    def close(self) -> None:
        """Closes everything; replies that have not left are lost."""
        self.shut()
        self._gatekeeper.close()
        self._context.term()


class LinkNews(Enum):
    """What a connection's end learns of its link."""

    BROKEN = auto()
    """The connection stood and is lost: what was under way on it may or may not have arrived."""
    REFUSED = auto()
    """The other end does not let these keys in; nobody tries again."""
    USELESS = auto()
    """The other end does not speak the protocol; nobody tries again."""


def is_folder(host: str) -> bool:
    """Whether what is served there is served over Unix sockets in this folder."""
    return host.startswith("/")


class ClientSocket(SharedSocket):
    """A DEALER with the job's client key, for one network connection; made and closed by the loop's thread.

    As long as the connection has not stood, ZeroMQ goes on trying; once it has broken, the socket is of no more use:
    nobody could say which of the messages in it have left.
    """

    def __init__(self, context: Context, address: str, keys: JobKeys, wake: Action) -> None:
        socket = context.socket(zmq.DEALER)
        socket.rcvhwm = 0
        socket.ipv6 = "[" in address
        socket.connect_timeout = 2_000  # a lost first packet would otherwise be repeated at growing intervals
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1_000
        if address.startswith("ipc://"):
            socket.plain_username = keys.client_public.encode()
            socket.plain_password = keys.client_secret.encode()
        else:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.client_public.encode()
            socket.curve_secretkey = keys.client_secret.encode()
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
        super().__init__(socket, events, wake)
        self._stood = False
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.shut()
            raise RunError(f"there can be no peer at {address}: {error}") from error

    def watch(self, loop: Loop, receive: Action, news: Callable[[LinkNews], None]) -> None:
        """Lets the loop wait for messages and for news; called in the loop."""

        def hear(event: int) -> None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stood = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                news(LinkNews.REFUSED)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                news(LinkNews.USELESS)
            elif event == zmq.EVENT_DISCONNECTED and self._stood:
                news(LinkNews.BROKEN)

        self.watch_events(loop, hear)
        _watch(loop, int(self._socket.fd), receive)

    def close(self, loop: Loop, linger_ms: int = 0) -> None:
        """Closes it, called in the loop; what was sent may go on leaving for so long."""
        loop.unwatch(int(self._monitor.fd))
        loop.unwatch(int(self._socket.fd))
        self.shut(linger_ms)
