"""What a session does about the dense part: for replica methods and for gradient methods."""
# ruff: noqa: B027 - what replica methods need not do

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.counts import AggregationState, Paces
from shadowsync.aggregation.stepping import DenseShare, DenseStep, DenseStepper
from shadowsync.checkpoint.job_state import DenseImage, TrainerImage, buffers, is_buffer, without_waiting
from shadowsync.cluster.context import Merging, Stepping
from shadowsync.cluster.images import Images
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.supervisor import Member, NobodyLeft
from shadowsync.cluster.trainer_dense import averaged_codec
from shadowsync.compression.channel import Channel
from shadowsync.compression.wire import WireCounter
from shadowsync.data.reader import Reader
from shadowsync.embedding.server import EmbeddingServer, RowStep
from shadowsync.embedding.service import EmbeddingService
from shadowsync.errors import DataError
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import later
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.training.gate import Gate
from shadowsync.training.replica import Replica

T = TypeVar("T")


class DenseSide(ABC):
    """The dense part of all trainers, wherever it is; what replica methods need not do does nothing here.

    Attributes:
        is_with_trainers: it is lost with the last trainer.
        is_with_servers: it is lost with a dense server.
        coordinator: of the global steps of a gradient method, once a generation has begun.
        error: what went wrong beside the trainers.
        aggregation: as `Session.aggregation`, of this run and what it went on from.
        held_bytes: memory of the gradients that wait for a global step, all servers; None where that is not known.
    """

    is_with_trainers: ClassVar[bool]
    is_with_servers: ClassVar[bool]
    coordinator: StepCoordinator | None = None

    def __init__(self, manager: ClusterManager, images: Images) -> None:
        self._manager, self._images = manager, images

    # --- a generation ------------------------------------------------------------------------------------------------

    def open(self, reader: Reader, generation: int) -> StepCoordinator | None:
        """A generation begins; what was under way in the one before is ended.

        Returns:
            what trainers find beside the lease service.
        """

    @abstractmethod
    def near(
        self, servers: Sequence[Any], rows: Sequence[EmbeddingServer], gate: Gate, counter: WireCounter
    ) -> Merging | Stepping:
        """What trainers in this process use, where all roles are here; `servers` is what the dense servers serve."""

    def fill(self) -> None:
        """Servers have fresh parts: gives them initial values, unless they have made them themselves.

        Raises:
            PeerLost: one of them is not there.
        """

    def look(self) -> None:
        """Called several times a second while trainers are at work."""
        if self.coordinator is not None:
            self.coordinator.look()

    def stop(self) -> None:
        """Lets everybody go who waits for others."""
        if self.coordinator is not None:
            self.coordinator.stop()

    def close(self) -> None:
        """Ends threads."""

    @abstractmethod
    def fill_server(self, server: Member) -> None:
        """A dense server has taken another's place while the others go on.

        Raises:
            NobodyLeft: it cannot go on.
        """

    def fill_trainer(self, trainer: Member) -> None:
        """A trainer is about to start while others go on; raises as `fill_server`."""

    # --- images ------------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        """Waits, while trainers stand still, until nothing changes anything any more; False if it does after that."""
        return self.coordinator is None or self.coordinator.settle(timeout_s)

    def paused(self) -> AbstractContextManager[None]:
        """While inside, trainers stand still."""
        return nullcontext() if self.coordinator is None else self.coordinator.paused()

    @property
    @abstractmethod
    def copies(self) -> int:
        """Replicas that `load` needs now."""

    @abstractmethod
    def image(self) -> DenseImage:
        """As `Session.dense_image`."""

    @abstractmethod
    def load(self, image: DenseImage) -> None:
        """As `Session.load_dense`."""

    def restart(self, before: AggregationState) -> None:
        """Counts go on from these; after `load`.

        Raises:
            PeerLost: a server is not there.
        """

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        error = None if self.coordinator is None else self.coordinator.error
        return None if isinstance(error, GONE) else error

    @property
    def aggregation(self) -> AggregationState | None:
        return None

    @property
    def held_bytes(self) -> int | None:
        return None

    def distance(self, sketches: Sequence[Tensor]) -> float | None:
        """Mean of ‖w_i − mean w‖ / ‖mean w‖ over the same coordinates of each trainer's replica; None for one."""
        return None


