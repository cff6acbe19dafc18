"""A service behind a socket: one thread receives, a pool of threads answers, and each request runs once however
often it comes."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.rpc.connection import JobKeys, Payload, Service, known_error, perform
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.messages import (
    FROM_CLIENT,
    Answer,
    Answers,
    Bye,
    Calls,
    Frames,
    Hello,
    Unknown,
    Welcome,
    encode,
    header_of,
    pack,
)
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.sockets import Loop, ServerSocket
from shadowsync.rpc.tensors import Malformed, tensors_of

_LOG = logging.getLogger(__name__)
_JOIN_S = 5.0

Ready = tuple[Answer, Frames]
"""An answer with its frames."""


@dataclass(eq=False)
class ClientRecord:
    """One client: its session, the route of the connection that it uses now, and its requests.

    Attributes:
        requests: by number; those that run have None, the others the answer that is kept until the client has it.
        low: the client waits for no number below.
        running: requests that run.
        gone: it was forgotten while requests of it ran.
    """

    client: str
    session: int
    route: bytes
    heard_at: float
    requests: dict[int, Ready | None] = field(default_factory=dict)
    low: int = 0
    running: int = 0
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A request to run; its end is owed to `Dispatcher.finish`."""

    record: ClientRecord
    number: int
    method: str
    request: Payload


@dataclass(frozen=True, slots=True)
class Taken:
    """What a message leads to, any or none of: an answer at once, requests to run, a client to be freed."""

    answer: Frames | None = None
    tasks: tuple[Task, ...] = ()
    gone: str | None = None


class Dispatcher:
    """Lets clients in, recognises requests that come again, forgets who is silent; any thread. No sockets, no clock.

    Who is here has the job's keys. Memory is taken only for what was sent (`tensors_of`); how much of that is under way
    its sender bounds, as it does in process.

    Attributes:
        incarnation: of this server, drawn at random.
        repeated: requests that came again, so far.
    """

    def __init__(self, forget_after_s: float) -> None:
        self.incarnation = secrets.randbits(63)
        self.repeated = 0
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._by_client: dict[str, ClientRecord] = {}
        self._by_route: dict[bytes, ClientRecord] = {}

    @property
    def clients(self) -> list[str]:
        with self._lock:
            return list(self._by_client)

    def take(self, route: bytes, frames: Sequence[Any], now_s: float) -> Taken:
        """A message that came on a route (a connection, as the socket names it); what no honest client sends is
        dropped."""
        try:
            message = header_of(frames, FROM_CLIENT)
            calls = message.calls if isinstance(message, Calls) else ()
            tensors = tensors_of(frames[1:], *(call.tensors for call in calls))
        except Malformed:
            return Taken()
        with self._lock:
            if isinstance(message, Hello):
                return self._hello(route, message, now_s)
            record = self._by_route.get(route)
            if record is None or record.session != message.session:
                return Taken([encode(Unknown(message.session))])
            record.heard_at = now_s
            if isinstance(message, Bye):
                return Taken(gone=record.client) if self._forget(record) else Taken()
            if message.low > record.low:
                record.low = message.low
                for number in [number for number in record.requests if number < message.low]:
                    del record.requests[number]
            if not calls:
                return Taken([encode(Answers())])
            tasks, ready = [], []
            for call, own in zip(calls, tensors, strict=True):
                if call.number in record.requests:
                    self.repeated += 1
                    if (kept := record.requests[call.number]) is not None:
                        ready.append(kept)
                elif call.number >= record.low:  # else its sender no longer waits for it
                    record.requests[call.number] = None
                    record.running += 1
                    tasks.append(Task(record, call.number, call.method, Payload(call.meta, own, record.client)))
            return Taken(joined(ready) if ready else None, tuple(tasks))

    def _hello(self, route: bytes, hello: Hello, now_s: float) -> Taken:
        """Binds the client to the route. One that was here before goes on in its session, wherever it was meanwhile;
        else it gets a new one: the client decides what that means for it."""
        record = self._by_client.get(hello.client)
        if record is None:
            record = ClientRecord(hello.client, secrets.randbits(62) + 1, route, now_s)
            self._by_client[hello.client] = record
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        record.route, record.heard_at = route, now_s
        self._by_route[route] = record
        return Taken([encode(Welcome(record.session, self.incarnation))])

    def finish(self, task: Task, answer: Ready, keep: bool) -> tuple[bytes, bool]:
        """Ends a task; where to send its answer, and whether its client went meanwhile and is now to be freed.

        With `keep` the answer is kept until its client has it, so that the request does not run again.
        """
        record = task.record
        with self._lock:
            record.running -= 1
            if task.number in record.requests:  # else its sender gave it up meanwhile
                if keep:
                    record.requests[task.number] = answer
                else:
                    del record.requests[task.number]
            return record.route, record.gone and not record.running

    def forget_silent(self, now_s: float) -> list[str]:
        """Forgets clients; those to be freed now, the others when their last task ends."""
        with self._lock:
            silent = [record for record in self._by_client.values() if record.heard_at < now_s - self._forget_after_s]
            return [record.client for record in silent if self._forget(record)]

    def _forget(self, record: ClientRecord) -> bool:
        """Drops a client; True if none of its requests runs any more, else the last one to end finds it `gone`."""
        record.gone = True
        del self._by_client[record.client]
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        return record.running == 0


