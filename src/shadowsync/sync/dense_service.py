"""A dense server behind the wire.

`p` parameters of the server's part. Vectors cross as frames of the codec; what the codec remembers of the way back
belongs to one trainer of one client, what it remembers of the way there is kept by `dense_remote`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.channel import Encoder
from shadowsync.compression.codec import Codec
from shadowsync.compression.rungs import received, rung
from shadowsync.errors import DataError
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.kept import Bounded, PerClient
from shadowsync.rpc.served import Client, served
from shadowsync.sync.dense import DenseServer, Sent
from shadowsync.sync.elastic import CenterEnd, Crossing


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


MOST_TRAINERS = 16
"""Trainers that one connection may speak for, each with two vectors here; in a job it is one."""
READ_S = 20.0
"""Deadline of a copy: it is for a checkpoint, for which all trainers wait."""


class _Trainer:
    """What is remembered of exchanges with one trainer, for each codec that they may be in."""

    def __init__(self, trainer_rank: int, length: int) -> None:
        self._rank, self._length = trainer_rank, length
        self._back: dict[str, Encoder] = {}
        self._ends: dict[str, CenterEnd] = {}

    def encoder(self, codec: Codec) -> Encoder:
        """Of the way back."""
        # setdefault is atomic: of several threads that ask first, all get one
        return self._back.setdefault(codec.name, Encoder(codec, f"the central copy for trainer {self._rank}"))

    def forget(self) -> None:
        """Differences begin anew."""
        self._ends.clear()

    def end(self, codec: Codec) -> CenterEnd:
        """Of differences, under a sparse codec."""
        found = self._ends.get(codec.name)
        about = f"what the dense server has for trainer {self._rank}"
        return found or self._ends.setdefault(codec.name, CenterEnd(codec, self._length, about))


_Mix = Callable[[DenseServer, Tensor, float, Sent], Tensor]


class DenseService:
    """A `DenseServer` as trainers and the driver reach it.

    `read` and `write` carry float32 as it stands: they serve checkpoints and new trainers. After a `write` differences
    begin anew.
    """

    def __init__(self, server: DenseServer, codec: Codec, generation: Generation = FIRST) -> None:
        self._server = server
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
            return self._trainer(client, asked.trainer_rank).end(codec).answer(self._server, sent, asked.alpha)
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
                trainer.forget()

    def _codec_of(self, asked: Exchange) -> Codec:
        self._generation.check(asked.generation)
        if not (math.isfinite(asked.alpha) and 0 < asked.alpha <= 1):
            raise DataError(f"an exchange came with alpha {asked.alpha}: it lies in (0, 1]")
        return rung(self._codec, asked.codec)

    def _exchange(self, mix: _Mix, client: Client, asked: Exchange, sent: Crossing) -> Crossing:
        codec = self._codec_of(asked)
        local = self._decoded(codec, sent.frames)
        encoder = self._trainer(client, asked.trainer_rank).encoder(codec)
        frames: list[tuple[Tensor, ...]] = []

        def arrived(tensor: Tensor) -> Tensor:
            encoded = encoder.encode(tensor)
            frames.append(encoded.frames)
            return codec.decode(encoded.frames, encoded.shape)

        mix(self._server, local, asked.alpha, arrived)
        return Crossing(frames[0], sent.whole)

    def _decoded(self, codec: Codec, frames: tuple[Tensor, ...]) -> Tensor:
        with received("an exchange", codec):
            values = codec.decode(frames, (self._server.length,))
        return self._fitting(values)

    def _fitting(self, values: Tensor) -> Tensor:
        if values.dtype != torch.float32 or values.shape != (self._server.length,):
            came = f"{values.dtype} {list(values.shape)}"
            raise DataError(f"a dense server of {self._server.length} float32 parameters got {came}")
        return values

    def _trainer(self, client: str, trainer_rank: int) -> _Trainer:
        return self._clients.of(client).get(trainer_rank, lambda: _Trainer(trainer_rank, self._server.length))
