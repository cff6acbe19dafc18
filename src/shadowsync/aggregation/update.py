"""A worker's end of gradient methods: it sends its gradients to all servers, and does not wait.

`B` samples of a batch, `D_f` width of feature f's vector, `P` elements of the model's flat tensor, `P_j` of dense
server j's.
"""

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowsync.aggregation.coordinator import StepCoordinator
from shadowsync.aggregation.stepping import DenseGradient, DenseShare, DenseStepper, Parameters, Version
from shadowsync.compression.channel import Channel, Differences, Stream
from shadowsync.compression.codec import Codec
from shadowsync.data.reader import LeasedBatch
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.errors import DataError, ShadowSyncError
from shadowsync.models.vectors import VectorGradients
from shadowsync.rpc.connection import Connection, Direct
from shadowsync.rpc.errors import CallTimeout
from shadowsync.rpc.pending import Mapped, Pending, Promise, all_of
from shadowsync.rpc.served import Client, ask, later
from shadowsync.training.pieces import renumbered
from shadowsync.training.replica import ParameterSlot, Replica, WorkerModule
from shadowsync.training.worker import Update

_LOG = logging.getLogger(__name__)
NO_VERSION = -1
"""Of parameters that nobody has."""


class ParameterReceiver:
    """A worker's end of the way back from one dense server (`stepping.ParameterSender`).

    Attributes:
        version: of the parameters that came last.
        having: the serial number of the message that brought them; 0 before the first.
    """

    def __init__(self, line: Channel, length: int) -> None:
        self.version, self.having = NO_VERSION, 0
        self._line, self._length = line, length
        self._differences = Differences("the dense parameters")

    def take(self, codec: Codec, came: Parameters) -> Version:
        """The parameters `[P_j]` after a message in that codec, counted.

        Raises:
            DataError: it goes on from a message that never came, or the frames are none of such a message.
        """
        known = self._differences.take(codec, came.message, (self._length,))
        if known is None:
            raise DataError("the dense server sent what has changed to a worker that has nothing")
        flat = known if codec.everything else known.clone()  # the next message is added to it
        self.version, self.having = came.version, came.serial
        came.message.count(self._line, self._length)
        return Version(came.version, flat)


def gradient_stream(line: Channel, worker: tuple[int, int], slots: Sequence[ParameterSlot], server: int = 0) -> Stream:
    """The stream of a worker's gradients to a dense server; `slots` there name the parameters in errors."""
    (rank, index), starts = worker, [slot.start for slot in slots]
    named = f"the dense gradient of worker {index} of trainer {rank}"
    return line.stream(("gradients", worker, server), named, lambda at: slots[bisect_right(starts, at) - 1].name)


class _Way:
    """One worker's way to one `DenseStepper`."""

    def __init__(
        self, to: Connection, line: Channel, worker: tuple[int, int], part: DenseShare, server: int, generation: int
    ) -> None:
        self._to, self._line, self._worker, self.part = to, line, worker, part
        self._server, self._generation = server, generation
        self.receiver = ParameterReceiver(line, part.length)

    def gradients(self, line: Channel) -> Stream:
        return gradient_stream(line, self._worker, self.part.own, self._server)

    @property
    def stream(self) -> Stream:
        return self.gradients(self._line.now)

    def newer(self) -> Pending[Version | None]:
        codec, receiver = self._line.now.codec, self.receiver

        def asked() -> Pending[Parameters | None]:
            given = self._worker[1], receiver.version, codec.name, receiver.having
            return later(self._to, DenseStepper.newer, Client(""), *given)

        def taken(came: Parameters | None) -> Version | None:
            return None if came is None else receiver.take(codec, came)

        if isinstance(self._to, Direct):  # those when the result is asked for: nothing has to cross before
            return Mapped(lambda: taken(asked().result()))
        return Mapped(taken, asked())

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        line, to = self._line.now, self._to
        flat = gradient.flat if isinstance(to, Direct) else gradient.flat.cpu()
        frames = self.gradients(line).encode(flat).frames
        return later(to, DenseStepper.receive, number, gradient.used, line.codec.name, frames, self._generation)


class DenseClient:
    """The dense part as a worker sees it: gradients go to all servers at once, and parameters come from all of them.

    Servers make a step at about the same time, not at the same: the version of the whole is the oldest of its parts.
    For each server there are the parameters that it has, the way to it and a line, whose codec is the server's.
    """

    def __init__(
        self,
        worker: tuple[int, int],
        parts: Sequence[DenseShare],
        servers: Sequence[Connection],
        lines: Sequence[Channel],
        length: int,
        generation: int = 0,
    ) -> None:
        self.worker = worker
        ways = enumerate(zip(servers, lines, parts, strict=True))
        self._ways = [_Way(to, line, worker, part, number, generation) for number, (to, line, part) in ways]
        self._flat = torch.zeros(length if len(parts) > 1 else 0)

    def newer(self, than: int) -> Pending[Version | None]:
        """The newest parameters, or None if their version is not above `than`; what a server has sent, it does not send
        again before it is newer.
        """
        return Mapped(lambda *found: self._version(than, found), *[way.newer() for way in self._ways])

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        if len(self._ways) == 1:  # all of the model, in its order
            return self._ways[0].hold(number, gradient)
        return all_of([way.hold(number, way.part.gradient(gradient)) for way in self._ways])

    @property
    def unsent(self) -> dict[str, Tensor]:
        """What codecs remember of the worker's gradients, with the numbers that parameters have in the model."""
        found: dict[str, Tensor] = {}
        for way in self._ways:
            found |= renumbered(way.stream.tensors(), dict(enumerate(way.part.indices)))
        return found

    def restore(self, unsent: Mapping[str, Tensor]) -> bool:
        """Goes on from what `unsent` gave, of any number of servers; False if that is not of this codec."""
        restored = [
            way.stream.restore(renumbered(unsent, {whole: own for own, whole in enumerate(way.part.indices)}))
            for way in self._ways
        ]
        return all(restored)

    def _version(self, than: int, found: Sequence[Version | None]) -> Version | None:
        if len(self._ways) == 1:
            return found[0]
        for way, version in zip(self._ways, found, strict=True):
            if version is not None:
                way.part.put(version.flat, self._flat)
        oldest = min(way.receiver.version for way in self._ways)
        return Version(oldest, self._flat.clone()) if oldest > than else None


