"""The central dense copy: the servers that hold its parts, and the trainers' exchanges with all of them.

`P` dense parameters, `p` of them on one server; `w_i` the replica of trainer i, `w_PS` the central copy, `v_i` what has
arrived of `w_i`, `e_i` what the trainer has not been told yet of what the central copy took from it.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shadowsync.compression.channel import Channel, Stream
from shadowsync.compression.codec import Codec, NotFinite, naming, received
from shadowsync.compression.differences import Differences
from shadowsync.compression.plain import Plain
from shadowsync.errors import DataError

Sent = Callable[[Tensor], Tensor]
"""What a tensor looks like at the other side: a lossy codec there and back."""


class DenseServer:
    """Parameters `start … start + p − 1` of the central copy `w_PS` (a role; needed by centralised methods only).

    Exchanges take turns, so that every one of them sees all of the one before.

    Args:
        values: the initial copy, `[p]`; kept and changed in place.
        lock: for turns, where the values are in memory that other processes have in common.
    """

    def __init__(self, values: Tensor, lock: AbstractContextManager[Any] | None = None) -> None:
        self._values = values
        self._lock = lock or threading.Lock()

    @property
    def length(self) -> int:
        """Parameters held, `p`."""
        return len(self._values)

    def elastic(self, local: Tensor, alpha: float, sent: Sent | None = None) -> Tensor:
        """Adds `d = α (local − w_PS)` as it arrives at the trainer to the central copy and returns it, `[p]`.

        `sent` of it, so that both sides apply the same difference.
        """
        with self._lock:
            difference = (local - self._values).mul_(alpha)
            difference = difference if sent is None else sent(difference)
            self._values.add_(difference)
        return difference

    def sequential(self, local: Tensor, alpha: float, sent: Sent | None = None) -> Tensor:
        """`w_PS ← (1−α) w_PS + α local`; returns a copy of the new `w_PS` as it arrives at the trainer, `[p]`."""
        with self._lock:
            self._values.lerp_(local, alpha)
            center = self._values.clone()
            return center if sent is None else sent(center)

    def read(self) -> Tensor:
        """A copy of the part, `[p]`."""
        with self._lock:
            return self._values.clone()

    def write(self, values: Tensor) -> None:
        """Replaces the part, `[p]`."""
        with self._lock:
            self._values.copy_(values)


Span = tuple[int, int]
"""First parameter of a part and the one after its last."""


@dataclass(frozen=True)
class Crossing:
    """What crosses between a trainer and a dense server, in either direction.

    Attributes:
        frames: of the codec.
        whole: nothing is left out; under a sparse codec the frame is the float32 vector itself.
        refreshes, early: as in `Encoded`.
    """

    frames: tuple[Tensor, ...]
    whole: bool
    refreshes: int = 0
    early: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(frame.nbytes for frame in self.frames)


class CenterEnd:
    """The dense server's end towards one trainer.

    The central copy takes all of `d = α (u_i − w_PS)` at once, where `u_i = v_i − e_i` is the replica as it will be
    when its trainer has heard of everything; of `e_i += d` crosses what the codec lets pass. So `w_PS + Σ (w_i − e_i)`
    is conserved, and what is left out on the way back does not hold the central copy up.

    A message that comes whole is answered whole: after it, `v_i = w_i` and `e_i = 0`.

    Args:
        codec: of the dense part, sparse.
        length: `p`.
        about: what answers are called in errors.
    """

    def __init__(self, codec: Codec, length: int, about: str) -> None:
        self._codec, self._about = codec, about
        self._stream = Stream(codec.of_differences(), about)
        self._expected = Differences("an exchange")  # of which `u_i` is known
        self._owed = torch.zeros(length)
        self._turn = threading.Lock()

    def answer(self, server: DenseServer, sent: Crossing, alpha: float) -> Crossing | None:
        """One exchange; None, and nothing was done, if it knows nothing that the message is a difference from.

        Raises:
            NonFiniteTensor: it would send NaN or infinities; nothing was done.
            DataError: the frames are none of such a message.
        """
        answers: list[tuple[Crossing, Tensor]] = []

        def encode(difference: Tensor) -> Tensor:
            answers.append(self._encode(self._owed + difference, sent.whole))
            return difference

        with self._turn:
            expected = self._expected.take(self._codec, sent.frames, tuple(self._owed.shape), sent.whole)
            if expected is None:
                return None
            if sent.whole:
                expected = self._expected.known = expected - self._owed
            try:
                expected.sub_(server.elastic(expected, alpha, encode))
            except BaseException:
                self._expected.forget()
                raise
            (answer, self._owed) = answers[0]
        return answer

    def _encode(self, owed: Tensor, whole: bool) -> tuple[Crossing, Tensor]:
        """What crosses of `e_i`, and what is left of it."""
        if whole:
            if not self._codec.everything and not bool(torch.isfinite(owed).all()):
                with naming(self._about):
                    raise NotFinite(owed)
            return Crossing((owed,), True), torch.zeros_like(owed)
        encoded = self._stream.encode(owed)
        left = owed - self._stream.codec.decode(encoded.frames, encoded.shape)
        return Crossing(encoded.frames, False, encoded.refreshes, encoded.early), left


def split_evenly(length: int, parts: int) -> list[Span]:
    """`parts` consecutive ranges that cover `0 … length − 1` and differ by at most one in size."""
    edges = [length * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


Mix = Callable[[DenseServer, Tensor, float, Sent], Tensor]


class CentralCopy(ABC):
    """The trainers' end towards all dense servers.

    Under a sparse codec, what it lets pass of `w_i − v_i` crosses (`Differences`), and both ends add it to `v_i`; what
    comes back is taken off `w_i` and `v_i`. What is left out stays in the replica, and so in the next difference. The
    first message, and any after a failure, is the replica itself; and workers of one trainer take turns, so that both
    ends see differences in one order.

    Args:
        spans: of the servers' parts.
        channel: of the dense part; exchanges are counted there.
    """

    def __init__(self, spans: Sequence[Span], channel: Channel) -> None:
        self.spans, self.channel = spans, channel
        self._known: dict[int, list[Differences]] = {}
        self._turns: dict[int, threading.Lock] = {}
        self._behind: set[int] = set()

    @property
    @abstractmethod
    def cpu_s(self) -> float:
        """As `Group.cpu_s`."""

    @abstractmethod
    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential` of trainer `rank`, at all servers.

        Raises:
            RunError: a server was given up or did not answer in time; the others have their exchange done.
        """

    @abstractmethod
    def _elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """`elastic` under a codec that is not sparse."""

    @abstractmethod
    def _carry(self, sent: Mapping[int, Crossing], rank: int, alpha: float) -> Mapping[int, Crossing | None]:
        """Takes messages of trainer `rank` to dense servers, by their positions, all at once; gives what
        `CenterEnd.answer` gave at each."""

    def elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic` of trainer `rank`, at all servers; raises as `sequential`."""
        if not self.channel.now.codec.sparse:
            return self._elastic(rank, weights, alpha)
        # setdefault is atomic: of several workers that come first, all get one
        with self._turns.setdefault(rank, threading.Lock()):
            made = [
                Differences(f"the replica of trainer {rank} for dense server {at}") for at in range(len(self.spans))
            ]
            known = self._known.setdefault(rank, made)
            try:
                parts = self._exchange(rank, known, weights, alpha)
            except BaseException:
                for differences in known:
                    differences.forget()
                raise
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def catch_up(self, rank: int) -> bool:
        """As `Group.catch_up` of trainer `rank`."""
        if rank not in self._behind:
            return False
        with self._turns.setdefault(rank, threading.Lock()):
            for differences in self._known[rank]:
                differences.forget()
        return True

    def count(self, sent: int, raw: int) -> None:
        """Counts one message, in bytes."""
        self.channel.count(sent, raw)

    def _exchange(self, rank: int, known: Sequence[Differences], weights: Tensor, alpha: float) -> list[Tensor]:
        parts = [weights[start:stop] for start, stop in self.spans]
        sent = {at: self._sent(known[at], part) for at, part in enumerate(parts)}
        answers = dict(self._carry(sent, rank, alpha))
        unknown = [at for at, answer in answers.items() if answer is None]
        for at in unknown:
            known[at].forget()
            sent[at] = self._sent(known[at], parts[at])
        answers |= self._carry({at: sent[at] for at in unknown}, rank, alpha)
        if all(crossing.whole for crossing in sent.values()):
            self._behind.discard(rank)
        else:
            self._behind.add(rank)
        return [self._taken(known[at], answers[at], len(part)) for at, part in enumerate(parts)]

    def _sent(self, known: Differences, part: Tensor) -> Crossing:
        encoded, whole = known.encode(self.channel.codec, part)
        self.count(encoded.byte_count, part.nbytes)
        if not whole:
            self.channel.count_kept(part.numel(), encoded.kept_count, encoded.refreshes, encoded.early)
        return Crossing(encoded.frames, whole, encoded.refreshes, encoded.early)

    def _taken(self, known: Differences, answer: Crossing | None, length: int) -> Tensor:
        if answer is None:
            raise DataError("a dense server does not accept a replica that comes whole")
        codec = Plain() if answer.whole else self.channel.codec.of_differences()
        with received("an exchange", codec):
            decoded = codec.decode_kept(answer.frames, (length,))
        moved = decoded.tensor
        self.count(answer.nbytes, moved.nbytes)
        if not answer.whole:
            self.channel.count_kept(moved.numel(), decoded.kept_count, answer.refreshes, answer.early)
        known.moved(moved)
        return moved


class DenseServers(CentralCopy):
    """The central copy in this process, split over its servers, which come in the order of their parts."""

    cpu_s = 0.0

    def __init__(self, servers: Sequence[DenseServer], channel: Channel) -> None:
        spans = split_evenly(sum(server.length for server in servers), max(1, len(servers)))[: len(servers)]
        super().__init__(spans, channel)
        self._servers = servers
        self._ends: dict[tuple[int, int], CenterEnd] = {}

    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        return self._each(DenseServer.sequential, rank, weights, alpha)

    def _elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        return self._each(DenseServer.elastic, rank, weights, alpha)

    def _carry(self, sent: Mapping[int, Crossing], rank: int, alpha: float) -> Mapping[int, Crossing | None]:
        answers = {}
        for at, part in sent.items():
            if (rank, at) not in self._ends:
                about = f"what dense server {at} has for trainer {rank}"
                self._ends[rank, at] = CenterEnd(self.channel.codec, self._servers[at].length, about)
            answers[at] = self._ends[rank, at].answer(self._servers[at], part, alpha)
        return answers

    def _each(self, exchange: Mix, rank: int, weights: Tensor, alpha: float) -> Tensor:
        replies = []
        for at, (server, (start, stop)) in enumerate(zip(self._servers, self.spans, strict=True)):
            there = self.channel.stream(("there", rank, at), f"the replica of trainer {rank} for dense server {at}")
            back = self.channel.stream(("back", rank, at), f"what dense server {at} has for trainer {rank}")
            replies.append(exchange(server, there.send(weights[start:stop]), alpha, back.send))
        return replies[0] if len(replies) == 1 else torch.cat(replies)
