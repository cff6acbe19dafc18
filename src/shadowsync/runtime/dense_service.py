"""A dense server behind the wire.

`p` parameters of the server's part. Vectors cross as frames of the codec; what the codec remembers of the way back
belongs to one trainer of one client, what it remembers of the way there is kept by `dense_remote`.
"""

import math
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Encoded
from shadowsync.errors import DataError
from shadowsync.runtime.generation import FIRST, Generation
from shadowsync.runtime.lines import Encoder
from shadowsync.runtime.mirror import Mirror
from shadowsync.runtime.rungs import rung
from shadowsync.runtime.wire.service import Meta, Method, Reply, Request
from shadowsync.sync.dense import DenseServer, Sent


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


_Mix = Callable[[DenseServer, Tensor, float, Sent], Tensor]


class DenseService:
    """What a `DenseServer` offers: `elastic`, `sequential`, `read`, `write`.

    `read` and `write` carry float32 as it stands: they serve checkpoints and new trainers.
    """

    def __init__(self, server: DenseServer, codec: Codec, generation: Generation = FIRST) -> None:
        self._server = server
        self._generation = generation
        self._codec = codec
        self._back: dict[str, dict[tuple[int, str], Encoder]] = {}
        self._mirrors: dict[str, dict[tuple[int, str], Mirror]] = {}
        self._lock = threading.Lock()
        self.methods: Mapping[str, Method] = {
            "elastic": Method(self._elastic),
            "sequential": Method(lambda request: self._exchange(DenseServer.sequential, request)),
            "read": Method(lambda _: Reply(tensors=(self._server.read(),)), once=False),
            "write": Method(self._write),
        }

    def client_gone(self, client: str) -> None:
        """Forgets what the codec remembers of that connection."""
        with self._lock:
            self._back.pop(client, None)
            self._mirrors.pop(client, None)

    def close(self) -> None:
        """Nothing to end."""

    def _elastic(self, request: Request) -> Reply:
        asked = self._asked(request)
        codec = rung(self._codec, asked.codec)
        if not codec.sparse:
            return self._exchange(DenseServer.elastic, request)
        differences = codec.of_differences()
        with self._lock:
            mirrors = self._mirrors.setdefault(request.client, {})
            mirror = mirrors.setdefault((asked.trainer_rank, codec.name), Mirror(differences, "a replica"))
        try:
            local = mirror.take(request.tensors, (self._server.length,), asked.whole)
        except Exception as error:  # a codec does not expect frames that it did not make
            raise DataError(f"the frames of an exchange are none of codec {codec.name}") from error
        if local is None:
            return Reply(Exchanged(False))
        encoder = self._encoder(codec, request.client, asked.trainer_rank)
        sent: list[Encoded] = []

        def send(tensor: Tensor) -> Tensor:
            sent.append(encoder.encode(tensor))
            return differences.decode(sent[0].frames, sent[0].shape)

        mirror.moved(self._server.elastic(self._checked(local), asked.alpha, send))
        return Reply(Exchanged(True, sent[0].refreshes, sent[0].early), sent[0].frames)

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
        encoder = self._encoder(codec, request.client, asked.trainer_rank)
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
        return Reply()

    def _decoded(self, codec: Codec, frames: tuple[Tensor, ...]) -> Tensor:
        try:
            values = codec.decode(frames, (self._server.length,))
        except Exception as error:  # a codec does not expect frames that it did not make
            raise DataError(f"the frames of an exchange are none of codec {codec.name}") from error
        return self._checked(values)

    def _checked(self, values: Tensor | None) -> Tensor:
        if values is None or values.dtype != torch.float32 or values.shape != (self._server.length,):
            came = "nothing" if values is None else f"{values.dtype} {list(values.shape)}"
            raise DataError(f"a dense server of {self._server.length} float32 parameters got {came}")
        return values

    def _encoder(self, codec: Codec, client: str, trainer_rank: int) -> Encoder:
        with self._lock:
            back = self._back.setdefault(client, {})
            about = f"the central copy for trainer {trainer_rank}"
            return back.setdefault((trainer_rank, codec.name), Encoder(codec.of_differences(), about))
