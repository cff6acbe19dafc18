"""The dense part of gradient methods as it is reached over the wire: by a worker, and by who has steps carried out.

`P` elements of the flat tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shadowsync.aggregation.dense_line import gradients
from shadowsync.aggregation.parameters import Message, ParameterReceiver
from shadowsync.aggregation.stepper_service import StepperService
from shadowsync.aggregation.stepping import DenseGradient, DenseStep, Version
from shadowsync.compression.channel import Line, Stream
from shadowsync.compression.codec import Codec
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Joined, Pending
from shadowsync.rpc.served import Client, later
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
        asked = Client(""), self.stream, than, codec.name, self._receiver.having
        answer = later(self.connection, StepperService.newer, *asked)
        return Joined([answer], lambda found: self._version(codec, *found))

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseParameters.hold`."""
        line = self.line.now
        frames = self._gradients(line).encode(gradient.flat.cpu()).frames
        sent = self.generation, number, gradient.used, line.codec.name, frames
        return later(self.connection, StepperService.hold, *sent)

    def commit(self, step: DenseStep) -> Pending[int]:
        """As `StepperService.commit`."""
        return later(self.connection, StepperService.commit, self.generation, step)

    def norm(self, step: DenseStep) -> Pending[float]:
        """As `DenseStepper.norm`."""
        return later(self.connection, StepperService.norm, self.generation, step)

    def restart(self, version: int) -> Pending[None]:
        """As `DenseStepper.restart`."""
        return later(self.connection, StepperService.restart, self.generation, version)

    def _gradients(self, line: Line) -> Stream:
        return gradients(line, (self.trainer, self.stream), self.slots, self.server)

    def _version(self, codec: Codec, message: Message | None) -> Version | None:
        return None if message is None else self._receiver.take(codec, message)
