"""The dense part of gradient methods behind the wire.

`P` elements of the flat tensor. What is remembered of parameters that were sent belongs to one stream of one client.
"""

from torch import Tensor

from shadowsync.aggregation.parameters import Message, ParameterSender
from shadowsync.aggregation.stepping import DenseGradient, DenseStep, DenseStepper
from shadowsync.compression.codec import Codec
from shadowsync.compression.rungs import received, rung
from shadowsync.embedding.step_messages import check_batch, checked_weights
from shadowsync.errors import DataError
from shadowsync.rpc.generation import FIRST, Generation
from shadowsync.rpc.kept import MOST_STREAMS, Bounded, PerClient
from shadowsync.rpc.served import Client, served


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

    def client_gone(self, client: str) -> None:
        """Forgets what it was sent."""
        self._senders.forget(client)

    @served()
    def hold(
        self, generation: int, number: int, used: tuple[bool, ...], codec: str, frames: tuple[Tensor, ...]
    ) -> None:
        """As `DenseStepper.hold`; the gradient comes in frames of that codec."""
        self._generation.check(generation)
        check_batch(number)
        flat = self._decoded(rung(self._codec, codec), frames)
        self._stepper.hold(number, DenseGradient(flat, used))

    @served(once=False)
    def newer(self, client: Client, stream: int, than: int, codec: str, having: int) -> Message | None:
        """As `DenseStepper.newer`, in that codec, for a worker of which message `having` came last; 0 if none did."""
        named = rung(self._codec, codec)
        found = self._stepper.newer(than)
        return None if found is None else self._sender(client, stream).answer(named, found, having)

    @served(once=False)
    def norm(self, generation: int, step: DenseStep) -> float:
        """As `DenseStepper.norm`."""
        self._check(generation, step)
        return self._stepper.norm(step)

    @served()
    def commit(self, generation: int, step: DenseStep) -> int:
        """As `DenseStepper.commit`; gives the bytes of the gradients that waited, those of the step with them."""
        self._check(generation, step)
        held_bytes = self._stepper.held_bytes
        self._stepper.commit(step)
        return held_bytes

    @served()
    def restart(self, generation: int, version: int) -> None:
        """As `DenseStepper.restart`."""
        self._generation.check(generation)
        if version < 0:
            raise DataError(f"parameters of version {version}: they count from 0")
        self._stepper.restart(version)

    def _check(self, generation: int, step: DenseStep) -> None:
        self._generation.check(generation)
        checked_weights(tuple(step.weights), tuple(step.weights.values()), step.divisor, step.lr)
        if step.norm is not None and step.norm < 0:
            raise DataError(f"a gradient has no norm of {step.norm}")

    def _decoded(self, codec: Codec, frames: tuple[Tensor, ...]) -> Tensor:
        flat = self._stepper.replica.flat
        with received("a gradient", codec):
            decoded = codec.decode(frames, tuple(flat.shape))
        return decoded.to(flat.device)

    def _sender(self, client: str, stream: int) -> ParameterSender:
        about = f"the dense parameters for worker {stream} of a trainer"
        return self._senders.of(client).get(stream, lambda: ParameterSender(about))
