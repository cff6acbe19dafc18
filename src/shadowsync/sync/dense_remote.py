"""The dense servers as a trainer reaches them over the wire, all of them at once.

`P` dense parameters, of which server j holds those of span j.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shadowsync.compression.channel import Encoder, Line
from shadowsync.compression.codec import Codec
from shadowsync.compression.rungs import received
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending, all_of
from shadowsync.rpc.served import Client, later
from shadowsync.sync.dense_service import DenseService, Exchange
from shadowsync.sync.elastic import Crossing, ElasticExchanges, Span

T = TypeVar("T")
_Method = Callable[[DenseService, Client, Exchange, Crossing], Crossing | None]

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
        generation: of the parts that this trainer belongs to.
    """

    connections: Sequence[Connection]
    spans: Sequence[Span]
    line: Line
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
            return self._exchange(DenseService.elastic, rank, weights, alpha)
        return self._differences.exchange(rank, weights, alpha)

    def catch_up(self, rank: int) -> bool:
        """As `Group.catch_up` of trainer `rank`."""
        return self._differences.catch_up(rank)

    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential` of trainer `rank`; raises as `elastic`."""
        return self._exchange(DenseService.sequential, rank, weights, alpha)

    def _carry(self, sent: Mapping[int, Crossing], rank: int, alpha: float) -> Mapping[int, Crossing | None]:
        asked = Exchange(rank, alpha, self.generation, self.line.codec.name)
        calls = [
            later(self.connections[at], DenseService.elastic, Client(""), asked, part) for at, part in sent.items()
        ]
        return dict(zip(sent, _answers(calls), strict=True))

    def _exchange(self, method: _Method, rank: int, weights: Tensor, alpha: float) -> Tensor:
        codec = self.line.now.codec
        asked = Exchange(rank, alpha, self.generation, codec.name)
        calls = [
            later(connection, method, Client(""), asked, self._encode(codec, rank, index, weights[start:stop]))
            for index, (connection, (start, stop)) in enumerate(zip(self.connections, self.spans, strict=True))
        ]
        parts = [
            self._decode(codec, answer, stop - start)
            for answer, (start, stop) in zip(_answers(calls), self.spans, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _encode(self, codec: Codec, rank: int, index: int, part: Tensor) -> Crossing:
        key = (rank, index, codec.name)
        # setdefault is atomic: of several workers that come first, all get one encoder
        about = f"the replica of trainer {rank} for dense server {index}"
        encoder = self._there.get(key) or self._there.setdefault(key, Encoder(codec, about))
        encoded = encoder.encode(part)
        self._count(encoded.byte_count, part.nbytes)
        return Crossing(encoded.frames, True)

    def _count(self, sent: int, raw: int) -> None:
        self._exchanged[0] += sent  # of several workers at once a message may be missed
        self.line.count(sent, raw)

    def _decode(self, codec: Codec, answer: Crossing | None, length: int) -> Tensor:
        frames = () if answer is None else answer.frames
        with received("an exchange", codec):
            part = codec.decode(frames, (length,))
        self._count(sum(frame.nbytes for frame in frames), part.nbytes)
        return part


def _answers(calls: Sequence[Pending[T]]) -> list[T]:
    all_of(calls).result()  # all of them, so that an error leaves no call behind
    return [call.result() for call in calls]
