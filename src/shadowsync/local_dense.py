"""The dense part of a run in one process: replicas that are merged, or one copy that global steps move."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.conductor import Conductor, StepParts
from shadowsync.aggregation.counts import AggregationState
from shadowsync.aggregation.dense_line import DenseLine
from shadowsync.aggregation.stepping import DenseStepper
from shadowsync.aggregation.update import GradientUpdate
from shadowsync.assembly import TrainerKit, WorkerKit, hogwild_workers, make_replica, make_trainer, step_rule
from shadowsync.choices import Aggregating, Choices
from shadowsync.compression.channel import Line, Stream, restore_all
from shadowsync.compression.codec import Codec
from shadowsync.config import Config
from shadowsync.data.desk import Desk
from shadowsync.data.feed import Feed
from shadowsync.dense_state import DenseImage, TrainerImage
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.metrics.wire import WireCounter
from shadowsync.session import distance
from shadowsync.sync.group import Averaging, DenseServers, InProcessGroup
from shadowsync.sync.main_memory import for_replica
from shadowsync.sync.schedule import Synchronisation, Unsynchronised
from shadowsync.training.gate import Gate
from shadowsync.training.pieces import by_parameter
from shadowsync.training.replica import Replica
from shadowsync.training.trainer import Trainer
from shadowsync.training.worker import Hooks


@dataclass(frozen=True)
class DenseMaterial:
    """What a dense part is made of.

    Attributes:
        config, choices: of the job.
        template: the initial values.
        gate: of all threads.
        wire: counts what would cross.
        kit: what trainers have in common.
    """

    config: Config
    choices: Choices
    template: Replica
    gate: Gate
    wire: WireCounter
    kit: TrainerKit

    def replica(self) -> Replica:
        """One more with the initial values."""
        return make_replica(self.config, self.choices, self.template.module, self.template.dims)

    @property
    def line(self) -> Line:
        """The way of the dense part."""
        return Line("dense", self._codec, self.wire)

    def line_of(self, replica: Replica) -> Line:
        """The way of gradients and averages of that replica, and of others like it."""
        return Line("dense", by_parameter(self._codec, replica.slots, len(replica.flat)), self.wire)

    @property
    def _codec(self) -> Codec:
        """As nothing can be measured here, `auto` is its weakest."""
        return self.choices.codecs["dense"].ladder[0]


class LocalDense(ABC):
    """The dense part of all trainers of a family of methods."""

    @abstractmethod
    def trainer(
        self, rank: int, clients: Sequence[EmbeddingClient], feed: Feed, hooks: Callable[[Trainer], Hooks]
    ) -> Trainer:
        """A trainer with a worker for each client."""

    @abstractmethod
    def image(self, living: Iterable[int]) -> DenseImage:
        """A copy of what the living trainers have; while everybody stands still."""

    @abstractmethod
    def load(self, image: DenseImage) -> None:
        """Puts a copy back."""

    @property
    @abstractmethod
    def copies(self) -> int:
        """Replicas in an image where everybody lives."""

    @property
    @abstractmethod
    def syncs(self) -> int:
        """Synchronisations so far, all trainers."""

    @abstractmethod
    def distance(self) -> float | None:
        """As `Session._replica_distance`."""

    @property
    def aggregation(self) -> AggregationState | None:
        """What a gradient method has done; None for the other family."""
        return None

    def recent_step_s(self) -> Mapping[Worker, float]:
        """As `Session.recent_step_s`."""
        return {}

    def mean_step_s(self) -> Mapping[Worker, float]:
        """As `Session.mean_step_s`."""
        return {}

    @property
    def held_bytes(self) -> int | None:
        """As `Session.most_held_bytes`, now."""
        return None

    def restart(self, before: AggregationState) -> None:  # noqa: B027 (matters to gradient methods only)
        """The counts go on from these."""

    def abandoned(self, rank: int) -> None:  # noqa: B027 (matters to gradient methods only)
        """A trainer died, and what it had not begun goes to others."""

    @abstractmethod
    def settle(self, living: Iterable[int]) -> None:
        """Called when everybody stands still, before an image is taken of the living trainers."""

    def paused(self) -> AbstractContextManager[None]:
        """While inside everybody stands still."""
        return nullcontext()

    def look(self) -> None:  # noqa: B027 (matters to gradient methods only)
        """Called several times a second while trainers are at work."""

    def stop(self) -> None:  # noqa: B027 (matters only where workers wait for each other)
        """Lets everybody go who waits for others."""


class LocalReplicas(LocalDense):
    """A replica for each trainer, merged by a `SyncMethod`."""

    def __init__(self, material: DenseMaterial) -> None:
        self._material = material
        config, choices, line = material.config, material.choices, material.line
        self.replicas = [material.replica() for _ in range(config.train.trainers)]
        self.servers = DenseServers.split(material.template.flat.detach().cpu(), config.cluster.dense_servers, line)
        averaged = material.line_of(self.replicas[0]) if choices.method.collective else line
        self._averaging = Averaging(range(len(self.replicas)), averaged, material.gate.waiting)
        self.synchronisations = [
            Synchronisation(
                choices.method,
                replica.flat,
                for_replica(replica.flat, InProcessGroup(rank, self._averaging, self.servers)),
                config.train.workers,
                material.gate,
                choices.method.init(replica.flat),
            )
            for rank, replica in enumerate(self.replicas)
        ]

    def trainer(
        self, rank: int, clients: Sequence[EmbeddingClient], feed: Feed, hooks: Callable[[Trainer], Hooks]
    ) -> Trainer:
        driver = self._material.choices.schedule.drive(self.synchronisations[rank])
        trainer = Trainer(rank, self.replicas[rank], driver, self._material.gate)
        workers = hogwild_workers(self._material.kit, trainer.replica, clients, feed)
        return make_trainer(self._material.kit, trainer, driver, workers, feed, hooks(trainer))

    def settle(self, living: Iterable[int]) -> None:
        for rank in living:
            self.synchronisations[rank].catch_up()

    def image(self, living: Iterable[int]) -> DenseImage:
        images = (TrainerImage.of(self.replicas[rank], self.synchronisations[rank].state) for rank in living)
        return DenseImage(tuple(images), self.servers.read() if self._material.choices.method.centralised else None)

    def load(self, image: DenseImage) -> None:
        for rank, trainer in enumerate(image.trainers):
            trainer.put_into(self.replicas[rank])
            self.synchronisations[rank].state = trainer.method
        self._averaging.forget()
        if image.center is not None:
            self.servers.write(image.center)

    @property
    def copies(self) -> int:
        return len(self.replicas)

    @property
    def syncs(self) -> int:
        return sum(part.count for part in self.synchronisations)

    def distance(self) -> float | None:
        return distance([replica.flat for replica in self.replicas])


class LocalGradients(LocalDense):
    """One copy with one optimizer state; workers of all trainers send it gradients, and each computes on a copy."""

    def __init__(
        self,
        material: DenseMaterial,
        aggregating: Aggregating,
        servers: Sequence[EmbeddingServer],
        desk: Desk,
    ) -> None:
        self._material, self._servers = material, servers
        self._stepper = DenseStepper(material.replica(), material.config.train.clip_norm)
        self._line = material.line_of(self._stepper.replica)
        self._gradients: dict[tuple[int, int], Stream] = {}
        rule = step_rule(material.config, aggregating, material.kit.settings().rates)
        self.conductor = Conductor(aggregating.method, rule, StepParts(self._stepper, servers, lambda: desk.trained))
        desk.number_by(lambda lease, *_: self.conductor.dispatch(lease.trainer))

    def trainer(
        self, rank: int, clients: Sequence[EmbeddingClient], feed: Feed, hooks: Callable[[Trainer], Hooks]
    ) -> Trainer:
        driver = Unsynchronised()
        workers = [self._worker((rank, index), client, feed) for index, client in enumerate(clients)]
        trainer = Trainer(rank, workers[0].replica, driver, self._material.gate)
        return make_trainer(self._material.kit, trainer, driver, workers, feed, hooks(trainer))

    def _worker(self, worker: tuple[int, int], client: EmbeddingClient, feed: Feed) -> WorkerKit:
        replica, dense = self._material.replica(), DenseLine(self._stepper, self._line, worker)
        self._gradients[worker] = dense.gradients
        ahead = self._material.kit.settings().prefetch > 0
        return WorkerKit(client, replica, GradientUpdate(worker, self.conductor, dense, client, feed, replica, ahead))

    def image(self, living: Iterable[int]) -> DenseImage:
        alive = set(living)
        feedback = {
            f"{rank}.{index}.{name}": tensor
            for (rank, index), stream in self._gradients.items()
            if rank in alive
            for name, tensor in stream.encoder.tensors().items()
        }
        return DenseImage((TrainerImage.of(self._stepper.replica, {}),), None, feedback)

    def load(self, image: DenseImage) -> None:
        image.trainers[0].put_into(self._stepper.replica)
        restore_all((stream.encoder, image.feedback_of(*worker)) for worker, stream in self._gradients.items())

    @property
    def copies(self) -> int:
        return 1

    @property
    def syncs(self) -> int:
        return 0

    def distance(self) -> float | None:
        return None

    @property
    def aggregation(self) -> AggregationState:
        return self.conductor.state

    def recent_step_s(self) -> Mapping[Worker, float]:
        return self.conductor.recent_step_s()

    def mean_step_s(self) -> Mapping[Worker, float]:
        return self.conductor.mean_step_s()

    @property
    def held_bytes(self) -> int:
        return self._stepper.held_bytes + sum(server.held_bytes for server in self._servers)

    def restart(self, before: AggregationState) -> None:
        self.conductor.restart(before)
        self._stepper.restart(before.global_steps)
        for server in self._servers:
            server.forget_held(before.global_steps - 1)

    def abandoned(self, rank: int) -> None:
        self.conductor.abandoned(rank)

    def settle(self, living: Iterable[int]) -> None:
        self.conductor.settle(0.0)

    def paused(self) -> AbstractContextManager[None]:
        return self.conductor.paused()

    def look(self) -> None:
        self.conductor.look()

    def stop(self) -> None:
        self.conductor.stop()
