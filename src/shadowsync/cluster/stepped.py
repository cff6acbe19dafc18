"""Gradient methods: the coordinator is the driver's, the dense part the dense servers'."""

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from shadowsync.aggregation.aggregator import Aggregation, Worker
from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.counts import AggregationState, Paces
from shadowsync.aggregation.stepping import DenseStep, DenseStepper
from shadowsync.checkpoint.job_state import DenseImage, TrainerImage
from shadowsync.cluster.context import Stepping
from shadowsync.cluster.dense_side import DenseSide
from shadowsync.cluster.images import Images
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.servers import PartImages
from shadowsync.cluster.supervisor import Member, NobodyLeft
from shadowsync.compression.wire import WireCounter
from shadowsync.data.leases import LeaseService
from shadowsync.data.reader import Reader
from shadowsync.embedding.server import EmbeddingServer, RowStep
from shadowsync.embedding.service import EmbeddingService
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.kept import Generation
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import later
from shadowsync.training.gate import Gate

T = TypeVar("T")


@dataclass
class RemoteSteps:
    """Carries global steps out on all servers at once, for one generation.

    An embedding server that dies meanwhile is left out: whoever takes its place holds none of the step's gradients.
    Without a dense server there is no step, and everybody is about to go back to a checkpoint.

    Attributes:
        manager: whose servers.
        generation: of the parts.
        held_bytes: memory of the gradients that waited on all servers when the last step came.
    """

    manager: ClusterManager
    generation: int
    held_bytes: int = field(default=0, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        """Returns when the step is made everywhere.

        Raises:
            PeerLost: the generation is over.
        """
        servers = self.manager.serving("embedding")
        sent = [later(member.connection, EmbeddingService.commit, rows, self.generation) for member in servers]
        try:
            held_bytes = self._step_dense(dense)
        except GONE:
            self._over.wait()
            raise
        self.held_bytes = held_bytes + sum(_unless_gone(answer, 0) for answer in sent)

    def _step_dense(self, step: DenseStep) -> int:
        """Has all dense servers make a step; the bytes of the gradients that waited there."""
        ways = [member.connection for member in self.manager.dense_servers()]
        clipped = self.manager.spec.job.config.train.clip_norm is not None
        if clipped and len(ways) > 1:  # each has only some of the parameters
            norms = [later(way, DenseStepper.norm, step, self.generation) for way in ways]
            step = replace(step, norm=math.hypot(*(norm.result() for norm in norms)))
        sent = [later(way, DenseStepper.commit, step, self.generation) for way in ways]
        return sum(answer.result() for answer in sent)

    def restart(self, steps: int) -> None:
        """So many steps were made before, and no gradient waits anywhere.

        Raises:
            PeerLost: a server is not there.
        """
        servers = self.manager.row_servers()
        sent = [
            later(member.connection, EmbeddingService.forget_held, steps - 1, self.generation) for member in servers
        ]
        ways = [member.connection for member in self.manager.dense_servers()]
        sent += [later(way, DenseStepper.restart, steps, self.generation) for way in ways]
        for answer in sent:
            answer.result()

    def end(self) -> None:
        """The generation is over."""
        self._over.set()


def _unless_gone(answer: Pending[T], otherwise: T) -> T:
    with contextlib.suppress(*GONE):  # the supervisor has found out, or will
        return answer.result()
    return otherwise


@dataclass
class NearSteps:
    """As `RemoteSteps`, on servers in this process, one after the other.

    Attributes:
        dense: the one stepper, and `rows` the embedding servers; once they are made.
    """

    generation: int
    dense: DenseStepper = field(init=False)
    rows: Sequence[EmbeddingServer] = field(init=False)

    @property
    def held_bytes(self) -> int:
        """Memory of the gradients that wait now."""
        return self.dense.held_bytes + sum(server.held_bytes for server in self.rows)

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        """As `RemoteSteps.carry_out`."""
        self.dense.commit(dense, self.generation)
        for server in self.rows:
            server.commit(rows)

    def restart(self, steps: int) -> None:
        """As `RemoteSteps.restart`."""
        self.dense.restart(steps, self.generation)
        for server in self.rows:
            server.forget_held(steps - 1)

    def end(self) -> None:
        """Nobody waits."""


class _Generation:
    """The coordinator of a generation, with the thread that carries its steps out where servers are elsewhere."""

    def __init__(
        self, method: Aggregation, rule: StepRule, rows: LeaseService, steps: RemoteSteps | NearSteps, paces: Paces
    ) -> None:
        self.steps = steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="steps")
        run = None if isinstance(steps, NearSteps) else self._pool.submit
        generation = Generation(steps.generation)
        self.coordinator = StepCoordinator(
            method, rule, rows, steps.carry_out, run=run, paces=paces, generation=generation
        )

    def end(self) -> None:
        self.coordinator.stop()
        self.steps.end()
        self._pool.shutdown(wait=False, cancel_futures=True)  # it may wait for a server that is silent


