"""The dense part of gradient methods as it is reached over the wire: by a worker, and by who has steps carried out.

`P` elements of the flat tensor.
"""

from dataclasses import dataclass

from shadowsync.aggregation.stepping import DenseGradient, DenseStep, Version
from shadowsync.embedding.pending import Pending
from shadowsync.errors import DataError
from shadowsync.runtime.fetched import Fetched, held_bytes, nothing
from shadowsync.runtime.lines import Line
from shadowsync.runtime.step_messages import GradientSent, NewerAsked, NewerGiven, RestartAsked, StepAsked
from shadowsync.runtime.wire.connection import Answer, Connection


@dataclass(frozen=True)
class StepperRemote:
    """A `StepperService` (an `aggregation.update.DenseParameters`), with the codec and counts of `DenseLine`.

    Attributes:
        connection: to the service.
        line: of the dense part; the codec is the service's.
        length: `P`.
        stream: of this worker among those that share the connection.
        generation: of the parts that the caller belongs to.
    """

    connection: Connection
    line: Line
    length: int
    stream: int = 0
    generation: int = 0

    def newer(self, than: int) -> Pending[Version | None]:
        """As `DenseParameters.newer`."""
        return Fetched(self.connection.call("newer", NewerAsked(than, self.stream)), self._version)

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseParameters.hold`."""
        encoded = self.line.stream(("gradients", self.stream)).encode(gradient.flat.cpu())
        sent = GradientSent(number, self.stream, gradient.used, self.generation)
        return Fetched(self.connection.call("hold", sent, encoded.frames), nothing)

    def commit(self, step: DenseStep) -> Pending[int]:
        """As `DenseStepper.commit`; answered with the bytes of the gradients that waited."""
        asked = StepAsked(
            step.step,
            tuple(step.weights),
            tuple(step.weights.values()),
            step.divisor,
            step.lr,
            step.below,
            self.generation,
        )
        return Fetched(self.connection.call("commit", asked), held_bytes)

    def restart(self, version: int) -> Pending[None]:
        """As `DenseStepper.restart`."""
        return Fetched(self.connection.call("restart", RestartAsked(version, self.generation)), nothing)

    def _version(self, answer: Answer) -> Version | None:
        given = answer.read(NewerGiven)
        if given.version is None:
            return None
        flat = self.line.codec.decode(answer.tensors, (self.length,))
        if flat.shape != (self.length,):
            raise DataError(f"the dense server sent {list(flat.shape)} parameters to a model of {self.length}")
        self.line.count(sum(frame.nbytes for frame in answer.tensors), flat.nbytes)
        return Version(given.version, flat)