class Merged(DenseSide):
    """Replica methods: each trainer has its own dense part, and dense servers may keep a central one."""

    is_with_trainers = True
    is_with_servers = False

    def near(
        self, servers: Sequence[Any], rows: Sequence[EmbeddingServer], gate: Gate, counter: WireCounter
    ) -> Merging:
        spec = self._manager.spec
        codec, method = spec.job.choices.codecs["dense"].levels[0], spec.job.choices.method
        averaged = Channel("dense", averaged_codec(codec, method.collective, spec.template), counter)
        averages = LocalAverages(range(spec.trainers), averaged, gate.waiting, method.meeting())
        return Merging(averages, tuple(servers))

    def fill(self) -> None:
        self._images.write_center(self._manager.spec.template.flat.detach().cpu())

    def fill_server(self, server: Member) -> None:
        """Its part of the central copy is the mean of the replicas."""
        images = self._images.of(self._manager.statuses.at_work())
        if not images:
            raise NobodyLeft(f"no trainer is left from which {server.role} could go on")
        weights = [image.replica["weight"] for image in images]
        self._images.write_part(server, sum(weights[1:], weights[0]) / len(weights))

    def fill_trainer(self, trainer: Member) -> None:
        """It goes on from a peer, under a centralised method from the central copy; its optimizer is the peer's."""
        peers, method = self._manager.statuses.at_work()[:1], self._manager.spec.job.choices.method
        if not peers:
            raise NobodyLeft(f"no trainer is left from which {trainer.role} could go on")
        (image,) = self._images.of(peers)
        image = without_waiting(image)  # what waits there is the peer's to step with
        if method.centralised:
            center = self._images.read_center()
            image = TrainerImage({**image.replica, "weight": center}, method.init(center))
        self._images.restore(trainer, image)

    @property
    def copies(self) -> int:
        return len(self._manager.statuses.at_work())

    def image(self) -> DenseImage:
        return self._images.dense()

    def load(self, image: DenseImage) -> None:
        self._images.load_dense(image)

    def distance(self, sketches: Sequence[Tensor]) -> float | None:
        if len(sketches) < 2:
            return None
        stacked = torch.stack(list(sketches))
        mean = stacked.mean(0)
        return float((stacked - mean).norm(dim=1).mean() / mean.norm().clamp_min(1e-12))


# --- gradient methods ------------------------------------------------------------------------------------------------


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
        return self.dense.held_bytes + sum(server.held_bytes for server in self.rows)

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        self.dense.commit(dense, self.generation)
        for server in self.rows:
            server.commit(rows)

    def restart(self, steps: int) -> None:
        self.dense.restart(steps, self.generation)
        for server in self.rows:
            server.forget_held(steps - 1)

    def end(self) -> None:
        """Nobody waits."""


