"""What a server knows of its clients, so that each request runs once however often it comes; no sockets, no clock."""

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shadowsync.rpc.messages import (
    Answered,
    Answers,
    Bye,
    Call,
    Calls,
    Frames,
    Hello,
    Malformed,
    Ping,
    Pong,
    Unknown,
    Welcome,
    encode,
    from_client,
)
from shadowsync.rpc.tensors import Misfit, tensors_of

_PONG = encode(Pong())

Kept = tuple[Answered, Frames]
"""An answer with its frames."""


@dataclass(eq=False)
class Record:
    """One client: its session, the route of the connection that it uses now, and its requests.

    Attributes:
        requests: by number; those that run have None, the others the reply that is kept until the client has it.
        low: the client waits for no number below.
        running: requests that run.
        called: it has called anything since it was let in.
        gone: it was forgotten while requests of it ran.
    """

    client: str
    session: int
    route: bytes
    heard_at: float
    requests: dict[int, Kept | None] = field(default_factory=dict)
    low: int = 0
    running: int = 0
    called: bool = False
    gone: bool = False

    def settle(self, low: int) -> None:
        """The client no longer waits for numbers below `low`."""
        if low > self.low:
            self.low = low
            for number in [number for number in self.requests if number < low]:
                del self.requests[number]


@dataclass(frozen=True, slots=True)
class Job:
    """A request to run; its end is owed to `Reception.finish`."""

    record: Record
    call: Call
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What a message leads to, any or none of: an answer at once, requests to run, a client to be freed."""

    answer: Frames | None = None
    jobs: tuple[Job, ...] = ()
    gone: str | None = None


_NOTHING = Step()


class Reception:
    """Lets clients in, recognises requests that come again, forgets who is silent; any thread.

    Who is here has the job's keys. Memory is taken only for what was sent (`tensors_of`); how much of that is under way
    its sender bounds, as it does in process.

    Args:
        forget_after_s: silence after which a client is forgotten.

    Attributes:
        incarnation: of this server, drawn at random.
        repeated: requests that came again, so far.
    """

    def __init__(self, forget_after_s: float) -> None:
        self.incarnation = secrets.randbits(63)
        self.repeated = 0
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._by_client: dict[str, Record] = {}
        self._by_route: dict[bytes, Record] = {}

    @property
    def clients(self) -> list[str]:
        """Those that it knows."""
        with self._lock:
            return list(self._by_client)

    def take(self, route: bytes, frames: Sequence[Any], now_s: float) -> Step:
        """A message that came on a route; what no honest client sends is dropped.

        Args:
            route: of the connection, as the socket names it.
            frames: of the message, without the route.
            now_s: any steady clock.
        """
        try:
            message = from_client(frames)
            calls = message.calls if isinstance(message, Calls) else ()
            tensors = tensors_of(frames[1:], *(call.tensors for call in calls))
        except (Malformed, Misfit):
            return _NOTHING
        with self._lock:
            if isinstance(message, Hello):
                return self._hello(route, message, now_s)
            record = self._by_route.get(route)
            if record is None or record.session != message.session:
                return Step(answer=[encode(Unknown(message.session))])
            record.heard_at = now_s
            if isinstance(message, Bye):
                return Step(gone=record.client) if self._forget(record) else _NOTHING
            record.settle(message.low)
            if isinstance(message, Ping):
                return Step(answer=[_PONG])
            found = [self._call(record, *call) for call in zip(calls, tensors, strict=True)]
            jobs = tuple(job for job, _ in found if job is not None)
            kept = [kept for _, kept in found if kept is not None]
            return Step(joined(kept) if kept else None, jobs)

    def _hello(self, route: bytes, hello: Hello, now_s: float) -> Step:
        """Binds the client to the route. A session that is not known is answered with a new one: the client decides
        what that means for it."""
        record = self._by_client.get(hello.client)
        if record is None:
            record = Record(hello.client, secrets.randbits(62) + 1, route, now_s)
            self._by_client[hello.client] = record
        elif hello.session != record.session and record.called:
            return _NOTHING  # somebody else with its name: the client itself knows its session by its first call
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        record.route, record.heard_at = route, now_s
        self._by_route[route] = record
        return Step(answer=[encode(Welcome(record.session, self.incarnation))])

    def _call(self, record: Record, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Job | None, Kept | None]:
        """The request to run, or the answer that it got before, or neither."""
        if call.number < record.low:
            return None, None  # its sender no longer waits for it
        if call.number in record.requests:
            self.repeated += 1
            return None, record.requests[call.number]
        record.called = True
        record.requests[call.number] = None
        record.running += 1
        return Job(record, call, tensors), None

    def finish(self, job: Job, reply: Kept, keep: bool) -> tuple[bytes, bool]:
        """Ends a job; where to send its reply, and whether its client went meanwhile and is now to be freed.

        Args:
            job: as it was given out.
            reply: is kept until its client has it, so that the request does not run again.
            keep: False where it may run again.
        """
        record, number = job.record, job.call.number
        with self._lock:
            record.running -= 1
            if number in record.requests:  # else its sender gave it up meanwhile
                if keep:
                    record.requests[number] = reply
                else:
                    del record.requests[number]
            return record.route, record.gone and not record.running

    def forget_silent(self, now_s: float) -> list[str]:
        """Forgets clients; those to be freed now, the others when their last job ends."""
        with self._lock:
            silent = [record for record in self._by_client.values() if record.heard_at < now_s - self._forget_after_s]
            return [record.client for record in silent if self._forget(record)]

    def _forget(self, record: Record) -> bool:
        """Drops a client; True if none of its requests runs any more, else the last one to end finds it `gone`."""
        record.gone = True
        del self._by_client[record.client]
        if self._by_route.get(record.route) is record:
            del self._by_route[record.route]
        return record.running == 0


def joined(answers: Sequence[Kept]) -> Frames:
    """One message of all of them."""
    header = encode(Answers(tuple(answer for answer, _ in answers)))
    return [header, *(frame for _, frames in answers for frame in frames)]
