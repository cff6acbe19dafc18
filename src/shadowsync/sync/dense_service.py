"""A dense server behind the wire.

`p` parameters of the server's part. Vectors cross as frames of the codec; what the codec remembers of the way back
belongs to one trainer of one client, what it remembers of the way there is kept by `dense_remote`.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shadowsync.compression.channel import Encoder
from shadowsync.compression.codec import Codec
from shadowsync.compression.rungs import received, rung
from shadowsync.errors import DataError
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.kept import Bounded, PerClient
from shadowsync.rpc.service import Meta, Method, Reply, Request
from shadowsync.sync.dense import DenseServer, Sent
from shadowsync.sync.elastic import CenterEnd, Crossing


class Exchange(Meta, frozen=True):
    """One trainer's side of an exchange; its frames are the tensors.

    Attributes:
        trainer_rank: which stream of the caller this is.
        alpha: elastic parameter, in (0, 1].
        generation: of the parts that the trainer belongs to.
        codec: of both directions, by name.
        whole: under a sparse codec: the vector itself comes, not the difference from what the server has.
    """

    trainer_rank: int
    alpha: float
    generation: int = 0
    codec: str = ""
    whole: bool = True


class Exchanged(Meta, frozen=True):
    """Answers an exchange of differences; tensors: the frames of the elastic difference.

    Attributes:
        known: False if the server has nothing that the message is a difference from; nothing was done.
        refreshes, early: as in `Encoded`.
    """

    known: bool
    refreshes: int = 0
    early: int = 0


MOST_TRAINERS = 16
"""Trainers that one connection may speak for, each with two vectors here; in a job it is one."""


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
    """What a `DenseServer` offers: `elastic`, `sequential`, `read`, `write`.

    `read` and `write` carry float32 as it stands: they serve checkpoints and new trainers. After a `write` differences
    begin anew.
    """

    def __init__(self, server: DenseServer, codec: Codec, generation: Generation = FIRST) -> None:
        self._server = server
        self._generation = generation
        self._codec = codec
        self._clients = PerClient(lambda: Bounded[int, _Trainer](MOST_TRAINERS, "trainers"))
        self.methods: Mapping[str, Method] = {
            "elastic": Method(self._elastic),
            "sequential": Method(lambda request: self._exchange(DenseServer.sequential, request)),
            "read": Method(lambda _: Reply(tensors=(self._server.read(),)), once=False),
            "write": Method(self._write),
        }

    def client_gone(self, client: str) -> None:
        """Forgets what the codec remembers of that connection."""
        self._clients.forget(client)

    def close(self) -> None:
        """Nothing to end."""

    def _elastic(self, request: Request) -> Reply:
        asked = self._asked(request)
        codec = rung(self._codec, asked.codec)
        if not codec.sparse:
            return self._exchange(DenseServer.elastic, request)
        end = self._trainer(request.client, asked.trainer_rank).end(codec)
        answer = end.answer(self._server, Crossing(request.tensors, asked.whole), asked.alpha)
        if answer is None:
            return Reply(Exchanged(False))
        return Reply(Exchanged(True, answer.refreshes, answer.early), answer.frames)

    def _asked(self, request: Request) -> Exchange:
        asked = request.read(Exchange)
        self._generation.check(asked.generation)
        if not (math.isfinite(asked.alpha) and 0 < asked.alpha <= 1):
            raise DataError(f"an exchange came with alpha {asked.alpha}: it lies in (0, 1]")
        return asked

    def _exchange(self, mix: _Mix, request: Request) -> Reply:
        asked = self._asked(request)
        codec = rung(self._codec, asked.codec)
        local = self._decoded(codec, request.tensors)
        encoder = self._trainer(request.client, asked.trainer_rank).encoder(codec)
        frames: list[tuple[Tensor, ...]] = []

        def sent(tensor: Tensor) -> Tensor:
            encoded = encoder.encode(tensor)
            frames.append(encoded.frames)
            return codec.decode(encoded.frames, encoded.shape)

        mix(self._server, local, asked.alpha, sent)
        return Reply(tensors=frames[0])

    def _write(self, request: Request) -> Reply:
        (values,) = request.tensors if len(request.tensors) == 1 else (None,)
        self._server.write(self._checked(values))
        for client in self._clients.values():
            for trainer in client.values():
                trainer.forget()
        return Reply()

    def _decoded(self, codec: Codec, frames: tuple[Tensor, ...]) -> Tensor:
        with received("an exchange", codec):
            values = codec.decode(frames, (self._server.length,))
        return self._checked(values)

    def _checked(self, values: Tensor | None) -> Tensor:
        if values is None or values.dtype != torch.float32 or values.shape != (self._server.length,):
            came = "nothing" if values is None else f"{values.dtype} {list(values.shape)}"
            raise DataError(f"a dense server of {self._server.length} float32 parameters got {came}")
        return values

    def _trainer(self, client: str, trainer_rank: int) -> _Trainer:
        return self._clients.of(client).get(trainer_rank, lambda: _Trainer(trainer_rank, self._server.length))
