"""What a server does with every message that comes, before any method runs; knows no sockets and no clock."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shadowsync.errors import RunError
from shadowsync.rpc.clients import Clients, Limits, Record
from shadowsync.rpc.errors import Fault
from shadowsync.rpc.ledger import Frames, Verdict
from shadowsync.rpc.messages import (
    Bye,
    Call,
    Failed,
    Hello,
    Malformed,
    Ping,
    Pong,
    Unknown,
    encode,
    from_client,
)
from shadowsync.rpc.tensors import Misfit, tensors_of

_PONG = encode(Pong())


@dataclass
class ServerCounts:
    """What a server has seen.

    Attributes:
        requests: that were run.
        replayed: that came again: answered from the kept reply, or dropped.
        malformed: messages of clients with the keys that were dropped because no honest client sends them.
        strangers: messages of a session that is not known on its connection.
        forgotten: clients that were silent for too long, or gave their places to others.
        refused: connections that did not have the keys, or did not speak the protocol.
    """

    requests: int = 0
    replayed: int = 0
    malformed: int = 0
    strangers: int = 0
    forgotten: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request to run; its end is owed to `Reception.finish`."""

    record: Record
    call: Call
    tensors: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Step:
    """What a message leads to, any or none of: an answer at once, a request to run, a client to be freed.

    Attributes:
        repeats_to: the client whose kept reply the answer is.
    """

    answer: Frames | None = None
    job: Job | None = None
    gone: str | None = None
    repeats_to: Record | None = None


_NOTHING = Step()


class Reception:
    """Lets clients in, recognises requests that come again, forgets who is silent; any thread."""

    def __init__(self, limits: Limits) -> None:
        self._lock = threading.Lock()
        self._clients = Clients(limits)
        self._counts = ServerCounts()

    @property
    def counts(self) -> ServerCounts:
        """What it has seen so far."""
        with self._lock:
            return replace(self._counts)

    @property
    def clients(self) -> list[str]:
        """Those that it knows."""
        with self._lock:
            return [record.client for record in self._clients.all()]

    def refused(self, connections: int) -> None:
        """Counts connections that did not come as far as a message."""
        with self._lock:
            self._counts.refused += connections

    def take(self, route: bytes, frames: Sequence[Any], now_s: float) -> Step:
        """A message that came on a route; whatever it is, it does no harm.

        Args:
            route: of the connection, as the socket names it.
            frames: of the message, without the route.
            now_s: any steady clock.
        """
        try:
            message = from_client(frames)
            if isinstance(message, Call):
                tensors = tensors_of(frames[1:], message.tensors)
                return self._call(route, message, tensors, now_s)
            if len(frames) > 1:
                raise Malformed("frames that no header announces")
        except (Malformed, Misfit):
            return self._malformed()
        if isinstance(message, Hello):
            return self._hello(route, message, now_s)
        return self._sign(route, message, now_s)

    def _malformed(self) -> Step:
        with self._lock:
            self._counts.malformed += 1
        return _NOTHING

    def _hello(self, route: bytes, hello: Hello, now_s: float) -> Step:
        with self._lock:
            yielding = self._clients.who_yields(hello, now_s)
            freed = yielding is not None and self._clients.forget(yielding)
            welcome = self._clients.hello(route, hello, now_s)
            self._counts.strangers += welcome is None
            self._counts.forgotten += yielding is not None
        gone = yielding.client if yielding is not None and freed else None
        return Step(answer=[encode(welcome)] if welcome else None, gone=gone)

    def _sign(self, route: bytes, sign: Ping | Bye, now_s: float) -> Step:
        with self._lock:
            record = self._clients.heard(route, sign.session, now_s)
            if record is None:
                return self._stranger(sign.session)
            if isinstance(sign, Bye):
                return Step(gone=record.client) if self._clients.forget(record) else _NOTHING
            record.ledger.settle(sign.low)
        return Step(answer=[_PONG])

    def _stranger(self, session: int) -> Step:
        self._counts.strangers += 1
        return Step(answer=[encode(Unknown(session))])

    def _call(self, route: bytes, call: Call, tensors: tuple[Tensor, ...], now_s: float) -> Step:
        with self._lock:
            record = self._clients.heard(route, call.session, now_s)
            if record is None:
                return self._stranger(call.session)
            if tensors and record.unread.crowded:
                return Step(answer=_refusal(call, "replies to calls of this client before it wait to be read"))
            verdict = record.ledger.admit(call.number, call.low)
            if verdict is Verdict.RUN:
                record.greeted_only = False
                self._counts.requests += 1
                return Step(job=Job(record, call, tensors))
            if verdict is Verdict.FLOOD:
                return Step(answer=_refusal(call, "too many calls of this client are open"))
            self._counts.replayed += 1
            return self._again(record, call, verdict)

    def _again(self, record: Record, call: Call, verdict: Verdict) -> Step:
        if verdict is Verdict.REPEAT:
            if record.unread.full:
                return _NOTHING  # it has yet to read what it asked for before
            return Step(answer=record.ledger.reply(call.number), repeats_to=record)
        if verdict is Verdict.LOST:
            return Step(
                answer=_refusal(call, "it has run, and its reply could not be kept until it was asked for again")
            )
        return _NOTHING

    def finish(self, job: Job, reply: Frames, keep: bool) -> tuple[bytes, bool]:
        """Ends a job; where to send its reply, and whether its client went meanwhile and is now to be freed."""
        record = job.record
        with self._lock:
            record.ledger.finish(job.call.number, reply if keep else None)
            return record.route, record.gone and not record.ledger.running

    def forget_silent(self, now_s: float) -> list[str]:
        """Forgets clients; those to be freed now, the others when their last job ends."""
        with self._lock:
            silent = self._clients.silent(now_s)
            self._counts.forgotten += len(silent)
            return [record.client for record in silent if self._clients.forget(record)]


def _refusal(call: Call, reason: str) -> Frames:
    return [
        encode(Failed(call.number, Fault.of(RunError(f"call {call.number} of {call.method} is refused: {reason}"))))
    ]
