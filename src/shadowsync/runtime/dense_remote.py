"""The dense servers as a trainer reaches them over the wire, all of them at once.

`P` dense parameters, of which server j holds those of span j.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.errors import DataError
from shadowsync.runtime.dense_service import Exchange, Exchanged
from shadowsync.runtime.lines import Encoder, Line
from shadowsync.runtime.mirror import Mirror
from shadowsync.runtime.wire.connection import Answer, Connection

Span = tuple[int, int]
"""First parameter of a part and the one after its last."""


@dataclass(frozen=True)
class DenseRemote:
    """The central copy behind connections; as `runtime.group.DenseServers`, with the same results, bit for bit.

    Attributes:
        connections: one to each dense server.
        spans: what each of them holds, in the same order (`runtime.group.split_evenly`).
        line: of exchanges in both directions; the codec is the service's.
        timeout_s: deadline of a call; None is the connection's own.
        generation: of the parts that this trainer belongs to.
    """

    connections: Sequence[Connection]
    spans: Sequence[Span]
    line: Line
    timeout_s: float | None = None
    generation: int = 0
    _exchanged: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)
    _mirrors: defaultdict[int, list[Mirror]] = field(init=False, repr=False, compare=False)
    _turns: defaultdict[int, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock), init=False, repr=False, compare=False
    )
    _there: dict[tuple[int, int, str], Encoder] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_mirrors", defaultdict(self._make_mirrors))

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of exchanges so far, both directions, about."""
        return self._exchanged[0]

    def elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic` of trainer `rank`.

        Raises:
            RunError: a server was given up or did not answer in time; the others have their exchange done.
        """
        if not self.line.now.codec.sparse:
            return self._exchange("elastic", rank, weights, alpha)
        with self._turns[rank]:  # both ends have to see the differences in one order
            mirrors = self._mirrors[rank]
            try:
                parts = self._differences(rank, weights, alpha)
            except BaseException:
                for mirror in mirrors:
                    mirror.forget()
                raise
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential` of trainer `rank`; raises as `elastic`."""
        return self._exchange("sequential", rank, weights, alpha)

    def read(self) -> Tensor:
        """A copy of the whole, `[P]`; raises as `elastic`."""
        calls = [connection.call("read", timeout_s=self.timeout_s) for connection in self.connections]
        return torch.cat([answer.tensors[0] for answer in _answers(calls)])

    def write(self, center: Tensor) -> None:
        """Replaces the whole, `[P]`; raises as `elastic`."""
        parts = (center[start:stop] for start, stop in self.spans)
        _answers(
            [
                connection.call("write", None, (part,), self.timeout_s)
                for connection, part in zip(self.connections, parts, strict=True)
            ]
        )

    def _make_mirrors(self) -> list[Mirror]:
        codec = self.line.codec.of_differences()
        return [Mirror(codec, f"the replica of a trainer for dense server {at}") for at in range(len(self.spans))]

    def _differences(self, rank: int, weights: Tensor, alpha: float) -> list[Tensor]:
        """Elastic differences; a server that has nothing of the replica gets it whole."""
        mirrors = self._mirrors[rank]
        answers = _answers([self._send_difference(rank, at, weights, alpha) for at in range(len(mirrors))])
        unknown = [at for at, answer in enumerate(answers) if not answer.read(Exchanged).known]
        for at in unknown:
            mirrors[at].forget()
        again = _answers([self._send_difference(rank, at, weights, alpha) for at in unknown])
        for at, answer in zip(unknown, again, strict=True):
            answers[at] = answer
        return [self._apply(mirror, answer) for mirror, answer in zip(mirrors, answers, strict=True)]

    def _send_difference(self, rank: int, at: int, weights: Tensor, alpha: float) -> Future[Answer]:
        part = weights[slice(*self.spans[at])]
        encoded, whole = self._mirrors[rank][at].encode(part)
        self._count(encoded.byte_count, part.nbytes)
        if not whole:
            self.line.count_kept(part.numel(), encoded.kept_count, encoded.refreshes, encoded.early)
        asked = Exchange(rank, alpha, self.generation, self.line.codec.name, whole)
        return self.connections[at].call("elastic", asked, encoded.frames, self.timeout_s)

    def _apply(self, mirror: Mirror, answer: Answer) -> Tensor:
        told = answer.read(Exchanged)
        if mirror.known is None or not told.known:
            raise DataError("a dense server does not accept a replica that comes whole")
        moved = self.line.codec.of_differences().decode_kept(answer.tensors, tuple(mirror.known.shape))
        self._count(sum(frame.nbytes for frame in answer.tensors), moved.tensor.nbytes)
        self.line.count_kept(moved.tensor.numel(), moved.kept_count, told.refreshes, told.early)
        mirror.moved(moved.tensor)
        return moved.tensor

    def _exchange(self, method: str, rank: int, weights: Tensor, alpha: float) -> Tensor:
        codec = self.line.now.codec
        asked = Exchange(rank, alpha, self.generation, codec.name)
        calls = [
            connection.call(method, asked, self._encode(codec, rank, index, weights[start:stop]), self.timeout_s)
            for index, (connection, (start, stop)) in enumerate(zip(self.connections, self.spans, strict=True))
        ]
        parts = [
            self._decode(codec, answer.tensors, stop - start)
            for answer, (start, stop) in zip(_answers(calls), self.spans, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _encode(self, codec: Codec, rank: int, index: int, part: Tensor) -> tuple[Tensor, ...]:
        key = (rank, index, codec.name)
        # setdefault is atomic: of several workers that come first, all get one encoder
        about = f"the replica of trainer {rank} for dense server {index}"
        encoder = self._there.get(key) or self._there.setdefault(key, Encoder(codec, about))
        encoded = encoder.encode(part)
        self._count(encoded.byte_count, part.nbytes)
        return encoded.frames

    def _count(self, sent: int, raw: int) -> None:
        self._exchanged[0] += sent  # of several workers at once a message may be missed
        self.line.count(sent, raw)

    def _decode(self, codec: Codec, frames: tuple[Tensor, ...], length: int) -> Tensor:
        part = codec.decode(frames, (length,))
        self._count(sum(frame.nbytes for frame in frames), part.nbytes)
        return part


def _answers(calls: Sequence[Future[Answer]]) -> list[Answer]:
    wait(calls)  # all of them, so that an error leaves no call behind
    return [call.result() for call in calls]