class Stepped(DenseSide):
    """One copy, on the dense servers, moved by the global steps of a coordinator beside the lease service.

    Args:
        method: says what goes into which step.
        rule: how steps are made.
        manager, images: of the session.
    """

    is_with_trainers = False
    is_with_servers = True

    def __init__(self, method: Aggregation, rule: StepRule, manager: ClusterManager, images: Images) -> None:
        super().__init__(manager, images)
        self._method, self._rule = method, rule
        self._now: _Generation | None = None
        self._before: AggregationState | None = None

    # --- a generation ------------------------------------------------------------------------------------------------

    def open(self, reader: Reader, generation: int) -> StepCoordinator:
        self.close()
        self._before = None if self._now is None else self.aggregation
        direct = self._manager.spec.direct
        steps = NearSteps(generation) if direct else RemoteSteps(self._manager, generation)
        paces = Paces() if self._now is None else self._now.coordinator.paces
        self._now = _Generation(self._method, self._rule, reader.leases, steps, paces)
        return self._now.coordinator

    def near(
        self, servers: Sequence[Any], rows: Sequence[EmbeddingServer], gate: Gate, counter: WireCounter
    ) -> Stepping:
        assert self._now is not None
        steps = self._now.steps
        assert isinstance(steps, NearSteps)
        (steps.dense,), steps.rows = servers, rows
        return Stepping(steps.dense, self._now.coordinator)

    def look(self) -> None:
        if self._now is not None:
            self._now.coordinator.look()

    def stop(self) -> None:
        if self._now is not None:
            self._now.coordinator.stop()

    def close(self) -> None:
        if self._now is not None:
            self._now.end()

    # --- deaths ------------------------------------------------------------------------------------------------------

    def fill_server(self, server: Member) -> None:
        raise NobodyLeft(f"the dense part was lost with the {server.role} before")

    @property
    def error(self) -> BaseException | None:
        error = None if self._now is None else self._now.coordinator.error
        return None if isinstance(error, GONE) else error

    # --- images ------------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        return self._now is None or self._now.coordinator.settle(timeout_s)

    def paused(self) -> AbstractContextManager[None]:
        return super().paused() if self._now is None else self._now.coordinator.paused()

    @property
    def copies(self) -> int:
        return 1

    def image(self) -> DenseImage:
        return DenseImage((self._parts.join(self._images.of(self._manager.dense_servers())),), None, self._feedback())

    def load(self, image: DenseImage) -> None:
        for server, own in zip(self._manager.dense_servers(), self._parts.split(image.trainers[0]), strict=True):
            self._images.restore(server, own)
        for member in self._with_feedback():
            self._images.restore(member, TrainerImage({}, image.feedback_of(member.index)))

    @property
    def _parts(self) -> PartImages:
        spec = self._manager.spec
        return PartImages(spec.parts, spec.template)

    def _feedback(self) -> dict[str, Tensor]:
        """What the trainers' workers have not sent of their gradients."""
        trainers = self._with_feedback()
        pairs = zip(trainers, self._images.of(trainers), strict=True)
        return {f"{member.index}.{name}": tensor for member, image in pairs for name, tensor in image.method.items()}

    def _with_feedback(self) -> list[Member]:
        """Trainers that keep something of their gradients, if only what they rounded them with."""
        whole = self._manager.spec.job.choices.codecs["dense"].everything
        return [] if whole else self._manager.statuses.at_work()

    def restart(self, before: AggregationState) -> None:
        if self._now is None:
            raise PeerLost("no generation has begun")
        self._now.coordinator.restart(before)
        self._before = None
        self._now.steps.restart(before.global_steps)

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def aggregation(self) -> AggregationState:
        """While everybody goes back to a checkpoint, until `restart` says to which counts, those of the end before."""
        if (before := self._before) is not None:
            return before
        return AggregationState() if self._now is None else self._now.coordinator.state

    @property
    def held_bytes(self) -> int:
        return 0 if self._now is None else self._now.steps.held_bytes

    def recent_step_s(self) -> Mapping[Worker, float]:
        return {} if self._now is None else self._now.coordinator.recent_step_s()

    def mean_step_s(self) -> Mapping[Worker, float]:
        return {} if self._now is None else self._now.coordinator.mean_step_s()
