"""The dense part of gradient methods as it is reached over the wire: by a worker, and by who has steps carried out.

`P` elements of the flat tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shadowsync.aggregation.dense_line import gradients
from shadowsync.aggregation.parameters import ParameterReceiver
from shadowsync.aggregation.step_messages import (
    GradientSent,
    NewerAsked,
    NewerGiven,
    NormGiven,
    RestartAsked,
    StepAsked,
)
from shadowsync.aggregation.stepping import DenseGradient, DenseStep, Version
from shadowsync.compression.channel import Line, Stream
from shadowsync.compression.codec import Codec
from shadowsync.embedding.step_messages import held_bytes
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.fetched import Fetched, nothing
from shadowsync.rpc.pending import Pending
from shadowsync.training.replica import Slot


@dataclass(frozen=True)
class StepperRemote:
    """A `StepperService` (an `aggregation.update.DenseParameters`), with the codec and counts of `DenseLine`.

    Attributes:
        connection: to the service.
        line: of the dense part; the codec is the service's.
        length: `P`, of what the service steps.
        stream: of this worker among those that share the connection.
        generation: of the parts that the caller belongs to.
        trainer, slots: its rank, and the parameters that the service steps, for errors.
        server: number of the service among those that share the line.
    """

    connection: Connection
    line: Line
    length: int
    stream: int = 0
    generation: int = 0
    trainer: int = 0
    slots: Sequence[Slot] = ()
    server: int = 0
    _receiver: ParameterReceiver = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_receiver", ParameterReceiver(self.line, self.length))

    @property
    def gradients(self) -> Stream:
        """As `DenseLine.gradients`."""
        return self._gradients(self.line.now)

    def newer(self, than: int) -> Pending[Version | None]:
        """As `DenseParameters.newer`."""
        codec = self.line.now.codec
        asked = NewerAsked(than, self.stream, codec.name, self._receiver.having)
        return Fetched(self.connection.call("newer", asked), lambda answer: self._version(codec, answer))

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseParameters.hold`."""
        line = self.line.now
        encoded = self._gradients(line).encode(gradient.flat.cpu())
        sent = GradientSent(number, gradient.used, self.generation, line.codec.name)
        return Fetched(self.connection.call("hold", sent, encoded.frames), nothing)

    def commit(self, step: DenseStep) -> Pending[int]:
        """As `DenseStepper.commit`; answered with the bytes of the gradients that waited."""
        return Fetched(self.connection.call("commit", self._asked(step)), held_bytes)

    def norm(self, step: DenseStep) -> Pending[float]:
        """As `DenseStepper.norm`."""
        return Fetched(self.connection.call("norm", self._asked(step)), lambda answer: answer.read(NormGiven).norm)

    def restart(self, version: int) -> Pending[None]:
        """As `DenseStepper.restart`."""
        return Fetched(self.connection.call("restart", RestartAsked(version, self.generation)), nothing)

    def _asked(self, step: DenseStep) -> StepAsked:
        return StepAsked(
            step.step,
            tuple(step.weights),
            tuple(step.weights.values()),
            step.divisor,
            step.lr,
            step.below,
            self.generation,
            step.norm,
        )

    def _gradients(self, line: Line) -> Stream:
        return gradients(line, (self.trainer, self.stream), self.slots, self.server)

    def _version(self, codec: Codec, answer: Answer) -> Version | None:
        return self._receiver.take(codec, answer.read(NewerGiven), answer.tensors)
