"""The dense part of gradient methods in this process, as a worker sees it over a wire.

`P` elements of the flat tensor.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from shadowsync.aggregation.parameters import ParameterReceiver, ParameterSender
from shadowsync.aggregation.stepping import DenseGradient, DenseStepper, Version
from shadowsync.compression.channel import Line, Stream
from shadowsync.rpc.pending import DONE, Callback, Pending
from shadowsync.training.replica import Slot

T = TypeVar("T")


class _Later(Pending[T], Generic[T]):
    """An answer that is found when somebody asks for it; one thread."""

    def __init__(self, find: Callable[[], T]) -> None:
        self._find = find
        self._found: list[T] = []

    def result(self) -> T:
        if not self._found:
            self._found.append(self._find())
        return self._found[0]

    def done(self) -> bool:
        return True

    def then(self, callback: Callback) -> None:
        callback(None)


def gradients(line: Line, worker: tuple[int, int], slots: Sequence[Slot], server: int = 0) -> Stream:
    """The stream of a worker's gradients to a dense server; `slots` there name the parameters in errors, as far as
    known."""
    (rank, index), starts = worker, [slot.start for slot in slots]
    named = f"the dense gradient of worker {index} of trainer {rank}"
    part_of = (lambda at: slots[bisect_right(starts, at) - 1].name) if slots else None
    return line.stream(("gradients", worker, server), named, part_of)


@dataclass(frozen=True)
class DenseLine:
    """Codecs are applied, and what would cross is counted (an `aggregation.update.DenseParameters`).

    Attributes:
        stepper: the other end.
        line: of the dense part.
        worker: whose streams these are: rank of the trainer, index there.
    """

    stepper: DenseStepper
    line: Line
    worker: tuple[int, int]
    _sender: ParameterSender = field(init=False, repr=False, compare=False)
    _receiver: ParameterReceiver = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sender = ParameterSender("the dense parameters for worker {1} of trainer {0}".format(*self.worker))
        object.__setattr__(self, "_sender", sender)
        object.__setattr__(self, "_receiver", ParameterReceiver(self.line, len(self.stepper.replica.flat)))

    def newer(self, than: int) -> Pending[Version | None]:
        """As `DenseStepper.newer`, when the answer is asked for: nothing has to cross before."""
        return _Later(lambda: self._newer(than))

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseStepper.hold`."""
        arrived = self.gradients.send(gradient.flat).to(gradient.flat.device)
        self.stepper.hold(number, replace(gradient, flat=arrived))
        return DONE

    @property
    def gradients(self) -> Stream:
        """What is sent of gradients, and kept of them."""
        return gradients(self.line, self.worker, self.stepper.replica.slots)

    def _newer(self, than: int) -> Version | None:
        found, codec = self.stepper.newer(than), self.line.codec
        if found is None:
            return None
        return self._receiver.take(codec, self._sender.answer(codec, found, self._receiver.having))
