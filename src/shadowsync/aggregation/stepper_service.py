"""The dense part of gradient methods behind the wire.

`P` elements of the flat tensor. What is remembered of parameters that were sent belongs to one stream of one client.
"""

from collections.abc import Mapping

from torch import Tensor

from shadowsync.aggregation.parameters import ParameterSender
from shadowsync.aggregation.step_messages import (
    GradientSent,
    NewerAsked,
    NewerGiven,
    NormGiven,
    RestartAsked,
    StepAsked,
)
from shadowsync.aggregation.stepping import DenseGradient, DenseStep, DenseStepper
from shadowsync.compression.codec import Codec
from shadowsync.compression.rungs import received, rung
from shadowsync.embedding.step_messages import Committed, check_batch, checked_weights
from shadowsync.errors import DataError
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.kept import MOST_STREAMS, Bounded, PerClient
from shadowsync.rpc.service import Method, Reply, Request


class StepperService:
    """What a `DenseStepper` offers: `hold` and `newer` to workers, `norm`, `commit` and `restart` to the driver.

    Args:
        stepper: what is served.
        codec: of the dense part.
        generation: whose gradients are taken.
        streams: that one client may have, each with up to one vector here: the workers of a trainer.
    """

    def __init__(
        self, stepper: DenseStepper, codec: Codec, generation: Generation = FIRST, streams: int = MOST_STREAMS
    ) -> None:
        self._stepper, self._codec, self._generation = stepper, codec, generation
        self._senders = PerClient(lambda: Bounded[int, ParameterSender](streams, "streams"))
        self.methods: Mapping[str, Method] = {
            "hold": Method(self._hold),
            "newer": Method(self._newer, once=False),
            "norm": Method(self._norm, once=False),
            "commit": Method(self._commit),
            "restart": Method(self._restart),
        }

    def client_gone(self, client: str) -> None:
        """Forgets what it was sent."""
        self._senders.forget(client)

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
        return Reply(*self._sender(request.client, asked.stream).answer(codec, found, asked.having))

    def _norm(self, request: Request) -> Reply:
        return Reply(NormGiven(self._stepper.norm(self._step(request))))

    def _commit(self, request: Request) -> Reply:
        step, held_bytes = self._step(request), self._stepper.held_bytes
        self._stepper.commit(step)
        return Reply(Committed(held_bytes))

    def _step(self, request: Request) -> DenseStep:
        asked = request.read(StepAsked)
        self._generation.check(asked.generation)
        weights = checked_weights(asked.batches, asked.weights, asked.divisor, asked.lr)
        if asked.norm is not None and asked.norm < 0:
            raise DataError(f"a gradient has no norm of {asked.norm}")
        return DenseStep(asked.step, weights, asked.divisor, asked.lr, asked.below, asked.norm)

    def _restart(self, request: Request) -> Reply:
        asked = request.read(RestartAsked)
        self._generation.check(asked.generation)
        if asked.version < 0:
            raise DataError(f"parameters of version {asked.version}: they count from 0")
        self._stepper.restart(asked.version)
        return Reply()

    def _decoded(self, codec: Codec, frames: tuple[Tensor, ...]) -> Tensor:
        flat = self._stepper.replica.flat
        with received("a gradient", codec):
            decoded = codec.decode(frames, tuple(flat.shape))
        return decoded.to(flat.device)

    def _sender(self, client: str, stream: int) -> ParameterSender:
        about = f"the dense parameters for worker {stream} of a trainer"
        return self._senders.of(client).get(stream, lambda: ParameterSender(about))