def joined(answers: Sequence[Ready]) -> Frames:
    """One message of all of them."""
    header = encode(Answers(tuple(answer for answer, _ in answers)))
    return [header, *(frame for _, frames in answers for frame in frames)]


class WireServer:
    """Serves from `start` to `close`, to clients that have the job's keys.

    Args:
        host: address of this machine that the others reach it by; or a folder that only this user may enter, for Unix
            sockets in it, which are not encrypted and serve this machine only.
        port: 0 takes a free one.
        threads: that answer; with more of them methods that wait hold up the others less.
        forget_client_after_s: silence after which what is kept for a client is freed.
        tick_s: how often silent clients are looked for.

    Attributes:
        service: what is served now; another may take its place at any time.
    """

    def __init__(
        self,
        service: Service,
        keys: JobKeys,
        host: str = "127.0.0.1",
        port: int = 0,
        threads: int = 4,
        forget_client_after_s: float = 120.0,
        tick_s: float = 0.25,
    ) -> None:
        self.address = ""
        self.service = service
        self._keys = keys
        self._host, self._port, self._thread_count, self._tick_s = host, port, threads, tick_s
        self.dispatcher = Dispatcher(forget_client_after_s)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Opens the address and starts to answer; raises `RunError` where it cannot be had."""
        self._loop = Loop("wire-server", self._tick, self._tick_s)
        self._socket = ServerSocket(self._keys, lambda: self._loop.post(self._receive))
        try:
            self.address = self._socket.bind(self._host, self._port)
        except RunError:
            self._loop.close()
            raise
        self._socket.watch(self._loop, self._receive)
        self._loop.start()
        for index in range(self._thread_count):
            self._threads.append(threading.Thread(target=self._work, name=f"wire-worker-{index}", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """Stops answering and frees what the service keeps for clients; waits up to 5 s for methods under way."""
        if not self._threads:
            return
        self._loop.close()
        self._free(self.dispatcher.clients)
        for _ in self._threads:
            self._queue.put(None)
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
        taken = self.dispatcher.take(route, frames, now_s)
        if taken.tasks:
            methods = [self.service.methods.get(task.method) for task in taken.tasks]
            if all(method is not None and method.quick for method in methods):
                self._run(taken.tasks, now_s)
            else:
                self._queue.put(partial(self._run, taken.tasks, now_s))
        if taken.answer is not None:
            self._socket.send([route, *taken.answer])
        if taken.gone is not None:
            self._free([taken.gone])

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._free(self.dispatcher.forget_silent(now_s))
        self._socket.tick(now_s)

    def _free(self, clients: Iterable[str]) -> None:
        for client in clients:
            self._queue.put(partial(self.service.client_gone, client))

    # in the threads that answer

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except BaseException:  # whatever it was, the others are not to wait for a thread that is no more
                _LOG.exception("a thread of the wire goes on after an error")

    def _run(self, tasks: Sequence[Task], since_s: float) -> None:
        """One after the other; what is answered at once is answered together."""
        ended: list[tuple[Task, Payload | BaseException]] = []
        for task in tasks:
            try:
                answer = perform(self.service, task.method, task.request)
            except BaseException as error:  # who asked waits for an answer
                ended.append((task, error))
                continue
            if isinstance(answer, Pending):
                answer.then(partial(self._later, task, answer, since_s))
            else:
                ended.append((task, answer))
        if ended:
            self._send(ended, since_s)

    def _later(self, task: Task, pending: Pending[Payload], since_s: float, _: BaseException | None) -> None:
        try:
            answer: Payload | BaseException = pending.result()
        except BaseException as error:
            answer = error
        self._send([(task, answer)], since_s)

    def _send(self, ended: Sequence[tuple[Task, Payload | BaseException]], since_s: float) -> None:
        """Of one client."""
        answers, route, is_gone = [], b"", False
        for task, answer in ended:
            method = self.service.methods.get(task.method)
            answers.append(self._ready(task, answer, since_s))
            route, gone = self.dispatcher.finish(task, answers[-1], keep=method is not None and method.once)
            is_gone = is_gone or gone
        self._socket.send([route, *joined(answers)])
        if is_gone:
            self.service.client_gone(ended[0][0].record.client)

    def _ready(self, task: Task, answer: Payload | BaseException, since_s: float) -> Ready:
        try:
            if isinstance(answer, BaseException):
                raise known_error(task.method, answer)
            specs, frames = pack(answer)
            return Answer(task.number, answer.meta, specs, time.monotonic() - since_s), frames
        except ShadowSyncError as error:
            return Answer(task.number, fault=Fault.of(error)), []
        except BaseException as error:  # an answer that cannot be written down
            return Answer(task.number, fault=Fault.of(known_error(f"the reply of {task.method}", error))), []
