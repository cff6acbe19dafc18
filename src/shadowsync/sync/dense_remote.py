"""The dense servers as a trainer reaches them over the wire, all of them at once.

`P` dense parameters, of which server j holds those of span j.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowsync.compression.channel import Encoder, Line
from shadowsync.compression.codec import Codec
from shadowsync.compression.rungs import received
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.sync.dense_service import Exchange, Exchanged
from shadowsync.sync.elastic import Crossing, ElasticExchanges, Span

CPU_S_PER_BYTE = 3e-9
"""What a byte of an exchange costs in other threads than the caller's, both ends together: to encrypt and decrypt it
(most of it), to copy it and to add it up. Measured on one machine; see docs/decisions.md."""


@dataclass(frozen=True)
class DenseRemote:
    """The central copy behind connections; as `sync.group.DenseServers`, with the same results, bit for bit.

    Attributes:
        connections: one to each dense server.
        spans: what each of them holds, in the same order (`sync.group.split_evenly`).
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
    _differences: ElasticExchanges = field(init=False, repr=False, compare=False)
    _there: dict[tuple[int, int, str], Encoder] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        differences = ElasticExchanges(self.spans, self.line, self._carry, self._count)
        object.__setattr__(self, "_differences", differences)

    @property
    def cpu_s(self) -> float:
        """As `Group.cpu_s`."""
        return self._exchanged[0] * CPU_S_PER_BYTE

    def elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic` of trainer `rank`.

        Raises:
            RunError: a server was given up or did not answer in time; the others have their exchange done.
        """
        if not self.line.now.codec.sparse:
            return self._exchange("elastic", rank, weights, alpha)
        return self._differences.exchange(rank, weights, alpha)

    def catch_up(self, rank: int) -> bool:
        """As `Group.catch_up` of trainer `rank`."""
        return self._differences.catch_up(rank)

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

    def _carry(self, sent: Mapping[int, Crossing], rank: int, alpha: float) -> Mapping[int, Crossing | None]:
        codec = self.line.codec.name
        calls = [
            self.connections[at].call(
                "elastic", Exchange(rank, alpha, self.generation, codec, part.whole), part.frames, self.timeout_s
            )
            for at, part in sent.items()
        ]
        return {at: _crossing(answer, sent[at].whole) for at, answer in zip(sent, _answers(calls), strict=True)}

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
        with received("an exchange", codec):
            part = codec.decode(frames, (length,))
        self._count(sum(frame.nbytes for frame in frames), part.nbytes)
        return part


def _crossing(answer: Answer, whole: bool) -> Crossing | None:
    told = answer.read(Exchanged)
    return Crossing(answer.tensors, whole, told.refreshes, told.early) if told.known else None


def _answers(calls: Sequence[Future[Answer]]) -> list[Answer]:
    wait(calls)  # all of them, so that an error leaves no call behind
    return [call.result() for call in calls]