def restore_all(workers: Iterable[tuple[DenseClient | Stream, Mapping[str, Tensor]]]) -> None:
    """`restore` of each worker; a word in the log where a residual is lost."""
    refused = [tensors for worker, tensors in workers if not worker.restore(tensors)]
    lost = sum(any(name.endswith("residual") for name in tensors) for tensors in refused)
    if lost:
        _LOG.warning(
            "what %d workers had not sent of their gradients is not of this codec: it is lost, and they start from "
            "nothing",
            lost,
        )


@dataclass
class GradientUpdate(Update):
    """Gradient methods: dense parameters are pulled when there are newer ones, gradients are sent under
    the batch's number, and the batch is done when a global step has taken or dropped it.

    Parameters are asked for as soon as a batch is begun, so that they cross beside its rows. With pulls `ahead` they
    cross while the batch before is computed: they are then older by that, as the rows are. Where a method makes workers
    wait, nothing that is older than its step is computed with. While this is quiet, what has arrived may still wait for
    its step, and is trained anew after a resume.

    Attributes:
        worker: who it is: rank of its trainer, index there.
        coordinator: the way to the `StepCoordinator`.
        embeddings: where the gradient of the pooled vectors goes.
        replica: the worker's own copy of the dense part.
        generation: of the parts that the worker belongs to.
        ahead: batches are begun, in another thread, before the one before is computed.
    """

    worker: tuple[int, int]
    coordinator: Connection
    dense: DenseClient
    embeddings: EmbeddingClient
    replica: Replica
    generation: int = 0
    ahead: bool = False
    _version: int = field(default=NO_VERSION, init=False)
    _asked: Pending[Version | None] | None = field(default=None, init=False, repr=False)
    _admitted: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        asked = self._ask(leased.number)

        def admitted() -> bool:
            answer = asked
            while True:
                try:
                    version = answer.result()
                    break
                except CallTimeout:
                    answer = self._ask(leased.number)
            if version is None:
                return False
            self._admitted[leased.number] = version
            if not self.ahead:
                self._asked = self.dense.newer(self._version)
            return True

        return admitted

    def _ask(self, number: int) -> Pending[int | None]:
        return later(self.coordinator, StepCoordinator.ask, self.worker, number, self.generation)

    def ready(self, leased: LeasedBatch) -> None:
        self._take(self._asked)
        if self._version < self._admitted.pop(leased.number):
            self._take(self.dense.newer(self._version))
        self._asked = self.dense.newer(self._version) if self.ahead else None

    def _take(self, asked: Pending[Version | None] | None) -> None:
        newer = None if asked is None else asked.result()
        if newer is not None and newer.number > self._version:
            self.replica.flat.copy_(newer.flat)
            self._version = newer.number

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        dense = DenseGradient(module.flat_gradient(), tuple(found is not None for found in module.gradients))
        sent = [self.dense.hold(leased.number, dense), self.embeddings.hold(pulled, gradient, leased.number)]
        self._sent(self._told(all_of(sent), leased.number, self._version))

    def _told(self, sent: Pending[None], number: int, version: int) -> Pending[None]:
        """Ends when all servers hold the gradients and the coordinator knows."""
        told: Promise[None] = Promise()

        def tell(error: BaseException | None) -> None:
            if error is not None:
                told.fail(error)
                return
            try:
                self.tell_arrived(number, version).then(told.end)
            except BaseException as failure:  # whoever waits is to hear of it, not the thread that brought the answer
                told.fail(failure)

        sent.then(tell)
        return told

    def tell_arrived(self, number: int, version: int) -> Pending[None]:
        """All servers hold the gradients of a batch that was computed with this version of the dense parameters."""
        return later(self.coordinator, StepCoordinator.arrived, number, version, self.generation)

    def idle(self) -> None:
        """As `Update.idle`; returns when it is known there, so that a later `begin` comes after it."""
        self.settle()
        ask(self.coordinator, StepCoordinator.idle, self.worker, self.generation)

    def left(self) -> None:
        """As `Update.left`; where the coordinator cannot be reached, the job gives up the whole trainer."""
        with contextlib.suppress(ShadowSyncError):
            ask(self.coordinator, StepCoordinator.left, self.worker, self.generation)