class Stepped(DenseSide):
    """One copy, on the dense servers, moved by the global steps of a coordinator beside the lease service."""

    is_with_trainers = False
    is_with_servers = True

    def __init__(self, method: Aggregation, rule: StepRule, manager: ClusterManager, images: Images) -> None:
        super().__init__(manager, images)
        self._method, self._rule = method, rule
        self._before: AggregationState | None = None
        self._steps: RemoteSteps | NearSteps
        self._pool: ThreadPoolExecutor
        """Carries steps out where servers are elsewhere."""

    # --- a generation ------------------------------------------------------------------------------------------------

    def open(self, reader: Reader, generation: int) -> StepCoordinator:
        self.close()
        self._before = None if self.coordinator is None else self.aggregation
        paces = Paces() if self.coordinator is None else self.coordinator.paces
        direct = self._manager.spec.direct
        self._steps = steps = NearSteps(generation) if direct else RemoteSteps(self._manager, generation)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self.coordinator = StepCoordinator(
            self._method,
            self._rule,
            reader.leases,
            steps.carry_out,
            run=None if direct else self._pool.submit,
            paces=paces,
            generation=generation,
        )
        return self.coordinator

    def near(
        self, servers: Sequence[Any], rows: Sequence[EmbeddingServer], gate: Gate, counter: WireCounter
    ) -> Stepping:
        steps = self._steps
        assert isinstance(steps, NearSteps)
        assert self.coordinator is not None
        (steps.dense,), steps.rows = servers, rows
        return Stepping(steps.dense, self.coordinator)

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.stop()
            self._steps.end()
            self._pool.shutdown(wait=False, cancel_futures=True)  # it may wait for a server that is silent

    # --- deaths ------------------------------------------------------------------------------------------------------

    def fill_server(self, server: Member) -> None:
        raise NobodyLeft(f"the dense part was lost with the {server.role} before")

    def fill_trainer(self, trainer: Member) -> None:
        """It has the parameters from the dense servers; running statistics are a peer's."""
        peers = self._manager.statuses.at_work()[:1]
        if buffers(self._manager.spec.template) and peers:
            (image,) = self._images.of(peers)
            self._images.restore(trainer, TrainerImage(image.replica, {}))

    # --- images ------------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        return 1

    def image(self) -> DenseImage:
        spec = self._manager.spec
        joined = join_images(spec.parts, spec.template, self._images.of(self._manager.dense_servers()))
        trainers = self._with_images()
        images = self._images.of(trainers)
        if images:  # modules run at the workers only: what they have found out on the way is not at the servers
            joined = TrainerImage({**joined.replica, **images[0].replica}, joined.method)
        pairs = zip(trainers, images, strict=True)
        feedback = {f"{member.index}.{name}": t for member, own in pairs for name, t in own.method.items()}
        return DenseImage((joined,), None, feedback)

    def load(self, image: DenseImage) -> None:
        spec = self._manager.spec
        split = split_image(spec.parts, spec.template, image.trainers[0])
        for server, own in zip(self._manager.dense_servers(), split, strict=True):
            self._images.restore(server, own)
        own_buffers = {name: tensor for name, tensor in image.trainers[0].replica.items() if is_buffer(name)}
        for member in self._with_images():
            self._images.restore(member, TrainerImage(own_buffers, image.feedback_of(member.index)))

    def _with_images(self) -> list[Member]:
        """Trainers that keep something: of their gradients, if only what they rounded them with, or in buffers."""
        whole = self._manager.spec.job.choices.codecs["dense"].everything
        return [] if whole and not buffers(self._manager.spec.template) else self._manager.statuses.at_work()

    def restart(self, before: AggregationState) -> None:
        if self.coordinator is None:
            raise PeerLost("no generation has begun")
        self.coordinator.restart(before)
        self._before = None
        self._steps.restart(before.global_steps)

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def aggregation(self) -> AggregationState:
        """While everybody goes back to a checkpoint, until `restart` says to which counts, those of the end before."""
        if (before := self._before) is not None:
            return before
        return AggregationState() if self.coordinator is None else self.coordinator.state

    @property
    def held_bytes(self) -> int:
        return 0 if self.coordinator is None else self._steps.held_bytes


# --- images of the parts of dense servers ----------------------------------------------------------------------------


def split_image(parts: Sequence[DenseShare], template: Replica, image: TrainerImage) -> list[TrainerImage]:
    """The image for each dense server; the first has the module's buffers. `template` is a replica of the whole."""
    if len(parts) == 1:
        return [image]
    scalars = template.optimizer.per_parameter

    def cut(name: str, part: DenseShare, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        return flat[list(part.indices)] if name in scalars else part.cut(flat)

    return [
        TrainerImage(
            {
                name: tensor if is_buffer(name) else cut(name, part, tensor)
                for name, tensor in image.replica.items()
                if part is parts[0] or not is_buffer(name)
            },
            {},
        )
        for part in parts
    ]


def join_images(parts: Sequence[DenseShare], template: Replica, images: Sequence[TrainerImage]) -> TrainerImage:
    """The inverse of `split_image`.

    Raises:
        DataError: they do not belong together.
    """
    if len(images) == 1:
        return images[0]
    joined = {}
    for name, first in images[0].replica.items():
        if is_buffer(name):
            joined[name] = first
            continue
        scalar = name in template.optimizer.per_parameter
        whole = joined[name] = first.new_zeros(len(template.slots) if scalar else len(template.flat))
        for part, image in zip(parts, images, strict=True):
            if (own := image.replica.get(name)) is None:
                raise DataError(f"a dense server keeps no {name} for its parameters")
            if scalar:
                whole[list(part.indices)] = own
            else:
                part.put(own, whole)
    return TrainerImage(joined, {})
