"""A service behind a socket: one thread receives, a pool of threads answers."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.loop import Loop
from shadowsync.rpc.messages import Done, Failed, Frames, pack
from shadowsync.rpc.reception import Job, Kept, Reception, joined
from shadowsync.rpc.service import Reply, Request, Service, known_error, perform
from shadowsync.rpc.sockets import ServerSocket

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
        link_timeout_s: silence of the network after which a connection counts as broken; its client makes a new one.
        forget_client_after_s: silence after which what is kept for a client is freed.
        tick_s: how often silent clients are looked for.
    """

    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 4
    max_message_bytes: int = 1 << 30
    link_timeout_s: float = 10.0
    forget_client_after_s: float = 120.0
    tick_s: float = 0.25


class WireServer:
    """Serves one service from `start` to `close`, to clients that have the job's keys."""

    def __init__(self, service: Service, keys: JobKeys, options: ServerOptions | None = None) -> None:
        self.address = ""
        self._service = service
        self._keys = keys
        self._options = options or ServerOptions()
        self._reception = Reception(self._options.forget_client_after_s)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._silent = False
        self._threads: list[threading.Thread] = []

    @property
    def clients(self) -> list[str]:
        """Those that it knows."""
        return self._reception.clients

    @property
    def repeated(self) -> int:
        """Requests that came again, so far."""
        return self._reception.repeated

    def start(self) -> None:
        """Opens the address and starts to answer.

        Raises:
            RunError: the address cannot be had.
        """
        options = self._options
        self._loop = Loop("wire-server", self._tick, options.tick_s)
        self._socket = ServerSocket(
            self._keys, options.max_message_bytes, options.link_timeout_s, lambda: self._loop.post(self._receive)
        )
        try:
            self.address = self._socket.bind(options.host, options.port)
        except RunError:
            self._loop.close()
            raise
        self._socket.watch(self._loop, self._receive)
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

    # in the loop

    def _receive(self) -> None:
        now_s = time.monotonic()
        for frames in self._socket.receive():
            try:
                self._take(frames[0].bytes, frames[1:], now_s)
            except BaseException:  # whatever it was, the messages behind it are not to suffer
                _LOG.exception("a message was dropped")

    def _take(self, route: bytes, frames: Frames, now_s: float) -> None:
        step = self._reception.take(route, frames, now_s)
        if step.jobs:
            methods = [self._service.methods.get(job.call.method) for job in step.jobs]
            if all(method is not None and method.quick for method in methods):
                self._run(step.jobs, now_s)
            else:
                self._jobs.put(partial(self._run, step.jobs, now_s))
        if step.answer is not None:
            self._socket.send([route, *step.answer])
        if step.gone is not None:
            self._free([step.gone])

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._free(self._reception.forget_silent(now_s))
        self._socket.tick(now_s)

    def _free(self, clients: Iterable[str]) -> None:
        for client in clients:
            self._jobs.put(partial(self._service.client_gone, client))

    # in the threads that answer

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # whatever it was, the others are not to wait for a thread that is no more
                _LOG.exception("a thread of the wire goes on after an error")

    def _run(self, jobs: Sequence[Job], since_s: float) -> None:
        """One after the other; what is answered at once is answered together."""
        ended: list[tuple[Job, Reply | BaseException]] = []
        for job in jobs:
            try:
                call = job.call
                outcome = perform(self._service, Request(call.method, call.meta, job.tensors, job.record.client))
            except BaseException as error:  # who asked waits for an answer
                ended.append((job, error))
                continue
            if isinstance(outcome, Future):
                outcome.add_done_callback(partial(self._later, job, since_s))
            else:
                ended.append((job, outcome))
        if ended:
            self._send(ended, since_s)

    def _later(self, job: Job, since_s: float, later: "Future[Reply]") -> None:
        try:
            reply: Reply | BaseException = later.result()
        except BaseException as error:  # also of one that was cancelled
            reply = error
        self._send([(job, reply)], since_s)

    def _send(self, ended: Sequence[tuple[Job, Reply | BaseException]], since_s: float) -> None:
        """Of one client."""
        answers, route, is_gone = [], b"", False
        for job, reply in ended:
            method = self._service.methods.get(job.call.method)
            answers.append(self._answer(job, reply, since_s))
            route, gone = self._reception.finish(job, answers[-1], keep=method is not None and method.once)
            is_gone = is_gone or gone
        if not self._silent:
            self._socket.send([route, *joined(answers)])
        if is_gone:
            self._service.client_gone(ended[0][0].record.client)

    def _answer(self, job: Job, reply: Reply | BaseException, since_s: float) -> Kept:
        call = job.call
        try:
            if isinstance(reply, BaseException):
                raise known_error(call.method, reply)
            meta, specs, frames = pack(reply.meta, reply.tensors, self._options.max_message_bytes)
            return Done(call.number, meta, specs, time.monotonic() - since_s), frames
        except ShadowSyncError as error:
            return Failed(call.number, Fault.of(error)), []
        except BaseException as error:  # a reply that cannot be written down
            return Failed(call.number, Fault.of(known_error(f"the reply of {call.method}", error))), []
