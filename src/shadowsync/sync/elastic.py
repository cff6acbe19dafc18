"""Elastic differences of which a part crosses: both ends of what replicas exchange with dense servers.

`P` dense parameters, `p` of them on one server; `w_i` the replica of trainer i, `w_PS` the central copy, `v_i` what has
arrived of `w_i`, `e_i` what the trainer has not been told yet of what the central copy took from it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.channel import Encoder, Line
from shadowsync.compression.codec import Codec, NotFinite, naming
from shadowsync.compression.mirror import Mirror
from shadowsync.compression.plain import Plain
from shadowsync.compression.rungs import received
from shadowsync.errors import DataError
from shadowsync.sync.dense import DenseServer

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
        self._codec, self._about = codec.of_differences(), about
        self._encoder = Encoder(self._codec, about)
        self._expected: Tensor | None = None
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
            if (expected := self._arrived(sent)) is None:
                return None
            self._expected = expected.sub_(server.elastic(expected, alpha, encode))
            (answer, self._owed) = answers[0]
        return answer

    def _arrived(self, sent: Crossing) -> Tensor | None:
        """`u_i` after that message, in memory of its own."""
        shape = tuple(self._owed.shape)
        if sent.whole:
            if len(sent.frames) != 1 or sent.frames[0].shape != shape or sent.frames[0].dtype != torch.float32:
                raise DataError(
                    f"the frames of an exchange are none of codec {self._codec.name}: {len(sent.frames)} are not a "
                    f"float32 vector {list(shape)}"
                )
            return sent.frames[0] - self._owed
        if self._expected is None:
            return None
        with received("an exchange", self._codec):
            return self._expected + self._codec.decode(sent.frames, shape)

    def _encode(self, owed: Tensor, whole: bool) -> tuple[Crossing, Tensor]:
        """What crosses of `e_i`, and what is left of it."""
        if whole:
            if not self._codec.everything and not bool(torch.isfinite(owed).all()):
                with naming(self._about):
                    raise NotFinite(owed)
            return Crossing((owed,), True), torch.zeros_like(owed)
        encoded = self._encoder.encode(owed)
        left = owed - self._codec.decode(encoded.frames, encoded.shape)
        return Crossing(encoded.frames, False, encoded.refreshes, encoded.early), left


Carry = Callable[[Mapping[int, Crossing], int, float], Mapping[int, Crossing | None]]
"""Takes messages of trainer `rank` to dense servers, by their positions, all at once: messages, rank, α. Gives what
`CenterEnd.answer` gave at each."""


class ElasticExchanges:
    """The trainers' ends towards all dense servers.

    What the threshold lets pass of `w_i − v_i` crosses (`Mirror`), and both ends add it to `v_i`; what comes back is
    taken off `w_i` and `v_i`. What is left out stays in the replica, and so in the next difference. The first message,
    and any after a failure, is the replica itself.

    Args:
        spans: of the servers' parts.
        line: of the dense part; exchanges are counted there.
        carry: the way to the servers.
        count: in place of the line's; bytes sent, and as they would be in fp32.
    """

    def __init__(
        self, spans: Sequence[Span], line: Line, carry: Carry, count: Callable[[int, int], None] | None = None
    ) -> None:
        self._spans, self._line, self._carry = spans, line, carry
        self._codec = line.codec.of_differences()
        self._count = count or line.count
        self._mirrors: dict[int, list[Mirror]] = {}
        self._turns: dict[int, threading.Lock] = {}
        self._behind: set[int] = set()

    def exchange(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic` of trainer `rank`, whose workers take turns: both ends see differences in one order."""
        # setdefault is atomic, as in `Line.stream`
        with self._turns.setdefault(rank, threading.Lock()):
            mirrors = self._mirrors.setdefault(rank, self._made(rank))
            try:
                parts = self._exchange(rank, mirrors, weights, alpha)
            except BaseException:
                for mirror in mirrors:
                    mirror.forget()
                raise
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def catch_up(self, rank: int) -> bool:
        """The next exchange of trainer `rank` leaves nothing out; False if the last one left nothing out."""
        if rank not in self._behind:
            return False
        with self._turns.setdefault(rank, threading.Lock()):
            for mirror in self._mirrors[rank]:
                mirror.forget()
        return True

    def _made(self, rank: int) -> list[Mirror]:
        return [
            Mirror(self._codec, f"the replica of trainer {rank} for dense server {at}")
            for at in range(len(self._spans))
        ]

    def _exchange(self, rank: int, mirrors: Sequence[Mirror], weights: Tensor, alpha: float) -> list[Tensor]:
        parts = [weights[start:stop] for start, stop in self._spans]
        sent = {at: self._sent(mirrors[at], part) for at, part in enumerate(parts)}
        answers = dict(self._carry(sent, rank, alpha))
        unknown = [at for at, answer in answers.items() if answer is None]
        for at in unknown:
            mirrors[at].forget()
            sent[at] = self._sent(mirrors[at], parts[at])
        answers |= self._carry({at: sent[at] for at in unknown}, rank, alpha)
        if all(crossing.whole for crossing in sent.values()):
            self._behind.discard(rank)
        else:
            self._behind.add(rank)
        return [self._taken(mirror, answers[at]) for at, mirror in enumerate(mirrors)]

    def _sent(self, mirror: Mirror, part: Tensor) -> Crossing:
        encoded, whole = mirror.encode(part)
        self._count(encoded.byte_count, part.nbytes)
        if not whole:
            self._line.count_kept(part.numel(), encoded.kept_count, encoded.refreshes, encoded.early)
        return Crossing(encoded.frames, whole, encoded.refreshes, encoded.early)

    def _taken(self, mirror: Mirror, answer: Crossing | None) -> Tensor:
        if mirror.known is None or answer is None:
            raise DataError("a dense server does not accept a replica that comes whole")
        shape = tuple(mirror.known.shape)
        codec = Plain() if answer.whole else self._codec
        with received("an exchange", codec):
            decoded = codec.decode_kept(answer.frames, shape)
        moved, kept = decoded.tensor, None if answer.whole else decoded.kept_count
        self._count(answer.nbytes, moved.nbytes)
        if kept is not None:
            self._line.count_kept(moved.numel(), kept, answer.refreshes, answer.early)
        mirror.moved(moved)
        return moved
