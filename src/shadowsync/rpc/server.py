"""A service behind a socket: one thread receives, a pool of threads answers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.rpc.clients import Limits, Record
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.ledger import Frames
from shadowsync.rpc.loop import Loop
from shadowsync.rpc.messages import Done, Failed, encode
from shadowsync.rpc.packing import Cargo
from shadowsync.rpc.reception import Job, Reception, ServerCounts
from shadowsync.rpc.service import Reply, Request, Service, known_error, perform
from shadowsync.rpc.sockets import ServerSocket, tracked

_LOG = logging.getLogger(__name__)
_JOIN_S = 5.0


@dataclass(frozen=True)
class ServerOptions:
    """How a service is served.

    Attributes:
        host: address of this machine that the others reach it by; or a folder that only this user may enter, for Unix
            sockets in it, which are not encrypted and serve this machine only.
        port: 0 takes a free one.
        threads: that answer; with more of them methods that wait hold up the others less.
        max_message_bytes: longest tensor that is sent.
        max_waiting: requests that wait for a thread; at that many no more are read until half of them are gone.
        link_timeout_s: silence of the network after which a connection counts as broken; its client makes a new one.
        tick_s: how often silent clients are looked for, and whether those who are slow have read.
        limits: of what is kept for clients.
    """

    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 4
    max_message_bytes: int = 1 << 30
    max_waiting: int = 1024
    link_timeout_s: float = 10.0
    tick_s: float = 0.25
    limits: Limits = field(default_factory=Limits)


class WireServer:
    """Serves one service from `start` to `close`, to clients that have the job's keys."""

    def __init__(self, service: Service, keys: JobKeys, options: ServerOptions | None = None) -> None:
        self.address = ""
        self._service = service
        self._keys = keys
        self._options = options or ServerOptions()
        self._reception = Reception(self._options.limits)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._full = self._silent = False
        self._parked: deque[tuple[Job, float]] = deque()
        self._threads: list[threading.Thread] = []

    @property
    def counts(self) -> ServerCounts:
        """What it has seen so far."""
        return self._reception.counts

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a thread."""
        return self._jobs.qsize()

    @property
    def clients(self) -> list[str]:
        """Those that it knows."""
        return self._reception.clients

    def start(self) -> None:
        """Opens the address and starts to answer.

        Raises:
            RunError: the address cannot be had.
        """
        options = self._options
        self._loop = Loop("wire-server", self._tick, options.tick_s)
        self._socket = ServerSocket(self._keys, options.max_message_bytes, options.link_timeout_s, self._wake)
        try:
            self.address = self._socket.bind(options.host, options.port)
        except RunError:
            self._loop.close()
            raise
        self._socket.watch(self._loop, self._receive, self._reception.refused)
        self._loop.start()
        for index in range(options.threads):
            self._threads.append(threading.Thread(target=self._work, name=f"wire-worker-{index}", daemon=True))
            self._threads[-1].start()

    def silence(self) -> None:
        """Hears and answers nobody any more, as if its process were gone; it is still to be closed."""
        self._silent = True
        self._loop.close()

    def close(self) -> None:
        """Stops answering and frees what the service keeps for clients; waits up to 5 s for methods under way."""
        if not self._threads:
            return
        self._loop.close()
        self._free(self._reception.clients)
        for _ in self._threads:
            self._jobs.put(None)
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._threads.clear()
        self._socket.close()

    def _wake(self) -> None:
        self._loop.post(self._receive)

    def _receive(self) -> None:
        if self._is_full():
            self._socket.quieten()
            return  # a worker calls again
        now_s = time.monotonic()
        for frames in self._socket.receive():
            try:
                self._take(frames[0].bytes, frames[1:], now_s)
            except BaseException:  # whatever it was, the messages behind it are not to suffer
                _LOG.exception("a message was dropped")

    def _take(self, route: bytes, frames: Frames, now_s: float) -> None:
        step = self._reception.take(route, frames, now_s)
        if step.job is not None:
            self._begin(step.job)
        if step.answer is not None:
            self._transmit(route, step.answer, step.repeats_to)
        if step.gone is not None:
            self._free([step.gone])

    def _transmit(self, route: bytes, frames: Frames, client: Record | None) -> None:
        """Sends a message; what is a reply to a client counts until it is read."""
        if client is not None and client.unread.add(sum(map(len, frames))):
            header, tracker = tracked(frames[0])
            self._socket.send([route, header, *frames[1:]])
            del header  # as long as anybody has it, it does not count as sent
            client.unread.follow(tracker)
        else:
            self._socket.send([route, *frames])

    def _begin(self, job: Job) -> None:
        method = self._service.methods.get(job.call.method)
        if method is not None and method.quick:
            self._run(job, time.monotonic())
        else:
            self._jobs.put(partial(self._run, job, time.monotonic()))

    def _resume(self) -> None:
        """Begins what waited for clients to read what they had asked for before; those that are gone get nothing."""
        for _ in range(len(self._parked)):
            job, since_s = self._parked.popleft()
            job.record.unread.park(-job.bytes)
            if job.record.gone:
                _, free = self._reception.finish(job, [], keep=False)
                self._free([job.record.client] if free else [])
            elif job.record.unread.full:
                self._park(job, since_s)
            else:
                self._jobs.put(partial(self._run, job, since_s))

    def _park(self, job: Job, since_s: float) -> None:
        job.record.unread.park(job.bytes)
        self._parked.append((job, since_s))

    def _is_full(self) -> bool:
        if self.queue_depth >= self._options.max_waiting:
            self._full = True
            if self.queue_depth > self._options.max_waiting // 2:  # as seen after saying so: a worker will see it too
                return True
            self._full = False
        return False

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._free(self._reception.forget_silent(now_s))
        self._socket.tick(now_s)
        self._resume()

    def _free(self, clients: Iterable[str]) -> None:
        for client in clients:
            self._jobs.put(partial(self._service.client_gone, client))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._full and self.queue_depth <= self._options.max_waiting // 2:
                self._full = False
                self._wake()
            try:
                job()
            except BaseException:  # whatever it was, the others are not to wait for a thread that is no more
                _LOG.exception("a thread of the wire goes on after an error")

    def _run(self, job: Job, since_s: float) -> None:
        if job.record.unread.full:
            self._park(job, since_s)
            return
        call = job.call
        request = Request(call.method, call.meta, job.tensors, job.record.client)
        try:
            outcome = perform(self._service, request)
        except BaseException as error:  # who asked waits for an answer
            self._send(job, _failed(call.number, known_error(call.method, error)))
            return
        if isinstance(outcome, Future):
            outcome.add_done_callback(lambda later: self._send(job, self._later(job, later, since_s)))
        else:
            self._send(job, self._packed(job, outcome, since_s))

    def _send(self, job: Job, reply: Frames) -> None:
        method = self._service.methods.get(job.call.method)
        route, gone = self._reception.finish(job, reply, keep=method is not None and method.once)
        if not self._silent:
            self._transmit(route, reply, job.record)
        if gone:
            self._service.client_gone(job.record.client)

    def _later(self, job: Job, later: "Future[Reply]", since_s: float) -> Frames:
        try:
            reply = later.result()
        except BaseException as error:  # also of one that was cancelled
            return _failed(job.call.number, known_error(job.call.method, error))
        return self._packed(job, reply, since_s)

    def _packed(self, job: Job, reply: Reply, since_s: float) -> Frames:
        call = job.call
        try:
            cargo = Cargo.of(reply.meta, reply.tensors, self._options.max_message_bytes)
            return [encode(Done(call.number, cargo.meta, cargo.specs, time.monotonic() - since_s)), *cargo.frames]
        except ShadowSyncError as error:
            return _failed(call.number, error)
        except BaseException as error:  # a reply that cannot be written down
            _LOG.exception("the reply of method %s failed", call.method)
            return _failed(
                call.number, RunError(f"the reply of {call.method} failed with {type(error).__name__}: {error}")
            )


def _failed(number: int, error: ShadowSyncError) -> Frames:
    return [encode(Failed(number, Fault.of(error)))]
