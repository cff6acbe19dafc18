"""The dense part of gradient methods behind the wire.

`P` elements of the flat tensor. Gradients cross as frames of the codec, parameters as those of `Codec.whole`; what that
remembers belongs to one stream of one client.
"""

import threading
from collections.abc import Mapping

from torch import Tensor

from shadowsync.aggregation.stepping import DenseGradient, DenseStep, DenseStepper
from shadowsync.compression.codec import Codec
from shadowsync.errors import DataError
from shadowsync.runtime.generation import FIRST, Generation
from shadowsync.runtime.lines import Encoder
from shadowsync.runtime.rungs import rung
from shadowsync.runtime.step_messages import (
    Committed,
    GradientSent,
    NewerAsked,
    NewerGiven,
    RestartAsked,
    StepAsked,
    check_batch,
    checked_weights,
)
from shadowsync.runtime.wire.service import Method, Reply, Request


class StepperService:
    """What a `DenseStepper` offers: `hold` and `newer` to workers, `commit` and `restart` to the driver."""

    def __init__(self, stepper: DenseStepper, codec: Codec, generation: Generation = FIRST) -> None:
        self._stepper, self._codec, self._generation = stepper, codec, generation
        self._back: dict[str, dict[tuple[int, str], Encoder]] = {}
        self._lock = threading.Lock()
        self.methods: Mapping[str, Method] = {
            "hold": Method(self._hold),
            "newer": Method(self._newer, once=False),
            "commit": Method(self._commit),
            "restart": Method(self._restart),
        }

    def client_gone(self, client: str) -> None:
        """Forgets what the codec remembers of that connection."""
        with self._lock:
            self._back.pop(client, None)

    def close(self) -> None:
        """Nothing to end."""

    def _hold(self, request: Request) -> Reply:
        sent = request.read(GradientSent)
        self._generation.check(sent.generation)
        check_batch(sent.number)
        flat = self._decoded(rung(self._codec, sent.codec), request.tensors)
        self._stepper.hold(sent.number, DenseGradient(flat, sent.used))
        return Reply()

    def _newer(self, request: Request) -> Reply:
        asked = request.read(NewerAsked)
        codec = rung(self._codec, asked.codec)
        found = self._stepper.newer(asked.than)
        if found is None:
            return Reply(NewerGiven(None))
        encoded = self._encoder(codec, request.client, asked.stream).encode(found.flat.cpu())
        return Reply(NewerGiven(found.number), encoded.frames)

    def _commit(self, request: Request) -> Reply:
        asked = request.read(StepAsked)
        self._generation.check(asked.generation)
        weights = checked_weights(asked.batches, asked.weights, asked.divisor, asked.lr)
        held_bytes = self._stepper.held_bytes
        self._stepper.commit(DenseStep(asked.step, weights, asked.divisor, asked.lr, asked.below))
        return Reply(Committed(held_bytes))

    def _restart(self, request: Request) -> Reply:
        asked = request.read(RestartAsked)
        self._generation.check(asked.generation)
        if asked.version < 0:
            raise DataError(f"parameters of version {asked.version}: they count from 0")
        self._stepper.restart(asked.version)
        return Reply()

    def _decoded(self, codec: Codec, frames: tuple[Tensor, ...]) -> Tensor:
        flat = self._stepper.replica.flat
        try:
            decoded = codec.decode(frames, tuple(flat.shape))
        except Exception as error:  # a codec does not expect frames that it did not make
            raise DataError(f"the frames of a gradient are none of codec {codec.name}") from error
        return decoded.to(flat.device)

    def _encoder(self, codec: Codec, client: str, stream: int) -> Encoder:
        with self._lock:
            back = self._back.setdefault(client, {})
            about = f"the dense parameters for stream {stream}"
            return back.setdefault((stream, codec.name), Encoder(codec.whole(), about))
