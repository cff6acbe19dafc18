"""A dense server behind the wire, and all of them as a trainer reaches them there.

`P` dense parameters, of which server j holds the `p` of span j. Vectors cross as frames of the codec; what the codec
remembers of the way back belongs to one trainer of one client, what it remembers of the way there to the trainer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.channel import Channel, Stream
from shadowsync.compression.codec import Codec, received
from shadowsync.errors import DataError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.kept import Bounded, PerClient
from shadowsync.rpc.pending import Pending, all_of
from shadowsync.rpc.served import Client, later, served
from shadowsync.sync.dense import CenterEnd, CentralCopy, Crossing, DenseServer, Mix, Span

MOST_TRAINERS = 16
"""Trainers that one connection may speak for, each with two vectors here; in a job it is one."""
READ_S = 20.0
"""Deadline of a copy: it is for a checkpoint, for which all trainers wait."""
CPU_S_PER_BYTE = 3e-9
"""What a byte of an exchange costs in other threads than the caller's, both ends together: to encrypt and decrypt it
(most of it), to copy it and to add it up. Measured on one machine; see docs/decisions.md."""


@dataclass(frozen=True)
class Exchange:
    """Which exchange of one trainer this is.

    Attributes:
        trainer_rank: which stream of the caller this is.
        alpha: elastic parameter, in (0, 1].
        generation: of the parts that the trainer belongs to.
        codec: of both directions, by name.
    """

    trainer_rank: int
    alpha: float
    generation: int = 0
    codec: str = ""


class _Trainer:
    """What is remembered of exchanges with one trainer, for each codec that they may be in, by its name."""

    def __init__(self) -> None:
        self.back: dict[str, Stream] = {}
        self.ends: dict[str, CenterEnd] = {}


class DenseService:
    """A `DenseServer` as trainers and the driver reach it.

    `read` and `write` carry float32 as it stands: they serve checkpoints and new trainers. After a `write` differences
    begin anew.
    """

    def __init__(self, server: DenseServer, codec: Codec, generation: Generation = FIRST) -> None:
        self.server = self._server = server
        self._generation = generation
        self._codec = codec
        self._clients = PerClient(lambda: Bounded[int, _Trainer](MOST_TRAINERS, "trainers"))

    def client_gone(self, client: str) -> None:
        """Forgets what the codec remembers of that connection."""
        self._clients.forget(client)

    @served()
    def elastic(self, client: Client, asked: Exchange, sent: Crossing) -> Crossing | None:
        """As `DenseServer.elastic`; under a sparse codec as `CenterEnd.answer`."""
        codec = self._codec_of(asked)
        if codec.sparse:
            ends, about = (
                self._trainer(client, asked).ends,
                f"what the dense server has for trainer {asked.trainer_rank}",
            )
            end = ends.get(codec.name) or ends.setdefault(codec.name, CenterEnd(codec, self._server.length, about))
            return end.answer(self._server, sent, asked.alpha)
        return self._exchange(DenseServer.elastic, client, asked, sent)

    @served()
    def sequential(self, client: Client, asked: Exchange, sent: Crossing) -> Crossing:
        """As `DenseServer.sequential`."""
        return self._exchange(DenseServer.sequential, client, asked, sent)

    @served(once=False, timeout_s=READ_S)
    def read(self) -> Tensor:
        """As `DenseServer.read`."""
        return self._server.read()

    @served()
    def write(self, values: Tensor) -> None:
        """As `DenseServer.write`."""
        self._server.write(self._fitting(values))
        for client in self._clients.values():
            for trainer in client.values():
                trainer.ends.clear()

    def _codec_of(self, asked: Exchange) -> Codec:
        self._generation.check(asked.generation)
        if not (math.isfinite(asked.alpha) and 0 < asked.alpha <= 1):
            raise DataError(f"an exchange came with alpha {asked.alpha}: it lies in (0, 1]")
        return self._codec.level(asked.codec)

    def _exchange(self, mix: Mix, client: Client, asked: Exchange, sent: Crossing) -> Crossing:
        codec = self._codec_of(asked)
        with received("an exchange", codec):
            local = codec.decode(sent.frames, (self._server.length,))
        local = self._fitting(local)
        # setdefault is atomic: of several threads that ask first, all get one
        back = self._trainer(client, asked).back.setdefault(
            codec.name, Stream(codec, f"the central copy for trainer {asked.trainer_rank}")
        )
        frames: list[tuple[Tensor, ...]] = []

        def arrived(tensor: Tensor) -> Tensor:
            encoded = back.encode(tensor)
            frames.append(encoded.frames)
            return codec.decode(encoded.frames, encoded.shape)

        mix(self._server, local, asked.alpha, arrived)
        return Crossing(frames[0], sent.whole)

    def _fitting(self, values: Tensor) -> Tensor:
        if values.dtype != torch.float32 or values.shape != (self._server.length,):
            came = f"{values.dtype} {list(values.shape)}"
            raise DataError(f"a dense server of {self._server.length} float32 parameters got {came}")
        return values

    def _trainer(self, client: str, asked: Exchange) -> _Trainer:
        return self._clients.of(client).get(asked.trainer_rank, _Trainer)


_Method = Callable[[DenseService, Client, Exchange, Crossing], Crossing | None]


class DenseRemote(CentralCopy):
    """The central copy behind connections; as `DenseServers`, with the same results, bit for bit.

    Args:
        connections: one to each dense server.
        spans: what each of them holds, in the same order (`split_evenly`).
        channel: of exchanges in both directions; the codec is the service's.
        generation: of the parts that this trainer belongs to.
    """

    def __init__(
        self, connections: Sequence[Connection], spans: Sequence[Span], channel: Channel, generation: int = 0
    ) -> None:
        super().__init__(spans, channel)
        self.connections, self._generation = connections, generation
        self._exchanged = 0
        self._there: dict[tuple[int, int, str], Stream] = {}

    @property
    def cpu_s(self) -> float:
        return self._exchanged * CPU_S_PER_BYTE

    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        return self._all(DenseService.sequential, rank, weights, alpha)

    def count(self, sent: int, raw: int) -> None:
        self._exchanged += sent  # of several workers at once a message may be missed
        self.channel.count(sent, raw)

    def _elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        return self._all(DenseService.elastic, rank, weights, alpha)

    def _carry(self, sent: Mapping[int, Crossing], rank: int, alpha: float) -> Mapping[int, Crossing | None]:
        asked = Exchange(rank, alpha, self._generation, self.channel.codec.name)
        calls = [self._call(at, DenseService.elastic, asked, part) for at, part in sent.items()]
        return dict(zip(sent, _answers(calls), strict=True))

    def _all(self, method: _Method, rank: int, weights: Tensor, alpha: float) -> Tensor:
        codec, calls = self.channel.now.codec, []
        asked = Exchange(rank, alpha, self._generation, codec.name)
        for at, (start, stop) in enumerate(self.spans):
            about = f"the replica of trainer {rank} for dense server {at}"
            there = self._there.setdefault((rank, at, codec.name), Stream(codec, about))
            part = weights[start:stop]
            encoded = there.encode(part)
            self.count(encoded.byte_count, part.nbytes)
            calls.append(self._call(at, method, asked, Crossing(encoded.frames, True)))
        parts = []
        for answer, (start, stop) in zip(_answers(calls), self.spans, strict=True):
            frames = () if answer is None else answer.frames
            with received("an exchange", codec):
                parts.append(codec.decode(frames, (stop - start,)))
            self.count(sum(frame.nbytes for frame in frames), parts[-1].nbytes)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _call(self, at: int, method: _Method, asked: Exchange, sent: Crossing) -> Pending[Crossing | None]:
        return later(self.connections[at], method, Client(""), asked, sent)


def _answers(calls: Sequence[Pending[Crossing | None]]) -> list[Crossing | None]:
    all_of(calls).result()  # all of them, so that an error leaves no call behind
    return [call.result() for call in calls]
